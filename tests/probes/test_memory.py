"""Host memory lies where it was asked to, whatever its size, and large pieces ask for huge pages."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes import memory
from probes.memory import HUGE_PAGE_BYTES, host_zeros


@given(
    size=st.integers(0, 3 * HUGE_PAGE_BYTES),
    alignment=st.sampled_from([1, 8, 64, 4096]),
    lead=st.integers(0, 63),
)
def test_it_begins_where_asked_and_holds_zeros(size: int, alignment: int, lead: int) -> None:
    found = host_zeros(size, alignment=alignment, lead_bytes=lead)
    assert found.dtype is torch.uint8
    assert found.shape == (size,)
    assert (found.data_ptr() - lead) % alignment == 0 or size == 0
    assert not found.any()
    found.fill_(255)
    assert int(found.long().sum()) == 255 * size


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_large_pieces_begin_with_a_huge_page() -> None:
    assert host_zeros(HUGE_PAGE_BYTES, alignment=64).data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("size", [1 << 50, 1 << 62])
def test_memory_that_is_not_there(size: int) -> None:
    with pytest.raises((MemoryError, RuntimeError)):
        host_zeros(size, alignment=64)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 12345)
    assert host_zeros(HUGE_PAGE_BYTES + 1, alignment=64).numel() == HUGE_PAGE_BYTES + 1
