"""What test_hosts.py runs in each rank's process: ``caee`` as one rank of several, on a host of its own if asked.

``OPTIONS`` comes from whoever runs this file, among its globals. The process is a fork of one that imported everything.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
from pathlib import Path

import torch

import runtime.parallel
from caee_cli.main import main

CLONE_NEWNET = 0x40000000


def run(
    namespace: str | None,
    environment: dict[str, str],
    arguments: list[str],
    output: Path,
    errors: Path,
    join_seconds: float,
) -> None:
    os.setsid()
    if namespace is not None:
        enter(namespace)
    os.environ |= environment
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    torch.set_num_threads(1)
    runtime.parallel.JOIN_TIMEOUT = datetime.timedelta(seconds=join_seconds)
    sys.argv = ["caee", *arguments]
    main()


def enter(namespace: str) -> None:
    """Join a network namespace; ``os.setns`` is of Python 3.12."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


run(**globals()["OPTIONS"])
