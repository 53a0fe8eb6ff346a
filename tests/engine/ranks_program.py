"""What test_ranks.py starts: passes over several checkpoints on one, two and four processes, left in one file each.

Arguments: the output folder, then model folders. Every case runs twice from the same cache state. The ranks are forks
of one process, which by then has run alone and so has imported and compiled everything: that takes longest.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import stock
import torch

from probes.devices import find_devices
from runtime.dispatch import Dispatched
from runtime.options import RunOptions
from runtime.parallel import Ranks, join, leave
from runtime.policy.guard import BrakeSettings
from runtime.policy.spec import parse_policy
from runtime.quality import measure_quality
from runtime.worker import RankSession

PROMPTS = [list(b"Hello there, my"), list(b"And he said, go"), list(b"Now is the time")]
HELD_OUT = [list(b"It was t"), list(b"he best "), list(b"of times")]
STEPS = 6
# Prunes alike on any number of ranks.
BRAKED = "importance:theta=0.3,compensation=none"
BRAKE = BrakeSettings(budget=0.01, sample_every=2, mean_over=2, hold=2, longest_hold=2)


def main(output: Path, folders: list[Path]) -> int:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # one thread here: a process with several must not fork
    run_rank({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, output, folders)
    os.sched_setaffinity(0, cores)
    return max(start_ranks(world, output, folders) for world in (2, 4))


def start_ranks(world: int, output: Path, folders: list[Path]) -> int:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=run_rank, args=({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output, folders)
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def run_rank(environment: dict[str, str], output: Path, folders: list[Path]) -> None:
    os.environ |= environment
    ranks = join("cpu")
    results = {}
    for number, folder in enumerate(folders):
        for dtype in ("float32", "bfloat16") if number == 0 else ("float32",):
            for policy in ("router", "caee:theta=0.6") if number < 2 else ("router",):
                results[folder.name, dtype, policy] = run_case(folder, dtype, policy, ranks)
        if number == 0:
            results[folder.name, "float32", BRAKED] = run_case(folder, "float32", BRAKED, ranks, BRAKE)
    shared = {
        (policy, data_parallel): run_shared(folders[0], policy, ranks, brake, data_parallel=data_parallel)
        for policy, brake in (("caee:theta=0.6", None), (BRAKED, BRAKE))
        for data_parallel in (False, True)
        if ranks.world == 2 or (ranks.world > 1 and brake is None)
    }
    if ranks.rank == 0:
        torch.save(results, output / f"{ranks.world}.pt")
        torch.save(shared, output / f"{ranks.world}-shared.pt")
    leave(ranks)


def run_case(
    folder: Path, dtype: str, policy: str, ranks: Ranks, brake: BrakeSettings | None = None
) -> list[dict[str, Any]]:
    session = open_session(folder, dtype, policy, ranks, brake)
    try:
        session.run_pass(PROMPTS, session.router, new_tokens=2)
        chosen = session.asked_policy()
        snapshot = session.execution.snapshot()
        return [one_pass(session, chosen, snapshot) for _ in range(2)]
    finally:
        session.close()


def open_session(
    folder: Path,
    dtype: str,
    policy: str,
    ranks: Ranks,
    brake: BrakeSettings | None,
    *,
    data_parallel: bool = False,
) -> RankSession:
    session = RankSession(
        RunOptions(
            model=folder,
            devices=find_devices(f"cpu:{ranks.world}"),
            tier="disk",
            policy=parse_policy(policy),
            cache="lfu",
            prompts=("Hello",),
            held_out=None,
            calibration=None,
            cache_experts=max(1, 8 // ranks.world),
            dtype=dtype,
            brake=brake,
            check_ranks=True,
            data_parallel=data_parallel,
        ),
        ranks,
    )
    torch.set_num_threads(1)  # whatever the number of ranks: more threads round otherwise
    return session


def run_shared(
    folder: Path, policy: str, ranks: Ranks, brake: BrakeSettings | None, *, data_parallel: bool
) -> dict[str, Any]:
    """Steps, a pass and quality; three sequences, or one, divide by neither two nor four ranks."""
    session = open_session(folder, "float32", policy, ranks, brake, data_parallel=data_parallel)
    try:
        session.run_pass(PROMPTS, session.router, new_tokens=2)
        chosen, snapshot = session.asked_policy(), session.execution.snapshot()
        dispatched = watch_dispatch(session)
        found = {**one_pass(session, chosen, snapshot), "ids": list(dispatched), "prompts": PROMPTS}
        session.execution.restore(snapshot)
        record = session.run_pass(PROMPTS, chosen, new_tokens=4)
        quality = measure_quality(session.model, HELD_OUT, session.router, chosen, batch_size=2, seed=0)
        found |= {
            "token_ids": record.token_ids,
            "tokens": [step.tokens for step in record.steps],
            "rerouted": [layer.rerouted_slots for step in record.steps for layer in step.layers],
            "losses": [quality.nll_policy, quality.nll_baseline, quality.mean_kl],
        }
        told = {name: value for name, value in found.items() if name != "logits"}
        return {**found, "ranks_agree": len(set(ranks.gather(repr(told)))) == 1}
    finally:
        session.close()


def watch_dispatch(session: RankSession) -> list[Any]:
    """Filled with the ids [T][K] of all ranks' tokens that every layer-step from now on dispatches."""
    exchange, seen = session.execution.dispatch.exchange, list[Any]()

    def watched(*given: Any) -> Dispatched:
        everywhere = exchange(*given)
        seen.append(everywhere.ids_GK.tolist())
        return everywhere

    session.execution.dispatch.exchange = watched  # type: ignore[method-assign]
    return seen


def one_pass(session: RankSession, policy: Any, snapshot: Any) -> dict[str, Any]:
    session.execution.restore(snapshot)
    session.release_brake()
    logits, records = stock.engine_logits(session.model, policy, PROMPTS, STEPS)
    layers = [layer for record in records for layer in record.layers]
    return {
        "logits": torch.stack(logits),
        "misses": [layer.misses_after_D.tolist() for layer in layers],
        "dispatched": [int(layer.dispatched_D.sum()) for layer in layers],
        "removed": [layer.removed for layer in layers],
        "errors": [layer.brake.error for layer in layers if layer.brake],
        "braked": [layer.brake.braked for layer in layers if layer.brake],
        "tripped": [layer.brake.tripped for layer in layers if layer.brake],
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]]))
