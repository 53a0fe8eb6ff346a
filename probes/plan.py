"""Which links this machine could have, how each would be measured, and why some cannot be here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from probes.backend import Backend, TorchBackend
from probes.devices import why_no_gpu
from probes.limits import last_level_cache_bytes, memory_available_bytes
from probes.numa import near
from probes.records import Concurrency, Device, LinkKind, LinkMode
from probes.scratch import ScratchFile
from probes.transfers import CopyTransfer, DiskTransfer, StagedTransfer, Transfer, pool_pair

# Pools of twice the last-level cache each: what is copied is never in the cache.
_CACHES = 2
_DEFAULT_CACHE_BYTES = 32 << 20
# All pools together may take this share of the memory that is free.
_MEMORY_SHARE = 4
# Pairs grow with the square of the GPUs: up to here each is measured in every way.
_EVERY_PAIR = 4
READ_AND_WRITE = "read+write"
BackendFactory = Callable[[torch.device], Backend]
Maker = Callable[[], Transfer]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """One link to measure in one way. ``makers[0]`` makes the measured transfer, the rest the load beside it.

    ``waived``: why it cannot be measured here (then there are no makers).
    """

    kind: LinkKind
    source: str
    destination: str
    mode: LinkMode | None = None
    concurrency: Concurrency = Concurrency.SOLO
    convention: str = "copy"
    makers: tuple[Maker, ...] = ()
    waived: str | None = None


def plan_links(
    devices: Sequence[Device],
    scratch: ScratchFile,
    *,
    max_bytes: int,
    seed: int,
    make_backend: BackendFactory = TorchBackend,
) -> tuple[LinkPlan, ...]:
    """Every link, alone and with all devices at once, in the order to measure them."""
    pool_bytes = _pool_bytes(max_bytes, len(devices))
    gpus = [device for device in devices if device.kind != "cpu"]
    return (
        *_host_memory(len(devices), pool_bytes, make_backend),
        *_disk(len(devices), scratch, seed),
        *(_gpu_links(gpus, pool_bytes, make_backend) if gpus else _absent_gpu_links(why_no_gpu())),
    )


def host_copies(device: Device, *, size_bytes: int, make_backend: BackendFactory = TorchBackend) -> Maker:
    """Pinned copies of up to ``size_bytes`` from host memory to ``device``."""
    backend = make_backend(torch.device(device.name_on_link))
    return _copies(backend, size_bytes, "host", "device", pinned=True)


def _pool_bytes(max_bytes: int, devices: int) -> int:
    cache = last_level_cache_bytes() or _DEFAULT_CACHE_BYTES
    wanted = max(max_bytes, _CACHES * cache)
    affordable = memory_available_bytes() // _MEMORY_SHARE // (2 * devices)
    return max(min(wanted, affordable) >> 20, 1) << 20


def _host_memory(devices: int, pool_bytes: int, make_backend: BackendFactory) -> Iterator[LinkPlan]:
    backend = make_backend(torch.device("cpu"))
    maker = _copies(backend, pool_bytes, "host", "host", read_and_write=True)
    yield from _alone_and_all(
        LinkPlan(kind=LinkKind.HOST_MEMORY, source="host", destination="host", convention=READ_AND_WRITE),
        [maker] * devices,
    )


def _disk(devices: int, scratch: ScratchFile, seed: int) -> Iterator[LinkPlan]:
    for mode in (LinkMode.DIRECT, LinkMode.BUFFERED):
        link = LinkPlan(kind=LinkKind.DISK_TO_HOST, source="disk", destination="host", mode=mode)
        file = scratch.file(mode)
        if file is None or scratch.content is None:
            yield from _both_waived(link, scratch.waived or scratch.not_direct or "there is no file to read")
            continue
        # Where direct reads cannot be had, the reason is worth knowing beside the buffered figures too.
        notes = () if scratch.not_direct is None else (scratch.not_direct,)
        readers = [
            partial(DiskTransfer, file, scratch.content, part=part, parts=devices, seed=seed, notes=notes)
            for part in range(devices)
        ]
        yield from _alone_and_all(link, readers)


def _gpu_links(gpus: Sequence[Device], pool_bytes: int, make_backend: BackendFactory) -> Iterator[LinkPlan]:
    names = [gpu.name_on_link for gpu in gpus]
    backends = [make_backend(torch.device(name)) for name in names]
    memory = [_copies(backend, pool_bytes, "device", "device", read_and_write=True) for backend in backends]
    for at, name in enumerate(names):
        link = LinkPlan(kind=LinkKind.DEVICE_MEMORY, source=name, destination=name, convention=READ_AND_WRITE)
        yield from _alone_and_all(link, _rotated(memory, at))
    for mode in (LinkMode.PINNED, LinkMode.PAGEABLE):
        pinned = mode is LinkMode.PINNED
        to_device = [_copies(backend, pool_bytes, "host", "device", pinned=pinned) for backend in backends]
        to_host = [_copies(backend, pool_bytes, "device", "host", pinned=pinned) for backend in backends]
        for at, name in enumerate(names):
            link = LinkPlan(kind=LinkKind.HOST_TO_DEVICE, source="host", destination=name, mode=mode)
            yield from _alone_and_all(link, _rotated(to_device, at))
            link = LinkPlan(kind=LinkKind.DEVICE_TO_HOST, source=name, destination="host", mode=mode)
            yield from _alone_and_all(link, _rotated(to_host, at))
    yield from _between_gpus(names, backends, pool_bytes)


def _between_gpus(names: Sequence[str], backends: Sequence[Backend], pool_bytes: int) -> Iterator[LinkPlan]:
    """Every ordered pair alone, with bytes coming the opposite way too, and through host memory.

    All at once as a ring, each device sending to the next.
    """
    count = len(names)
    if count == 1:
        yield from _pair_waived(names[0], "cuda", "there is only one GPU")
        return
    ring = [partial(_between, backends[at], backends[(at + 1) % count], pool_bytes) for at in range(count)]
    for at, to in itertools.permutations(range(count), 2):
        link = LinkPlan(kind=LinkKind.DEVICE_TO_DEVICE, source=names[at], destination=names[to])
        there = partial(_between, backends[at], backends[to], pool_bytes)
        back = partial(_between, backends[to], backends[at], pool_bytes)
        neighbours = to == (at + 1) % count
        if neighbours:
            yield from _alone_and_all(link, _rotated(ring, at))
        else:
            yield replace(link, makers=(there,))
        both, staged = replace(link, concurrency=Concurrency.BOTH_WAYS), replace(link, mode=LinkMode.STAGED)
        if neighbours or count <= _EVERY_PAIR:
            yield replace(both, makers=(there, back))
            yield replace(staged, makers=(partial(StagedTransfer, backends[at], backends[to], pool_bytes),))
        else:
            reason = f"with more than {_EVERY_PAIR} GPUs only those next to each other are measured so, to save time"
            yield replace(both, waived=reason)
            yield replace(staged, waived=reason)


def _pair_waived(source: str, destination: str, reason: str) -> Iterator[LinkPlan]:
    link = LinkPlan(kind=LinkKind.DEVICE_TO_DEVICE, source=source, destination=destination)
    yield from _both_waived(link, reason)
    yield replace(link, concurrency=Concurrency.BOTH_WAYS, waived=reason)
    yield replace(link, mode=LinkMode.STAGED, waived=reason)


def _absent_gpu_links(reason: str) -> Iterator[LinkPlan]:
    yield from _both_waived(LinkPlan(kind=LinkKind.DEVICE_MEMORY, source="cuda", destination="cuda"), reason)
    for mode in (LinkMode.PINNED, LinkMode.PAGEABLE):
        for kind, source, destination in (
            (LinkKind.HOST_TO_DEVICE, "host", "cuda"),
            (LinkKind.DEVICE_TO_HOST, "cuda", "host"),
        ):
            yield from _both_waived(LinkPlan(kind=kind, source=source, destination=destination, mode=mode), reason)
    yield from _pair_waived("cuda", "cuda", reason)


def _alone_and_all(link: LinkPlan, makers: Sequence[Maker]) -> Iterator[LinkPlan]:
    yield replace(link, makers=(makers[0],))
    together = replace(link, concurrency=Concurrency.ALL)
    if len(makers) == 1:
        yield replace(together, waived="there is only one device: nothing to share the link with")
    else:
        yield replace(together, makers=tuple(makers))


def _both_waived(link: LinkPlan, reason: str) -> Iterator[LinkPlan]:
    for concurrency in (Concurrency.SOLO, Concurrency.ALL):
        yield replace(link, concurrency=concurrency, waived=reason)


def _rotated(makers: Sequence[Maker], first: int) -> list[Maker]:
    return [*makers[first:], *makers[:first]]


def _copies(
    backend: Backend,
    pool_bytes: int,
    source: str,
    destination: str,
    *,
    pinned: bool = False,
    read_and_write: bool = False,
) -> Maker:
    def make() -> Transfer:
        with near(backend.device):
            first, second, notes = pool_pair(backend, pool_bytes, source=source, destination=destination, pinned=pinned)
        return CopyTransfer(backend, first, second, read_and_write=read_and_write, notes=notes)

    return make


def _between(source: Backend, destination: Backend, pool_bytes: int) -> Transfer:
    pools = source.device_buffer(pool_bytes), destination.device_buffer(pool_bytes)
    return CopyTransfer(source, *pools, other=destination)
