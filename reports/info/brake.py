"""What the automatic brake saw and did, in words."""

from __future__ import annotations

from probes.units import format_seconds
from reports.info.words import number, percent, plural
from store.records import BrakeStatistics


def brake_sentence(brake: BrakeStatistics) -> str:
    """How often it acted, on what, and what watching took."""
    text = f"The brake, set to a mean relative error of {percent(brake.budget)} in a layer's output, {_acted(brake)}"
    text += f"; {_samples(brake)}."
    if brake.quality_layer_steps and brake.quality_braked_layer_steps:
        share = brake.quality_braked_layer_steps / brake.quality_layer_steps
        text += (
            f" While quality was measured, the router's own choice was in force in {percent(share)} of the "
            "layer-steps, so the loss is that of the policy with its brake."
        )
    return text


def _acted(brake: BrakeStatistics) -> str:
    if brake.trips == 0 and brake.braked_layer_steps == 0:
        return "never acted"
    share = brake.braked_layer_steps / max(1, brake.layer_steps)
    return (
        f"acted {plural(brake.trips, 'time')}: the router's own choice was in force in {percent(share)} of "
        f"{plural(brake.layer_steps, 'layer-step')}, and times and fetches are those of the policy with its brake"
    )


def _samples(brake: BrakeStatistics) -> str:
    if brake.samples == 0:
        return f"it took no sample: they are {number(brake.sample_every)} layer-steps apart, and only in decode steps"
    text = plural(brake.samples, "sample")
    if brake.mean_error is not None:
        text += f", {percent(brake.mean_error)} on average and {percent(brake.highest_error)} at most"
    fetches = f"{number(brake.shadow_fetches)} {'fetch' if brake.shadow_fetches == 1 else 'fetches'}"
    return f"{text}, took {format_seconds(brake.shadow_seconds)} and {fetches}, which no other figure includes"
