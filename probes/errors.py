"""Every error a user can meet.

::

    CaeeError                 exit 1: what, why, what to do next
    ├── UsageError            exit 2: the command was called wrongly
    ├── InputError            something that came from outside is wrong
    │   ├── CaseError         a decision's inputs (field, row, value)
    │   ├── TraceError        a routing trace or an engine's dump
    │   ├── CheckpointError   a model folder, a config or a safetensors file
    │   └── ImportFormatError a measuring tool's output
    ├── StoreError            the store cannot be opened, read or written
    ├── DeviceError           a device, link or driver does not do what is asked
    ├── RunError              a live run failed (a rank died, a transfer failed)
    ├── CheckFailed           exit 3: the work was done, and the check it was asked for failed
    └── Interrupted           exit 130: stopped by the user; the message says what was kept
"""

from __future__ import annotations


class CaeeError(Exception):
    """What went wrong and why, in a line, and in ``hint`` what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # A keyword-only argument is lost by the default pickling between ranks.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[CaeeError], message: str, hint: str | None) -> CaeeError:
    return kind(message, hint=hint)


class UsageError(CaeeError):
    """The command was called wrongly: an unknown name, a value out of range, options that exclude each other."""

    exit_code = 2


class InputError(CaeeError):
    """Something that came from outside (a file, a dump, a config) is wrong."""


class CaseError(InputError):
    """A decision's inputs are wrong; the message names the field, the row and the value."""


class TraceError(InputError):
    """A routing trace, or a dump that should become one, cannot be used."""


class CheckpointError(InputError):
    """A model folder is missing, incomplete, damaged or of a family that is not supported."""


class ImportFormatError(InputError):
    """A measuring tool's output was not recognised, or contradicts itself."""


class StoreError(CaeeError):
    """The store cannot be opened, read, written or migrated."""


class DeviceError(CaeeError):
    """A device, a link or its driver is absent or does not do what is asked."""


class RunError(CaeeError):
    """A live run failed: a rank died, a transfer failed twice, the ranks disagree."""


class CheckFailed(CaeeError):
    """The work was done, but the check that was asked for failed (drift, quality, damage)."""

    exit_code = 3


class Interrupted(CaeeError):
    """Stopped by the user; the message says what was kept."""

    exit_code = 130
