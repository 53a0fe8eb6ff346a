"""The caches of all devices in flat arrays, compiled: the books of ``runtime.cache``, at the simulator's speed.

Each device's cached copies stand in a binary heap, lowest rank on top. An entry keeps the rank it had when it was
placed; it is brought up to date when a search for a victim meets it, so that a hit costs nothing. That is sound because
a use only raises a rank. ``belady`` and ``forecast`` rank by when an expert is needed next, which changes with every
layer-step, so their entries are searched one by one and stand in no order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.cache import CacheSpec
from runtime.compile import inlined

LFU, LRU, BELADY, FORECAST = range(4)


class Cache(NamedTuple):
    """P copies, D devices with S slots each; entry i of device d stands at d·S + i.

    ``uses``, ``used_at``: [P] how often, and moment · P + copy of the last one, which orders by last use, layer, id.
    ``heap``: the copies; ``heap_count``, ``heap_used_at``: their ranks when placed. ``size``: entries by device.
    ``stack``: scratch of the search. ``next_use``: [P / replicas] when the router next chooses an expert. For
    ``prefetch``: ``own[own_start[d]:own_start[d + 1]]`` are the copies that device d can hold, ascending.
    """

    kind: int
    decay: float
    admit: bool
    prefetch: bool
    slots: int
    layers: int
    uses: npt.NDArray[np.float64]
    used_at: npt.NDArray[np.int64]
    resident: npt.NDArray[np.bool_]
    heap: npt.NDArray[np.int64]
    heap_count: npt.NDArray[np.float64]
    heap_used_at: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    stack: npt.NDArray[np.int64]
    next_use: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]
    own_start: npt.NDArray[np.int64]


def empty_cache(spec: CacheSpec | None, slots: int, devices_LNR: npt.NDArray[np.int32], devices: int) -> Cache:
    """Nothing cached or used yet, for copies on ``devices_LNR``. No ``spec``: on-device inference has no cache."""
    layers, experts, _ = devices_LNR.shape
    copies = devices_LNR.size
    # More slots than a device has copies stay empty.
    slots = min(slots, int(np.bincount(devices_LNR[devices_LNR >= 0]).max(initial=0)))
    entries = slots * devices if spec is not None else 0
    prefetch = spec is not None and spec.prefetch
    device_P = devices_LNR.reshape(-1)
    return Cache(
        kind=("lfu", "lru", "belady", "forecast").index(spec.kind) if spec else LFU,
        decay=spec.decay if spec else 1.0,
        admit=spec.admit if spec else False,
        prefetch=prefetch,
        slots=slots if spec else 0,
        layers=layers,
        uses=np.zeros(copies),
        used_at=np.full(copies, -1, np.int64),
        resident=np.zeros(copies, np.bool_),
        heap=np.zeros(entries, np.int64),
        heap_count=np.zeros(entries),
        heap_used_at=np.zeros(entries, np.int64),
        size=np.zeros(devices, np.int64),
        stack=np.zeros((slots if spec else 0) + 2, np.int64),
        next_use=np.full(layers * experts if spec and spec.kind == "belady" else 0, np.iinfo(np.int64).max),
        own=np.argsort(device_P, kind="stable") if prefetch else np.zeros(0, np.int64),
        own_start=np.searchsorted(np.sort(device_P), np.arange(devices + 1)) if prefetch else np.zeros(0, np.int64),
    )


@inlined
def _below(count: float, used_at: int, other_count: float, other_used_at: int) -> bool:
    """Whether one rank is lower than another."""
    # No short circuit: a branch here could not be predicted.
    return bool((count < other_count) | ((count == other_count) & (used_at < other_used_at)))


@inlined
def _sink(cache: Cache, base: int, size: int, place: int, copy: int, count: float, used_at: int) -> None:
    """Puts an entry at ``place``, or below, where nothing under it ranks lower."""
    heap, counts, ages = cache.heap, cache.heap_count, cache.heap_used_at
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        left = base + child
        right = left + (child + 1 < size)
        lower = _below(counts[right], ages[right], counts[left], ages[left])
        child += lower
        below = left + lower
        if _below(count, used_at, counts[below], ages[below]):
            break
        at = base + place
        heap[at], counts[at], ages[at] = heap[below], counts[below], ages[below]
        place = child
    at = base + place
    heap[at], counts[at], ages[at] = copy, count, used_at


@inlined
def _rise(cache: Cache, base: int, place: int, count: float, used_at: int) -> int:
    """Moves higher-ranked entries above ``place`` down; returns the place that becomes free."""
    heap, counts, ages = cache.heap, cache.heap_count, cache.heap_used_at
    while place > 0:
        parent = (place - 1) // 2
        above = base + parent
        if not _below(count, used_at, counts[above], ages[above]):
            break
        at = base + place
        heap[at], counts[at], ages[at] = heap[above], counts[above], ages[above]
        place = parent
    return place


@inlined
def start_step(cache: Cache) -> None:
    """Counts decay. Rounding can make unequal counts equal, so the heaps are put in order again."""
    if cache.decay == 1.0:
        return
    for copy in range(len(cache.uses)):
        cache.uses[copy] *= cache.decay
    if cache.kind == FORECAST:
        return
    for entry in range(len(cache.heap)):
        cache.heap_count[entry] *= cache.decay
    for device in range(len(cache.size)):
        base = device * cache.slots
        for place in range(cache.size[device] // 2 - 1, -1, -1):
            entry = base + place
            copy, count, used_at = cache.heap[entry], cache.heap_count[entry], cache.heap_used_at[entry]
            _sink(cache, base, cache.size[device], place, copy, count, used_at)


@inlined
def use(cache: Cache, copy: int, moment: int) -> None:
    """A copy is dispatched at layer-step ``moment``, resident or not; ``forecast`` counts by ``demand`` instead."""
    if cache.kind != FORECAST:
        cache.uses[copy] += 1.0
    cache.used_at[copy] = moment * len(cache.uses) + copy


@inlined
def fetch(cache: Cache, device: int, copy: int, moment: int, replicas: int) -> None:
    """Caches a used, non-resident copy if there is room, or if another may go for it."""
    place = cache.size[device]
    base = device * cache.slots
    if place < cache.slots:
        cache.size[device] += 1
    else:
        if cache.kind == FORECAST:
            layer = copy * cache.layers // len(cache.uses)
            place = longest_wait(cache, device, layer, moment)
            refused = place >= 0 and wait(cache, copy, layer) > wait(cache, cache.heap[base + place], layer)
        else:
            place = (
                _furthest(cache, device, moment, replicas) if cache.kind == BELADY else _lowest(cache, device, moment)
            )
            refused = place >= 0 and cache.admit and cache.uses[copy] < cache.uses[cache.heap[base + place]]
        if place < 0 or refused:
            return
        cache.resident[cache.heap[base + place]] = False
    cache.resident[copy] = True
    if cache.kind == BELADY or cache.kind == FORECAST:
        cache.heap[base + place] = copy
    else:
        count = cache.uses[copy] if cache.kind == LFU else 0.0
        place = _rise(cache, base, place, count, cache.used_at[copy])
        _sink(cache, base, cache.size[device], place, copy, count, cache.used_at[copy])


@inlined
def _lowest(cache: Cache, device: int, moment: int) -> int:
    """Where the lowest-ranked copy stands that was not dispatched at ``moment``; −1 if there is none.

    Goes down from the top: past entries of this layer-step, and not below one that may go.
    """
    base, size = device * cache.slots, cache.size[device]
    now = moment * len(cache.uses)
    found = -1
    cache.stack[0] = 0
    depth = 1 if size else 0
    while depth:
        place = cache.stack[depth - 1]
        entry = base + place
        if found >= 0 and not _below(
            cache.heap_count[entry],
            cache.heap_used_at[entry],
            cache.heap_count[base + found],
            cache.heap_used_at[base + found],
        ):
            depth -= 1
            continue
        copy = cache.heap[entry]
        used_at = cache.used_at[copy]
        if cache.heap_used_at[entry] != used_at:
            count = cache.uses[copy] if cache.kind == LFU else 0.0
            _sink(cache, base, size, place, copy, count, used_at)
        elif used_at < now:
            found = place
            depth -= 1
        else:
            depth -= 1
            for child in range(2 * place + 1, min(2 * place + 3, size)):
                cache.stack[depth] = child
                depth += 1
    return found


@inlined
def _furthest(cache: Cache, device: int, moment: int, replicas: int) -> int:
    """Where the copy stands that is needed last (ties: the lowest) and was not dispatched now; −1 if there is none."""
    base = device * cache.slots
    now = moment * len(cache.uses)
    found, lowest, furthest = -1, np.int64(-1), np.int64(-1)
    for place in range(cache.size[device]):
        copy = cache.heap[base + place]
        needed = cache.next_use[copy // replicas]
        if cache.used_at[copy] < now and (needed > furthest or (needed == furthest and copy < lowest)):
            found, lowest, furthest = place, copy, needed
    return found


@inlined
def rate(cache: Cache, copy: int, moment: int) -> float:
    """``runtime.cache.CacheBook.rate`` of a copy, at layer-step ``moment`` (from 1)."""
    if cache.decay != 1.0:
        return float((1.0 - cache.decay) * cache.uses[copy])
    return float(cache.uses[copy] / ((moment - 1) // cache.layers + 1))


@inlined
def demand(cache: Cache, copy: int) -> None:
    """The router chose the copy, whether or not it stays: what ``forecast`` counts."""
    if cache.kind == FORECAST:
        cache.uses[copy] += 1.0


@inlined
def wait(cache: Cache, copy: int, layer: int) -> float:
    """``runtime.cache.expected_wait`` of a copy, from ``layer``."""
    turn = (copy * cache.layers // len(cache.uses) - layer - 1) % cache.layers + 1
    return float(turn + cache.layers / ((1.0 - cache.decay) * cache.uses[copy]))


@inlined
def longest_wait(cache: Cache, device: int, layer: int, moment: int) -> int:
    """Where the copy stands that is expected last (ties: least recently used) and was not dispatched or moved now;
    −1 if there is none."""
    base = device * cache.slots
    now = moment * len(cache.uses)
    found, longest, oldest = -1, -1.0, np.int64(0)
    for place in range(cache.size[device]):
        copy = cache.heap[base + place]
        used_at = cache.used_at[copy]
        if used_at < now:
            expected = wait(cache, copy, layer)
            if expected > longest or (expected == longest and used_at < oldest):
                found, longest, oldest = place, expected, used_at
    return found


@inlined
def exchange(cache: Cache, device: int, layer: int, moment: int) -> bool:
    """Brings the absent copy that is expected first for the cached one that is expected last, if that is later."""
    if cache.size[device] < cache.slots:
        return False
    place = longest_wait(cache, device, layer, moment)
    if place < 0:
        return False
    victim = cache.heap[device * cache.slots + place]
    coming, shortest = np.int64(-1), wait(cache, victim, layer)
    for at in range(cache.own_start[device], cache.own_start[device + 1]):
        copy = cache.own[at]
        if not cache.resident[copy] and cache.uses[copy] > 0.0:
            expected = wait(cache, copy, layer)
            if expected < shortest:
                coming, shortest = copy, expected
    if coming < 0:
        return False
    cache.resident[victim], cache.resident[coming] = False, True
    cache.heap[device * cache.slots + place] = coming
    cache.used_at[coming] = moment * len(cache.uses) + coming
    return True
