"""Expert caches: which experts each device holds, as a deterministic function of what was dispatched to it.

A book is bookkeeping only: no bytes move here. Every rank mirrors every device's book from the same kept sets, so no
rank asks another what it holds; the simulator replays the same books.

Shape legend: L MoE layers, N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.errors import UsageError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS = ("lfu", "lru", "belady")
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """A replacement rule. ``decay`` multiplies all counts at the start of every step; ``admit``: do not cache a fetched
    expert that was used less often than the one that would have to go. Both belong to ``lfu``.

    ``belady`` evicts what the router itself needs last (Belady 1966); it looks ahead, so only the simulator has it.
    """

    kind: str
    decay: float = 1.0
    admit: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown cache {self.kind!r}", hint=f"choose one of {', '.join(KINDS)}")
        if self.kind != "lfu" and (self.decay != 1.0 or self.admit):
            raise UsageError(f"cache {self.kind!r} takes no parameters", hint="decay and admit belong to lfu")
        if not 0.0 < self.decay <= 1.0:
            raise UsageError(f"cache decay {self.decay} is not in (0, 1]", hint="for example lfu:decay=0.97")

    @property
    def parameters(self) -> dict[str, float | int]:
        return {"decay": self.decay, "admit": int(self.admit)} if self.kind == "lfu" else {}

    def __str__(self) -> str:
        changed = [f"decay={self.decay:g}"] if self.decay != 1.0 else []
        changed += ["admit=1"] if self.admit else []
        return f"{self.kind}:{','.join(changed)}" if changed else self.kind


def parse_cache(text: str) -> CacheSpec:
    """The cache written ``NAME`` or ``NAME:key=value,key=value``, as in ``lfu:decay=0.97,admit=1``.

    Raises ``UsageError`` for an unknown name or key and for a value out of range.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    values: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in ("decay", "admit") or key in values:
            raise UsageError(f"cache {text!r}: cannot read {pair!r}", hint="keys are decay=X and admit=0|1, each once")
        values[key] = value
    if values.get("admit", "0") not in ("0", "1"):
        raise UsageError(f"cache {text!r}: admit is {values['admit']!r}", hint="write admit=1 or admit=0")
    try:
        decay = float(values.get("decay", "1"))
    except ValueError as error:
        raise UsageError(f"cache {text!r}: decay is {values['decay']!r}", hint="decay is a number in (0, 1]") from error
    return CacheSpec(kind=kind, decay=decay, admit=values.get("admit") == "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One paid movement: ``expert`` comes to ``slot``, where ``evicted`` (layer, expert) was. No slot: not cached."""

    expert: int
    slot: int | None
    evicted: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """A book's whole state at one moment; ``CacheBook.restore`` accepts it from a book of the same size."""

    moment: int
    used: int
    count: Floats
    slot_of: Ints
    key: Ints
    last: Ints


class CacheBook:
    """One device's cache of ``slots`` experts, shared by all ``layers`` of ``experts`` each; empty at first.

    Slots are numbered from 0; an expert keeps its slot while it stays. Use counts exist for all experts, resident or
    not. ``next_use_LN`` (only for ``belady``) is read at every eviction: the caller keeps in it the layer-step at which
    the router itself next chooses each expert, ``NEVER`` if it does not. Raises ``UsageError`` for a size below 0 and
    for ``belady`` without ``next_use_LN``.
    """

    def __init__(
        self, spec: CacheSpec, slots: int, layers: int, experts: int, *, next_use_LN: Ints | None = None
    ) -> None:
        if slots < 0 or layers < 1 or experts < 1:
            raise UsageError(f"a cache of {slots} slots for {layers} layers of {experts} experts is not possible")
        if spec.kind == "belady" and next_use_LN is None:
            raise UsageError("belady looks ahead, which a live run cannot", hint="use lfu or lru")
        self.spec = spec
        self.slots = slots
        self._experts = experts
        self._size = layers * experts
        self._next_use = None if next_use_LN is None else next_use_LN.reshape(-1)
        self._moment = 0
        self._used = 0
        # By expert: flat index layer · experts + id.
        self._count = np.zeros(self._size)
        self._slot_of = np.full(self._size, -1, np.int64)
        # By slot: the expert in it, and when it was last used, as moment · (layers · experts) + flat index: one number
        # that orders by last use, then layer, then id.
        self._key = np.full(slots, -1, np.int64)
        self._last = np.zeros(slots, np.int64)

    def start_step(self) -> None:
        """A new step begins: counts decay."""
        if self.spec.decay != 1.0:
            self._count *= self.spec.decay

    def resident(self, layer: int) -> Bools:
        """[N] which experts of ``layer`` are in the cache now (a copy)."""
        return self._slot_of[layer * self._experts : (layer + 1) * self._experts] >= 0

    def slot_of(self, layer: int, expert: int) -> int | None:
        """The slot that holds the expert, None if it is not resident."""
        slot = int(self._slot_of[layer * self._experts + expert])
        return slot if slot >= 0 else None

    def dispatch(self, layer: int, experts: Sequence[int] | Ints) -> list[Fetch]:
        """One layer-step: ``experts`` of ``layer`` (ascending ids, each once) are used on this device.

        Returns what has to be moved, in ascending id. An expert of this very layer-step is never evicted.
        """
        self._moment += 1
        flat = np.asarray(experts, np.int64) + layer * self._experts
        self._count[flat] += 1
        slots = self._slot_of[flat]
        hits = slots >= 0
        self._last[slots[hits]] = self._moment * self._size + flat[hits]
        if hits.all():
            return []
        victims = _Victims(self, slots[hits])
        return [self._fetch(int(key), victims) for key in flat[~hits]]

    def _fetch(self, key: int, victims: _Victims) -> Fetch:
        expert = key % self._experts
        evicted = None
        if self._used < self.slots:
            slot = self._used
            self._used += 1
            victims.protect(slot)
        else:
            found = victims.lowest()
            if found is None or (self.spec.admit and self._count[key] < self._count[self._key[found]]):
                return Fetch(expert=expert, slot=None, evicted=None)
            slot = found
            victims.protect(slot)
            old = int(self._key[slot])
            self._slot_of[old] = -1
            evicted = divmod(old, self._experts)
        self._slot_of[key] = slot
        self._key[slot] = key
        self._last[slot] = self._moment * self._size + key
        return Fetch(expert=expert, slot=slot, evicted=evicted)

    def rank(self) -> tuple[Floats, Ints]:
        """Per slot in use: what eviction orders by, first and second; the lowest goes. Both are copies."""
        key = self._key[: self._used]
        if self.spec.kind == "lfu":
            return self._count[key], self._last[: self._used].copy()
        if self.spec.kind == "lru":
            return np.zeros(self._used), self._last[: self._used].copy()
        assert self._next_use is not None
        return -self._next_use[key].astype(np.float64), key.copy()

    def snapshot(self) -> CacheSnapshot:
        """The state now, independent of what follows."""
        return CacheSnapshot(
            moment=self._moment,
            used=self._used,
            count=self._count.copy(),
            slot_of=self._slot_of.copy(),
            key=self._key.copy(),
            last=self._last.copy(),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Go back to ``snapshot``. Raises ``UsageError`` if it is of a book of another size."""
        if snapshot.count.shape != self._count.shape or snapshot.key.shape != self._key.shape:
            raise UsageError("the snapshot is of a cache of another size")
        self._moment, self._used = snapshot.moment, snapshot.used
        self._count[:], self._slot_of[:] = snapshot.count, snapshot.slot_of
        self._key[:], self._last[:] = snapshot.key, snapshot.last


class _Victims:
    """Who may go during one layer-step. Ranks are read once, at the first eviction: what is used or cached during the
    layer-step is protected, so nobody else's rank changes."""

    def __init__(self, book: CacheBook, protected: Ints) -> None:
        self._book = book
        self._protected = [protected]
        self._rank: tuple[Floats, Ints] | None = None

    def protect(self, slot: int) -> None:
        if self._rank is None:
            self._protected.append(np.array([slot], np.int64))
        else:
            self._rank[0][slot] = np.inf

    def lowest(self) -> int | None:
        """The slot of the lowest-ranked expert that may go, None if none may."""
        if self._rank is None:
            self._rank = self._book.rank()
            self._rank[0][np.concatenate(self._protected)] = np.inf
        first, second = self._rank
        lowest = first.min(initial=np.inf)
        if lowest == np.inf:
            return None
        tied = np.flatnonzero(first == lowest)
        return int(tied[second[tied].argmin()])
