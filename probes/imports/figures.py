"""What every reader of a foreign output hands over, and the cost model of a link of which only a rate is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from probes.ids import new_id
from probes.records import Concurrency, Device, Field, LayerModel, LinkGroup, LinkKind, LinkMode, LinkModel, ModelForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Devices, cost models and shared links of a machine that someone else measured."""

    devices: tuple[Device, ...]
    models: tuple[LinkModel, ...]
    link_groups: tuple[LinkGroup, ...]
    warnings: tuple[str, ...]
    layers: tuple[LayerModel, ...] = ()
    facts: dict[str, Field] = field(default_factory=dict)


def model_of_rate(
    kind: LinkKind,
    source: str,
    destination: str,
    *,
    mode: LinkMode | None,
    concurrency: Concurrency,
    bytes_per_s: float,
    alpha: float = 1.0,
    beta_seconds: float = 0.0,
) -> LinkModel:
    """α = 1 and β = 0 unless known: a single large transfer tells the bandwidth and nothing about latency."""
    return LinkModel(
        model_id=new_id(),
        kind=kind,
        source=source,
        destination=destination,
        mode=mode,
        concurrency=concurrency,
        form=ModelForm.AFFINE,
        alpha=alpha,
        bandwidth_bytes_per_s=bytes_per_s,
        beta_seconds=beta_seconds,
        n_half_bytes=beta_seconds * bytes_per_s / alpha,
        segments=None,
        ci95=None,
        holdout_mape=None,
        max_relative_error=None,
        status="ok",
    )


def named_gpus(names: Sequence[str]) -> tuple[Device, ...]:
    """Devices of which nothing but the name is known, in order."""
    return tuple(
        Device(index=index, kind="cuda", name=name, uuid=None, memory_bytes=None) for index, name in enumerate(names)
    )
