"""Starting one process per device through torch's elastic launcher, and making one clear error of what goes wrong.

The ranks are forks of a server that has imported everything once: importing takes longer than a short run. Under
``torchrun`` (one host or several) the processes exist already and run the same program; nothing is started then.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from probes.errors import CaeeError, RunError
from runtime.liveness import Patience, Watch, beating
from runtime.parallel import WATCHED, PeerLost

PRELOADED = ("transformers.modeling_utils", "transformers.conversion_mapping", "runtime.policy.fast")
"""What every rank needs beside its program; importing it starts no thread and touches no device."""

LAUNCHER_CHECK_SECONDS = 1.0
PATIENCE = Patience()
LONGEST_SOCKET_FOLDER = 64
"""Of the 107 bytes that a socket's path may have, multiprocessing adds some 40 to the temporary folder's."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank brings home: a value, or the error that ended it."""

    value: Any = None
    error: CaeeError | None = None


def started_by_torchrun() -> bool:
    """Whether this process is already one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(program: Callable[[Any], Any], argument: Any, *, processes: int, patience: Patience = PATIENCE) -> Any:
    """Run ``program(argument)`` on ``processes`` ranks and return rank 0's value.

    Raises the root cause of a failure (a rank's own error before another's complaint that a peer is gone; a rank that
    hangs beyond ``patience``), and ``KeyboardInterrupt`` when the user stops it; the ranks have ended by then.
    """
    if processes == 1:
        return program(argument)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launcher()
    watch = Watch(processes, patience)
    try:
        _start_server(program)
        # The launcher's folder for logs, which nobody writes, would stay otherwise.
        with tempfile.TemporaryDirectory(prefix="caee-launch-", ignore_cleanup_errors=True) as logs, watch:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                start_method="forkserver",
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            outcomes = elastic_launch(config, _guarded)(program, argument, os.getpid(), watch.senders, patience)
    except ChildFailedError as error:
        raise (watch.error or _died(error)) from error
    except (SignalException, KeyboardInterrupt) as error:
        _end_server()
        raise KeyboardInterrupt from error
    return _first_value([outcomes[rank] for rank in sorted(outcomes)])


def _silence_launcher() -> None:
    """What the launcher logs about ends of ranks, we say ourselves."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _start_server(program: Callable[[Any], Any]) -> None:
    """Start the process that imports everything once and that all ranks are forks of, and wait until it is ready.

    Ctrl-C reaches every process of the group. The server and its forks inherit it blocked, so that none ends with a
    traceback while it imports; the ranks let it in when they can end quietly.
    """
    multiprocessing.set_forkserver_preload([program.__module__, *PRELOADED])
    resource_tracker.ensure_running()  # which would let the signal in again if it were started by the server's start
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    folder = tempfile.gettempdir()
    try:
        # The server listens at a socket in the temporary folder, and a socket's path must be short.
        tempfile.tempdir = folder if len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER else "/tmp"
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    first = multiprocessing.get_context("forkserver").Process(target=_do_nothing)
    first.start()
    first.join()


def _end_server() -> None:
    """It would otherwise finish importing, with the terminal in its hands."""
    server = getattr(forkserver, "_forkserver", None)  # Python has no public way to end it
    process_id = getattr(server, "_forkserver_pid", None)
    if process_id is not None:
        os.kill(process_id, signal.SIGKILL)


def _do_nothing() -> None:
    """What the server's first fork does."""


def _end_without(launcher: int) -> None:
    """End this rank once its launcher is gone without a word (killed): it is no child of it that would be told."""
    while True:
        time.sleep(LAUNCHER_CHECK_SECONDS)
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            os._exit(1)


def _guarded(
    program: Callable[[Any], Any], argument: Any, launcher: int, beats: Sequence[Connection], patience: Patience
) -> Outcome:
    os.environ[WATCHED] = "1"
    threading.Thread(target=_end_without, args=(launcher,), daemon=True).start()
    # From here on Ctrl-C ends a rank at once, which leaves the message to its parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        with beating(beats[int(os.environ["LOCAL_RANK"])], patience):
            return Outcome(value=program(argument))
    except CaeeError as error:
        return Outcome(error=error)
    except Exception as error:
        if os.environ.get("CAEE_DEBUG") == "1":
            raise
        return Outcome(error=RunError(f"unexpected {type(error).__name__}: {str(error).strip()[:300]}"))


def _first_value(outcomes: list[Outcome]) -> Any:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
    return outcomes[0].value


def _died(error: Any) -> RunError:
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return RunError(
        f"rank {rank} {how}; the run was stopped on all ranks and nothing of it was stored",
        hint="SIGKILL mostly means out of memory: see dmesg, or give a smaller --batch-size or --cache-experts",
    )
