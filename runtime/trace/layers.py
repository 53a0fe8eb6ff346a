"""The first MoE layers of a trace, as a trace of its own: what a run of few layers replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from probes.errors import UsageError
from runtime.trace.records import Int64s, RoutingTrace, TraceMeta, TraceSource


class FirstLayers:
    """``source`` with its first ``layers`` MoE layers alone; layers of a draft head do not count (a ``TraceSource``).

    Raises ``UsageError`` where there are not as many.
    """

    def __init__(self, source: TraceSource, layers: int) -> None:
        own = np.flatnonzero(~np.isin(source.meta.layer_numbers, source.meta.draft_layers))
        if not 1 <= layers <= len(own):
            raise UsageError(
                f"--layers {layers} is not possible: the trace has {len(own)} MoE layers",
                hint=f"give 1 to {len(own)}, or leave --layers out for all of them",
            )
        self._source = source
        self._which: Int64s = own[:layers]
        self.meta: TraceMeta = dataclasses.replace(
            source.meta,
            layer_numbers=tuple(source.meta.layer_numbers[layer] for layer in self._which),
            draft_layers=(),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return self._source.notes

    @property
    def fraction_read(self) -> float:
        return self._source.fraction_read

    def chunks(self) -> Iterator[RoutingTrace]:
        """The source's chunks, their other layers left out."""
        return map(self._cut, self._source.chunks())

    def token_chunks(self) -> Iterator[RoutingTrace]:
        """What the tokens are, without routing where the source can tell that apart."""
        chunks: Iterator[RoutingTrace] = getattr(self._source, "token_chunks", self._source.chunks)()
        return chunks

    def _cut(self, chunk: RoutingTrace) -> RoutingTrace:
        which = self._which
        return dataclasses.replace(
            chunk,
            meta=self.meta,
            ids_TLK=chunk.ids_TLK[:, which],
            gates_TLK=chunk.gates_TLK[:, which],
            scores_TLN=None if chunk.scores_TLN is None else chunk.scores_TLN[:, which],
            selection_TLN=None if chunk.selection_TLN is None else chunk.selection_TLN[:, which],
        )
