"""Interleaved pairs of passes, one with the router's own choice and one with the policy, and what is said of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from probes.files import written_whole
from runtime.recording import PassRecord
from store.records import FEWEST_PAIRS

if TYPE_CHECKING:
    from runtime.options import RunOptions
    from runtime.tracerun.options import TraceRunOptions
    from runtime.tracerun.session import TraceRunReport, TraceRunSession
    from runtime.worker import RankReport, RankSession

PassesOfRanks = list[list[PassRecord]]
"""By rank, then by pair."""

MOST_PAIRS = 24
"""Most interleaved pairs when their number follows from the time."""


def how_many_pairs(session: RankSession | TraceRunSession, pass_seconds: float, *, fewest: int) -> int:
    """As many as were asked for, else as fit the time with passes of ``pass_seconds`` on rank 0, within bounds."""
    options = session.options
    if options.pairs is not None:
        return options.pairs
    fitting = int(options.seconds_for_pairs / (2 * pass_seconds))
    return int(session.ranks.from_first(min(max(fitting, fewest), MOST_PAIRS)))


def measure_pairs(
    session: RankSession | TraceRunSession,
    count: int,
    run_pass: Callable[[int, bool], PassRecord],
    report: Callable[[PassesOfRanks, PassesOfRanks], object],
) -> tuple[PassesOfRanks, PassesOfRanks]:
    """Passes of the baseline and of the policy. ``run_pass``: of a pair's number, and whether with the policy.

    What is complete so far survives an interruption: after every pair rank 0 writes a ``report`` of it.
    """
    ranks, file = session.ranks, session.options.partial_file
    passes: tuple[PassesOfRanks, PassesOfRanks] = ([[] for _ in range(ranks.world)], [[] for _ in range(ranks.world)])
    for pair in range(count):
        # The order within a pair alternates, so that drift does not look like an effect.
        for with_policy in (False, True) if pair % 2 == 0 else (True, False):
            records = ranks.gather(run_pass(pair, with_policy))
            for of_rank, record in zip(passes[with_policy], records, strict=True):
                of_rank.append(record)
            session.progress.advance()
        if file is not None and ranks.rank == 0:
            with written_whole(file, force=True) as stream:
                pickle.dump(report(*passes), stream)
    return passes


def remarks(options: RunOptions | TraceRunOptions, report: RankReport | TraceRunReport) -> list[str]:
    """What the record says of few pairs, a cache smaller than asked for, and reads that are not direct."""
    found = []
    if len(report.baseline[0]) < FEWEST_PAIRS:
        found.append(f"fewer than {FEWEST_PAIRS} pairs: no interval of the gain is given, and nothing is called a gain")
    if options.cache_experts is not None and options.cache_experts > report.experts_per_device:
        found.append(f"--cache-experts {options.cache_experts}: a device holds {report.experts_per_device}, all cached")
    if report.read_reason is not None and options.tier == "disk":
        found.append(f"reads were not direct ({report.read_reason}): the page cache may hide the cost of fetches")
    return found
