"""What ``show`` says: equal to plain counting, the same however a trace is cut, silent about what is padding."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caee_cli.main import run_app
from probes.errors import UsageError
from runtime.simulate.index import is_decode
from runtime.trace.chunking import cut, rechunk
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.reader import read_trace
from runtime.trace.records import LoadProfile, Phase, RoutingTrace, TokenKind, TraceMeta
from runtime.trace.show import show_info
from runtime.trace.writer import TraceWriter


class Source:
    """A trace in memory as a source of chunks."""

    notes: tuple[str, ...] = ("a note",)
    fraction_read = 1.0

    def __init__(self, trace: RoutingTrace, chunk: int = 1000) -> None:
        self.meta = trace.meta
        self._trace, self._chunk = trace, chunk

    def chunks(self) -> Iterator[RoutingTrace]:
        return rechunk([self._trace], self._chunk)


def show(trace: RoutingTrace, devices: int = 4, chunk: int = 1000) -> dict[str, Any]:
    return show_info(Path("t"), Source(trace, chunk), devices)


@pytest.fixture
def busy(make_trace: Any) -> RoutingTrace:
    """Steps of different lengths, all kinds and phases, some empty slots."""
    trace = make_trace(tokens=60, layers=2, experts=8, top_k=3, sequences=4)
    rng = np.random.default_rng(0)
    ids = trace.ids_TLK.copy()
    ids[5, 1, 2] = -1
    return dataclasses.replace(
        trace,
        ids_TLK=ids,
        token_step_T=np.sort(rng.integers(0, 12, 60)).astype(np.int64),
        token_phase_T=rng.integers(-1, 2, 60).astype(np.int8),
        token_kind_T=np.where(rng.random(60) < 0.2, rng.integers(1, 3, 60), 0).astype(np.int8),
    )


def test_show_equals_plain_counting(busy: RoutingTrace) -> None:
    info = show(busy)
    counts: Any = [Counter(), Counter()]
    activated: Any = defaultdict(set)
    ratio_high: Any = [[], []]
    ratio_low: Any = [[], []]
    real = [t for t in range(60) if busy.token_kind_T[t] == TokenKind.REAL]
    for t in real:
        for layer in range(2):
            slots = zip(busy.ids_TLK[t, layer], busy.gates_TLK[t, layer], strict=True)
            used = [(int(e), float(g)) for e, g in slots if e >= 0]
            counts[layer].update(e for e, _ in used)
            total = sum(g for _, g in used)
            ratio_high[layer].append(max(g for _, g in used) / total)
            ratio_low[layer].append(min(g for _, g in used) / total)
            for e, _ in used:
                activated[int(busy.token_step_T[t]), layer].add(e)
    assert info["tokens"]["total"] == 60
    assert info["tokens"]["real"] == len(real)
    assert sum(info["tokens"][f"real_{phase.name.lower()}"] for phase in Phase) == len(real)
    assert info["choices"] == sum(sum(c.values()) for c in counts)
    assert info["steps"] == len({int(busy.token_step_T[t]) for t in real})
    for layer, entry in enumerate(info["layers"]):
        assert entry["importance"]["highest"] == pytest.approx(np.mean(ratio_high[layer]))
        assert entry["importance"]["lowest"] == pytest.approx(np.mean(ratio_low[layer]))
        loads = [sum(n for e, n in counts[layer].items() if e // 2 == device) for device in range(4)]
        assert entry["by_device"]["max_over_mean"] == pytest.approx(max(loads) / np.mean(loads))
        assert entry["by_expert"]["max"] == max(counts[layer].values())
        hottest = entry["hot_experts"][0]
        assert counts[layer][hottest["expert"]] == hottest["choices"] == max(counts[layer].values())
        per_step = [
            [sum(1 for e in experts if e // 2 == device) for device in range(4)]
            for (_, at), experts in activated.items()
            if at == layer
        ]
        assert entry["activated_experts_per_device_and_step"] == pytest.approx(np.mean(per_step, axis=0))


@pytest.mark.parametrize("chunk", [1, 2, 7, 13, 59])
def test_show_does_not_depend_on_chunks(busy: RoutingTrace, chunk: int) -> None:
    assert json.dumps(_rounded(show(busy, chunk=chunk))) == json.dumps(_rounded(show(busy)))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 10)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("count", [1, 2, 5])
def test_warnings_agree_with_their_counts(make_trace: Any, count: int) -> None:
    """Of everything that is counted, as many as ``count``."""
    whole = make_trace(tokens=60, layers=1, experts=count + 8, top_k=3, sequences=1)
    ids = np.tile(np.array([[[0, 1, 2]]], np.int16), (60, 1, 1))
    ids[np.arange(60), 0, 2] = 2 + np.arange(60) % 6
    ids[20 : 20 + count, 0, 2] = -1
    gates, kind = np.full((60, 1, 3), 1 / 3, np.float32), np.zeros(60, np.int8)
    gates[20 : 20 + count, 0, :2] = 0.5
    gates[ids == -1] = 0
    gates[30 : 30 + count] = 0.1
    kind[10 : 10 + count] = TokenKind.PADDING
    position, phase = np.arange(60, dtype=np.int32), np.ones(60, np.int8)
    position[40 : 40 + count], phase[50 : 50 + count] = -1, Phase.UNKNOWN
    trace = dataclasses.replace(
        whole, ids_TLK=ids, gates_TLK=gates, token_kind_T=kind, token_position_T=position, token_phase_T=phase
    )
    warnings = show(trace, devices=1)["warnings"]
    s, are, were, have, do = ("", "is", "was", "has", "does") if count == 1 else ("s", "are", "were", "have", "do")
    for said in (
        f"0 warm-up dummies and {count} padding row{s} count{'s' if count == 1 else ''} for nothing",
        f"{count} token{s} {have} weights that do not sum to 1",
        f"{count} real token{s} {do} not say whether",
        f"{count} real token{s} {have} no position",
        f"{count} slot{s} {are} empty",
        f"{count} of {count + 8} experts of all layers {were} never chosen",
    ):
        assert any(warning.startswith(said) for warning in warnings), (said, warnings)


def test_padding_and_dummies_count_for_nothing(busy: RoutingTrace) -> None:
    real = busy.token_kind_T == TokenKind.REAL
    garbage = dataclasses.replace(
        busy,
        ids_TLK=np.where(real[:, None, None], busy.ids_TLK, 7777).astype(np.int16),
        gates_TLK=np.where(real[:, None, None], busy.gates_TLK, np.nan).astype(np.float32),
    )
    assert show(garbage) == show(busy)
    only_real = show(dataclasses.replace(busy, token_kind_T=np.zeros(60, dtype=np.int8)))
    assert only_real["layers"] != show(busy)["layers"]


def test_warnings_name_the_dirt(make_trace: Any) -> None:
    trace = make_trace(tokens=600, sequences=1)
    assert not [warning for warning in show(trace)["warnings"] if "identical" in warning or "repeated" in warning]
    trace.ids_TLK[100:400], trace.gates_TLK[100:400] = trace.ids_TLK[100], trace.gates_TLK[100]
    position = trace.token_position_T.copy()
    position[500] = position[499]
    dirty = dataclasses.replace(trace, token_position_T=position, gates_TLK=trace.gates_TLK * np.float32(2.5))
    warnings = show(dirty, chunk=77)["warnings"]
    assert any("300 real tokens stand in long runs of identical rows" in warning for warning in warnings)
    assert any(warning.startswith("1 token does not come after") for warning in warnings)
    assert any(warning.startswith("600 tokens have weights that do not sum to 1") for warning in warnings)
    assert any("steps were not recorded" in warning for warning in warnings)


def test_tokens_without_a_phase_are_said_to_count_as_the_simulator_counts_them(make_trace: Any) -> None:
    trace = make_trace(tokens=30)
    phase = trace.token_phase_T.copy()
    phase[:7] = Phase.UNKNOWN
    unsure = dataclasses.replace(trace, token_phase_T=phase)
    assert any(
        warning.startswith("7 real tokens do not say whether") and "as decode" in warning
        for warning in show(unsure)["warnings"]
    )
    assert is_decode(unsure)[:7].all()
    assert not [warning for warning in show(trace)["warnings"] if "do not say whether" in warning]


def test_edges(make_trace: Any) -> None:
    one = show(make_trace(tokens=1, experts=1, top_k=1, layers=1, sequences=1), devices=1)
    assert one["layers"][0]["importance"] == {"highest": 1.0, "lowest": 1.0, "ratio": 1.0}
    assert one["balance"]["by_expert"]["max_over_mean"] == 1.0
    none = show(make_trace(tokens=0))
    assert none["tokens"]["total"] == 0
    assert none["sequences"] == {"count": 0, "tokens_min": None, "tokens_median": None, "tokens_max": None}
    assert none["balance"]["by_device"]["gini"] is None
    assert any("no real token" in warning for warning in none["warnings"])
    with pytest.raises(UsageError, match="--devices 17"):
        show(make_trace(), devices=17)


def test_a_profile_shows_what_counts_tell() -> None:
    meta = TraceMeta(model=None, num_experts=4, top_k=2, layer_numbers=(3, 4))
    profile = LoadProfile(meta=meta, counts_LN=np.array([[4.0, 0, 2, 2], [1, 1, 1, 1]]), tokens=4)
    info = show_info(Path("p"), profile, 2)
    assert info["kind"] == "load_profile"
    assert info["layers"][0]["by_device"]["max_over_mean"] == 1.0
    assert info["layers"][0]["by_expert"]["max_over_mean"] == 2.0
    assert info["layers"][0]["importance"] is None
    assert any("different numbers of choices: 4 to 8" in warning for warning in info["warnings"])
    assert any("1 of 8 experts" in warning for warning in info["warnings"])


# ---------------------------------------------------------------- the commands


def test_import_and_show_from_the_command_line(
    make_trace: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "t.jsonl", tmp_path / "t.parquet"
    trace = make_trace(tokens=20, sequences=2)
    rows = [
        {
            "seq": trace.sequence_names[trace.token_sequence_T[t]], "pos": t, "ids": trace.ids_TLK[t].tolist(),
            "p": trace.gates_TLK[t].tolist(),
        }
        for t in range(20)
    ]  # fmt: skip
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_app(["trace", "import", str(source), "-o", str(target), "--json", "--model", "tiny"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["schema"] == "caee.trace.import/1"
    assert (document["tokens"], document["meta"]["model"]) == (20, "tiny")
    assert "inferred from the highest id" in output.err
    assert run_app(["trace", "import", str(source), "-o", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_app(["trace", "show", str(target), "--json", "--devices", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == "caee.trace.show/1"
    assert shown["balance"]["devices"] == 2
    assert run_app(["trace", "show", str(target)]) == 0
    text = capsys.readouterr().out
    assert "3 layers × 16 experts, top-4" in text
    assert "max_over_mean" in text
    # Foreign files are shown without importing them.
    assert run_app(["trace", "show", str(source), "--num-experts", "16", "--json", "--devices", "2"]) == 0
    direct = json.loads(capsys.readouterr().out)
    assert direct["layers"] == shown["layers"]


@pytest.mark.parametrize("command", [["show"], ["import", "-o", "o.parquet"]])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"\x1f\x8b\x08", b"{", b"PK\x03\x04", b"\x93NUMPY", b"\xff" * 9])
def test_no_file_ends_in_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    content: bytes,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_bytes(content)
    assert run_app(["trace", command[0], "f", *command[1:]]) == 1
    error = capsys.readouterr().err
    assert error.startswith("caee: ")
    assert "unexpected" not in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("called", ["t.parquet", "link", "hard"])
@pytest.mark.parametrize(
    "command",
    [["import", "t.parquet"], ["synth", "--like", "t.parquet"], ["synth", "--like", "u", "--profile", "t.parquet"]],
)
def test_a_trace_that_is_read_is_not_written(
    make_trace: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    called: str,
    force: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_trace().meta) as writer:
        writer.write(make_trace())
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    content = path.read_bytes()
    assert run_app(["trace", *command, "-o", called, *force]) == 2
    assert f"{called} is what the command reads" in capsys.readouterr().err
    assert path.read_bytes() == content


@pytest.mark.parametrize(("output", "code"), [(".", 2), ("absent/o", 1), ("/proc/o", 1), ("t.parquet/o", 1)])
@pytest.mark.parametrize("command", [["import", "t.parquet"], ["synth", "--like", "t.parquet"]])
def test_an_output_that_cannot_be_is_said_before_the_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    output: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.parquet").write_text("no trace: whoever reads it says so")
    assert run_app(["trace", *command, "-o", output, "--force"]) == code
    error = capsys.readouterr().err
    assert ("is a folder" if code == 2 else "cannot write in") in error


def test_markup_in_names_is_shown_not_obeyed(
    make_trace: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[red]t.parquet"
    trace = make_trace(model="[bold]evil[/nonsense]")
    with TraceWriter(path, trace.meta) as writer:
        writer.write(trace)
    assert run_app(["trace", "show", str(path)]) == 0
    assert "[bold]evil[/nonsense]" in capsys.readouterr().out


def test_the_interrupted_recording_is_imported(
    make_trace: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.trace.writer import TraceRecorder

    trace = make_trace(tokens=40)
    recorder = TraceRecorder(tmp_path / "t.parquet", trace.meta, piece_tokens=16)
    recorder.write(trace)
    del recorder
    assert run_app(["trace", "show", str(tmp_path / "t.parquet"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens"]["total"] == 32
    assert any("interrupted recording" in remark for remark in shown["notes"])
    folder = str(tmp_path / "t.parquet.partial")
    assert run_app(["trace", "import", folder, "-o", str(tmp_path / "t.parquet")]) == 0
    np.testing.assert_array_equal(read_trace(tmp_path / "t.parquet").ids_TLK, cut(trace, 0, 32).ids_TLK)


def test_the_real_trace_shows_the_papers_picture(shared_data: Path) -> None:
    path = shared_data / "routing" / "vllm_jsonl" / "qwen15_moe_layer0.jsonl"
    info = show_info(path, detect_and_open(path), 4)
    assert info["tokens"] == {
        "total": 21024, "real": 4384, "padding": 0, "dummy": 16640, "real_unknown": 4384, "real_prefill": 0,
        "real_decode": 0,
    }  # fmt: skip
    assert info["choices"] == 4384 * 4
    assert info["importance"]["ratio"] == pytest.approx(2.69, abs=0.01)
