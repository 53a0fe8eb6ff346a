"""What ``caee trace show`` says of a trace or a load profile, as one document (schema ``caee.trace.show/1``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import UsageError
from probes.text import plural, verb
from runtime.trace.balance import FORMULAS, Balance, balance, device_loads, device_of_expert
from runtime.trace.records import Float64s, LoadProfile, Phase, TokenKind, TraceMeta, TraceSource
from runtime.trace.tally import Tally

SCHEMA = "caee.trace.show/1"
HOT_EXPERTS = 5
DEFAULT_DEVICES = 8


def show_info(path: Path, source: TraceSource | LoadProfile, devices: int | None = None) -> dict[str, Any]:
    """The document of the file that ``source`` was opened from; balance is given by expert and for ``devices``.

    Default: 8 devices, or as many as there are experts.

    Raises ``UsageError`` where there are more devices than experts, ``TraceError`` where the file is wrong.
    """
    devices = min(DEFAULT_DEVICES, source.meta.num_experts) if devices is None else devices
    if not 1 <= devices <= source.meta.num_experts:
        raise UsageError(f"--devices {devices}: not between 1 and the {source.meta.num_experts} experts of a layer")
    body = _profile(source, devices) if isinstance(source, LoadProfile) else _routing(source, devices)
    return {"schema": SCHEMA, "path": str(path), **body}


def _routing(source: TraceSource, devices: int) -> dict[str, Any]:
    meta = source.meta
    device_N = device_of_expert(meta.num_experts, devices)
    tally = Tally(meta, device_N, devices)
    tally.add_all(source.chunks())
    tokens_S = tally.tokens_S[tally.tokens_S > 0]
    document = {
        "kind": "routing",
        "meta": _meta(meta),
        "tokens": {
            "total": sum(tally.kinds.values()),
            **{kind.name.lower(): count for kind, count in tally.kinds.items()},
            **{f"real_{phase.name.lower()}": count for phase, count in tally.phases.items()},
        },
        "sequences": {
            "count": len(tokens_S),
            "tokens_min": int(tokens_S.min()) if len(tokens_S) else None,
            "tokens_median": float(np.median(tokens_S)) if len(tokens_S) else None,
            "tokens_max": int(tokens_S.max()) if len(tokens_S) else None,
        },
        "steps": tally.steps or None,
        "ranks": sorted(tally.ranks),
        "choices": int(tally.counts_LN.sum()),
        "empty_slots": tally.empty_slots,
        **_loads(meta, tally.counts_LN.astype(np.float64), devices, tally),
    }
    return {**document, "warnings": _routing_warnings(tally), "notes": list(source.notes)}


def _profile(profile: LoadProfile, devices: int) -> dict[str, Any]:
    meta = profile.meta
    return {
        "kind": "load_profile",
        "meta": _meta(meta),
        "tokens": {"total": profile.tokens},
        "choices": float(profile.counts_LN.sum()),
        **_loads(meta, profile.counts_LN, devices, None),
        "warnings": _profile_warnings(profile),
        "notes": ["a load profile: counts without tokens, so nothing can be said of single tokens, steps or weights"],
    }


def _loads(meta: TraceMeta, counts_LN: Float64s, devices: int, tally: Tally | None) -> dict[str, Any]:
    by_expert = balance(counts_LN)
    device_N = device_of_expert(meta.num_experts, devices)
    by_device = balance(device_loads(counts_LN, device_N, devices))
    used_LD = device_loads(counts_LN > 0, device_N, devices)
    layers = []
    for layer, number in enumerate(meta.layer_numbers):
        entry: dict[str, Any] = {
            "layer": number,
            "draft": number in meta.draft_layers,
            "choices": float(counts_LN[layer].sum()),
            "importance": _importance(tally, layer),
            "by_expert": dataclasses.asdict(by_expert.layers[layer]),
            "by_device": dataclasses.asdict(by_device.layers[layer]),
            "used_experts_per_device": used_LD[layer].astype(int).tolist(),
            "activated_experts_per_device_and_step": _activated(tally, layer),
            "hot_experts": _hot_experts(counts_LN[layer], tally.share_sums_LN[layer] if tally else None),
        }
        layers.append(entry)
    return {
        "importance": _importance(tally, None),
        "balance": {
            "devices": devices,
            "placement": "contiguous",
            "by_device": _averages(by_device),
            "by_expert": _averages(by_expert),
            "formulas": FORMULAS,
        },
        "layers": layers,
    }


def _importance(tally: Tally | None, layer: int | None) -> dict[str, float | None] | None:
    """Mean highest and mean lowest share among a token's experts, and their ratio (paper, Fig. 4)."""
    if tally is None or not tally.weighed_L.sum():
        return None
    part = slice(None) if layer is None else layer
    weighed = int(np.sum(tally.weighed_L[part]))
    highest, lowest = float(np.sum(tally.highest_L[part])), float(np.sum(tally.lowest_L[part]))
    if not weighed:
        return None
    return {
        "highest": highest / weighed,
        "lowest": lowest / weighed,
        "ratio": highest / lowest if lowest else None,
    }


def _activated(tally: Tally | None, layer: int) -> list[float] | None:
    return (tally.activated_LD[layer] / tally.steps).tolist() if tally is not None and tally.steps else None


def _hot_experts(count_N: Float64s, share_sum_N: Float64s | None) -> list[dict[str, Any]]:
    """The most chosen experts; ``importance``: the sum of their shares, None where there are no tokens."""
    mean = float(count_N.mean())
    hottest = np.argsort(-count_N, kind="stable")[:HOT_EXPERTS]
    return [
        {
            "expert": int(expert),
            "choices": float(count_N[expert]),
            "load_over_mean": float(count_N[expert]) / mean,
            "importance": None if share_sum_N is None else float(share_sum_N[expert]),
        }
        for expert in hottest
        if count_N[expert] > 0
    ]


def _averages(figures: Balance) -> dict[str, float | None]:
    return {name: getattr(figures, name) for name in FORMULAS}


def _meta(meta: TraceMeta) -> dict[str, Any]:
    document = dataclasses.asdict(meta)
    document["moe_layers"] = meta.moe_layers
    if not meta.top_k:
        document["top_k"] = None
    return document


def _routing_warnings(tally: Tally) -> list[str]:
    meta = tally.meta
    real = tally.kinds[TokenKind.REAL]
    dummies, padding = tally.kinds[TokenKind.DUMMY], tally.kinds[TokenKind.PADDING]
    unmarked, repeated, unnormalised = tally.unmarked_dummies, tally.repeated, tally.unnormalised
    no_phase, no_position, empty = tally.phases[Phase.UNKNOWN], tally.without_position, tally.empty_slots
    unused = int((tally.counts_LN == 0).sum())
    sequences_known = meta.parameters.get("sequences") != "batch rows"
    found = {
        "no real token: every figure is empty": not real,
        f"{dummies:,} warm-up {'dummy' if dummies == 1 else 'dummies'} and {plural(padding, 'padding row')} "
        f"{verb(dummies + padding, 'counts', 'count')} for nothing": dummies + padding > 0,
        f"{plural(unmarked, 'real token')} {verb(unmarked, 'stands', 'stand')} in long runs of identical rows: warm-up "
        "dummies that are not marked": unmarked > 0,
        f"{plural(repeated, 'token')} {verb(repeated, 'does', 'do')} not come after earlier ones of the sequence: "
        "repeated, or out of order": repeated > 0 and sequences_known,
        f"{plural(unnormalised, 'token')} {verb(unnormalised, 'has', 'have')} weights that do not sum to 1, in some "
        "layer: not normalised by the router, or scaled": unnormalised > 0,
        "gate weights were not recorded: shares are equal, importance means nothing": not meta.gates_recorded,
        "full scores were not recorded: a simulation cannot re-route, and prunes without compensation": (
            not meta.scores_recorded
        ),
        f"{plural(no_phase, 'real token')} {verb(no_phase, 'does', 'do')} not say whether prefill or decode: a "
        "simulation counts that as decode": no_phase > 0,
        "steps were not recorded: batches have to be made up (--batch-size B)": real > 0 and not tally.steps,
        f"{plural(no_position, 'real token')} {verb(no_position, 'has', 'have')} no position": no_position > 0,
        f"{plural(empty, 'slot')} {verb(empty, 'is', 'are')} empty (id −1)": empty > 0,
        _never_chosen(unused, tally.counts_LN.size): real > 0 and unused > 0,
    }
    return [warning for warning, is_so in found.items() if is_so]


def _never_chosen(unused: int, experts: int) -> str:
    return f"{unused:,} of {plural(experts, 'expert')} of all layers {verb(unused, 'was', 'were')} never chosen"


def _profile_warnings(profile: LoadProfile) -> list[str]:
    rows = profile.counts_LN.sum(axis=1)
    unused = int((profile.counts_LN == 0).sum())
    found = {
        f"layers were counted over different numbers of choices: {rows.min():.0f} to {rows.max():.0f}": (
            rows.min() != rows.max()
        ),
        "top-k is not known, so the number of tokens is not either (give --top-k)": not profile.meta.top_k,
        _never_chosen(unused, profile.counts_LN.size): unused > 0,
    }
    return [warning for warning, is_so in found.items() if is_so]
