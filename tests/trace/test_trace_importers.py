"""Importers: every foreign format becomes what it says, told by content; dirt is marked, damage is a clear error."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from caee_cli.main import run_app
from probes.errors import TraceError, UsageError
from runtime.trace.chunking import join
from runtime.trace.importers.detect import FORMATS, detect_and_open
from runtime.trace.importers.dummies import DUMMY_RUN, DummyMarker
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.importing import import_trace
from runtime.trace.profile import write_profile
from runtime.trace.reader import read_trace
from runtime.trace.records import LoadProfile, Phase, RoutingTrace, TokenKind
from runtime.trace.writer import TraceWriter, write_trace


def imported(path: Path, **options: Any) -> tuple[RoutingTrace, tuple[str, ...]]:
    source = detect_and_open(path, ImportOptions(**options))
    assert not isinstance(source, LoadProfile)
    trace = join(list(source.chunks()))
    assert source.fraction_read == 1.0
    return trace, source.notes


def profiled(path: Path, **options: Any) -> LoadProfile:
    profile = detect_and_open(path, ImportOptions(**options))
    assert isinstance(profile, LoadProfile)
    return profile


def topk_line(seq: str = "a", pos: int = 0, ids: Any = ((0, 1), (2, 3)), p: Any = ((0.75, 0.25), (0.5, 0.5))) -> str:
    return json.dumps({"seq": seq, "pos": pos, "ids": ids, "p": p}) + "\n"


# ---------------------------------------------------------------- topk-jsonl


def test_topk_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "anything.bin"
    path.write_text(topk_line(pos=7) + "\n" + topk_line("b", ids=[[3, 300], [0, -1]], p=[[0.1, 0.9], [1, 0]]))
    trace, notes = imported(path)
    assert trace.meta.num_experts == 301
    assert "inferred from the highest id: 301" in notes[0]
    assert (trace.meta.top_k, trace.meta.layer_numbers, trace.meta.normalised) == (2, (0, 1), True)
    assert trace.sequence_names == ("a", "b")
    assert trace.token_position_T.tolist() == [7, 0]
    assert trace.token_phase_T.tolist() == [Phase.DECODE, Phase.DECODE]
    assert trace.ids_TLK.tolist() == [[[0, 1], [2, 3]], [[3, 300], [0, -1]]]
    np.testing.assert_array_equal(trace.gates_TLK[1, 0], np.array([0.1, 0.9], np.float32))
    assert imported(path, num_experts=500)[1] == ()
    assert imported(path, phase=Phase.PREFILL)[0].token_phase_T.tolist() == [Phase.PREFILL, Phase.PREFILL]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_files_are_read_directly_and_a_cut_one_is_a_clear_error(tmp_path: Path, pack: Any) -> None:
    rng = np.random.default_rng(0)
    lines = [topk_line(pos=pos, p=rng.random((2, 2)).tolist()) for pos in range(2000)]
    packed = pack("".join(lines).encode())
    path = tmp_path / "t.jsonl"
    path.write_bytes(packed)
    assert imported(path)[0].tokens == 2000
    path.write_bytes(packed + packed)
    with pytest.raises(TraceError, match="line 2001: position 0 of sequence 'a' comes after position 1999"):
        imported(path)
    for length in (6, len(packed) // 2, len(packed) - 5):
        path.write_bytes(packed[:length])
        with pytest.raises(TraceError, match=r"cut off or damaged|line"):
            write_trace(tmp_path / "o.parquet", detect_and_open(path))  # type: ignore[arg-type]  # never a profile
        assert not (tmp_path / "o.parquet").exists()


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (topk_line(pos=1)[:40], "line 2: not an object"),
        ('{"seq": "a", "pos": 1}\n', "line 2: not an object"),
        (topk_line(pos=0), "line 2: position 0 of sequence 'a' comes after position 0: a token twice"),
        (topk_line(pos=-4), "line 2: seq 'a' or pos -4"),
        (topk_line("b", ids=[[0, 1]], p=[[1, 1]]), "line 2: 'ids' is not 2 layers of 2 .*two models"),
        (topk_line("b", ids=[[0, 1, 2], [0, 1, 2]]), "line 2: 'ids' is not 2 layers of 2"),
        (topk_line("b", ids=[[0, 1], [0, "x"]]), "line 2: 'ids' is not 2 layers of 2"),
        (topk_line("b", ids=[[0, 1.5], [0, 1]]), "line 2: 'ids' is not 2 layers of 2"),
        (topk_line("b", p=[[1, None], [0, 1]]), "line 2: 'p' is not 2 layers of 2 numbers"),
        (topk_line("b", p=[[1, float("nan")], [0, 1]]), "token 1 .*'b', position 0.*, layer 0.*gate weight nan"),
        (topk_line("b", p=[[1, -1], [0, 1]]), "gate weight -1.0 is negative"),
        (topk_line("b", ids=[[0, 9], [0, 1]]), r"token 1 .*expert id 9 is not in -1\.\.3"),
        (topk_line("b", ids=[[0, 10**30], [0, 1]]), "line 2"),
        (topk_line("b", ids=[[0, 70000], [0, 1]]), "line 2: an expert id"),
        (topk_line("b", ids=[[1, 1], [0, 1]]), "expert id 1 appears twice in one token"),
        ("[" * 100_000 + "\n", "line 2: not an object"),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path: Path, second_line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(topk_line() + second_line)
    with pytest.raises(TraceError) as caught:
        imported(path, num_experts=4)
    assert re.search(message, f"{caught.value} {caught.value.hint}", re.DOTALL)


def test_top_k_that_disagrees_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(topk_line())
    with pytest.raises(TraceError, match="2 experts per token, not --top-k 3"):
        imported(path, top_k=3)


# ---------------------------------------------------------------- vllm-jsonl

META = {"type": "meta", "model_id": "m", "vllm_version": "0.9", "layers_logged": [0], "top_k": 2, "num_experts": 8}


def route(token: int, layer: int = 0, ids: Any = (1, 2), weights: Any = (0.5, 0.25), request: str = "r") -> Any:
    return {
        "type": "route", "req_id": request, "token_idx": token, "layer": layer, "topk_ids": ids,
        "topk_weights": weights,
    }  # fmt: skip


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_vllm_log_marks_dummies_and_splits_at_restarts(tmp_path: Path) -> None:
    dummies = [route(token % 200) for token in range(300)]
    real = [route(token, ids=[token, 7]) for token in range(3)] + [route(token, ids=[token, 6]) for token in range(2)]
    trace, notes = imported(write_lines(tmp_path / "t", [META, *dummies, *real]))
    assert trace.token_kind_T.tolist() == [TokenKind.DUMMY] * 300 + [TokenKind.REAL] * 5
    assert any("300 identical rows are marked as warm-up dummies" in note for note in notes)
    assert any("token_idx starts again 3 times" in note for note in notes)
    assert trace.token_step_T[[0, 199, 200, 300, 302, 303, 304]].tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert trace.sequence_names == ("r#0", "r#1", "r#2", "r#3")
    assert trace.token_position_T[-5:].tolist() == [0, 1, 2, 0, 1]
    assert (trace.meta.model, trace.meta.engine_version, trace.meta.num_experts) == ("m", "0.9", 8)
    assert trace.meta.normalised is False
    assert (trace.token_phase_T == Phase.UNKNOWN).all()


def test_vllm_log_by_layer_and_by_token_give_the_same_tokens(tmp_path: Path) -> None:
    def row(step: int, token: int, layer: int) -> Any:
        return route(token, layer, ids=[step, 4 + token], weights=[layer / 8, 0.5])

    meta = {**META, "layers_logged": [3, 5]}
    by_layer = [row(step, token, layer) for step in range(3) for layer in (3, 5) for token in range(2)]
    by_token = [row(step, token, layer) for step in range(3) for token in range(2) for layer in (3, 5)]
    one, _ = imported(write_lines(tmp_path / "a", [meta, *by_layer]))
    two, _ = imported(write_lines(tmp_path / "b", [meta, *by_token]))
    assert one.meta.layer_numbers == (3, 5)
    assert one.ids_TLK.tolist() == [[[step, 4 + token]] * 2 for step in range(3) for token in range(2)]
    np.testing.assert_array_equal(one.ids_TLK, two.ids_TLK)
    np.testing.assert_array_equal(one.gates_TLK, two.gates_TLK)
    with pytest.raises(TraceError, match="token 1 of request 'r' lacks 1 of 2 layers"):
        imported(write_lines(tmp_path / "c", [meta, *by_token[:-1]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([META, {**META, "model_id": "other"}, route(0)], "line 2: model_id 'other' after 'm': two models"),
        ([META, route(0, ids=[1, 2, 3], weights=[1, 1, 1])], "line 2: 3 experts, not 2"),
        ([route(0), route(1, ids=[1], weights=[1])], "line 2: 1 experts, not 2"),
        ([META, route(0, ids=[1, 2], weights=[1])], "line 2: not a route line"),
        ([META, route(0, ids=[1, "2"])], "line 2: not a route line"),
        ([META, route(0, ids=[1, 99])], r"expert id 99 is not in -1\.\.7"),
        ([META, route(0, weights=[float("nan"), 1])], "gate weight nan is not finite"),
        ([META, {"type": "route"}], "line 2: not a route line"),
        ([META], "holds no route line"),
        ([{**META, "num_experts": "many"}, route(0)], "line 1: not a route line"),
    ],
)
def test_bad_vllm_logs_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        imported(write_lines(tmp_path / "t", rows))


@pytest.mark.parametrize("chunk", [1, 7, 100, 5000])
def test_dummies_are_found_however_the_stream_is_cut(make_trace: Any, chunk: int) -> None:
    from runtime.trace.chunking import cut, rechunk

    trace = make_trace(tokens=1000, seed=3)
    expected = np.zeros(1000, dtype=bool)
    for start, length in ((0, DUMMY_RUN), (400, DUMMY_RUN - 1), (700, 300)):
        trace.ids_TLK[start : start + length] = trace.ids_TLK[start]
        trace.gates_TLK[start : start + length] = trace.gates_TLK[start]
        expected[start : start + length] = length >= DUMMY_RUN
    marker = DummyMarker()
    marked = join(list(marker.mark(rechunk([cut(trace, 0, 1000)], chunk))))
    np.testing.assert_array_equal(marked.token_kind_T == TokenKind.DUMMY, expected)
    np.testing.assert_array_equal(marked.ids_TLK, trace.ids_TLK)
    assert marker.marked == expected.sum()


# ---------------------------------------------------------------- sglang-recorder


def sglang_records(to_logical: Any) -> list[dict[str, Any]]:
    """One prompt pass of two requests, one decode pass, one mixed pass, as the recorder keeps them."""
    import torch

    rng = np.random.default_rng(1)
    layers, physical = to_logical.shape
    records = []
    for number, (mode, lengths, positions) in enumerate(
        [(1, [3, 2], [0, 1, 2, 0, 1]), (2, None, [3, 2]), (3, [2, 1], [0, 1, 4])]
    ):
        ids = np.full((layers, len(positions), 8), -1, dtype=np.int32)
        for layer in range(1, layers):  # layer 0 is dense
            for token in range(len(positions)):
                ids[layer, token, :2] = rng.choice(physical - 1, 2, replace=False)
        counts = np.stack([np.bincount(row[row >= 0], minlength=physical) for row in ids]).astype(np.int32)
        records.append(
            {
                "forward_pass_id": 10 + number, "rank": 1, "gatherer_key": "primary",
                "input_ids": [5] * len(positions), "positions": positions, "extend_seq_lens": lengths,
                "forward_mode": mode, "topk_ids_of_layer": torch.from_numpy(ids), "misc_objects": [],
                "global_physical_count": torch.from_numpy(counts),
            }
        )  # fmt: skip
    return records


TO_LOGICAL = np.array([[0, 1, 2, 3, 4, 5, 0], [5, 4, 3, 2, 1, 0, 5], [0, 1, 2, 3, 4, 5, 1]])


def save_dump(path: Path, **content: Any) -> Path:
    import torch

    torch.save({key: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in content.items()}, path)
    return path


def test_sglang_per_token_maps_physical_ids_back(tmp_path: Path) -> None:
    records = sglang_records(TO_LOGICAL)
    path = save_dump(tmp_path / "d.pt", records=records, last_physical_to_logical_map=TO_LOGICAL)
    trace, notes = imported(path)
    assert (trace.meta.num_experts, trace.meta.top_k, trace.meta.layer_numbers) == (6, 2, (1, 2))
    assert not trace.meta.gates_recorded
    expected = [
        [
            [TO_LOGICAL[layer][physical] for physical in record["topk_ids_of_layer"][layer, token, :2]]
            for layer in (1, 2)
        ]
        for record in records
        for token in range(len(record["positions"]))
    ]
    np.testing.assert_array_equal(trace.ids_TLK, expected)
    assert (trace.gates_TLK == 0.5).all()
    assert trace.token_step_T.tolist() == [10] * 5 + [11] * 2 + [12] * 3
    assert trace.token_phase_T.tolist() == [0] * 5 + [1] * 2 + [0, 0, -1]
    assert trace.token_position_T.tolist() == [0, 1, 2, 0, 1, 3, 2, 0, 1, 4]
    assert (trace.token_rank_T == 1).all()
    assert [trace.sequence_names[number] for number in trace.token_sequence_T[[0, 3, 5, 6]]] == [
        "rank1/pass10/prompt0", "rank1/pass10/prompt1", "rank1/row0", "rank1/row1",
    ]  # fmt: skip
    assert any("equal share" in note for note in notes)
    assert any("last placement" in note for note in notes)


def test_sglang_per_pass_and_stat_become_the_same_profile(tmp_path: Path) -> None:
    records = sglang_records(TO_LOGICAL)
    trace, _ = imported(save_dump(tmp_path / "t.pt", records=records, last_physical_to_logical_map=TO_LOGICAL))
    counts = np.stack([np.bincount(trace.ids_TLK[:, layer].ravel(), minlength=6) for layer in range(2)])
    for record in records:
        del record["topk_ids_of_layer"]
    per_pass = profiled(save_dump(tmp_path / "p.pt", records=records, last_physical_to_logical_map=TO_LOGICAL), top_k=2)
    np.testing.assert_array_equal(per_pass.counts_LN, counts)
    assert (per_pass.tokens, per_pass.meta.layer_numbers) == (10, (1, 2))
    logical = np.concatenate([np.zeros((1, 6), np.int64), counts])
    half = np.stack([logical // 2, logical - logical // 2]).astype(np.int32)
    stat = profiled(
        save_dump(tmp_path / "s.pt", rank=0, logical_count=half, average_utilization_rate_over_window=None), top_k=2
    )
    np.testing.assert_array_equal(stat.counts_LN, counts)


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_a_dump_that_would_execute_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    torch.save({"logical_count": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(TraceError, match="only executing code could load"):
        detect_and_open(tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(TraceError, match="begins with") as caught:
        detect_and_open(tmp_path / "evil.pkl")
    assert "pickles are never opened" in str(caught.value.hint)
    assert not (tmp_path / "executed").exists()


def test_bad_sglang_dumps_are_refused(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "d.pt"
    records = sglang_records(TO_LOGICAL)
    save_dump(path, records=records, last_physical_to_logical_map=TO_LOGICAL)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut off or damaged"):
        detect_and_open(path)
    save_dump(path, weight=np.zeros(3))
    with pytest.raises(TraceError, match="not an SGLang recorder dump: it has \\['weight'\\]"):
        detect_and_open(path)
    save_dump(path, records=[], last_physical_to_logical_map=TO_LOGICAL)
    with pytest.raises(TraceError, match="holds no record"):
        detect_and_open(path)
    save_dump(path, records=records, last_physical_to_logical_map=TO_LOGICAL[:2])
    with pytest.raises(TraceError, match="record 0: 3 layers, the placement has 2"):
        detect_and_open(path)
    records[1]["topk_ids_of_layer"][1, 0, 0] = 7
    save_dump(path, records=records, last_physical_to_logical_map=TO_LOGICAL)
    with pytest.raises(TraceError, match=r"record 1: a physical expert id is not in -1\.\.6"):
        imported(path)
    records[1]["topk_ids_of_layer"][1, 0, 0] = 0
    records[0]["extend_seq_lens"] = [3, 3]
    save_dump(path, records=records, last_physical_to_logical_map=TO_LOGICAL)
    with pytest.raises(TraceError, match="record 0: extend_seq_lens sum to 6, not to 5"):
        imported(path)
    records[0]["extend_seq_lens"] = ["x", 3]
    save_dump(path, records=records, last_physical_to_logical_map=TO_LOGICAL)
    with pytest.raises(TraceError, match="record 0: damaged"):
        imported(path)
    torch.save([1, 2], path)
    with pytest.raises(TraceError, match="it holds a list"):
        detect_and_open(path)


# ---------------------------------------------------------------- routed-experts


def test_routed_experts_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = np.argsort(rng.random((5, 3, 16)), axis=-1)[..., :4].astype(np.uint8)
    first[:, 0] = 0  # a dense layer
    np.save(tmp_path / "one.npy", first)
    trace, notes = imported(tmp_path / "one.npy", num_experts=16, phase=Phase.DECODE)
    assert trace.sequence_names == ("one",)
    assert trace.meta.layer_numbers == (1, 2)
    assert not trace.meta.gates_recorded
    np.testing.assert_array_equal(trace.ids_TLK, first[:, 1:])
    assert (trace.gates_TLK == 0.25).all()
    assert (trace.token_phase_T == Phase.DECODE).all()
    assert any("1 layer without any expert is dense" in note for note in notes)
    np.savez_compressed(tmp_path / "two.npz", first=first, second=first[::-1], token_ids=np.arange(5))
    trace, notes = imported(tmp_path / "two.npz", num_experts=16)
    assert trace.sequence_names == ("first", "second")
    assert trace.token_position_T.tolist() == [0, 1, 2, 3, 4] * 2
    assert any("token_ids" in note for note in notes)
    np.savez(tmp_path / "bad.npz", first=first, second=first[:, :2])
    with pytest.raises(TraceError, match="'second': 2 layers of 4 experts, 3 of 4"):
        detect_and_open(tmp_path / "bad.npz")
    np.save(tmp_path / "float.npy", first.astype(float))
    with pytest.raises(TraceError, match="no integer array"):
        detect_and_open(tmp_path / "float.npy")
    np.save(tmp_path / "pickled.npy", np.array([_Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="pickled objects, which are refused"):
        detect_and_open(tmp_path / "pickled.npy")
    whole = (tmp_path / "one.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-20])
    with pytest.raises(TraceError, match="cut off"):
        detect_and_open(tmp_path / "cut.npy")


# ---------------------------------------------------------------- counts


def test_counts_in_every_form(tmp_path: Path) -> None:
    counts = [[0, 0, 0], [4, 0, 2], [3, 3, 0]]
    documents = {
        "logical-count": {"logical_count": counts},
        "logical-count of steps": {"logical_count": [[[0] * 3] * 3, counts]},
        "olmoe": {"counts": {"2": counts[2], "1": counts[1], "10": [0, 0, 0]}},
        "glm": {"tokens": 3, "layers": {"2": {"cnt": counts[2], "gate": [1, 1, 0]}, "1": {"cnt": counts[1]}}},
        "eplb": {"weight": counts, "num_replicas": 4},
    }
    for name, document in documents.items():
        path = tmp_path / name
        path.write_text(json.dumps(document, indent=1 if name == "olmoe" else None))
        profile = profiled(path, top_k=2)
        np.testing.assert_array_equal(profile.counts_LN, counts[1:], err_msg=name)
        assert profile.meta.layer_numbers == (1, 2), name
        assert profile.tokens == 3, name
    assert profiled(tmp_path / "glm").meta.top_k == 2
    assert profiled(tmp_path / "olmoe").tokens is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"logical_count": [[1, 2], [3]]}, "not a table of numbers"),
        ({"logical_count": [[1, "x"]]}, "not a table of numbers"),
        ({"logical_count": [[0, 0]]}, "all counts are zero"),
        ({"logical_count": [[1, -2]]}, r"layer 0, expert 1: count -2\.0"),
        ({"logical_count": [[1, float("nan")]]}, r"layer 0, expert 1: count nan"),
        ({"counts": {"a": [1]}}, "not an object of layer numbers"),
        ({"counts": [[1]]}, "not an object of layer numbers"),
    ],
)
def test_bad_counts_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps(document))
    with pytest.raises(TraceError, match=message):
        detect_and_open(tmp_path / "c.json")


# ---------------------------------------------------------------- detection


@pytest.mark.parametrize("content", [b"hello", b'{"a": 1}\n', b"[1, 2]", b'{"a": ', b"\x00" * 50, b"\x80\x04]."])
def test_an_unknown_file_lists_what_was_looked_for(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        detect_and_open(path)
    if content != b'{"a": ':
        assert all(known.name in caught.value.message for known in FORMATS)


def test_detection_edges(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        detect_and_open(path)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(TraceError, match="is empty"):
        detect_and_open(path)
    with pytest.raises(TraceError, match="No such file"):
        detect_and_open(tmp_path / "absent")
    path.write_text("plain words")
    with pytest.raises(TraceError) as unknown:
        detect_and_open(path)
    # The names in one short line; what each holds is said of the one that is asked for.
    assert len(unknown.value.message) < 240 + len(str(path))
    assert all(known.name in unknown.value.message for known in FORMATS)
    for known in FORMATS:
        with pytest.raises(TraceError) as named:
            detect_and_open(path, format_name=known.name)
        assert f"looked for {known.looks_for} ({known.name})" in named.value.message
    path.write_text(topk_line())
    with pytest.raises(TraceError, match="looked for"):
        detect_and_open(path, format_name="vllm-jsonl")
    with pytest.raises(UsageError, match="unknown format 'x'"):
        detect_and_open(path, format_name="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 17}, "has 16 experts a layer, not --num-experts 17"),
        ({"top_k": 3}, "has 4 experts per token, not --top-k 3"),
    ],
)
def test_a_trace_that_says_its_sizes_is_not_told_others(
    make_trace: Any, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    trace = make_trace(experts=16, top_k=4)
    with TraceWriter(tmp_path / "t.parquet", trace.meta) as writer:
        writer.write(trace)
    with pytest.raises(UsageError, match=message):
        import_trace(tmp_path / "t.parquet", tmp_path / "o.parquet", ImportOptions(**options))
    assert not (tmp_path / "o.parquet").exists()
    same = ImportOptions(num_experts=16, top_k=4)
    assert import_trace(tmp_path / "t.parquet", tmp_path / "o.parquet", same).tokens == trace.tokens
    asked = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert run_app(["trace", "show", str(tmp_path / "t.parquet"), *asked]) == 2


def stating_files(folder: Path) -> dict[str, Path]:
    """A file of every form that says its number of experts, 6."""
    counts = [[1, 0, 2, 0, 3, 4]] * 2
    records = sglang_records(TO_LOGICAL)
    per_pass = [{key: value for key, value in each.items() if key != "topk_ids_of_layer"} for each in records]
    log = write_lines(folder / "log", [{**META, "num_experts": 6}, route(0)])
    write_trace(folder / "own.parquet", detect_and_open(log))  # type: ignore[arg-type]  # never a profile
    documents = {
        "logical_count": {"logical_count": counts},
        "weight": {"weight": counts, "num_replicas": 8},
        "counts": {"counts": {"0": counts[0], "1": counts[1]}},
        "layers": {"layers": {"0": {"cnt": counts[0]}, "1": {"cnt": counts[1]}}},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return {
        "own": folder / "own.parquet",
        "vllm log": log,
        "per_token": save_dump(folder / "t.pt", records=records, last_physical_to_logical_map=TO_LOGICAL),
        "per_pass": save_dump(folder / "p.pt", records=per_pass, last_physical_to_logical_map=TO_LOGICAL),
        "stat": save_dump(folder / "s.pt", rank=0, logical_count=np.array([counts], np.int32)),
        **{name: folder / name for name in documents},
    }


@pytest.mark.parametrize(
    "form", ["own", "vllm log", "per_token", "per_pass", "stat", "logical_count", "weight", "counts", "layers"]
)
@pytest.mark.parametrize("asked", [1, 5, 7, 600])
def test_a_number_of_experts_is_not_taken_against_the_file(
    form: str, asked: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = stating_files(tmp_path)[form], tmp_path / "o.parquet"
    commands = [("import", str(path), "-o", str(target)), ("show", str(path))]
    for command in commands:
        assert run_app(["trace", *command, "--num-experts", str(asked)]) == 2
        assert f"has 6 experts a layer, not --num-experts {asked}" in " ".join(capsys.readouterr().err.split())
        assert not target.exists()
    for command in commands:
        assert run_app(["trace", *command, "--num-experts", "6"]) == 0
    assert detect_and_open(target).meta.num_experts == 6


def test_a_simulation_does_not_take_it_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_lines(tmp_path / "log", [META, *(route(token) for token in range(20))])
    store = str(tmp_path / "store.db")
    asked = ["simulate", str(log), "--seconds-per-expert", "0.001", "--devices", "2", "--batch-size", "1"]
    assert run_app([*asked, "--store", store, "--num-experts", "16"]) == 2
    assert "has 8 experts a layer, not --num-experts 16" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("highest", "asked"), [(9, 10), (9, 16), (99, 100), (99, 128)])
def test_a_log_with_ids_beyond_its_own_number_takes_one_that_holds_them(
    tmp_path: Path, highest: int, asked: int
) -> None:
    log = write_lines(tmp_path / "log", [META, route(0), route(1, ids=[0, highest])])
    with pytest.raises(TraceError, match=rf"expert id {highest} is not in -1\.\.7"):
        imported(log)
    with pytest.raises(UsageError, match=f"has 8 experts a layer, not --num-experts {highest}"):
        import_trace(log, tmp_path / "o.parquet", ImportOptions(num_experts=highest))
    trace, notes = imported(log, num_experts=asked)
    assert trace.meta.num_experts == asked
    assert f"states 8 experts, but has ids up to {highest}: the {asked} that were given are taken" in notes[0]


# ---------------------------------------------------------------- the real files


def test_every_real_file_imports_or_is_refused_with_a_reason(shared_data: Path, tmp_path: Path) -> None:
    target = tmp_path / "o.parquet"
    for path in sorted((shared_data / "routing").rglob("*")):
        if path.is_dir() or path.name.startswith("decode.jsonl"):
            continue
        if path.suffix == ".md":
            with pytest.raises(TraceError, match="looked for"):
                detect_and_open(path)
            continue
        top_k = {"deepseek_v3_sglang": 8, "olmoe": 2 if "mistral" in path.name else 8}.get(path.parent.name)
        source = detect_and_open(path, ImportOptions(top_k=top_k))
        if isinstance(source, LoadProfile):
            write_profile(target, source, force=True)
            if source.meta.top_k:
                rows = source.counts_LN.sum(axis=1)
                assert source.tokens == round(rows.max() / source.meta.top_k), path
        else:
            write_trace(target, source, force=True)


def test_the_figures_of_the_real_counts(shared_data: Path) -> None:
    routing = shared_data / "routing"
    deepseek = profiled(routing / "deepseek_v3_sglang" / "decode_in1000out1000.json", top_k=8)
    assert deepseek.counts_LN.shape == (58, 256)
    assert deepseek.meta.layer_numbers == tuple(range(3, 61))
    assert deepseek.tokens == 147308544 / 8
    glm = profiled(routing / "glm_5_2" / "merged_all.json")
    assert (glm.counts_LN.shape, glm.tokens, glm.meta.top_k) == ((75, 256), 1931616, 8)
    assert glm.gate_sums_LN is not None
    assert glm.saliency_sums_LN is not None
    assert profiled(routing / "olmoe" / "olmoe__expert_counts__c4.json", top_k=8).counts_LN.shape == (3, 64)
    eplb = profiled(routing / "eplb" / "readme_example.json")
    assert eplb.counts_LN[0].tolist() == [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    assert "phy2log" in eplb.meta.parameters["eplb"]  # type: ignore[operator]  # a JSON object


@pytest.mark.parametrize(
    ("name", "dummies", "tokens", "normalised"),
    [("olmoe_layer0.jsonl", 2048, 6519, True), ("qwen15_moe_layer0.jsonl", 16640, 21024, False)],
)
def test_the_dummies_of_the_real_vllm_logs(
    shared_data: Path, name: str, dummies: int, tokens: int, normalised: bool
) -> None:
    trace, notes = imported(shared_data / "routing" / "vllm_jsonl" / name)
    assert trace.tokens == tokens
    assert (trace.token_kind_T == TokenKind.DUMMY).sum() == dummies
    assert any(f"{dummies} identical rows" in note for note in notes)
    assert trace.meta.normalised is normalised


def test_the_real_gpt_oss_trace_fits_in_1_8_bytes_per_choice(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "routing" / "gpt_oss_20b" / "decode.jsonl.gz"
    source = detect_and_open(path, ImportOptions(num_experts=32))
    assert not isinstance(source, LoadProfile)
    target = tmp_path / "g.parquet"
    assert write_trace(target, source) == 16952
    trace = read_trace(target)
    assert trace.ids_TLK.shape == (16952, 24, 4)
    assert len(trace.sequence_names) == 38
    assert target.stat().st_size / trace.ids_TLK.size <= 1.8
    with gzip.open(path, "rt") as lines:
        first = json.loads(next(lines))
    np.testing.assert_array_equal(trace.gates_TLK[0], np.array(first["p"], dtype=np.float32))
