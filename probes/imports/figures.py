"""What every reader of a foreign output hands over, and the cost model of a link of which only a rate is known."""

from __future__ import annotations

from dataclasses import dataclass

from probes.ids import new_id
from probes.records import Concurrency, Device, LayerModel, LinkGroup, LinkKind, LinkMode, LinkModel, ModelForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Devices, cost models and shared links of a machine that someone else measured."""

    devices: tuple[Device, ...]
    models: tuple[LinkModel, ...]
    link_groups: tuple[LinkGroup, ...]
    warnings: tuple[str, ...]
    layers: tuple[LayerModel, ...] = ()


def model_of_rate(
    kind: LinkKind,
    source: str,
    destination: str,
    *,
    mode: LinkMode | None,
    concurrency: Concurrency,
    bytes_per_s: float,
) -> LinkModel:
    """α = 1 and β = 0: a single large transfer tells the bandwidth and nothing about latency."""
    return LinkModel(
        model_id=new_id(),
        kind=kind,
        source=source,
        destination=destination,
        mode=mode,
        concurrency=concurrency,
        form=ModelForm.AFFINE,
        alpha=1.0,
        bandwidth_bytes_per_s=bytes_per_s,
        beta_seconds=0.0,
        n_half_bytes=0.0,
        segments=None,
        ci95=None,
        holdout_mape=None,
        max_relative_error=None,
        status="ok",
    )
