"""Task files of lm-evaluation-harness, read as data.

The package would import Python for ``!function``, load scripts for data sets and metrics, and download what a name
means. A task file comes from outside, so only what is listed here is let through: plain values, data in local files.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from probes.errors import InputError, RunError, UsageError
from probes.text import first_line

SHAPES = ("decode", "prefill")
OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")

BUILDERS: Mapping[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
"""What reads a data set, and how the names of its files end."""

PLAIN_TYPES = frozenset(("Value", "ClassLabel", "List", "LargeList", "Sequence"))
"""What a column may be said to be, in the words of the library that reads it."""

LARGEST_FILE = 1 << 20


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FIELDS = _names(
    "task task_alias tag metadata output_type dataset_path dataset_name dataset_kwargs training_split validation_split "
    "test_split fewshot_split num_fewshot fewshot_config fewshot_delimiter target_delimiter description doc_to_text "
    "doc_to_target doc_to_choice gen_prefix metric_list filter_list generation_kwargs repeats should_decontaminate"
)
FEWSHOT_FIELDS = _names(
    "sampler split samples fewshot_indices fewshot_delimiter target_delimiter doc_to_text doc_to_target doc_to_choice "
    "gen_prefix"
)
DATA_FIELDS = _names("data_files field sep delimiter column_names")
GENERATION_FIELDS = _names("until max_gen_toks do_sample temperature top_p top_k")

RUN_CODE = {
    "process_docs": "names Python code",
    "process_results": "names Python code",
    "custom_dataset": "names Python code",
    "class": "names Python code",
    "unsafe_code": "runs code that the model writes",
    "use_prompt": "loads a prompt from elsewhere",
    "trust_remote_code": "runs code of a data set",
    "hf_evaluate": "loads the script of a metric",
}
"""Fields that are refused for what they do; every other that is not listed above is one that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One task: its name, and the harness's configuration, all plain values; data files have absolute paths."""

    path: Path
    name: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What is evaluated. ``shape``: ``decode`` has contexts teacher-forced in lockstep too, ``prefill`` computes them
    in one forward pass. ``limit``: only so many documents of each task, the first ones."""

    files: tuple[TaskFile, ...]
    shape: str = "decode"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UsageError(f"--lm-eval-shape {self.shape} is unknown", hint=f"choose one of {', '.join(SHAPES)}")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--lm-eval-limit {self.limit} is too small", hint="give at least 1")


def require_harness() -> None:
    """Raise ``RunError`` where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise RunError(
            "--lm-eval needs lm-evaluation-harness, which is not installed",
            hint="in a clone of caee: pip install '.[lm-eval]'",
        )


def read_task_files(paths: Sequence[Path]) -> tuple[TaskFile, ...]:
    """The tasks of files and folders, in the order given. Raises ``InputError`` for what is not plain data.

    Of a folder every ``.yaml`` file below it that names a task is one; the others are there to be included.
    """
    tasks: dict[str, TaskFile] = {}
    for path in paths:
        for found in _tasks_of(path.expanduser()):
            other = tasks.setdefault(found.name, found)
            if other is not found:
                raise InputError(
                    f"{found.path}: task {found.name} is already in {other.path}",
                    hint="give each task a name of its own",
                )
    return tuple(tasks.values())


def _tasks_of(path: Path) -> list[TaskFile]:
    if not path.is_dir():
        return [_task(path, path.resolve().parent)]
    files = sorted(file for file in path.rglob("*.yaml") if file.is_file())
    tasks = [_task(file, path.resolve()) for file in files if isinstance(_load(file).get("task"), str)]
    if not tasks:
        raise InputError(f"{path} holds no task", hint="a task is a .yaml file with task: NAME and data in local files")
    return tasks


def _task(path: Path, folder: Path) -> TaskFile:
    config = _included(path, folder, ())
    name = config.get("task")
    if not isinstance(name, str) or not name:
        _refuse(path, "it names no task", "write task: NAME; of a group, give the files of its tasks")
    for field in config:
        _check_field(path, field, FIELDS)
    if config.get("output_type", "generate_until") not in OUTPUT_TYPES:
        _refuse(path, f"output_type {config['output_type']!r} is unknown", f"one of {', '.join(OUTPUT_TYPES)}")
    _check_fields(path, config, "fewshot_config", FEWSHOT_FIELDS)
    _check_metrics(path, config.get("metric_list"))
    _check_generation(path, config)
    return TaskFile(path=path, name=name, config={**config, **_data(path, config)})


class _PlainLoader(yaml.SafeLoader):
    """Plain values only, each written out, and a clear word about the harness's own tag."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # A few lines of aliases of aliases make more values than any memory holds.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # its stub has no types
            raise yaml.composer.ComposerError(
                problem=f"alias *{event.anchor} is not followed; write the value out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


def _refuse_function(loader: _PlainLoader, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(
        problem=f"!function {node.value} names Python code, which caee does not run", problem_mark=node.start_mark
    )


_PlainLoader.add_constructor("!function", _refuse_function)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            _refuse(path, "it is larger than 1 MiB", "keep data in files of their own")
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)  # a SafeLoader
    except OSError as error:
        raise InputError(
            f"cannot read the task file {path}: {error.strerror}", hint="give a .yaml file or a folder of them"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or first_line(error)
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(
            f"{path}{where}: {problem}", hint="write the task with templates ({{field}}) and plain values only"
        ) from error
    if not isinstance(config, dict):
        _refuse(path, "it is no mapping of fields", "see docs/quality.md for a task file")
    return config


def _included(path: Path, folder: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    """The file's fields over those that it includes, which lie in ``folder`` or below it."""
    if path.resolve() in including:
        _refuse(path, "it includes itself", "remove one include")
    config = _load(path)
    merged: dict[str, Any] = {}
    for name in _list(config.pop("include", [])):
        base = path.parent / str(name)
        if not base.resolve().is_relative_to(folder):
            _refuse(path, f"include {name} lies outside {folder}", "put what is included beside the task file")
        merged.update(_included(base, folder, (*including, path.resolve())))
    return {**merged, **config}


def _data(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The fields that say where the data are, with files that exist, by their absolute paths."""
    builder, given = str(config.get("dataset_path")), config.get("dataset_kwargs") or {}
    if builder not in BUILDERS:
        _refuse(
            path,
            f"dataset_path {builder} is no reader of local files, and caee downloads no data sets",
            f"dataset_path: one of {', '.join(BUILDERS)}, with dataset_kwargs: data_files: FILE",
        )
    _check_fields(path, config, "dataset_kwargs", DATA_FIELDS)
    named = given.get("data_files")
    if not named:
        _refuse(path, "it names no data files", "write dataset_kwargs: data_files: FILE, or one for each split")
    by_split = named if isinstance(named, dict) else {"train": named}
    files = {
        str(split): [_data_file(path, name, BUILDERS[builder]) for name in _list(names)]
        for split, names in by_split.items()
    }
    # The harness would hand a configuration's name to the builder; its own is `default`.
    return {"dataset_name": None, "dataset_kwargs": {**given, "data_files": files}}


def _data_file(path: Path, name: Any, endings: tuple[str, ...]) -> str:
    # A colon chains file systems and archives; `*`, `?` and brackets would be patterns.
    if not isinstance(name, str) or any(mark in name for mark in (":", "*", "?", "[")):
        _refuse(path, f"data file {name!r} is no plain path", "name local files one by one")
    file = path.parent / Path(name).expanduser()
    if file.suffix not in endings or not file.is_file():
        _refuse(path, f"there is no file {file} that ends in {' or '.join(endings)}", "paths start at the task file")
    if file.suffix == ".parquet":
        _check_columns(path, file)
    return str(file.resolve())


def _check_columns(path: Path, file: Path) -> None:
    """A Parquet file may say that a column holds pictures or sounds, which would be fetched from where they say."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        described = json.loads((parquet.read_schema(file).metadata or {}).get(b"huggingface", b"{}"))
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot read {file}: {first_line(error)}", hint="give a Parquet file") from error
    if strange := _types_in(described) - PLAIN_TYPES:
        _refuse(path, f"{file} has columns of type {', '.join(sorted(strange))}", "keep numbers and texts alone")


def _types_in(described: Any) -> set[str]:
    parts = described.values() if isinstance(described, dict) else described if isinstance(described, list) else ()
    own = {str(described["_type"])} if isinstance(described, dict) and "_type" in described else set()
    return own.union(*map(_types_in, parts))


def _check_metrics(path: Path, metrics: Any) -> None:
    for metric in _list(metrics or []):
        if not isinstance(metric, dict) or not isinstance(metric.get("metric"), str):
            _refuse(path, "metric_list holds something that is no metric", "write - metric: NAME")
        if metric.get("hf_evaluate"):
            _check_field(path, "hf_evaluate", frozenset())


def _check_generation(path: Path, config: dict[str, Any]) -> None:
    _check_fields(path, config, "generation_kwargs", GENERATION_FIELDS)
    given = config.get("generation_kwargs") or {}
    if given.get("do_sample"):
        _refuse(
            path, "generation_kwargs asks for sampling", "before and after compare greedy answers: do_sample: false"
        )


def _check_fields(path: Path, config: dict[str, Any], name: str, allowed: frozenset[str]) -> None:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        _refuse(path, f"{name} is no mapping of fields", "see docs/quality.md for a task file")
    for field in given:
        _check_field(path, field, allowed)


def _check_field(path: Path, field: Any, allowed: frozenset[str]) -> None:
    if field in RUN_CODE:
        _refuse(path, f"{field} {RUN_CODE[field]}, which caee does not do", f"write the task without {field}")
    if field not in allowed:
        _refuse(path, f"field {field} is not known here", f"remove it; known are {', '.join(sorted(allowed))}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refuse(path: Path, what: str, hint: str) -> NoReturn:
    raise InputError(f"{path}: {what}", hint=hint)
