"""What a trace-driven run was, in words: there is no model behind its times."""

from __future__ import annotations

from probes.text import verb
from reports.info.words import number, percent, plural
from store.records import Replay, RunRecord


def replayed(run: RunRecord, replay: Replay) -> str:
    """Which part of which trace."""
    work = run.workload
    tokens = f"about {plural(work.batch_size, 'token')}" if replay.recorded else plural(work.batch_size, "token")
    layers = (
        f"all {plural(work.moe_layers, 'MoE layer')}"
        if work.moe_layers == replay.model_layers
        else f"the first {work.moe_layers} of {plural(replay.model_layers, 'MoE layer')}"
    )
    return f"{plural(replay.steps, 'step')} of {tokens} of the trace {replay.trace}, {layers}, replayed"


def replay_sentence(run: RunRecord, replay: Replay) -> str:
    """What was moved and multiplied, and what that leaves out."""
    own = run.workload.experts_per_device
    shared = (
        "each with bytes of its own"
        if replay.distinct_experts >= own
        else f"of which {number(replay.distinct_experts)} of {number(own)} per device "
        f"{verb(replay.distinct_experts, 'has', 'have')} bytes of their own and the "
        "others share them"
    )
    return (
        f"A trace was replayed, without a checkpoint: stand-ins of the experts were moved ({replay.storage} as stored, "
        f"{shared}), and what was multiplied is {replay.multiplies}. Times are of the MoE layers alone, without "
        f"attention and other dense parts, so a whole model's step changes by a smaller share; what pruning does to "
        f"quality is not known from a trace, only that {percent(run.with_policy.removed_importance)} of the importance "
        f"was removed."
    )
