"""What the NVIDIA driver knows, each call guarded on its own: a field is a value or the reason why it is unknown.

Drivers, container tools, MIG, unified-memory and embedded parts each leave different calls unanswered; one refusal says
nothing about the next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from probes.records import Field

_MAX_NVLINKS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    """A GPU or a MIG slice. ``board`` is the handle of the GPU that a slice lies on, or its own."""

    index: int
    uuid: Field
    handle: Any
    board: Any

    @property
    def is_slice(self) -> bool:
        return self.handle is not self.board


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """An initialised NVML with the GPUs it lists, in PCI bus order; slices follow the GPU they lie on."""

    nvml: Any
    gpus: tuple[NvmlGpu, ...]

    def ask(self, function: str, *arguments: Any, convert: Callable[[Any], Any] = lambda answer: answer) -> Field:
        """``convert(nvml.function(*arguments))`` as a field."""
        return guarded(lambda: convert(getattr(self.nvml, function)(*arguments)))


def guarded(call: Callable[[], Any]) -> Field:
    """The answer of ``call``, with bytes decoded, or the reason why there is none."""
    try:
        answer = call()
    except Exception as error:
        # NVMLError, but also NVMLLibraryMismatchError (no NVMLError), AttributeError for a function that this version
        # of pynvml lacks, and UnicodeDecodeError for a name that is no text.
        return Field(value=None, reason=_reason(error))
    if isinstance(answer, bytes):
        answer = answer.decode("utf-8", errors="replace")
    return Field(value=answer)


@contextlib.contextmanager
def open_driver() -> Iterator[Driver | str]:
    """The driver, or in a sentence why there is none."""
    try:
        import pynvml
    except ImportError as error:
        yield f"the nvidia-ml-py package is not installed: {error}"
        return
    started = guarded(pynvml.nvmlInit)
    if started.reason is not None:
        yield f"NVML cannot be used: {started.reason}"
        return
    try:
        yield Driver(nvml=pynvml, gpus=tuple(_list_gpus(pynvml)))
    finally:
        guarded(pynvml.nvmlShutdown)


def nvlinks(driver: Driver, board: Any) -> Field:
    """Number of active NVLinks, or the reason of the first refusal where not one link answers."""
    states = [driver.ask("nvmlDeviceGetNvLinkState", board, link) for link in range(_MAX_NVLINKS)]
    answered = [state.value for state in states if state.reason is None]
    return Field(value=sum(1 for state in answered if state)) if answered else states[0]


def _list_gpus(nvml: Any) -> Iterator[NvmlGpu]:
    count = guarded(nvml.nvmlDeviceGetCount).value
    for index in range(count if isinstance(count, int) else 0):
        found = _handle(nvml.nvmlDeviceGetHandleByIndex, index)
        if found is None:
            continue
        yield NvmlGpu(index=index, uuid=_uuid(nvml, found), handle=found, board=found)
        slices = guarded(partial(nvml.nvmlDeviceGetMaxMigDeviceCount, found)).value
        for number in range(slices if isinstance(slices, int) else 0):
            part = _handle(nvml.nvmlDeviceGetMigDeviceHandleByIndex, found, number)
            if part is not None:
                yield NvmlGpu(index=index, uuid=_uuid(nvml, part), handle=part, board=found)


def _handle(function: Callable[..., Any], *arguments: Any) -> Any:
    # A handle is no field: it stays in this module, and a GPU without one cannot be asked anything.
    try:
        return function(*arguments)
    except Exception:
        return None


def _uuid(nvml: Any, handle: Any) -> Field:
    return guarded(partial(nvml.nvmlDeviceGetUUID, handle))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__.replace('NVMLError_', '')}: {text}" if text else type(error).__name__
