"""The sums of a run as Prometheus reads them: text exposition format 0.0.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from runtime.signals.step import StepsHeader
from runtime.signals.totals import SECONDS_BOUNDS, Series, Snapshot, Sums

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, str]
Sample = tuple[str, Labels, float]
"""What follows the metric's name, the labels, and the value."""

_COUNTERS: tuple[tuple[str, str, Callable[[Sums], float]], ...] = (
    ("caee_steps_total", "Forward passes of the model.", lambda s: s.steps),
    ("caee_tokens_total", "Real tokens that went through the model.", lambda s: s.tokens),
    (
        "caee_token_layers_total",
        "Tokens times MoE layers: what caee_removed_importance_total is a share of.",
        lambda s: s.token_layers,
    ),
    (
        "caee_removed_importance_total",
        "Gate weight of choices that were not dispatched, in shares of one token at one layer.",
        lambda s: s.removed,
    ),
    (
        "caee_rerouted_slots_total",
        "Slots that went to an expert outside their token's choice.",
        lambda s: s.rerouted_slots,
    ),
    ("caee_fallbacks_total", "Layers of steps whose scores were no numbers.", lambda s: s.fallbacks),
    ("caee_decide_seconds_total", "Seconds spent deciding, on rank 0.", lambda s: s.decide_seconds),
    ("caee_fetch_wait_seconds_total", "Seconds spent waiting for experts, on rank 0.", lambda s: s.fetch_wait_seconds),
    ("caee_experts_seconds_total", "Seconds spent computing experts, on rank 0.", lambda s: s.experts_seconds),
    (
        "caee_exchange_seconds_total",
        "Seconds spent exchanging outputs, waiting for slower ranks included, on rank 0.",
        lambda s: s.exchange_seconds,
    ),
)
_DEVICE_COUNTERS: tuple[tuple[str, str, Callable[[Sums], list[int]]], ...] = (
    ("caee_expert_fetches_total", "Experts brought to the device.", lambda s: s.fetches),
    ("caee_expert_dispatches_total", "Experts run on the device, fetched or not.", lambda s: s.dispatches),
)


def exposition(snapshot: Snapshot) -> str:
    """All metrics of ``snapshot``; those of which nothing is known yet have no samples."""
    blocks = [_info(snapshot.header)]
    for name, text, value in _COUNTERS:
        blocks.append(_block(name, "counter", text, (("", _labels(k), value(s)) for k, s in snapshot.series.items())))
    for name, text, values in _DEVICE_COUNTERS:
        blocks.append(_block(name, "counter", text, _by_device(snapshot, values)))
    blocks.append(
        _block("caee_step_seconds", "histogram", "Seconds per forward pass, on rank 0.", _histogram(snapshot))
    )
    blocks += [*_gauges(snapshot), *_brake(snapshot)]
    return "".join(blocks)


def _info(header: StepsHeader | None) -> str:
    try:
        installed = version("caee")
    except PackageNotFoundError:
        installed = "unknown"
    labels = {"version": installed}
    if header is not None:
        labels |= {
            "model": header.model,
            "policy": header.policy,
            "tier": header.tier,
            "devices": str(len(header.devices)),
        }
    return _block("caee_run_info", "gauge", "What runs; always 1.", [("", labels, 1)])


def _by_device(snapshot: Snapshot, values: Callable[[Sums], list[int]]) -> Iterator[Sample]:
    for key, sums in snapshot.series.items():
        for device, count in enumerate(values(sums)):
            yield "", {"device": str(device), **_labels(key)}, count


def _histogram(snapshot: Snapshot) -> Iterator[Sample]:
    for key, sums in snapshot.series.items():
        below = 0
        for bound, count in zip((*map(str, SECONDS_BOUNDS), "+Inf"), sums.seconds_buckets, strict=True):
            below += count
            yield "_bucket", {**_labels(key), "le": bound}, below
        yield "_sum", _labels(key), sums.seconds
        yield "_count", _labels(key), sums.steps


def _gauges(snapshot: Snapshot) -> Iterator[str]:
    last = {key: sums.last for key, sums in snapshot.series.items() if sums.last is not None}
    hits = [("", _labels(key), step.hit_rate) for key, step in last.items() if step.hit_rate is not None]
    yield _block("caee_hit_rate", "gauge", "Share of dispatched experts that were cached, in the latest step.", hits)
    removed = [
        ("", _labels(key), step.removed_importance) for key, step in last.items() if step.removed_importance is not None
    ]
    text = "Removed importance per real token and layer, in the latest step."
    yield _block("caee_removed_importance", "gauge", text, removed)


def _brake(snapshot: Snapshot) -> Iterator[str]:
    """Without samples where the run has no brake."""
    brake = snapshot.brake

    def block(name: str, kind: str, text: str, value: int) -> str:
        return _block(name, kind, text, [] if brake is None else [("", {}, value)])

    engaged, trips, held = (int(brake.engaged), brake.trips, brake.braked_layer_steps) if brake else (0, 0, 0)
    yield block("caee_brake_engaged", "gauge", "1 while the router's own choice is back in force.", engaged)
    yield block("caee_brake_trips_total", "counter", "How often the brake took hold.", trips)
    yield block("caee_braked_layer_steps_total", "counter", "Layer-steps that the brake left to the router.", held)


def _labels(key: Series) -> Labels:
    return {"pass": key.pass_kind, "phase": key.phase, "policy": key.policy}


def _block(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {_escaped(text)}\n", f"# TYPE {name} {kind}\n"]
    for suffix, labels, value in samples:
        written = ",".join(f'{label}="{_escaped(content, quote=True)}"' for label, content in labels.items())
        lines.append(f"{name}{suffix}{f'{{{written}}}' if written else ''} {_number(value)}\n")
    return "".join(lines)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str, *, quote: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quote else escaped
