"""The evaluation tasks of a run: rank 0 has the harness ask, all ranks answer."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.parallel import PeerLost, Ranks
from runtime.tasks.compare import compare
from runtime.tasks.files import TaskOptions
from runtime.tasks.harness import HarnessTask, load_tasks
from runtime.tasks.lockstep import Answer, Answerer, Asked, Order
from runtime.tasks.model import LockstepLM
from store.records import TaskResult


class TaskSession:
    """Tasks that are loaded on rank 0; all ranks make the same calls.

    Raises ``InputError`` where the harness does not take a task.
    """

    def __init__(self, options: TaskOptions, ranks: Ranks) -> None:
        self._ranks = ranks
        self._options = options
        self._tasks: list[HarnessTask] = load_tasks(options.files, options.limit) if ranks.rank == 0 else []

    def measure(self, answerer: Answerer, *, context_limit: int | None, seed: int) -> tuple[TaskResult, ...]:
        """Every task with the router's own choice and with the policy, each from the same start; none beside rank 0."""
        if self._ranks.rank != 0:
            while (order := self._ranks.gather(None)[0]) is not None:
                answerer.answer(order)
            return ()
        try:
            results = tuple(self._result(task, answerer, context_limit, seed) for task in self._tasks)
        except PeerLost:
            raise
        except Exception as error:
            self._ranks.tell(error)
            raise
        self._ranks.gather(None)
        return results

    def _result(self, task: HarnessTask, answerer: Answerer, context_limit: int | None, seed: int) -> TaskResult:
        models = [
            LockstepLM(answerer.tokenizer, _Asker(self._ranks, answerer, treated=treated).ask, context_limit)
            for treated in (False, True)
        ]
        baseline, treated = (task.scores(model) for model in models)
        return TaskResult(
            task=task.file.name,
            shape=self._options.shape,
            requests=task.requests,
            requests_cut=models[0].cut,
            removed_importance=answerer.pruned.importance,
            metrics=tuple(compare(*pair, seed=seed) for pair in zip(baseline, treated, strict=True)),
        )


class _Asker:
    """Has all ranks answer what the harness asks in one pass, which begins at the start."""

    def __init__(self, ranks: Ranks, answerer: Answerer, *, treated: bool) -> None:
        self._ranks = ranks
        self._answerer = answerer
        self._treated = treated
        self._restart = True

    def ask(self, asked: Sequence[Asked]) -> list[Answer]:
        order = Order(asked=tuple(asked), treated=self._treated, restart=self._restart)
        self._restart = False
        return self._answerer.answer(self._ranks.gather(order)[0])
