"""The language model that the harness asks: its ``LM`` interface over token ids, answered by all ranks in step.

Texts become tokens as the harness's own ``HFLM`` makes them, so that scores compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from probes.errors import InputError
from runtime.tasks.lockstep import Answer, Asked

DEFAULT_NEW_TOKENS = 256


class Request(Protocol):
    """What the harness asks: its ``Instance``."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class LockstepLM:
    """The three requests of the harness's ``lm_eval.api.model.LM``, which ``evaluate`` knows by these names.

    ``answer``: token ids in, answers out, in the same order. ``context_limit``: positions of the model, None where
    unknown; of what is longer the beginning is left out, and counted in ``cut``. ``answering``: while it waits for
    answers.
    """

    rank = 0
    world_size = 1

    def __init__(
        self, tokenizer: Any, answer: Callable[[Sequence[Asked]], list[Answer]], context_limit: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._limit = context_limit
        self.cut = 0
        self.answering = False

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log share of the continuation in nats, and whether it is the greedy one."""
        answers = self._ask([self._scored(*self._encode_pair(*request.args)) for request in requests])
        return [(answer.log_share, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Of each (text,): its log share in nats; a text longer than the model's context is cut into windows."""
        windows = [list(self._windows(self._encode(request.args[0]))) for request in requests]
        answers = iter(self._ask([window for each in windows for window in each]))
        return [sum(next(answers).log_share for _ in each) for each in windows]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Of each (context, settings): what is written greedily, up to the first text of ``until``."""
        asked = [self._written(*request.args) for request in requests]
        return [
            _up_to(self._tokenizer.decode(self._without_end(answer.token_ids)), each.until)
            for each, answer in zip(asked, self._ask(asked), strict=True)
        ]

    def _ask(self, asked: Sequence[Asked]) -> list[Answer]:
        self.answering = True
        answers = self._answer(asked)
        self.answering = False
        return answers

    def _encode(self, text: str) -> list[int]:
        """With what the tokenizer puts in front by itself, unless the text has it already."""
        start = self._tokenizer.bos_token
        begun = bool(start) and text.startswith(start)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not begun)
        return ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encoded as one text, then divided; spaces between the two belong to what follows."""
        if context == "":
            ids: list[int] = self._tokenizer.encode(continuation, add_special_tokens=False)
            start = self._start()
            return ([start], ids) if ids[:1] != [start] else (ids[:1], ids[1:])
        before = self._encode(context.rstrip())
        return before or [self._start()], self._encode(context + continuation)[len(before) :]

    def _start(self) -> int:
        """What stands before a text that nothing precedes."""
        known = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id)
        return next((token for token in known if token is not None), 0)

    def _scored(self, context: list[int], forced: list[int]) -> Asked:
        if not forced:
            raise InputError("a continuation has no token", hint="give every choice a text of its own")
        # The last token is not fed, so that it may stand one beyond the model's positions.
        room = None if self._limit is None else self._limit + 1 - len(forced)
        return Asked(context=self._fitting(context, room), forced=tuple(forced))

    def _written(self, context: str, settings: dict[str, Any]) -> Asked:
        until = settings.get("until") or []
        new_tokens = int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        room = None if self._limit is None else self._limit - new_tokens
        return Asked(
            context=self._fitting(self._encode(context) or [self._start()], room),
            new_tokens=new_tokens,
            until=(until,) if isinstance(until, str) else tuple(until),
        )

    def _fitting(self, context: list[int], room: int | None) -> tuple[int, ...]:
        if room is None or len(context) <= room:
            return tuple(context)
        if room < 1:
            raise InputError(
                f"an answer leaves no room for its context in the {self._limit:,} positions of the model",
                hint="give shorter choices, or a smaller max_gen_toks",
            )
        self.cut += 1
        return tuple(context[-room:])

    def _windows(self, ids: list[int]) -> Iterator[Asked]:
        """Every token once, each with as much before it as fits: the last window is full, and scores what is left."""
        limit = self._limit or max(1, len(ids))
        whole = [self._start(), *ids]
        for at in range(0, len(ids), limit):
            end = min(at + limit, len(ids))
            begin = max(0, end - limit)
            yield Asked(context=tuple(whole[begin : at + 1]), forced=tuple(ids[at:end]))

    def _without_end(self, token_ids: tuple[int, ...]) -> list[int]:
        ended = token_ids and token_ids[-1] == self._tokenizer.eos_token_id
        return list(token_ids[:-1] if ended else token_ids)


def _up_to(text: str, until: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
