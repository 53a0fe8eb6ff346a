"""Reads past the page cache: the right bytes, from any offset, and a clear word where they cannot be had."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.disk import ALIGNMENT, DirectFile, aligned_buffer
from probes.errors import DeviceError, InputError
from probes.filesystem import mount_of
from probes.records import LinkMode

SIZE = 5 * ALIGNMENT + 123
CONTENT = os.urandom(SIZE)


@pytest.fixture(scope="module")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "random.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("direct", [True, False])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_range_reads_back(random_file: Path, direct: bool, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, SIZE))
    size = data.draw(st.integers(0, SIZE - offset))
    with DirectFile(random_file, direct=direct) as file:
        buffer = aligned_buffer(max(file.span_bytes(offset, size), 1))
        part = file.read_into(offset, size, buffer)
    assert part.numpy().tobytes() == CONTENT[offset : offset + size]


def test_says_how_it_reads(random_file: Path) -> None:
    with DirectFile(random_file) as file:
        assert (file.mode is LinkMode.DIRECT) == (file.reason is None)
    with DirectFile(random_file, direct=False) as file:
        assert file.mode is LinkMode.BUFFERED
        assert file.reason


def test_memory_file_systems_are_never_called_direct() -> None:
    shared_memory = Path("/dev/shm")
    mount = mount_of(shared_memory)
    if mount is None or mount.kind != "tmpfs" or not os.access(shared_memory, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    path = shared_memory / f"caee-test-{os.getpid()}"
    path.write_bytes(CONTENT)
    try:
        with DirectFile(path) as file:
            assert file.mode is LinkMode.BUFFERED
            assert "tmpfs" in (file.reason or "")
            buffer = aligned_buffer(file.span_bytes(1, 9000))
            assert file.read_into(1, 9000, buffer).numpy().tobytes() == CONTENT[1:9001]
    finally:
        path.unlink()


@pytest.mark.parametrize("kind", ["zfs", "tmpfs"])
def test_direct_needs_a_file_system_that_honours_it(
    random_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from probes import disk
    from probes.filesystem import Mount

    monkeypatch.setattr(disk, "mount_of", lambda path: Mount(mount_point=Path("/"), kind=kind, source="x"))
    with DirectFile(random_file) as file:
        assert file.mode is LinkMode.BUFFERED
        assert kind in (file.reason or "")


def test_reads_beyond_the_end_name_file_and_bytes(random_file: Path) -> None:
    with DirectFile(random_file) as file:
        buffer = aligned_buffer(file.span_bytes(SIZE - 10, 20))
        with pytest.raises(InputError, match=rf"random\.bin ends at byte {SIZE}.*{SIZE - 10} to {SIZE + 10}"):
            file.read_into(SIZE - 10, 20, buffer)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_truncated_while_open(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "shrinks.bin"
    path.write_bytes(CONTENT)
    with DirectFile(path, direct=direct) as file:
        os.truncate(path, 2 * ALIGNMENT)
        with pytest.raises(InputError, match="ends at byte"):
            file.read_into(ALIGNMENT, 3 * ALIGNMENT, aligned_buffer(3 * ALIGNMENT))


@pytest.mark.parametrize("direct", [True, False])
def test_one_short_read_is_retried_a_second_is_not(
    random_file: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    genuine = os.preadv
    short = 0

    def shortened(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal short
        if short == 0:
            return genuine(descriptor, buffers, offset)
        short -= 1
        return genuine(descriptor, [buffers[0][:ALIGNMENT]], offset)

    with DirectFile(random_file, direct=direct) as file:
        monkeypatch.setattr(os, "preadv", shortened)
        buffer = aligned_buffer(4 * ALIGNMENT)
        short = 1
        assert file.read_into(0, 4 * ALIGNMENT, buffer).numpy().tobytes() == CONTENT[: 4 * ALIGNMENT]
        short = 2
        with pytest.raises(InputError, match=r"random\.bin"):
            file.read_into(0, 4 * ALIGNMENT, buffer)


def test_a_failing_disk_is_a_device_error(random_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with DirectFile(random_file) as file:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(DeviceError, match=r"random\.bin at bytes 4096 to 8192 failed: Input/output error"):
            file.read_into(ALIGNMENT, 100, aligned_buffer(ALIGNMENT))


@pytest.mark.parametrize("missing", ["absent.bin", "."])
def test_what_cannot_be_opened(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        DirectFile(tmp_path / missing)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.bin"
    path.touch()
    with DirectFile(path) as file:
        assert file.read_into(0, 0, aligned_buffer(ALIGNMENT)).numel() == 0


def test_threads_share_one_file(random_file: Path) -> None:
    def read(offset: int) -> bool:
        buffer = aligned_buffer(file.span_bytes(offset, 5000))
        return file.read_into(offset, 5000, buffer).numpy().tobytes() == CONTENT[offset : offset + 5000]

    with DirectFile(random_file) as file, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, [offset % (SIZE - 5000) for offset in range(0, 400_000, 997)]))


@given(size=st.integers(0, 3 * ALIGNMENT), alignment=st.sampled_from([64, 512, ALIGNMENT]))
def test_aligned_buffers(size: int, alignment: int) -> None:
    buffer = aligned_buffer(size, alignment=alignment)
    assert buffer.numel() == size
    assert buffer.dtype == torch.uint8
    assert size == 0 or buffer.data_ptr() % alignment == 0


def test_memory_that_cannot_be_had_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="cannot allocate"):
        aligned_buffer(1 << 62)


def test_mounts_with_odd_names_and_layers(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:9 / {tmp_path}/a\\040b rw shared:1 master:2 - xfs /dev/b rw\n"
        f"3 1 0:9 / {tmp_path}/a\\040b rw - tmpfs none rw\n"
        "broken line\n",
        encoding="utf-8",
    )
    lower = mount_of(tmp_path / "other", mountinfo=table)
    upper = mount_of(tmp_path / "a b" / "c", mountinfo=table)
    assert lower is not None
    assert upper is not None
    assert (lower.kind, upper.kind) == ("ext4", "tmpfs")
    assert mount_of(tmp_path, mountinfo=tmp_path / "absent") is None
