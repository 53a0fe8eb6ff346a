"""How far a policy's knob may be turned: the most aggressive setting whose loss on held-out text stays within a limit.

A setting is acceptable where the upper end of the 95 % interval of its rise in loss is within the limit, so that chance
alone rarely lets one pass. The gain and the drop that are reported are measured afterwards, on other passages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.passes import Pruned
from runtime.policy.knob import furthest, knob_of, turned
from runtime.policy.make import make_policy
from runtime.policy.types import Policy, PolicySpec
from runtime.quality import Losses, measure_losses
from runtime.statistics import mean_difference_interval
from store.records import PolicyPoint, PolicySearch

if TYPE_CHECKING:
    from runtime.worker import RankSession


def search_knob(session: RankSession, passages: list[list[int]], spec: PolicySpec, limit: float) -> PolicySearch:
    """Try settings of ``spec``'s knob on ``passages``, each from the caches as they are now, all ranks in step.

    The caches are left as the last setting left them.
    """
    options = session.options
    knob = knob_of(spec, offloading=options.offloading)
    start = session.execution.snapshot()
    batches = -(-len(passages) // options.batch_size)
    session.progress.expect(batches * (1 + len(knob.settings).bit_length()))

    def losses_of(policy: Policy, *, bypass_cache: bool = False) -> Losses:
        session.model.signals.begin_pass("search")
        return measure_losses(
            session.model,
            passages,
            policy,
            batch_size=options.batch_size,
            bypass_cache=bypass_cache,
            on_batch=session.progress.advance,
        )

    baseline = losses_of(session.router, bypass_cache=True)
    points: list[PolicyPoint] = []

    def acceptable(value: float) -> bool:
        session.execution.restore(start)
        session.release_brake()
        losses = losses_of(make_policy(turned(spec, knob, value), offloading=options.offloading))
        # Every rank computes the same; whatever the last bit, all must take the same turn.
        points.append(session.ranks.from_first(policy_point(value, baseline, losses, limit, seed=options.seed)))
        return points[-1].within_limit

    chosen = furthest(knob.settings, acceptable)
    return PolicySearch(
        knob=knob.key,
        max_quality_drop=limit,
        nll_baseline=float(baseline.nll_B.mean()),
        sequences=len(passages),
        tokens=sum(len(passage) - 1 for passage in passages),
        points=tuple(points),
        chosen=chosen,
    )


def policy_point(value: float, baseline: Losses, losses: Losses, limit: float, *, seed: int) -> PolicyPoint:
    """What a setting did to the loss, and to the experts that were fetched."""
    differences, scale = losses.nll_B - baseline.nll_B, float(baseline.nll_B.mean())
    low, high = (float(bound) / scale for bound in mean_difference_interval(differences, seed=seed))
    layers = [layer for step in losses.steps for layer in step.layers]
    return PolicyPoint(
        value=value,
        nll=float(losses.nll_B.mean()),
        loss_rise=float(differences.mean()) / scale,
        loss_rise_ci95=(low, high),
        removed_importance=Pruned.of(losses.steps).importance,
        max_device_misses_per_step=float(np.sum([layer.misses_after_D.max() for layer in layers])) / len(losses.steps),
        within_limit=high <= limit,
    )
