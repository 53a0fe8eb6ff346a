"""How long this thread was ready to run and was not allowed to: other programs' doing, not the link's."""

from __future__ import annotations

import os

_SCHEDSTAT = "/proc/thread-self/schedstat"


class WaitingTime:
    """Seconds that the thread which made this object has waited for a processor; always 0 where the kernel is silent.

    Source: Documentation/scheduler/sched-stats.rst, the second field of /proc/<pid>/schedstat in nanoseconds.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def seconds(self) -> float:
        if self._fd < 0:
            return 0.0
        fields = os.pread(self._fd, 64, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
