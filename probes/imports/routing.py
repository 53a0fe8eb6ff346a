"""Which experts the ``balanced`` rows of measured kernel tables activate.

The tables come from aiconfigurator (github.com/ai-dynamo/aiconfigurator, collector/helper.py, ``balanced_logits``). Its
tokens pick experts at even distances, and where there are fewer tokens than that distance they are spread out by a
division. That division was made in bfloat16, which holds eight significant bits: among more than 256 experts, several
picks fall on the same expert, and fewer experts are activated than tokens × top-k says.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_ROUND_UP = 0x7FFF
_KEPT_BITS = 0xFFFF0000


def activated_experts(tokens: int, top_k: int, num_experts: int, expert_parallel_size: int) -> int:
    """How many of the first device's ``num_experts / expert_parallel_size`` experts get at least one token."""
    stride = math.ceil(num_experts / top_k)
    tokens_T1 = np.arange(tokens)[:, None]
    picks_K = np.arange(top_k)[None, :]
    if tokens >= stride:
        chosen_TK = (tokens_T1 + picks_K * stride) % num_experts
    else:
        spread_T1 = _bfloat16(_bfloat16(tokens_T1 * stride) / np.float32(tokens))
        chosen_TK = np.floor(_bfloat16(spread_T1 + picks_K * stride) % num_experts).astype(np.int64)
    return len(np.unique(chosen_TK[chosen_TK < num_experts // expert_parallel_size]))


def _bfloat16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Rounded to the nearest bfloat16, ties to even, and kept as float32."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + _ROUND_UP + ((bits >> 16) & 1)) & _KEPT_BITS
    return rounded.astype(np.uint32).view(np.float32)
