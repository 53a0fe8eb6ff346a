"""What an importer offers: a format's name, how it is recognised, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import TraceError, UsageError
from runtime.trace.check import check_chunk, check_meta
from runtime.trace.chunking import rechunk, tokens_per_chunk
from runtime.trace.records import Float32s, LoadProfile, Phase, RoutingTrace, TraceMeta, TraceSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user knows and the file does not say; None: take it from the file, or leave it unknown.

    ``phase`` holds for tokens of which the file says no phase.
    """

    num_experts: int | None = None
    top_k: int | None = None
    model: str | None = None
    phase: Phase = Phase.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A file's beginning: its first bytes, decompressed, and the JSON value that it (or its first line) holds."""

    path: Path
    start: bytes
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One foreign format. ``looks_for`` completes the sentence "a file of this format has …"."""

    name: str
    looks_for: str
    recognises: Callable[[Head], bool]
    open: Callable[[Head, ImportOptions], TraceSource | LoadProfile]


@dataclass(slots=True, kw_only=True)
class Reading:
    """What one pass over a file has found so far."""

    fraction: float = 0.0
    notes: list[str] = field(default_factory=list)


class ImportedTrace:
    """A foreign file as a ``TraceSource``: ``decode`` yields chunks of any size; here they are resized and checked."""

    def __init__(
        self, meta: TraceMeta, decode: Callable[[Reading], Iterator[RoutingTrace]], *, notes: tuple[str, ...] = ()
    ) -> None:
        check_meta(meta)
        self.meta = meta
        self._decode = decode
        self._first_notes = notes
        self._reading = Reading()

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._first_notes, *self._reading.notes)

    @property
    def fraction_read(self) -> float:
        return self._reading.fraction

    def chunks(self) -> Iterator[RoutingTrace]:
        """The trace's chunks in file order, each checked. Raises ``TraceError``."""
        self._reading = Reading()
        tokens = 0
        for chunk in rechunk(self._decode(self._reading), tokens_per_chunk(self.meta)):
            check_chunk(chunk, first_token=tokens)
            tokens += chunk.tokens
            yield chunk
        if not tokens:
            raise TraceError("the file holds no token", hint="record some traffic first")
        self._reading.fraction = 1.0


def inferred_experts(options: ImportOptions, stated: int | None, highest_id: int) -> tuple[int, tuple[str, ...]]:
    """Number of experts: as the file says, else as the user says, else one more than the highest id; with a note where
    it is inferred, or where the file contradicts itself.

    A file's own word stands: a number that is given against it is a slip, which ``check_asked`` refuses, since a wrong
    one moves experts to other devices in every figure. The user knows better only where ids reach beyond what the file
    states, which is then wrong: logs of a placement with redundant experts have ids of copies, and an engine that
    spreads experts may state those of one rank.
    """
    asked = options.num_experts
    if asked is not None and stated is not None and stated <= highest_id < asked:
        note = (
            f"the file states {stated} experts, but has ids up to {highest_id}: the {asked} that were given are taken, "
            "and if some are copies of redundant experts, they count as experts of their own"
        )
        return asked, (note,)
    known = asked if stated is None else stated
    if known is not None:
        return known, ()
    experts = highest_id + 1
    note = f"the number of experts is inferred from the highest id: {experts}; give --num-experts if there are more"
    return experts, (note,)


def check_asked(path: Path, meta: TraceMeta, options: ImportOptions) -> None:
    """Raise ``UsageError`` where a file that says its own sizes says others than the options do."""
    for option, asked, stated, of in (
        ("--num-experts", options.num_experts, meta.num_experts, "experts a layer"),
        ("--top-k", options.top_k, meta.top_k or None, "experts per token"),
    ):
        if asked is not None and stated is not None and asked != stated:
            raise UsageError(
                f"{path} has {stated} {of}, not {option} {asked}", hint=f"leave {option} out: the file says the number"
            )


def weights_sum_to_one(gates_TLK: Float32s) -> bool:
    """Whether a sample of weights is normalised, within the rounding of bfloat16 and of printed digits."""
    return bool(gates_TLK.size and np.all(np.abs(gates_TLK.sum(axis=-1) - 1.0) < 0.02))


def phase_named(name: str) -> Phase:
    """The phase that a user wrote. Raises ``UsageError``."""
    try:
        return Phase[name.upper()]
    except KeyError:
        known = ", ".join(phase.name.lower() for phase in Phase)
        raise UsageError(f"unknown phase {name!r}", hint=f"known phases: {known}") from None
