"""Task files of lm-evaluation-harness: what is read of them, and that everything else is refused by name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from caee_cli.main import run_app
from probes.errors import InputError, UsageError
from runtime.tasks.files import DATA_FIELDS, FIELDS, RUN_CODE, TaskOptions, read_task_files

TOOL = Path(__file__).parents[2] / "tools" / "endings_task.py"
PLAIN: dict[str, Any] = {
    "task": "endings",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{endings}}",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc"}],
}


def write(folder: Path, name: str = "endings.yaml", **changes: Any) -> Path:
    """A task file that is well, but for ``changes``; None takes a field out. Its data lie beside it."""
    (folder / "data.jsonl").write_text('{"context": "a", "endings": ["b", "c"], "right": 0}\n')
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return path


# What is read -------------------------------------------------------------------------------------------------------


def test_a_task_is_read_with_its_data_by_absolute_path(tmp_path: Path) -> None:
    (task,) = read_task_files([write(tmp_path)])
    assert task.name == "endings"
    assert task.config["dataset_kwargs"] == {"data_files": {"test": [str(tmp_path / "data.jsonl")]}}
    assert task.config["metric_list"] == PLAIN["metric_list"]


@pytest.mark.parametrize("given", ["data.jsonl", ["data.jsonl"], {"test": ["data.jsonl"]}])
def test_data_files_in_every_form(tmp_path: Path, given: Any) -> None:
    (task,) = read_task_files([write(tmp_path, dataset_kwargs={"data_files": given})])
    (files,) = task.config["dataset_kwargs"]["data_files"].values()
    assert files == [str(tmp_path / "data.jsonl")]


def test_own_fields_go_before_included_ones_and_a_later_include_before_an_earlier(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "first.yaml").write_text("description: first\ntarget_delimiter: one\ngen_prefix: one\n")
    (tmp_path / "second.yaml").write_text("include: below/first.yaml\ntarget_delimiter: two\n")
    (task,) = read_task_files([write(tmp_path, include=["second.yaml"], description="own")])
    assert [task.config[name] for name in ("description", "target_delimiter", "gen_prefix")] == ["own", "two", "one"]
    assert "include" not in task.config


def test_a_folder_holds_every_task_below_it_and_what_they_include(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "base.yaml").write_text("description: base\n")
    write(tmp_path, "one.yaml", task="one", include="base.yaml")
    write(tmp_path / "below", "two.yaml", task="two", include="../base.yaml")
    assert [task.name for task in read_task_files([tmp_path])] == ["two", "one"]


# What is refused ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"a field that acts: {name}": ({name: "utils.run"}, f"{name} {what}") for name, what in RUN_CODE.items()},
    "code of a data set": ({"dataset_kwargs": {"data_files": "data.jsonl", "trust_remote_code": True}}, "runs code"),
    "a metric's script": ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "loads the script of a metric"),
    "a metric that is none": ({"metric_list": ["acc"]}, "no metric"),
    "few-shot code": ({"fewshot_config": {"process_docs": "utils.run"}}, "process_docs names Python code"),
    "few-shot text": ({"fewshot_config": "utils"}, "fewshot_config is no mapping"),
    "an unknown field": ({"doc_to_image": "picture"}, "field doc_to_image is not known"),
    "a data set of the hub": ({"dataset_path": "org/name"}, "downloads no data sets"),
    "a loading script": ({"dataset_path": "./load.py"}, "downloads no data sets"),
    "no data set": ({"dataset_path": None}, "downloads no data sets"),
    "no data files": ({"dataset_kwargs": None}, "names no data files"),
    "an address": ({"dataset_kwargs": {"data_files": "https://example.org/data.jsonl"}}, "no plain path"),
    "a chain": ({"dataset_kwargs": {"data_files": "zip://data.jsonl::data.zip"}}, "no plain path"),
    "a pattern": ({"dataset_kwargs": {"data_files": "*.jsonl"}}, "no plain path"),
    "a number for a file": ({"dataset_kwargs": {"data_files": 3}}, "no plain path"),
    "a missing file": ({"dataset_kwargs": {"data_files": "other.jsonl"}}, "there is no file"),
    "data of another kind": ({"dataset_path": "parquet"}, "there is no file"),
    "an unknown kind": ({"output_type": "code"}, "output_type 'code' is unknown"),
    "a group": ({"task": ["one", "two"]}, "names no task"),
    "no name": ({"task": None}, "names no task"),
    "sampling": ({"generation_kwargs": {"do_sample": True}}, "asks for sampling"),
    "beams": ({"generation_kwargs": {"num_beams": 4}}, "field num_beams is not known"),
    "itself": ({"include": "endings.yaml"}, "includes itself"),
    "an include outside": ({"include": "../other.yaml"}, "lies outside"),
    "an include by absolute path": ({"include": "/etc/other.yaml"}, "lies outside"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_plain_data_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    changes, words = REFUSED[fault]
    path = write(tmp_path, **changes)
    with pytest.raises(InputError) as raised:
        read_task_files([path])
    assert str(path) in raised.value.message
    assert words in raised.value.message
    assert raised.value.hint


@given(field=st.text(min_size=1, max_size=20), value=st.none() | st.booleans() | st.integers() | st.text(max_size=5))
def test_no_field_is_let_through_that_is_not_listed(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    if field in FIELDS | {"include"}:
        return
    folder = tmp_path_factory.mktemp("task")
    path = write(folder)
    path.write_text(yaml.safe_dump({**PLAIN, field: value}))
    with pytest.raises(InputError, match=r"endings\.yaml"):
        read_task_files([path])
    if field not in DATA_FIELDS:
        path.write_text(yaml.safe_dump({**PLAIN, "dataset_kwargs": {"data_files": "data.jsonl", field: value}}))
        with pytest.raises(InputError, match=r"endings\.yaml"):
            read_task_files([path])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("doc_to_text: !function side.effect", "line 1: !function side.effect names Python code"),
        ("task: one\nmetric_list:\n- metric: !function side.effect", "line 3: !function side.effect names Python code"),
        ("task: !!python/object/apply:os.system [exit]", "python/object/apply"),
        ("task: !unknown one", "unknown"),
        ("metadata: &a [b, b]\ntask: *a", "line 2: alias *a is not followed"),
        ("metadata: &a [*a]", "alias *a is not followed"),
        ("- a\n- b", "no mapping"),
        ("", "no mapping"),
        ("task: [", "line 1"),
        ("task: " + "[" * 5000, "endings.yaml"),
        ("task: one\n#" + " " * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_plain_yaml_is_refused_and_runs_nothing(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "side.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = tmp_path / "endings.yaml"
    path.write_text(text)
    for given_path in (path, tmp_path):
        with pytest.raises(InputError) as raised:
            read_task_files([given_path])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError) as raised:
        read_task_files([path])
    assert words in raised.value.message


def parquet_file(path: Path, **described: Any) -> None:
    """One column, and what the library that reads it is told of it."""
    column = pa.table({"context": ["http://localhost/picture.png"]})
    metadata = {"huggingface": json.dumps({"info": {"features": {"context": described}}})} if described else None
    parquet.write_table(column.replace_schema_metadata(metadata), path)


def test_columns_of_a_parquet_file_are_numbers_and_texts(tmp_path: Path) -> None:
    changes = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": "data.parquet"}}
    for described in ({}, {"_type": "Value"}, {"feature": {"_type": "Value"}, "_type": "List"}):
        parquet_file(tmp_path / "data.parquet", **described)
        assert len(read_task_files([write(tmp_path, **changes)])) == 1
    for described in ({"_type": "Image"}, {"feature": {"a": {"_type": "Audio"}}, "_type": "List"}):
        parquet_file(tmp_path / "data.parquet", **described)
        with pytest.raises(InputError, match=r"columns of type (Image|Audio)"):
            read_task_files([write(tmp_path, **changes)])
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(InputError, match="cannot read"):
        read_task_files([write(tmp_path, **changes)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    for name, words in (("none.yaml", "cannot read"), ("binary.yaml", "binary.yaml"), ("empty", "holds no task")):
        with pytest.raises(InputError, match=words):
            read_task_files([tmp_path / name])


def test_a_link_does_not_lead_an_include_outside(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.yaml").write_text("description: outside\n")
    (inside / "linked.yaml").symlink_to(tmp_path / "outside.yaml")
    with pytest.raises(InputError, match="lies outside"):
        read_task_files([write(inside, include="linked.yaml")])


def test_two_tasks_of_one_name(tmp_path: Path) -> None:
    paths = [write(tmp_path, "one.yaml"), write(tmp_path, "two.yaml")]
    with pytest.raises(InputError, match=r"endings is already in .*one\.yaml"):
        read_task_files(paths)


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"shape": "whole"}, {"limit": 0}])
def test_options_that_are_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--lm-eval-"):
        TaskOptions(files=(), **options)


def test_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *given: None if name == "lm_eval" else find(name, *given)
    )
    code = run_app(["run", "--lm-eval", str(write(tmp_path)), "--store", str(tmp_path / "store.db")])
    errors = capsys.readouterr().err
    assert code == 1  # nothing is wrong with the command
    assert "lm-evaluation-harness, which is not installed" in errors
    assert "pip install '.[lm-eval]'" in errors


def test_options_of_tasks_without_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--lm-eval-limit", "3"], ["--lm-eval-shape", "prefill"]):
        assert run_app(["run", *option, "--store", str(tmp_path / "store.db")]) == 2
        assert "belong to --lm-eval" in capsys.readouterr().err


def test_the_package_is_imported_only_where_it_is_used() -> None:
    program = "import sys, runtime.worker, caee_cli.running, runtime.tasks.session; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_task_is_made_of_any_text(tmp_path: Path) -> None:
    text = " ".join(f"word {number}" for number in range(300))
    (tmp_path / "text.txt").write_text(text)
    made = []
    for folder in ("one", "two"):
        program = [sys.executable, str(TOOL), str(tmp_path / "text.txt"), "-o", str(tmp_path / folder)]
        subprocess.run([*program, "--documents", "20"], check=True)
        (task,) = read_task_files([tmp_path / folder])
        (file,) = task.config["dataset_kwargs"]["data_files"]["test"]
        made.append([json.loads(line) for line in Path(file).read_text().splitlines()])
    assert made[0] == made[1]
    assert len(made[0]) == 20
    assert {document["right"] for document in made[0]} == {0, 1}
    for document in made[0]:
        true, wrong = document["endings"][document["right"]], document["endings"][1 - document["right"]]
        assert document["context"] + true in text
        assert wrong != true
        assert (len(document["context"]), len(true), len(wrong)) == (64, 16, 16)
