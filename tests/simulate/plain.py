"""A simulator written as its definition reads, sharing nothing with the real one: what the others must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Expert = tuple[int, int]
UNIT = 2**30


@dataclass
class NaiveCache:
    """The definition, spelled out: every rank computed anew, nothing kept in order."""

    kind: str
    slots: int
    decay: float = 1.0
    admit: bool = False
    next_use: dict[Expert, float] = field(default_factory=dict)
    counts: dict[Expert, float] = field(default_factory=dict)
    last: dict[Expert, int] = field(default_factory=dict)
    resident: set[Expert] = field(default_factory=set)
    now: int = 0

    def start_step(self) -> None:
        for expert in self.counts:
            self.counts[expert] *= self.decay

    def dispatch(self, layer: int, experts: list[int]) -> list[tuple[int, bool, Expert | None]]:
        """For each fetched expert: its id, whether it is cached now, and who had to go."""
        self.now += 1
        used = [(layer, expert) for expert in experts]
        for expert in used:
            self.counts[expert] = self.counts.get(expert, 0.0) + 1
            self.last[expert] = self.now
        return [self.fetch(expert, used) for expert in used if expert not in self.resident]

    def fetch(self, expert: Expert, used: list[Expert]) -> tuple[int, bool, Expert | None]:
        victim = None
        if len(self.resident) >= self.slots:
            candidates = [other for other in self.resident if other not in used]
            if not candidates:
                return expert[1], False, None
            victim = min(candidates, key=self.rank)
            if self.admit and self.counts[expert] < self.counts[victim]:
                return expert[1], False, None
            self.resident.remove(victim)
        self.resident.add(expert)
        return expert[1], True, victim

    def rank(self, expert: Expert) -> tuple[float, float, Expert]:
        if self.kind == "lfu":
            return self.counts[expert], self.last[expert], expert
        if self.kind == "lru":
            return 0.0, self.last[expert], expert
        return -self.next_use.get(expert, float("inf")), 0.0, expert


@dataclass
class PlainResult:
    steps: int = 0
    before: Counter[tuple[int, int]] = field(default_factory=Counter)
    after: Counter[tuple[int, int]] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    max_misses: int = 0
    removed: int = 0
    tokens: int = 0


def batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[tuple[int, int]]]:
    """Each step's tokens as (sequence, place in it)."""
    waiting = [(sequence, length) for sequence, length in enumerate(lengths) if length]
    slots = [(*waiting.pop(0), 0) for _ in range(batch_size)]
    while True:
        yield [(sequence, at) for sequence, _, at in slots]
        for slot, (sequence, length, at) in enumerate(slots):
            if at + 1 < length:
                slots[slot] = (sequence, length, at + 1)
            elif waiting:
                slots[slot] = (*waiting.pop(0), 0)
            else:
                return


def shares(ids: Sequence[int], gates: Sequence[float]) -> dict[int, int]:
    """q of each chosen expert of a token."""
    total = 0.0
    for gate in gates:
        total += float(gate)
    return {
        int(expert): round((float(gate) / total if total else 1 / len(ids)) * UNIT)
        for expert, gate in zip(ids, gates, strict=True)
    }


def kept_experts(
    tokens: list[dict[int, int]], importance: Counter[int], paid: dict[int, int], device: dict[int, int], rule: Any
) -> set[int]:
    """``rule``: None (router), or (name, θ) with θ by cir."""
    if rule is None:
        return set(importance)
    name, theta = rule
    mandatory: set[int] = set()
    for token in tokens:
        carried = 0
        for expert in sorted(token, key=lambda expert: (-token[expert], expert)):
            mandatory.add(expert)
            carried += token[expert]
            if carried >= round(theta * UNIT) - len(token):
                break
    if name == "importance":
        return mandatory
    kept = set(mandatory)

    def cost(experts: set[int]) -> int:
        load: Counter[int] = Counter()
        for expert in experts:
            load[device[expert]] += paid[expert]
        return max(load.values())

    for expert in sorted(set(importance) - mandatory, key=lambda expert: (-importance[expert], expert)):
        if cost(kept | {expert}) <= cost(mandatory):
            kept.add(expert)
    return kept


def simulate(
    sequences: list[Any], *, experts: int, devices: int, batch_size: int, cache: Any, slots: int, rule: Any, warmup: int
) -> PlainResult:
    """``sequences``: of each, its tokens; of each, (ids, gates) by layer. ``cache``: arguments of ``NaiveCache``."""
    steps = list(batches([len(sequence) for sequence in sequences], batch_size))
    layers = len(next(tokens for tokens in sequences if tokens)[0])
    routing = [
        [[shares(*sequences[sequence][at][layer]) for sequence, at in step] for layer in range(layers)]
        for step in steps
    ]
    uses: dict[Expert, list[int]] = {}
    for moment in range(len(steps) * layers):
        step, layer = divmod(moment, layers)
        for expert in {expert for token in routing[step][layer] for expert in token}:
            uses.setdefault((layer, expert), []).append(moment)
    books = [NaiveCache(slots=slots, **cache) for _ in range(devices)]
    device = {expert: expert * devices // experts for expert in range(experts)}
    result = PlainResult()
    for step in range(len(steps)):
        for book in books:
            book.start_step()
        for layer in range(layers):
            tokens = routing[step][layer]
            importance: Counter[int] = Counter()
            for token in tokens:
                importance.update(token)
            moment = step * layers + layer
            for expert in range(experts):
                later = [at for at in uses.get((layer, expert), []) if at > moment]
                uses[layer, expert] = later
                for book in books:
                    book.next_use[layer, expert] = later[0] if later else float("inf")
            absent = {expert: (layer, expert) not in books[device[expert]].resident for expert in importance}
            paid = {expert: int(missing) for expert, missing in absent.items()}
            kept = kept_experts(tokens, importance, paid, device, rule)
            misses = []
            for at, book in enumerate(books):
                used = sorted(expert for expert in kept if device[expert] == at)
                misses.append(len(book.dispatch(layer, used)))
            if step < warmup:
                continue
            for expert in importance:
                result.before[layer, device[expert]] += absent[expert]
            for at in range(devices):
                result.after[layer, at] += misses[at]
            result.gaps[max(misses) - min(misses)] += 1
            result.max_misses += max(misses)
            result.removed += sum(share for expert, share in importance.items() if expert not in kept)
            result.tokens += len(tokens)
        result.steps += step >= warmup
    return result
