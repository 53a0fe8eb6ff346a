"""The machine, the workload and the policy of a run, as rows to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.records import Fingerprint
from probes.units import format_size
from store.records import Replay, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact; ``reason`` says why ``value`` is None."""

    group: str
    name: str
    value: str | int | float | bool | None
    reason: str | None = None


def fingerprint_info(fingerprint: Fingerprint) -> tuple[Fact, ...]:
    """Identity first, then state, each in alphabetical order."""
    groups = (("identity", fingerprint.identity), ("state", fingerprint.state))
    return tuple(
        Fact(group=group, name=name, value=fields[name].value, reason=fields[name].reason)
        for group, fields in groups
        for name in sorted(fields)
    )


def parameters_info(run: RunRecord) -> tuple[Fact, ...]:
    """Policy with every parameter, and the whole workload."""
    work = run.workload
    policy = [Fact(group="policy", name="name", value=run.policy.name)]
    policy += [Fact(group="policy", name=name, value=value) for name, value in run.policy.parameters.items()]
    if run.replay is not None:
        return (
            *policy,
            *(Fact(group="workload", name=name, value=value) for name, value in _replayed(run, run.replay)),
        )
    workload: dict[str, str | int | None] = {
        "model": run.model,
        "model family": run.model_family,
        "devices": ", ".join(f"{device.name_on_link} ({device.name})" for device in run.devices),
        "expert tier": run.tier,
        "read mode": work.read_mode,
        "dtype": work.dtype,
        "MoE layers": work.moe_layers,
        "experts per layer": work.num_experts,
        "experts per token (top-k)": work.top_k,
        "expert size": format_size(work.expert_bytes),
        "experts per device, all layers": work.experts_per_device,
        "cache": work.cache,
        "cached experts per device": work.cache_experts,
        "batch size (concurrency)": work.batch_size,
        "prompts": work.prompts,
        "tokens per prompt": work.input_len or "as given",
        "new tokens per sequence": work.max_new_tokens,
        "pairs": work.pairs,
        "phases under the policy": work.phases,
        "seed": work.seed,
        "calibration": run.calibration_id,
    }
    return (*policy, *(Fact(group="workload", name=name, value=value) for name, value in workload.items()))


def _replayed(run: RunRecord, replay: Replay) -> Iterator[tuple[str, str | int | None]]:
    """The workload of a trace-driven run."""
    work = run.workload
    yield from (
        ("model (shapes alone)", run.model),
        ("trace", replay.trace),
        ("warm-up steps", replay.warmup_steps),
        ("measured steps", replay.steps),
        ("tokens per step", f"{work.batch_size}, as recorded, on average" if replay.recorded else work.batch_size),
        ("MoE layers", f"{work.moe_layers} of {replay.model_layers}"),
        ("experts per layer", work.num_experts),
        ("experts per token (top-k)", work.top_k),
        ("expert size", f"{format_size(work.expert_bytes)} ({replay.storage})"),
        ("multiplied", replay.multiplies),
        ("experts per device, all layers", work.experts_per_device),
        ("of them with bytes of their own", replay.distinct_experts),
        ("whose bytes were compared afterwards, per device", replay.checked_experts),
        ("devices", ", ".join(f"{device.name_on_link} ({device.name})" for device in run.devices)),
        ("expert tier", run.tier),
        ("read mode", work.read_mode),
        ("cache", work.cache),
        ("cached experts per device", work.cache_experts),
        ("pairs", work.pairs),
        ("seed", work.seed),
        ("calibration", run.calibration_id),
    )
