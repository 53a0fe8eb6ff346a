"""Telling of every step, on rank 0: every rank mirrors all caches, so one rank knows the figures of all devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from probes.errors import RunError
from runtime.policy.spec import format_policy
from runtime.policy.types import Policy
from runtime.recording import StepRecord
from runtime.signals.step import BrakeState, StepsHeader, header_line, step_line, step_signal

if TYPE_CHECKING:
    from runtime.policy.guard import Brake


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalFiles:
    """Where rank 0 writes steps, and the name of the model to write into them."""

    paths: tuple[Path, ...]
    model: str


class StepSignals(Protocol):
    """Is told of passes and of their steps, in order. ``step``: once a step's record is complete, its time included.

    Not for concurrent calls. ``begin_pass`` says what the steps that follow are part of (``runtime.signals.step``).
    """

    def begin_pass(self, kind: str) -> None: ...

    def step(self, record: StepRecord, policy: Policy) -> None: ...

    def close(self) -> None: ...


class NoSignals:
    """Tells nobody."""

    def begin_pass(self, kind: str) -> None:
        """Does nothing."""

    def step(self, record: StepRecord, policy: Policy) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class StepLines:
    """Appends lines to ``path``, each handed to the system at once, so that whoever follows the file sees it.

    Raises ``RunError`` where the file cannot be written.
    """

    def __init__(self, path: Path, header: StepsHeader) -> None:
        self._path = path
        try:
            self._stream: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self.write(header_line(header))

    def close(self) -> None:
        """No more lines."""
        self._stream.close()

    def write(self, line: str) -> None:
        rest = line.encode()
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        return RunError(
            f"the steps cannot be written to {self._path}: {error.strerror or error}",
            hint="free some space, or name another file with --steps-jsonl",
        )


class LineSignals:
    """Writes every step to each of ``files``. ``brake``: the one in force, if any. ``seconds``: spent here so far."""

    def __init__(self, files: Sequence[StepLines], brake: Callable[[], Brake | None] = lambda: None) -> None:
        self._files = tuple(files)
        self._brake = brake
        self._pass_kind = "warm-up"
        self._passes = 0
        self._names: dict[int, tuple[Policy, str]] = {}
        self.steps = 0
        self.seconds = 0.0

    def begin_pass(self, kind: str) -> None:
        self._pass_kind = kind
        self._passes += 1

    def step(self, record: StepRecord, policy: Policy) -> None:
        start = time.perf_counter()
        self.steps += 1
        signal = step_signal(
            record,
            step=self.steps,
            pass_kind=self._pass_kind,
            pass_number=self._passes,
            policy=self._name(policy),
            brake=self._brake_state(),
        )
        line = step_line(signal)
        for file in self._files:
            file.write(line)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """No more steps."""
        for file in self._files:
            file.close()

    def _name(self, policy: Policy) -> str:
        """Writing a policy out takes longer than the rest; the object is kept, so that its id stays its own."""
        known = self._names.get(id(policy))
        if known is None:
            known = self._names[id(policy)] = policy, format_policy(policy.spec)
        return known[1]

    def _brake_state(self) -> BrakeState | None:
        brake = self._brake()
        if brake is None:
            return None
        return BrakeState(engaged=brake.engaged, trips=brake.trips, braked_layer_steps=brake.braked_steps)


def open_signals(
    files: SignalFiles | None, header: Callable[[str], StepsHeader], brake: Callable[[], Brake | None]
) -> StepSignals:
    """Signals to ``files``, or to nobody. ``header``: of a model's name. Raises ``RunError``."""
    if files is None or not files.paths:
        return NoSignals()
    return LineSignals([StepLines(path, header(files.model)) for path in files.paths], brake)
