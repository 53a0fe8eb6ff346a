"""lm-evaluation-harness itself: documents become requests, answers become scores. Imported on rank 0 alone."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from probes.errors import CaeeError, InputError
from probes.text import first_line
from runtime.tasks.files import TaskFile
from runtime.tasks.model import LockstepLM

FEWSHOT_SEED = 1234
"""The harness's own default, so that examples are drawn as it draws them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One metric's value of every document, and how the harness makes one of them. ``chance``: what guessing scores."""

    metric: str
    filter: str
    values: list[Any]
    aggregate: Callable[[list[Any]], Any]
    higher_is_better: bool | None
    chance: float | None


class HarnessTask:
    """One task, its data loaded and all its requests built once, so that what is wrong with them shows at once."""

    def __init__(self, file: TaskFile, limit: int | None) -> None:
        self.file = file
        self._limit = limit
        with self._blamed(lambda: True):
            self._task = _make_task(file)
            self._task.build_all_requests(limit=limit, rank=0, world_size=1)
            self.requests = len(self._task.instances)

    def scores(self, model: LockstepLM) -> list[Scores]:
        """Have ``model`` answer every request. Raises ``InputError`` where answers cannot be scored."""
        from lm_eval.evaluator import evaluate

        self._task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with self._blamed(lambda: not model.answering):
            results = evaluate(
                lm=model, task_dict={"tasks": {self.file.name: self._task}}, limit=self._limit, bootstrap_iters=0
            )
        samples = results["samples"][self.file.name]
        return [self._metric(samples, *key) for key in dict.fromkeys(_keys(samples))]

    def _metric(self, samples: Sequence[dict[str, Any]], metric: str, filter_name: str) -> Scores:
        from lm_eval.api.metrics import mean

        own = [sample for sample in samples if sample["filter"] == filter_name and metric in sample["metrics"]]
        guessed = metric in ("acc", "acc_norm", "acc_bytes") and self._task.OUTPUT_TYPE == "multiple_choice"
        return Scores(
            metric=metric,
            filter=filter_name,
            values=[sample[metric] for sample in own],
            aggregate=self._task.aggregation().get(metric, mean),
            higher_is_better=self._task.higher_is_better().get(metric),
            chance=mean([self._guessed(sample["doc"]) for sample in own]) if guessed else None,
        )

    def _guessed(self, document: dict[str, Any]) -> float:
        """The share of a document's choices that count as right."""
        target = self._task.doc_to_text(document) if self._task.multiple_input else self._task.doc_to_target(document)
        right = len(set(target)) if isinstance(target, list) else 1
        return right / len(self._task.doc_to_choice(document))

    @contextlib.contextmanager
    def _blamed(self, is_its_own: Callable[[], bool]) -> Iterator[None]:
        """Of what goes wrong in the harness the task file is to blame."""
        try:
            yield
        except CaeeError:
            raise
        except Exception as error:
            if not is_its_own():
                raise
            raise InputError(
                f"{self.file.path}: lm-evaluation-harness cannot use this task: {type(error).__name__}: "
                f"{first_line(error)[:300]}",
                hint="docs/quality.md has a task file that works",
            ) from error


def load_tasks(files: Sequence[TaskFile], limit: int | None) -> list[HarnessTask]:
    """Raises ``InputError`` where the harness does not take a task."""
    _prepare()
    return [HarnessTask(file, limit) for file in files]


def _prepare() -> None:
    # Nothing here needs the network; the harness and its libraries would look for news of what they know by name.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets
    import lm_eval.api.metrics
    import lm_eval.api.task
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda documents, **_: documents  # its bar would be drawn over ours
    own = lm_eval.utils.env
    # A template in a task file could reach Python through the attributes of its values.
    sandbox = SandboxedEnvironment(undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline)
    sandbox.filters.update(own.filters)
    lm_eval.utils.env = sandbox


def _make_task(file: TaskFile) -> Any:
    from lm_eval.api.registry import AGGREGATION_REGISTRY, FILTER_REGISTRY, METRIC_REGISTRY
    from lm_eval.api.task import ConfigurableTask

    # What the harness does not know by name it would look for elsewhere.
    for metric in file.config.get("metric_list") or []:
        _check_known(file, "metric", metric["metric"], METRIC_REGISTRY)
        if "aggregation" in metric:
            _check_known(file, "aggregation", metric["aggregation"], AGGREGATION_REGISTRY)
    for pipeline in file.config.get("filter_list") or []:
        for step in pipeline["filter"]:
            _check_known(file, "filter", step["function"], FILTER_REGISTRY)
    with tempfile.TemporaryDirectory(prefix="caee-lm-eval-") as folder:
        config = copy.deepcopy({key: value for key, value in file.config.items() if value is not None})
        config["dataset_kwargs"] |= {"cache_dir": folder, "keep_in_memory": True}
        task = ConfigurableTask(config=config)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return task


def _check_known(file: TaskFile, kind: str, name: Any, known: Any) -> None:
    if not isinstance(name, str) or name not in known:
        raise InputError(
            f"{file.path}: lm-evaluation-harness has no {kind} {name!r} of its own",
            hint=f"one of {', '.join(sorted(known))}",
        )


def _keys(samples: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    return ((metric, sample["filter"]) for sample in samples for metric in sample["metrics"])
