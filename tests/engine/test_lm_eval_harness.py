"""``caee run --lm-eval`` with lm-evaluation-harness itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from caee_cli.main import run_app
from probes.errors import InputError
from runtime.tasks.files import read_task_files
from runtime.tasks.harness import load_tasks
from runtime.tasks.model import LockstepLM
from store.session import open_store

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install '.[lm-eval]'")

Checkpoint = Callable[..., Path]
Caee = Callable[..., tuple[int, Any, str]]

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."
DOCUMENTS = [
    {"context": TEXT[at : at + 7 + at % 3], "endings": [TEXT[at : at + 4], TEXT[at + 9 : at + 15]], "right": at % 2}
    for at in range(0, 30, 5)
]
PLAIN: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "target_delimiter": "",
}
KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "right",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_target": "{{endings[right]}}",
        "generation_kwargs": {"until": ["z"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 1,
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}


def write(folder: Path, kind: str = "choice", documents: list[dict[str, Any]] = DOCUMENTS, **changes: Any) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump({"task": kind, **PLAIN, **KINDS[kind], **changes}))
    return path


# The command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def caee(tmp_path: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> Caee:
    """``caee run`` on a tiny model, in this process: exit code, document and errors."""
    (tmp_path / "held_out.txt").write_text(TEXT)

    def run(*extra: str, devices: str = "cpu:1") -> tuple[int, Any, str]:
        files = ["--store", str(tmp_path / "store.db"), "--held-out", str(tmp_path / "held_out.txt")]
        short = ["--pairs", "1", "--output-len", "3", "--batch-size", "4", "--cache-experts", "6", "--theta", "0.5"]
        model = str(checkpoint("qwen3_moe", top_k=4))
        code = run_app(["run", model, "--json", "--devices", devices, *files, *short, *extra])
        output, errors = capsys.readouterr()
        return code, json.loads(output) if output else None, errors

    return run


@torch.inference_mode()
def chosen(model: Any, document: dict[str, Any]) -> int:
    """The ending that transformers itself, in a forward pass over all of it, finds likelier."""
    context, shares = list(document["context"].encode()), []
    for ending in document["endings"]:
        ids = torch.tensor([[*context, *ending.encode()]])
        found = model(input_ids=ids).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        shares.append(float(found.gather(1, ids[0, len(context) :, None]).sum()))
    return shares.index(max(shares))


@pytest.mark.slow
def test_tasks_of_every_kind_are_run_and_kept(
    tmp_path: Path, caee: Caee, checkpoint: Checkpoint, stock: ModuleType
) -> None:
    for kind in KINDS:
        write(tmp_path, kind)
    code, document, errors = caee("--lm-eval", str(tmp_path))
    assert code == 0, errors
    tasks = {task["task"]: task for task in document["tasks"]}
    assert list(tasks) == sorted(KINDS)
    assert {task: each["requests"] for task, each in tasks.items()} == {"choice": 12, "text": 6, "writing": 6}
    for task in tasks.values():
        assert task["shape"] == "decode"
        assert 0 < task["removed_importance"] < 1
        for metric in task["metrics"]:
            assert metric["documents"] == 6
            assert metric["difference"] == pytest.approx(metric["with_policy"] - metric["baseline"])
            assert metric["difference_ci95"][0] <= metric["difference"] <= metric["difference_ci95"][1]
    model = stock.load(checkpoint("qwen3_moe", top_k=4), torch.float32)
    right = [chosen(model, each) == each["right"] for each in DOCUMENTS]
    assert tasks["choice"]["metrics"][0]["baseline"] == sum(right) / len(right)
    assert [metric["chance"] for metric in tasks["choice"]["metrics"]] == [0.5, 0.5]
    assert tasks["text"]["metrics"][0]["chance"] is None
    with open_store(str(tmp_path / "store.db")) as store:
        assert [task.task for task in store.run(document["run_id"]).tasks] == list(tasks)
        assert store.check() == ()


@pytest.mark.slow
def test_ranks_answer_in_step(tmp_path: Path, caee: Caee) -> None:
    for kind in KINDS:
        write(tmp_path, kind)
    asked = ("--lm-eval", str(tmp_path), "--no-quality", "--lm-eval-limit", "5")
    _, alone, _ = caee(*asked)
    for shape, extra in (("decode", ["--data-parallel"]), ("prefill", [])):
        code, together, errors = caee(*asked, "--lm-eval-shape", shape, *extra, "--check-ranks", devices="cpu:2")
        assert code == 0, errors
        for one, two in zip(alone["tasks"], together["tasks"], strict=True):
            assert two["shape"] == shape
            assert one["requests"] == two["requests"] == (10 if one["task"] == "choice" else 5)
            # The policy sees other devices; what the router chooses depends on none.
            for before, after in zip(one["metrics"], two["metrics"], strict=True):
                assert after["baseline"] == pytest.approx(before["baseline"], rel=1e-5)


@pytest.mark.slow
def test_what_goes_wrong_on_the_rank_that_asks_ends_all_with_its_reason(tmp_path: Path, caee: Caee) -> None:
    # Its score fails only once the texts are written.
    metrics = [{"metric": "f1", "aggregation": "f1", "higher_is_better": True}]
    code, _, errors = caee("--lm-eval", str(write(tmp_path, "writing", metric_list=metrics)), devices="cpu:2")
    assert code == 1
    assert "writing.yaml: lm-evaluation-harness cannot use this task" in errors


def test_phases_without_decoding_are_refused(tmp_path: Path, caee: Caee) -> None:
    code, _, errors = caee("--lm-eval", str(write(tmp_path)), "--phases", "prefill")
    assert code == 2
    assert "--lm-eval-shape prefill" in errors


# What it does not do -----------------------------------------------------------------------------------------------


def test_nothing_is_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError(f"a connection to {given}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (task,) = load_tasks(read_task_files([write(tmp_path)]), None)
    assert task.requests == 12


@pytest.mark.parametrize("field", ["doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix"])
@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.system('touch {0}') }}}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
        "{{{{ lipsum.__globals__['os'].popen('touch {0}').read() }}}}",
    ],
)
def test_a_template_does_not_reach_python(tmp_path: Path, field: str, template: str) -> None:
    path = write(tmp_path, **{field: template.format(tmp_path / "ran")})
    with pytest.raises(InputError, match=r"choice\.yaml: .*SecurityError"):
        load_tasks(read_task_files([path]), None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric_list": [{"metric": "script"}]}, "no metric 'script' of its own"),
        ({"metric_list": [{"metric": "acc", "aggregation": "script"}]}, "no aggregation 'script' of its own"),
        ({"filter_list": [{"name": "f", "filter": [{"function": "script"}]}]}, "no filter 'script' of its own"),
    ],
)
def test_a_name_that_the_harness_does_not_know_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        load_tasks(read_task_files([write(tmp_path, **changes)]), None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_split": "train"}, "KeyError"),
        ({"doc_to_text": "{{question}}"}, "question"),
        ({"doc_to_text": "{{context"}, "TemplateSyntaxError"),
        ({"documents": [*DOCUMENTS[:2], {"context": "a"}]}, "NoneType"),
        ({"documents": []}, "cannot use this task"),
    ],
)
def test_a_task_that_does_not_fit_its_data_is_refused_before_anything_runs(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=rf"choice\.yaml.*{words}"):
        load_tasks(read_task_files([write(tmp_path, **changes)]), None)


def test_data_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("tempfile.tempdir", None)
    load_tasks(read_task_files([write(tmp_path)]), None)
    assert list(home.iterdir()) == []


# As the harness's own models do --------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of two-letter tokens, so that where a text is cut matters."""

    bos_token, bos_token_id, eos_token_id, pad_token_id = None, None, 0, None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + sum(map(ord, text[at : at + 2])) for at in range(0, len(text), 2)]


@given(context=st.text("ab \n", max_size=6), continuation=st.text("ab ", min_size=1, max_size=6))
def test_pairs_are_encoded_as_the_harness_encodes_them(context: str, continuation: str) -> None:
    from lm_eval.api.model import TemplateLM

    theirs = SimpleNamespace(tok_encode=Letters().encode, backend="causal")
    if context.strip():
        expected = TemplateLM._encode_pair(theirs, context, continuation)
        assert LockstepLM(Letters(), lambda asked: [], None)._encode_pair(context, continuation) == expected


@given(length=st.integers(1, 40), limit=st.integers(1, 12))
def test_windows_are_those_of_the_harness(length: int, limit: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids = list(range(1, length + 1))
    expected = [make_disjoint_window(pair) for pair in get_rolling_token_windows(ids, 0, limit, 1)]
    windows = LockstepLM(Letters(), lambda asked: [], limit)._windows(ids)
    assert [(list(window.context), list(window.forced)) for window in windows] == expected
