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

KINDS = ("lfu", "lru", "belady", "forecast")
KEYS = {"lfu": ("decay", "admit"), "forecast": ("decay", "prefetch")}
FORECAST_DECAY = 0.98
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """A replacement rule. ``decay`` multiplies all counts at the start of every step (``lfu``, ``forecast``).

    ``admit`` (``lfu``): do not cache a fetched expert that was used less often than the one that would have to go.
    ``belady`` evicts what the router itself needs last (Belady 1966); it looks ahead, so only the simulator has it.
    ``forecast`` evicts what it expects to be needed last (``expected_wait``) and caches nothing that is expected later
    than that; ``prefetch``: idle links exchange such experts for ones that are expected sooner.
    """

    kind: str
    decay: float = 1.0
    admit: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown cache {self.kind!r}", hint=f"choose one of {', '.join(KINDS)}")
        given = {"decay": self.decay != 1.0, "admit": self.admit, "prefetch": self.prefetch}
        taken = KEYS.get(self.kind, ())
        for key in given:
            if given[key] and key not in taken:
                raise UsageError(
                    f"cache {self.kind!r} takes no {key}",
                    hint=f"it takes {' and '.join(taken)}" if taken else "it has no parameters",
                )
        if not 0.0 < self.decay <= 1.0:
            raise UsageError(f"cache decay {self.decay} is not in (0, 1]", hint="for example lfu:decay=0.97")
        if self.kind == "forecast" and self.decay == 1.0:
            raise UsageError(
                "cache forecast needs a decay below 1: counts over all time tell no rate",
                hint="for example forecast:decay=0.98",
            )

    @property
    def parameters(self) -> dict[str, float | int]:
        return {
            key: getattr(self, key) if key == "decay" else int(getattr(self, key)) for key in KEYS.get(self.kind, ())
        }

    @property
    def counts_demand(self) -> bool:
        """Whether the router's own choice is counted, pruned or not, rather than what is used."""
        return self.kind == "forecast"

    def __str__(self) -> str:
        changed = [f"decay={self.decay:g}"] if self.decay != 1.0 else []
        changed += [f"{key}=1" for key in ("admit", "prefetch") if getattr(self, key)]
        return f"{self.kind}:{','.join(changed)}" if changed else self.kind


def parse_cache(text: str) -> CacheSpec:
    """The cache written ``NAME`` or ``NAME:key=value,key=value``, as in ``lfu:decay=0.97,admit=1``.

    Raises ``UsageError`` for an unknown name or key and for a value out of range.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    values: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in ("decay", "admit", "prefetch") or key in values:
            raise UsageError(
                f"cache {text!r}: cannot read {pair!r}", hint="keys are decay=X, admit=0|1, prefetch=0|1, each once"
            )
        values[key] = value
    for key in ("admit", "prefetch"):
        if values.get(key, "0") not in ("0", "1"):
            raise UsageError(f"cache {text!r}: {key} is {values[key]!r}", hint=f"write {key}=1 or {key}=0")
    try:
        decay = float(values.get("decay", FORECAST_DECAY if kind == "forecast" else 1.0))
    except ValueError as error:
        raise UsageError(f"cache {text!r}: decay is {values['decay']!r}", hint="decay is a number in (0, 1]") from error
    return CacheSpec(kind=kind, decay=decay, admit=values.get("admit") == "1", prefetch=values.get("prefetch") == "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One paid movement: ``expert`` comes to ``slot``, where ``evicted`` (layer, expert) was. No slot: not cached."""

    expert: int
    slot: int | None
    evicted: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """One paid movement ahead of need: ``expert`` of ``layer`` comes to ``slot``, where ``evicted`` was."""

    layer: int
    expert: int
    slot: int
    evicted: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """A book's whole state at one moment; ``CacheBook.restore`` accepts it from a book of the same size."""

    moment: int
    used: int
    count: Floats
    slot_of: Ints
    key: Ints
    last: Ints


def expected_wait(layer: Ints, count: Floats, *, now: int, layers: int, decay: float) -> Floats:
    """Layer-steps from layer ``now`` until an expert of ``layer`` is expected to be chosen again, less a constant.

    Its layer's next turn comes in 1 to ``layers`` layer-steps, and it is chosen at one turn in 1/p: p = (1 − decay) ·
    ``count`` is the share of past steps that chose it, where the last ones weigh most. Infinite for a count of 0.
    """
    turn = (layer - now - 1) % layers + 1
    with np.errstate(divide="ignore", over="ignore"):
        wait: Floats = turn + layers / ((1.0 - decay) * count)
    return wait


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
            raise UsageError("belady looks ahead, which a live run cannot", hint="use lfu, lru or forecast")
        self.spec = spec
        self.slots = slots
        self._experts = experts
        self._layers = layers
        self._size = layers * experts
        self._next_use = None if next_use_LN is None else next_use_LN.reshape(-1)
        self._moment = 0
        self._layer = 0
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

    def rate(self, layer: int) -> Floats:
        """[N] the share of steps in which each expert of ``layer`` was used here; of late, if counts decay."""
        count = self._count[layer * self._experts : (layer + 1) * self._experts]
        if self.spec.decay != 1.0:
            return (1.0 - self.spec.decay) * count
        return count / (self._moment // self._layers + 1)

    def slot_of(self, layer: int, expert: int) -> int | None:
        """The slot that holds the expert, None if it is not resident."""
        slot = int(self._slot_of[layer * self._experts + expert])
        return slot if slot >= 0 else None

    def slots_of(self, layer: int, experts_E: Ints) -> list[int]:
        """``slot_of`` many experts, −1 for those that are not resident."""
        slots: list[int] = self._slot_of[experts_E + layer * self._experts].tolist()
        return slots

    def dispatch(
        self, layer: int, experts: Sequence[int] | Ints, demanded: Sequence[int] | Ints | None = None
    ) -> list[Fetch]:
        """One layer-step: ``experts`` of ``layer`` (ascending ids, each once) are used on this device.

        ``demanded``: what the router itself chose there, pruned or not, which is what ``forecast`` counts; None: the
        same. Returns what has to be moved, in ascending id. An expert of this very layer-step is never evicted.
        """
        self._moment += 1
        self._layer = layer
        flat = np.asarray(experts, np.int64) + layer * self._experts
        if self.spec.counts_demand and demanded is not None:
            self._count[np.asarray(demanded, np.int64) + layer * self._experts] += 1
        else:
            self._count[flat] += 1
        slots = self._slot_of[flat]
        if slots.min(initial=0) >= 0:
            self._last[slots] = self._moment * self._size + flat
            return []
        hits = slots >= 0
        self._last[slots[hits]] = self._moment * self._size + flat[hits]
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
            if found is None or self._is_refused(key, int(self._key[found])):
                return Fetch(expert=expert, slot=None, evicted=None)
            slot = found
            victims.protect(slot)
            evicted = self._evict(slot)
        self._put(key, slot)
        return Fetch(expert=expert, slot=slot, evicted=evicted)

    def prefetch(self, most: int) -> list[Prefetch]:
        """After ``dispatch``: up to ``most`` exchanges that bring an expert expected sooner for one expected later.

        Comes: the non-resident expert of shortest expected wait that was ever counted (ties: lowest layer, then id).
        Goes: as at a fetch. What was used or fetched in this layer-step stays, prefetched ones included.
        """
        if self._used < self.slots:
            return []
        # Waits stay as they are during a layer-step, and who went is expected later than whoever goes next: so the
        # exchanges pair the two orders off.
        absent = np.flatnonzero((self._slot_of < 0) & (self._count > 0))
        movable = np.flatnonzero(self._last // self._size < self._moment)
        coming_wait, going_wait = self._wait(absent), self._wait(self._key[movable])
        # Only these can be part of an exchange, and few are left to be put in order.
        sooner = coming_wait < going_wait.max(initial=0.0)
        later = going_wait > coming_wait.min(initial=np.inf)
        absent, coming_wait = absent[sooner], coming_wait[sooner]
        movable, going_wait = movable[later], going_wait[later]
        coming = np.argsort(coming_wait, kind="stable")[: min(most, len(movable))]
        going = np.lexsort((self._last[movable], -going_wait))[: len(coming)]
        count = int(np.cumprod(coming_wait[coming] < going_wait[going]).sum())
        exchanged = []
        for key, slot in zip(absent[coming[:count]], movable[going[:count]], strict=True):
            layer, expert = divmod(int(key), self._experts)
            evicted = self._evict(int(slot))
            self._put(int(key), int(slot))
            exchanged.append(Prefetch(layer=layer, expert=expert, slot=int(slot), evicted=evicted))
        return exchanged

    def _is_refused(self, key: int, victim: int) -> bool:
        """Whether a fetched expert is not worth the place of ``victim``."""
        if self.spec.kind == "forecast":
            mine, other = self._wait(np.array([key, victim]))
            return bool(mine > other)
        return self.spec.admit and bool(self._count[key] < self._count[victim])

    def _evict(self, slot: int) -> tuple[int, int]:
        old = int(self._key[slot])
        self._slot_of[old] = -1
        return divmod(old, self._experts)

    def _put(self, key: int, slot: int) -> None:
        self._slot_of[key] = slot
        self._key[slot] = key
        self._last[slot] = self._moment * self._size + key

    def _wait(self, key: Ints) -> Floats:
        return expected_wait(
            key // self._experts, self._count[key], now=self._layer, layers=self._layers, decay=self.spec.decay
        )

    def rank(self) -> tuple[Floats, Ints]:
        """Per slot in use: what eviction orders by, first and second; the lowest goes. Both are copies."""
        key = self._key[: self._used]
        if self.spec.kind == "lfu":
            return self._count[key], self._last[: self._used].copy()
        if self.spec.kind == "lru":
            return np.zeros(self._used), self._last[: self._used].copy()
        if self.spec.kind == "forecast":
            return -self._wait(key), self._last[: self._used].copy()
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
