"""A rank whose sums come out wrong on the way; the processes that measure collectives import it by this name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from probes.collective_ranks import RankTask, RankTimes, measure_rank


def serve(task: RankTask, connection: object) -> None:
    """The real measurement over an all_reduce that adds one to the first element."""
    real = dist.all_reduce

    def wrong(tensor: torch.Tensor) -> None:
        real(tensor)
        tensor[0] += 1

    dist.all_reduce = wrong  # type: ignore[assignment]  # the fault under test
    times: RankTimes = measure_rank(task)
    connection.send(times)  # type: ignore[attr-defined]  # a Connection
