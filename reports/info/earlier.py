"""Runs that earlier versions stored, as this one would have measured them."""

from __future__ import annotations

from dataclasses import replace

from store.records import FEWEST_PAIRS, PassStatistics, RunRecord


def without_rough_intervals(run: RunRecord) -> RunRecord:
    """``run`` without the intervals that earlier versions gave of fewer than ``FEWEST_PAIRS`` pairs."""
    if run.workload.pairs >= FEWEST_PAIRS:
        return run
    return replace(
        run,
        gain_ttft=None if run.gain_ttft is None else replace(run.gain_ttft, ci95=None),
        gain_tpot=replace(run.gain_tpot, ci95=None),
        baseline=_without_intervals(run.baseline),
        with_policy=_without_intervals(run.with_policy),
    )


def _without_intervals(passes: PassStatistics) -> PassStatistics:
    first = passes.ttft_seconds
    return replace(
        passes,
        ttft_seconds=None if first is None else replace(first, ci95=None),
        tpot_seconds=replace(passes.tpot_seconds, ci95=None),
    )
