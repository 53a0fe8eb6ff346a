"""What a routing trace is once it is in memory: the dataclasses that readers, importers and the simulator share.

Shape legend: T tokens, L MoE layers, K slots per token (top-k), N logical experts. A token is one row through all the
layers. A long trace is an iterator of ``RoutingTrace`` chunks in file order, all with the same ``meta``; a token is
never split between chunks, and ``token_sequence_T`` counts through the whole trace, not from each chunk's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
# Expert ids are int16: −1 is an empty slot, ids run up to 32,766.
MAX_EXPERTS = int(np.iinfo(np.int16).max)

Int8s = npt.NDArray[np.int8]
Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Phase(IntEnum):
    """Whether a token was part of a prompt or was generated; decode tokens pass one a step and sequence."""

    UNKNOWN = -1
    PREFILL = 0
    DECODE = 1


class TokenKind(IntEnum):
    """Padding fills a batch's shape; a dummy is a warm-up or profiling run's token. Both count for nothing."""

    REAL = 0
    PADDING = 1
    DUMMY = 2


class IdSpace(StrEnum):
    """Logical experts are the model's; physical ones are slots of a placement with redundant experts."""

    LOGICAL = "logical"
    PHYSICAL = "physical"


class ScoreFunction(StrEnum):
    """How the router turns logits into gate scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """What a trace says of the model and the engine that it was recorded from. None: not known.

    ``layer_numbers``: the model's number of each of the L recorded MoE layers, in order; ``draft_layers``: those of
    them that belong to a draft (multi-token prediction) head. ``normalised``: a token's gate weights sum to 1 before
    scaling. ``gates_recorded``: False where only ids are known, so that ``gates_TLK`` holds equal shares.
    ``top_k`` is 0 where it is unknown, in load profiles only. ``parameters``: whatever else the source says, as JSON
    values (the parameters of a synthetic trace, the seed of a run).
    """

    model: str | None
    num_experts: int
    top_k: int
    layer_numbers: tuple[int, ...]
    draft_layers: tuple[int, ...] = ()
    score_function: ScoreFunction = ScoreFunction.UNKNOWN
    normalised: bool | None = None
    routed_scaling_factor: float | None = None
    engine: str | None = None
    engine_version: str | None = None
    id_space: IdSpace = IdSpace.LOGICAL
    gates_recorded: bool = True
    scores_recorded: bool = False
    selection_recorded: bool = False
    format_version: int = FORMAT_VERSION
    parameters: dict[str, object] = field(default_factory=dict)

    @property
    def moe_layers(self) -> int:
        """How many MoE layers the trace holds (L)."""
        return len(self.layer_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """A trace, or a chunk of one: the router's choices for T tokens in file order.

    ``sequence_names``: names of the sequences numbered so far, so that ``sequence_names[token_sequence_T[t]]`` is
    token t's; a later chunk's names begin with an earlier chunk's. ``token_position_T``: place in its sequence, −1
    unknown. ``token_step_T``: forward pass, −1 not recorded. ``token_phase_T``: ``Phase``. ``token_kind_T``:
    ``TokenKind``. ``token_rank_T``: data-parallel rank. ``ids_TLK``: chosen experts in the router's order, −1 an
    empty slot. ``gates_TLK``: gate weights G(t)_e as the engine gave them, 0 in empty slots. ``scores_TLN`` and
    ``selection_TLN``: full gate scores and what the router ranked by, None where not recorded.
    """

    meta: TraceMeta
    sequence_names: tuple[str, ...]
    token_sequence_T: Int32s
    token_position_T: Int32s
    token_step_T: Int64s
    token_phase_T: Int8s
    token_kind_T: Int8s
    token_rank_T: Int16s
    ids_TLK: Int16s
    gates_TLK: Float32s
    scores_TLN: Float32s | None = None
    selection_TLN: Float32s | None = None

    @property
    def tokens(self) -> int:
        """How many tokens this chunk holds (T), padding and dummies included."""
        return len(self.token_sequence_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    """How often each expert was chosen, without the tokens: what counts-only dumps hold.

    ``counts_LN``: float64, since engines average; integers wherever the source gives integers. ``gate_sums_LN``:
    summed gate weights; ``saliency_sums_LN``: summed gate · ‖expert output‖; None where not given. ``tokens``: how
    many tokens were counted, None where the source does not say and top-k is unknown.
    """

    meta: TraceMeta
    counts_LN: Float64s
    tokens: int | None
    gate_sums_LN: Float64s | None = None
    saliency_sums_LN: Float64s | None = None


class TraceSource(Protocol):
    """A trace that is read as a stream, whatever its file's format.

    ``chunks()`` starts from the beginning at every call, with memory bounded by the chunk size. ``notes``: what an
    importer had to infer or mark, in sentences, complete once ``chunks()`` is exhausted. ``fraction_read``: how much
    of the file the last ``chunks()`` has read, 0 to 1. Whatever is wrong with the file is raised as ``TraceError``.
    """

    @property
    def meta(self) -> TraceMeta: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def fraction_read(self) -> float: ...

    def chunks(self) -> Iterator[RoutingTrace]: ...
