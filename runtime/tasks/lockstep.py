"""All ranks answer in step: what follows a context is scored or written, one token per sequence and step.

Shape legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.engine import LockstepModel, Phases, left_padded
from runtime.passes import Pruned


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One sequence of token ids. ``context``: at least one. ``forced``: what follows, to be scored; where it is empty
    up to ``new_tokens`` are written instead, until the text holds one of ``until``."""

    context: tuple[int, ...]
    forced: tuple[int, ...] = ()
    new_tokens: int = 0
    until: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.context) + (len(self.forced) or self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``log_share``: of the forced tokens together, nats, 0 where none is; ``greedy``: each was the most likely one;
    ``token_ids``: what followed the context."""

    log_share: float
    greedy: bool
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """One sequence on its way. ``pending``: of its context, still to be fed."""

    asked: Asked
    has_ended: Callable[[Sequence[int], Sequence[str]], bool]
    pending: deque[int] = field(default_factory=deque)
    token_ids: list[int] = field(default_factory=list)
    log_share: float = 0.0
    greedy: bool = True
    done: bool = False

    @property
    def wanted(self) -> int:
        """The token whose share counts next; any, where none does."""
        scored = self.asked.forced and not self.pending and not self.done
        return self.asked.forced[len(self.token_ids)] if scored else 0

    def follow(self, best: int, log_share: float) -> int | None:
        """The token to feed next, None when there is none; ``log_share``: of the wanted token, ``best`` most likely."""
        if self.pending:
            return self.pending.popleft()
        if self.done:
            return None
        if self.asked.forced:
            token = self.wanted
            self.log_share += log_share
            self.greedy &= token == best
            self.token_ids.append(token)
            self.done = len(self.token_ids) == len(self.asked.forced)
        else:
            token = best
            self.token_ids.append(token)
            full = len(self.token_ids) >= self.asked.new_tokens
            self.done = full or self.has_ended(self.token_ids, self.asked.until)
        return None if self.done else token

    def answer(self) -> Answer:
        return Answer(log_share=self.log_share, greedy=self.greedy, token_ids=tuple(self.token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 has all ranks do: answer ``asked``, with the policy or with the router's own choice; ``restart``:
    from the caches that all passes start from."""

    asked: tuple[Asked, ...]
    treated: bool
    restart: bool


@dataclass(slots=True, kw_only=True)
class Answerer:
    """Answers on one rank; all ranks call it with the same orders.

    ``phases`` of the router's own choice and of the policy; ``restart`` brings caches and brake back to the start;
    ``prefill``: contexts are computed in one forward pass. ``expect`` and ``advance`` tell of batches. ``pruned``:
    since the last restart.
    """

    model: LockstepModel
    tokenizer: Any
    baseline: Phases
    treated: Phases
    restart: Callable[[], None]
    prefill: bool
    batch_size: int
    expect: Callable[[int], None]
    advance: Callable[[], None]
    pruned: Pruned = field(default_factory=Pruned)

    def answer(self, order: Order) -> list[Answer]:
        """In the order asked; batches hold sequences of like length, the longest first."""
        if order.restart:
            self.restart()
            self.pruned = Pruned()
        phases = self.treated if order.treated else self.baseline
        self.model.signals.begin_pass("tasks")
        places = sorted(range(len(order.asked)), key=lambda at: -len(order.asked[at]))
        batches = [places[at : at + self.batch_size] for at in range(0, len(places), self.batch_size)]
        self.expect(len(batches))
        answers: dict[int, Answer] = {}
        for batch in batches:
            answers.update(zip(batch, self._batch([order.asked[at] for at in batch], phases), strict=True))
            self.advance()
        return [answers[at] for at in range(len(order.asked))]

    def _batch(self, batch: Sequence[Asked], phases: Phases) -> Iterator[Answer]:
        rows = [_Row(asked, self.has_ended) for asked in batch]
        first = [asked.context if self.prefill else asked.context[:1] for asked in batch]
        for row, fed in zip(rows, first, strict=True):
            row.pending.extend(row.asked.context[len(fed) :])
        self._advance(rows, first, phases)
        return (row.answer() for row in rows)

    @torch.inference_mode()
    def _advance(self, rows: Sequence[_Row], first: Sequence[Sequence[int]], phases: Phases) -> None:
        """Feed ``first``, then a token to every row that has one, until none has: the others are as padding is."""
        pad = self.tokenizer.pad_token_id or 0
        ids, mask = left_padded(first, pad, self.model.device)
        key_values, prefill = self.model.begin(), self.prefill
        while True:
            policy = phases.prefill if prefill else phases.decode
            logits_BV, record = self.model.step(ids, mask, key_values, policy, prefill=prefill)
            tokens = _follow(rows, logits_BV)
            self.model.settle()
            self.model.signals.step(record, policy)
            self.pruned.add(record)
            if all(token is None for token in tokens):
                return
            ids = torch.tensor([[pad if token is None else token] for token in tokens], device=self.model.device)
            real = [[int(token is not None)] for token in tokens]
            mask = torch.cat([mask, torch.tensor(real, device=mask.device)], 1)
            prefill = False

    def has_ended(self, token_ids: Sequence[int], until: Sequence[str]) -> bool:
        """Whether a text that is being written is complete."""
        if token_ids[-1] == self.tokenizer.eos_token_id:
            return True
        text = self.tokenizer.decode(list(token_ids))
        return any(stop in text for stop in until)


def _follow(rows: Sequence[_Row], logits_BV: torch.Tensor) -> list[int | None]:
    log_shares_BV = logits_BV.float().log_softmax(-1)
    wanted_B = torch.tensor([row.wanted for row in rows], device=logits_BV.device)
    found = log_shares_BV.gather(1, wanted_B[:, None])[:, 0].tolist()
    best = log_shares_BV.argmax(-1).tolist()
    return [row.follow(*answer) for row, *answer in zip(rows, best, found, strict=True)]
