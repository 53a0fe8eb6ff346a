"""The Parquet format: what is written comes back, in bounded chunks, and a crash loses only the last piece."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.errors import InputError, TraceError, UsageError
from probes.files import written_whole
from runtime.trace import chunking, writer
from runtime.trace.chunking import cut, join, rechunk
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.importing import import_trace
from runtime.trace.profile import read_profile, write_profile
from runtime.trace.reader import TraceReader, partial_folder, read_trace, recorded_file
from runtime.trace.records import IdSpace, LoadProfile, RoutingTrace, ScoreFunction, TokenKind, TraceMeta
from runtime.trace.writer import (
    PIECE_SECONDS,
    Recovered,
    TraceRecorder,
    TraceWriter,
    recover,
    refuse_existing,
    write_trace,
)

ARRAYS = [field.name for field in dataclasses.fields(RoutingTrace) if field.name not in ("meta", "sequence_names")]


def assert_same(a: RoutingTrace, b: RoutingTrace) -> None:
    assert a.meta == b.meta
    names_a = [a.sequence_names[number] for number in a.token_sequence_T]
    assert names_a == [b.sequence_names[number] for number in b.token_sequence_T]
    for name in ARRAYS:
        left, right = getattr(a, name), getattr(b, name)
        if left is None or right is None:
            assert left is right
        else:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right, err_msg=name)


def write(path: Path, trace: RoutingTrace, pieces: int = 1) -> None:
    with TraceWriter(path, trace.meta) as target:
        for part in np.array_split(np.arange(trace.tokens), pieces):
            target.write(cut(trace, int(part[0]), int(part[-1]) + 1) if len(part) else cut(trace, 0, 0))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 60),
    layers=st.integers(1, 4),
    experts=st.sampled_from([1, 5, 300, 32766]),
    sequences=st.integers(1, 5),
    pieces=st.integers(1, 7),
    chunk=st.integers(1, 25),
    scores=st.booleans(),
    seed=st.integers(0, 99),
)
def test_round_trip(
    make_trace: Any, tmp_path_factory: pytest.TempPathFactory, tokens: int, layers: int, experts: int, sequences: int,
    pieces: int, chunk: int, scores: bool, seed: int,
) -> None:  # fmt: skip
    scores = scores and experts < 1000
    trace = make_trace(
        tokens=tokens, layers=layers, experts=experts, top_k=min(3, experts), sequences=sequences, seed=seed,
        scores_recorded=scores, selection_recorded=scores,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    original = chunking.tokens_per_chunk
    writer.tokens_per_chunk = lambda meta: chunk  # type: ignore[attr-defined]  # small row groups
    try:
        write(path, trace, pieces)
    finally:
        writer.tokens_per_chunk = original  # type: ignore[attr-defined]  # undo
    chunks = list(TraceReader(path).chunks())
    assert [part.tokens for part in chunks] == [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    if tokens:
        assert_same(join(chunks), trace)
        assert_same(join(list(rechunk(chunks, 7))), trace)
    else:
        with pytest.raises(TraceError, match="no token"):
            read_trace(path)


def test_everything_a_token_carries_survives(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=6, experts=400, top_k=4)
    ids = trace.ids_TLK.copy()
    ids[0, 0] = [399, 256, -1, -1]
    trace = dataclasses.replace(
        trace,
        ids_TLK=ids,
        gates_TLK=np.where(ids >= 0, trace.gates_TLK, 0).astype(np.float32),
        token_step_T=np.array([-1, 0, 1, 2**40, 4, 5], dtype=np.int64),
        token_phase_T=np.array([-1, 0, 1, 1, 1, 1], dtype=np.int8),
        token_kind_T=np.array([0, 1, 2, 0, 0, 0], dtype=np.int8),
        token_rank_T=np.array([0, 1, 2, 3, 4, 300], dtype=np.int16),
        meta=dataclasses.replace(
            trace.meta, model=None, layer_numbers=(3, 4, 61), draft_layers=(61,), score_function=ScoreFunction.SIGMOID,
            normalised=True, routed_scaling_factor=2.5, engine="e", engine_version="1", id_space=IdSpace.PHYSICAL,
            parameters={"seed": 1, "name": "θ", "list": [1, 2.5, None]},
        ),
    )  # fmt: skip
    write(tmp_path / "t.parquet", trace)
    assert_same(read_trace(tmp_path / "t.parquet"), trace)


def test_ids_without_weights_come_back_as_equal_shares(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=5, gates_recorded=False)
    write(tmp_path / "t.parquet", trace)
    back = read_trace(tmp_path / "t.parquet")
    assert not back.meta.gates_recorded
    assert (back.gates_TLK == 0.25).all()
    assert not [name for name in pq.read_schema(tmp_path / "t.parquet").names if name.startswith("gate")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.gates_TLK.__setitem__((3, 1, 2), np.nan), r"token 3 .*'s0'.*layer 1.*nan is not finite"),
        (lambda t: t.gates_TLK.__setitem__((3, 1, 2), -0.5), "layer 1, place 2: gate weight -0.5 is negative"),
        (lambda t: t.ids_TLK.__setitem__((7, 0, 0), 16), r"token 7 .*expert id 16 is not in -1..15"),
        (lambda t: t.ids_TLK.__setitem__((7, 0, 0), -2), "expert id -2"),
        (lambda t: t.ids_TLK.__setitem__((7, 2), 5), "expert id 5 appears twice in one token"),
        (lambda t: t.scores_TLN.__setitem__((2, 2, 3), -1), "gate score -1.0 is negative"),
        (lambda t: t.selection_TLN.__setitem__((2, 2, 3), np.inf), "selection score inf is not finite"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_written(
    make_trace: Any, tmp_path: Path, change: Any, message: str
) -> None:
    trace = make_trace(sequences=1, scores_recorded=True, selection_recorded=True)
    change(trace)
    with pytest.raises(TraceError, match=message):
        write(tmp_path / "t.parquet", trace, pieces=4)
    assert list(tmp_path.iterdir()) == []
    # Padding rows are not read, so the same values in them do no harm.
    kind = np.full(trace.tokens, TokenKind.PADDING, dtype=np.int8)
    write(tmp_path / "t.parquet", dataclasses.replace(trace, token_kind_T=kind))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up_names_the_file_and_leaves_nothing(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(InputError, match=r"cannot write .*full\.parquet: No space left on device") as caught:
        write(tmp_path / "full.parquet", make_trace())
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept(make_trace: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write(path, make_trace())
    assert path.read_text() == "mine"
    with TraceWriter(path, make_trace().meta, force=True) as target:
        target.write(make_trace())
    assert_same(read_trace(path), make_trace())


def test_a_cut_or_foreign_file_is_a_clear_error(make_trace: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, make_trace())
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match="not a complete Parquet file"):
            read_trace(path)
    damaged = bytearray(whole)
    damaged[4:200] = bytes(196)
    path.write_bytes(bytes(damaged))
    with pytest.raises(TraceError, match="damaged"):
        read_trace(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="not a routing trace"):
        read_trace(path)
    with pytest.raises(TraceError, match="does not exist"):
        TraceReader(tmp_path / "absent.parquet")


def _rewrite(path: Path, change: Any) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def _reword(table: pa.Table, old: bytes, new: bytes) -> pa.Table:
    return table.replace_schema_metadata({b"caee.trace": table.schema.metadata[b"caee.trace"].replace(old, new)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(0, t.num_rows - 1), "one row for each of its 3 layers"),
        (lambda t: t.take(list(range(t.num_rows))[::-1]), "in their order"),
        (lambda t: t.drop_columns(["id_1"]), "column 'id_1'"),
        (lambda t: t.replace_schema_metadata({b"caee.trace": b"{"}), "metadata is damaged"),
        (
            lambda t: t.replace_schema_metadata(
                {
                    b"caee.trace": t.schema.metadata[b"caee.trace"].replace(
                        b'"format_version": 1', b'"format_version": 9'
                    )
                }
            ),
            "format version 9",
        ),
        (
            lambda t: t.replace_schema_metadata(
                {b"caee.trace": t.schema.metadata[b"caee.trace"].replace(b'"num_experts": 16', b'"num_experts": 3')}
            ),
            "top_k is 4",
        ),
    ],
)
def test_a_file_changed_by_others_is_a_clear_error(make_trace: Any, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "t.parquet"
    write(path, make_trace())
    _rewrite(path, change)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_recording_closes_into_one_file(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=50)
    path = tmp_path / "t.parquet"
    with TraceRecorder(path, trace.meta, piece_tokens=16) as recorder:
        for start in range(0, 50, 5):
            recorder.write(cut(trace, start, start + 5))
    assert_same(read_trace(path), trace)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


def test_a_recording_without_tokens_closes_into_an_empty_trace(make_trace: Any, tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", make_trace().meta):
        pass
    assert list(TraceReader(tmp_path / "t.parquet").chunks()) == []


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 3)), min_size=1, max_size=12),
    piece_tokens=st.integers(1, 20),
)
def test_a_crash_loses_what_came_within_the_time_of_a_piece(
    make_trace: Any, steps: list[tuple[int, float]], piece_tokens: int
) -> None:
    """Against plain bookkeeping: after every step, what a crash would leave."""
    trace = make_trace(tokens=sum(tokens for tokens, _ in steps))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        recorder = TraceRecorder(path, trace.meta, piece_tokens=piece_tokens, clock=clock)
        written = kept = 0
        last = clock.now
        for tokens, seconds in steps:
            clock.now += seconds
            recorder.write(cut(trace, written, written + tokens))
            written += tokens
            if written - kept >= piece_tokens:
                kept += (written - kept) // piece_tokens * piece_tokens
                last = clock.now
            if clock.now - last >= PIECE_SECONDS and written > kept:
                kept, last = written, clock.now
            assert kept == (TraceReader(path).tokens if kept else 0)
            assert kept == written or clock.now - last < PIECE_SECONDS
        recorder.close()
        assert_same(read_trace(path), trace)
        assert recorder.tokens == written


@pytest.mark.parametrize("when", range(1, 9))
def test_an_interrupted_write_leaves_no_gap(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """Ctrl-C falls into any of the places where a piece is written: before, within and after."""
    trace = make_trace(tokens=60)
    path = tmp_path / "t.parquet"
    calls = []

    def count() -> None:
        calls.append(1)
        if len(calls) == when:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interrupting(*arguments: Any, **options: Any) -> Iterator[Any]:
        with written_whole(*arguments, **options) as stream:
            count()
            yield stream
        count()

    monkeypatch.setattr(writer, "written_whole", interrupting)
    recorder = TraceRecorder(path, trace.meta, piece_tokens=8)

    def record() -> None:
        with recorder:
            for start in range(0, 60, 10):
                recorder.write(cut(trace, start, start + 10))

    with pytest.raises(KeyboardInterrupt):
        record()
    if when == 1:
        assert list(tmp_path.iterdir()) == []
        assert recorder.tokens == 0
        return
    kept = read_trace(path)
    assert kept.tokens == recorder.tokens == 8 * (when // 2)
    assert_same(kept, cut(trace, 0, kept.tokens))
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_recording_that_fails_before_its_first_token_leaves_nothing(
    make_trace: Any, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), TraceRecorder(tmp_path / "t.parquet", make_trace().meta):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [[], [".00000000.parquet.abc.part"]])
def test_a_folder_without_a_piece_is_no_recording(make_trace: Any, tmp_path: Path, left: list[str]) -> None:
    trace = make_trace()
    path = tmp_path / "t.parquet"
    partial_folder(path).mkdir()
    for name in left:
        (partial_folder(path) / name).write_bytes(b"PAR1")
    for read in (TraceReader, detect_and_open):
        with pytest.raises(TraceError, match=r"t\.parquet(?!\.partial)"):
            read(path)
    refuse_existing(path, force=False)
    with TraceRecorder(path, trace.meta) as recorder:
        recorder.write(trace)
    assert_same(read_trace(path), trace)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize("name", ["notes.txt", "t.parquet", ".hidden", "0.parquet"])
@pytest.mark.parametrize("force", [False, True])
def test_what_others_left_where_pieces_go_is_not_removed(
    make_trace: Any, tmp_path: Path, name: str, force: bool
) -> None:
    path = tmp_path / "t.parquet"
    partial_folder(path).mkdir()
    (partial_folder(path) / name).write_text("precious")
    with pytest.raises(UsageError, match="holds something else"):
        TraceRecorder(path, make_trace().meta, force=force)
    assert (partial_folder(path) / name).read_text() == "precious"
    (tmp_path / "u.parquet.partial").write_text("precious")
    with pytest.raises(UsageError, match="holds something else"):
        refuse_existing(tmp_path / "u.parquet", force=force)


@pytest.mark.parametrize("written", [".", "..", "/", ""])
def test_a_folder_is_no_name_for_a_trace(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for force in (False, True):
        for start in (TraceRecorder, lambda path, meta, force: TraceWriter(path, meta, force=force).__enter__()):
            with pytest.raises(UsageError, match="is a folder"):
                start(Path(written), make_trace().meta, force=force)
    with pytest.raises(TraceError):
        TraceReader(Path(written))
    assert list(tmp_path.iterdir()) == []


_RECORD_FOREVER = """
import sys
from pathlib import Path
from runtime.trace.reader import read_trace
from runtime.trace.writer import TraceRecorder
trace = read_trace(Path(sys.argv[1]))
recorder = TraceRecorder(Path(sys.argv[2]), trace.meta, piece_tokens=32)
while True:
    recorder.write(trace)
    print(recorder.tokens, flush=True)
"""


def test_a_killed_recording_is_read_up_to_its_last_complete_piece(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=40)
    write(tmp_path / "source.parquet", trace)
    path = tmp_path / "t.parquet"
    process = subprocess.Popen(
        [sys.executable, "-c", _RECORD_FOREVER, str(tmp_path / "source.parquet"), str(path)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent.parent,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(5):
        written = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    # What a write that was cut short leaves behind is not a piece.
    (partial_folder(path) / ".00000099.parquet.abc.part").write_bytes(b"PAR1")
    reader = TraceReader(path)
    assert "interrupted recording" in reader.notes[0]
    kept = join(list(reader.chunks()))
    assert kept.tokens >= written // 32 * 32
    assert kept.tokens % 32 == 0
    np.testing.assert_array_equal(kept.ids_TLK, trace.ids_TLK[np.arange(kept.tokens) % 40])
    with pytest.raises(UsageError, match="interrupted recording"):
        TraceRecorder(path, trace.meta)
    assert recover(path) == Recovered(tokens=kept.tokens, left_out=None)
    assert_same(read_trace(path), kept)
    assert not partial_folder(path).exists()


def test_pieces_of_two_recordings_do_not_mix(make_trace: Any, tmp_path: Path) -> None:
    folder = partial_folder(tmp_path / "t.parquet")
    folder.mkdir()
    write(folder / "00000000.parquet", make_trace())
    write(folder / "00000001.parquet", make_trace(model="other"))
    with pytest.raises(TraceError, match="another recording"):
        TraceReader(folder)
    for piece in folder.iterdir():
        piece.unlink()
    with pytest.raises(TraceError, match="no complete piece"):
        TraceReader(folder)


def _truncate(piece: Path) -> None:
    piece.write_bytes(piece.read_bytes()[: piece.stat().st_size // 2])


def _overwrite(piece: Path) -> None:
    piece.write_bytes(np.random.default_rng(0).bytes(piece.stat().st_size))


def _flip_a_bit(piece: Path) -> None:
    content = bytearray(piece.read_bytes())
    # Within the pages of a column: the index at the end of the file stays whole.
    content[pq.ParquetFile(piece).metadata.row_group(0).column(4).data_page_offset + 40] ^= 4
    piece.write_bytes(content)


def _empty(piece: Path) -> None:
    piece.write_bytes(b"")


def _another_table(piece: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), piece)


DAMAGE = (_truncate, _overwrite, _flip_a_bit, _empty, _another_table, Path.unlink)


@pytest.fixture
def interrupted(make_trace: Any, tmp_path: Path) -> tuple[Path, RoutingTrace]:
    """A recording's folder of five pieces of 16 tokens each, and what was recorded."""
    trace = make_trace(tokens=80)
    folder = partial_folder(tmp_path / "t.parquet")
    recorder = TraceRecorder(tmp_path / "t.parquet", trace.meta, piece_tokens=16)
    recorder.write(trace)
    assert sorted(piece.name for piece in folder.iterdir()) == [f"{number:08d}.parquet" for number in range(5)]
    return folder, trace


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("number", range(5))
def test_a_damaged_recording_is_read_up_to_the_damage(
    interrupted: tuple[Path, RoutingTrace], damage: Callable[[Path], None], number: int
) -> None:
    folder, trace = interrupted
    damage(folder / f"{number:08d}.parquet")
    if damage == Path.unlink and number == 4:  # nothing tells that there was a fifth
        assert TraceReader(folder).left_out is None
        return
    if number == 0:
        with pytest.raises(
            TraceError, match=r"no complete piece of a recording: 00000000.parquet is (damaged|missing)"
        ):
            TraceReader(folder)
        return
    reader = TraceReader(folder)
    assert reader.tokens == 16 * number
    kept = join(list(reader.chunks()))
    np.testing.assert_array_equal(kept.ids_TLK, trace.ids_TLK[: 16 * number])
    np.testing.assert_array_equal(kept.gates_TLK, trace.gates_TLK[: 16 * number])
    assert reader.left_out is not None
    assert reader.left_out in reader.notes
    assert reader.left_out.startswith(
        f"left out: {number:08d}.parquet, which is {'missing' if damage == Path.unlink else 'damaged ('}"
    )
    assert str(folder) not in reader.left_out  # the note before it has named it
    after = {4: "", 3: "; the 1 after it is left out with it"}
    assert reader.left_out.endswith(after.get(number, f"; the {4 - number} after it are left out with it") or ")")


def test_what_is_left_of_a_damaged_recording_becomes_a_file(interrupted: tuple[Path, RoutingTrace]) -> None:
    folder, _ = interrupted
    _truncate(folder / "00000003.parquet")
    path = recorded_file(folder)
    recovered = recover(path)
    assert recovered.tokens == read_trace(path).tokens == 48
    assert recovered.left_out is not None
    # Whoever wants to try more finds the pieces as they were.
    assert len(list(folder.iterdir())) == 5
    with pytest.raises(UsageError, match="exists already"):
        recover(path)


def test_a_damaged_recording_is_imported_with_a_note(interrupted: tuple[Path, RoutingTrace], tmp_path: Path) -> None:
    folder, trace = interrupted
    (folder / "00000002.parquet").unlink()
    (folder / "notes.parquet").write_bytes(b"not a piece")
    imported = import_trace(folder, tmp_path / "out.parquet", ImportOptions())
    assert imported.tokens == 32
    assert imported.notes[1] == ("left out: 00000002.parquet, which is missing; the 2 after it are left out with it")
    np.testing.assert_array_equal(read_trace(tmp_path / "out.parquet").ids_TLK, trace.ids_TLK[:32])


def test_closing_a_recording_does_not_lose_damaged_pieces_silently(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=80)
    recorder = TraceRecorder(tmp_path / "t.parquet", trace.meta, piece_tokens=16)
    recorder.write(trace)
    folder = partial_folder(tmp_path / "t.parquet")
    _truncate(folder / "00000001.parquet")
    with pytest.raises(TraceError, match=r"damaged while it was written; left out: 00000001.parquet"):
        recorder.close()
    assert len(list(folder.iterdir())) == 5
    assert not (tmp_path / "t.parquet").exists()


def test_profiles_round_trip(tmp_path: Path) -> None:
    meta = TraceMeta(model=None, num_experts=4, top_k=0, layer_numbers=(3, 4))
    counts = np.arange(8.0).reshape(2, 4)
    profile = LoadProfile(meta=meta, counts_LN=counts, tokens=7, gate_sums_LN=counts / 2)
    path = tmp_path / "p.parquet"
    write_profile(path, profile)
    back = read_profile(path)
    np.testing.assert_array_equal(back.counts_LN, counts)
    assert back.gate_sums_LN is not None
    np.testing.assert_array_equal(back.gate_sums_LN, counts / 2)
    assert (back.meta, back.tokens, back.saliency_sums_LN) == (meta, 7, None)
    with pytest.raises(TraceError, match="load profile"):
        TraceReader(path)
    with pytest.raises(TraceError, match=r"layer 4, expert 1: count -1\.0"):
        write_profile(tmp_path / "q.parquet", dataclasses.replace(profile, counts_LN=-counts + 4))


def test_weights_of_few_values_take_less_room(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(tokens=4000, layers=8, experts=32)
    rounded = (trace.gates_TLK.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    write(tmp_path / "float.parquet", trace)
    write(tmp_path / "bfloat.parquet", dataclasses.replace(trace, gates_TLK=rounded))
    assert (tmp_path / "bfloat.parquet").stat().st_size < 0.6 * (tmp_path / "float.parquet").stat().st_size


def test_writing_a_trace_tells_its_progress(make_trace: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", make_trace())
    told: list[float] = []
    tokens = write_trace(tmp_path / "b.parquet", TraceReader(tmp_path / "a.parquet"), on_progress=told.append)
    assert tokens == make_trace().tokens
    assert told[-1] == 1.0
