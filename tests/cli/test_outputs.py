"""What is refused as an output before any work: inputs and the store by any name, and what cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from caee_cli.outputs import check_output, refuse_overwriting
from probes.errors import CaeeError, InputError, UsageError
from probes.files import require_writable, written_whole

CALLED: dict[str, Callable[[Path, Path], Path]] = {
    "by its name": lambda file, _: file,
    "by a relative name": lambda file, _: Path(os.path.relpath(file)),
    "by a way around": lambda file, _: file.parent / "inner" / ".." / file.name,
    "by a symbolic link": lambda file, link: (link.symlink_to(file), link)[1],
    "by a hard link": lambda file, link: (link.hardlink_to(file), link)[1],
    "by a link to its folder": lambda file, link: (link.symlink_to(file.parent), link / file.name)[1],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "there" / "inner").mkdir(parents=True)
    file = tmp_path / "there" / "input"
    file.write_text("precious")
    return file


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("called", CALLED)
def test_an_input_is_no_output_by_whatever_name(file: Path, tmp_path: Path, called: str, force: bool) -> None:
    output = CALLED[called](file, tmp_path / "link")
    for inputs in ([None, file], [file.parent]):
        with pytest.raises(UsageError, match="is what the command reads"):
            check_output(output, force=force, inputs=inputs)
    # The other way around too: the output has the plain name, the input the other.
    with pytest.raises(UsageError, match="is what the command reads"):
        check_output(file, force=force, inputs=[output])
    assert file.read_text() == "precious"


@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("ending", ["", "-wal"])
def test_nor_is_the_store(
    file: Path, tmp_path: Path, called: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = CALLED[called](file, tmp_path / "link")
    store = tmp_path / "there" / "store.db"
    monkeypatch.delenv("CAEE_STORE", raising=False)
    file.rename(f"{store}{ending}")
    if not output.exists():
        output = Path(f"{store}{ending}")
    for named in (str(store), f"sqlite:///{store}"):
        with pytest.raises(UsageError, match="is the store's own file"):
            refuse_overwriting(output, store=named)
        monkeypatch.setenv("CAEE_STORE", named)
        with pytest.raises(UsageError, match="is the store's own file"):
            refuse_overwriting(output)
        monkeypatch.delenv("CAEE_STORE")


def test_any_other_file_is_an_output(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("old")
    for store in (None, str(tmp_path / "none.db"), ".", "sqlite://", "postgresql://host/database", "no://such"):
        check_output(other, force=True, inputs=[file, tmp_path / "absent", None], store=store)
    check_output(tmp_path / "new", force=False, inputs=[file])
    check_output(None, force=False, inputs=[file])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "there"]
    assert other.read_text() == "old"


@pytest.mark.parametrize(
    ("written", "kind", "message"),
    [
        (".", UsageError, "is a folder"),
        ("..", UsageError, "is a folder"),
        ("/", UsageError, "is a folder"),
        ("", UsageError, "is a folder"),
        ("there", UsageError, "is a folder"),
        ("/dev/null", UsageError, "not a file"),
        ("pipe", UsageError, "not a file"),
        ("absent/new", InputError, "cannot write in absent"),
        ("there/input/new", InputError, "cannot write in there/input"),
        ("/proc/new", InputError, "cannot write in /proc"),
        ("/proc/self/new", InputError, "cannot write in /proc/self"),
        ("x" * 300, InputError, "name too long"),
    ],
)
def test_what_cannot_be_written_is_said_before_and_when_it_is_written(
    written: str, kind: type[CaeeError], message: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for force in (False, True):
        for check in (require_writable, lambda path, force: written_whole(path, force=force).__enter__()):
            with pytest.raises(kind, match=message):
                check(Path(written), force=force)
        with pytest.raises(kind, match=message):
            check_output(Path(written), force=force)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "there"]


def test_a_folder_one_may_not_write_to(file: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    file.parent.chmod(0o500)
    try:
        with pytest.raises(InputError, match="Permission denied"):
            check_output(file.parent / "new", force=False)
    finally:
        file.parent.chmod(0o700)


def test_an_existing_file_needs_force_and_is_left_alone(file: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        check_output(file, force=False)
    check_output(file, force=True)
    assert file.read_text() == "precious"
    assert [each.name for each in file.parent.iterdir() if each.is_file()] == ["input"]


def write_half(file: Path, number: int) -> None:
    with written_whole(file, force=True) as stream:
        stream.write(b"half")
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_without_room_leaves_what_was_there_and_names_the_file(file: Path, number: int) -> None:
    with pytest.raises(InputError) as caught:
        write_half(file, number)
    assert caught.value.message == f"cannot write {file}: {os.strerror(number)}"
    assert "free some space" in (caught.value.hint or "")
    assert file.read_text() == "precious"
    assert [path.name for path in file.parent.iterdir() if path.is_file()] == [file.name]


def test_other_faults_pass_as_they_are(file: Path) -> None:
    with pytest.raises(OSError, match="Input/output"):
        write_half(file, errno.EIO)
    assert file.read_text() == "precious"
