"""What a run is given to do: how long prompts may be, prompts of a given length, passages of held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from probes.errors import InputError, UsageError
from runtime.experts.headers import read_headers
from runtime.models.config import context_limit, read_config_file

FEWEST_SEARCHED = 8
"""Passages to search on: an interval over fewer says little."""


def check_model(folder: Path, *, input_len: int | None, max_new_tokens: int) -> None:
    """Refuse what can be seen without loading anything: a config or weights that are absent, damaged or cut off, and
    sequences longer than the model's context. Raises ``CheckpointError`` and ``UsageError``.
    """
    config = read_config_file(folder)
    read_headers(folder)
    limit = context_limit(config)
    # Without --input-len the prompts' lengths show once there is a tokenizer; one token is the least.
    check_context(limit, 1 if input_len is None else input_len, max_new_tokens)


def check_context(limit: int | None, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ``UsageError`` where prompt and answer together pass the model's ``limit``."""
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise UsageError(
            f"{prompt_tokens:,} prompt {'token' if prompt_tokens == 1 else 'tokens'} and {max_new_tokens:,} new ones "
            f"are more than the {limit:,} positions of the model (max_position_embeddings)",
            hint="ask for fewer new tokens, or give shorter prompts",
        )


def cut_prompts(ids: Sequence[int], *, length: int, count: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens each, from places of the text ``ids`` that follow from ``seed`` alone.

    Places differ as long as the text has enough of them. Raises ``InputError`` where the text is too short.
    """
    if len(ids) < length:
        raise InputError(
            f"the text that prompts are cut from has {len(ids):,} tokens, --input-len asks for {length:,}",
            hint="give a longer text with --prompts or --held-out, or a smaller --input-len",
        )
    places = len(ids) - length + 1
    starts = np.random.default_rng(seed).choice(places, size=count, replace=places < count)
    return [list(ids[start : start + length]) for start in starts.tolist()]


def held_out_passages(
    ids: Sequence[int], *, length: int, count: int, search: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Passages of equal length, spread over the whole text, since neighbours are alike: at most ``count`` of at most
    ``length`` tokens to measure quality on, and with ``search`` as many others, between them, to choose a policy on.

    Raises ``InputError`` where the text is too short.
    """
    if len(ids) < 2:
        raise InputError(
            f"the held-out text has {len(ids)} tokens, which leaves none to predict",
            hint="give a longer text with --held-out, or leave quality out with --no-quality",
        )
    parts = 2 if search else 1
    length = min(length, len(ids) // (parts * (FEWEST_SEARCHED if search else 1)))
    if length < 2:
        raise InputError(
            f"the held-out text has {len(ids)} tokens, too few to search on one half of it and measure on the other",
            hint="give a longer text with --held-out, a thousand tokens or more, or leave out --max-quality-drop",
        )
    count = min(count, len(ids) // (parts * length))
    stride = len(ids) // count
    starts = range(0, stride * count, stride)
    measured = [list(ids[at : at + length]) for at in starts]
    if not search:
        return measured, []
    between = stride // 2  # at least ``length``, and as far from the next passage
    return measured, [list(ids[at + between : at + between + length]) for at in starts]
