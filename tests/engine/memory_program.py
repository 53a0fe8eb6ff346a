"""Prints, for every model folder named, the peak of this process's memory while it is loaded and run once, in bytes.

    python memory_program.py CACHE_EXPERTS WARM_FOLDER FOLDER…

The warm folder is run before, so that imports, compiled code and the like do not count. Every measurement has a process
of its own, forked off, and prints one JSON line: the peak above what the process had before, and what it is made of.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from probes.devices import find_devices
from runtime.experts.transfer import most_buffers
from runtime.models.skeleton import read_config
from runtime.options import RunOptions
from runtime.parallel import Ranks
from runtime.policy.spec import parse_policy
from runtime.worker import RankSession


def main() -> None:
    assert os.environ.get("OMP_NUM_THREADS") == "1", "threads do not survive a fork"
    # Where a processor multiplies half precision itself, oneDNN packs copies of the largest matrices for that: what the
    # stock model needs as well, and no part of what the runtime holds.
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
    cache, warm, *folders = sys.argv[1:]
    run(Path(warm), 2)
    for folder in folders:
        if os.fork() == 0:
            run(Path(warm), 2)  # a fork begins without the pages of its libraries
            sys.stdout.write(json.dumps(measure(Path(folder), int(cache))) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.wait()
        assert status == 0


def measure(folder: Path, cache: int) -> dict[str, int]:
    # Resets the peak, which would be that of the warming up.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    session = run(folder, cache)
    peak = status("VmHWM") - before
    slots = {id(parameter) for parameter in session.pool.parameters.values()}
    dense = sum(p.nbytes for p in session.loaded.model.parameters() if id(p) not in slots)
    cached = sum(parameter.nbytes for parameter in session.pool.parameters.values())
    return {
        "peak": peak,
        "dense": dense,
        "cache": cached,
        "staging": most_buffers(session.device) * session.source.staging_bytes(),
        "experts": session.index.expert_bytes * session.index.num_experts * len(session.index.reads),
    }


def run(folder: Path, cache: int) -> RankSession:
    """Load ``folder`` and write three tokens after a prompt that needs more experts than are staged at once."""
    config = read_config(folder)
    options = RunOptions(
        model=folder,
        devices=find_devices("cpu:1"),
        tier="disk",
        policy=parse_policy("router"),
        cache="lfu",
        prompts=("A prompt whose letters go to many an expert.",),
        held_out=None,
        calibration=None,
        cache_experts=cache,
        dtype=str(config.dtype).removeprefix("torch."),
    )
    session = RankSession(options, Ranks(rank=0, world=1))
    session.run_pass(session.encoded_prompts(), session.router, new_tokens=3)
    session.close()
    return session


def status(name: str) -> int:
    """A size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    main()
