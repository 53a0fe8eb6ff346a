"""Experts that wait in host memory: few allocations, every byte in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.backend import TorchBackend
from probes.disk import ALIGNMENT
from probes.errors import DeviceError, RunError
from runtime.experts import transfer
from runtime.experts.index import Piece, index_experts
from runtime.experts.memory import Bytes, Staging, tensor_of
from runtime.experts.transfer import SLAB_BYTES, DiskSource, ExpertSource, HostSource

Expert = dict[tuple[str, int, bool], bytes]


class CountingBackend(TorchBackend):
    """Remembers how large the host buffers are that were asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sizes: list[int] = []

    def host_buffer(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        if pinned:
            self.sizes.append(size_bytes)
        return super().host_buffer(size_bytes, pinned=pinned)


def delivered(source: ExpertSource, staging: Staging | None, layer: int, expert: int) -> Expert:
    """Every piece's bytes, by where they belong."""
    found: Expert = {}

    def take(pieces: tuple[Piece, ...], data: Bytes, start: int) -> None:
        assert start == 0
        for piece in pieces:
            stored = tensor_of(data[piece.start : piece.start + piece.size_bytes])
            found[piece.parameter, piece.part, piece.scales] = stored.numpy().tobytes()

    source.deliver(layer, expert, staging, take)
    return found


def test_a_read_that_fails_once_while_loading_is_repeated(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_experts(checkpoint("qwen3_moe"))
    backend = CountingBackend()
    every = [(layer, expert) for layer in range(len(index.reads)) for expert in range(index.num_experts)]
    sound = HostSource(index, backend, every)
    deliver, tried = DiskSource.deliver, set()

    def fails_after_a_span(source: DiskSource, layer: int, expert: int, *rest: Any) -> None:
        deliver(source, layer, expert, *rest)
        if (layer, expert) not in tried:
            tried.add((layer, expert))
            raise DeviceError("no answer")

    monkeypatch.setattr(DiskSource, "deliver", fails_after_a_span)
    repeated = HostSource(index, backend, every)
    assert len(tried) == len(every)
    assert all(delivered(repeated, None, *each) == delivered(sound, None, *each) for each in every)

    def fails(*_: object) -> None:
        raise DeviceError("no answer")

    monkeypatch.setattr(DiskSource, "deliver", fails)
    with pytest.raises(RunError, match="fetching expert 0 of MoE layer 0 failed twice: no answer"):
        HostSource(index, backend, every)


@pytest.mark.parametrize("slab_bytes", [1, 30_000, SLAB_BYTES])
def test_host_memory_holds_what_the_disk_does(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "SLAB_BYTES", slab_bytes)
    index = index_experts(checkpoint("qwen3_moe"))
    backend = CountingBackend()
    disk = DiskSource(index)
    staging = Staging(backend.host_buffer(disk.staging_bytes(), pinned=False), backend.device)
    every = [(layer, expert) for layer in range(len(index.reads)) for expert in range(index.num_experts)]
    host = HostSource(index, backend, every)
    for layer, expert in every:
        there, here = delivered(disk, staging, layer, expert), delivered(host, None, layer, expert)
        assert len(here) == 3
        assert here == there
    reads = [read.size_bytes for layer in index.reads for expert in layer for read in expert]
    total = sum(-(-size // 64) * 64 for size in reads)
    if slab_bytes == SLAB_BYTES:
        assert backend.sizes == [total]
    assert total <= sum(backend.sizes) < total + (max(reads) + 64) * len(backend.sizes)
    assert (SLAB_BYTES + ALIGNMENT).bit_count() == 1
    disk.close()
    host.close()
