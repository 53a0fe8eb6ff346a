"""A second, independent implementation of the decision, straight from the definitions, for comparison only.

Plain dictionaries and sets from one JSON case to one JSON outcome, all in one pass, brute force where that is simplest.
It shares nothing with the package: no import, no structure. ``random`` is left out, since its draws are its own.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

ONE = 2**30


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    case = {key: value for key, value in case.items() if value is not None}
    policy = {key: value for key, value in case["policy"].items() if value is not None}
    name = policy["name"]
    device = dict(enumerate(case["placement"]))
    experts = range(len(device))
    devices = range(max(device.values()) + 1)
    cached = {e for e in experts if "resident" in case and case["resident"][e]}
    picos = {e: round(case["cost"][e] * 1e12) for e in experts}
    rate = case.get("rate", [0] * len(device))
    groups = [(set(g["devices"]), round(g["factor"] * 1024)) for g in case.get("link_groups", [])]
    mask = case.get("token_mask", [True] * len(case["scores"]))
    real = [t for t, counts in enumerate(mask) if counts]
    G = {t: dict(enumerate(case["scores"][t])) for t in real}
    rank_by = {t: dict(enumerate(case.get("selection_scores", case["scores"])[t])) for t in real}
    width = case["top_k"] if "top_k" in case else len(case["topk_ids"][real[0]])

    def by(score: dict[int, Any], among: Any) -> list[int]:
        return sorted(sorted(among), key=lambda e: score[e], reverse=True)

    if "topk_ids" in case:
        slots = {t: list(case["topk_ids"][t]) for t in real}
    else:
        slots = {t: by(rank_by[t], experts)[:width] for t in real}
    K = {t: [e for e in slots[t] if e != -1] for t in real}

    q: dict[int, dict[int, int]] = {}
    for t in real:
        total = 0.0
        for e in K[t]:
            total = total + G[t][e]
        q[t] = {e: round((G[t][e] / total if total else 1 / len(K[t])) * ONE) for e in K[t]}
    weight_of = {e: sum(q[t].get(e, 0) for t in real) for e in experts}
    active = {e for t in real for e in K[t]}
    top = {by(q[t], K[t])[0] for t in real if K[t]}

    def load(S: Any) -> dict[int, int]:
        return {d: sum(picos[e] for e in S if device[e] == d and e not in cached) for d in devices}

    def f_of(S: Any) -> int:
        each = load(S)
        shared = [math.floor(Fraction(factor * sum(each[d] for d in g), 1024)) for g, factor in groups]
        return max([*each.values(), *shared])

    def cir_set(share: float) -> set[int]:
        found = set()
        for t in real:
            order = by(q[t], K[t])
            lengths = [
                n for n in range(1, len(order) + 1) if sum(q[t][e] for e in order[:n]) >= round(share * ONE) - width
            ]
            found |= set(order[: min(lengths, default=len(order))])
        return found

    def must() -> set[int]:
        rule = policy.get("rule", "cir" if "resident" in case else "score")
        if rule == "cir":
            found = cir_set(policy.get("theta", 0.8))
        else:
            found = {e for e in active if weight_of[e] >= round(policy.get("theta", 0.6) * ONE)}
        if "ceiling" in policy:
            found |= cir_set(1 - policy["ceiling"])
        return found or set(by(weight_of, active)[:1])

    compensation, reselect = policy.get("compensation", "active"), policy.get("reselect", "affected")
    mandatory = None
    dispatched: dict[int, list[int]] = {}
    kept = set(active)
    if name in ("caee", "importance"):
        mandatory = must()
        kept = set(mandatory)
        if name == "caee":
            for e in by(weight_of, active - mandatory):
                if f_of(kept | {e}) <= f_of(mandatory):
                    kept.add(e)
    elif name == "budget":
        kept = budget(
            policy,
            active,
            cached,
            device,
            devices,
            picos,
            top | (cir_set(1 - policy["ceiling"]) if "ceiling" in policy else set()),
            {e: weight_of[e] + round(policy.get("reuse", 0) * rate[e] * ONE) for e in experts},
            f_of,
            by,
        )
    elif name == "oea":
        kept = {e for t in real for e in by(q[t], K[t])[: policy["k0"]]}
    elif name == "xshare":
        reselect = "all"
        kept = set(top)
        summed = {e: sum((Fraction(G[t][e]) for t in real), Fraction(0)) for e in experts}
        for e in by(summed, active - top):
            here = kept if policy.get("budget") is not None else {x for x in kept if device[x] == device[e]}
            if len(here) < (policy["budget"] if policy.get("budget") is not None else policy["per_device"]):
                kept.add(e)
    elif name == "lynx":
        votes = {e: Fraction(0) for e in experts}
        for t in real:
            most = max(G[t].values())
            for e in experts:
                if G[t][e] == most:
                    power = 0
                elif G[t][e] == 0:
                    power = -policy["beta"]
                else:
                    power = math.floor(policy["alpha"] * (math.log(G[t][e]) - math.log(most)))
                votes[e] += Fraction(2) ** min(0, max(-policy["beta"], power))
        kept = top | set(by(votes, active)[: policy["keep"]])
    elif name == "top-k":
        dispatched = {t: [e if e in by(q[t], K[t])[: policy["k0"]] else -1 for e in slots[t]] for t in real}
    elif name == "skip":
        dispatched = {
            t: [e if e != -1 and not q[t][e] < policy["beta"] * max(q[t].values()) else -1 for e in slots[t]]
            for t in real
        }
    elif name == "max-rank":
        for t in real:
            row = list(slots[t])
            wanted = [e for e in by(rank_by[t], experts)[: policy["m"]] if e in cached]
            for own in by(rank_by[t], K[t])[policy["j"] :]:
                at = row.index(own)
                row[at] = next((e for e in wanted if e == own or e not in row), own)
            dispatched[t] = row
    elif name == "cache-prior":
        logs = {t: {e: math.log(G[t][e]) if G[t][e] else -math.inf for e in experts} for t in real}
        ranges = [
            max(finite) - min(finite) if (finite := [v for v in logs[t].values() if v > -math.inf]) else 0.0
            for t in real
        ]
        mean = sum(ranges) / len(ranges) if ranges else 0.0
        for t in real:
            prior = {e: logs[t][e] + policy["lambda"] * mean * (e in cached) for e in experts}
            first = by(q[t], K[t])[: policy["j"]]
            new = iter((first + [e for e in by(prior, experts) if e not in first])[: len(K[t])])
            dispatched[t] = [-1 if e == -1 else next(new) for e in slots[t]]

    if dispatched:
        kept = {e for row in dispatched.values() for e in row} - {-1}
    elif name == "router":
        dispatched = slots
    else:
        candidates = kept | cached if compensation == "resident" else kept
        for t in real:
            alive = [e for e in K[t] if e in kept]
            if compensation == "none":
                row = [e if e in kept else -1 for e in slots[t]]
            elif reselect == "all":
                row = by(rank_by[t], candidates)[:width]
            elif len(alive) == len(K[t]):
                row = slots[t]
            else:
                row = by(rank_by[t], alive + by(rank_by[t], candidates - set(alive))[: len(K[t]) - len(alive)])
            dispatched[t] = row + [-1] * (width - len(row))

    weights = []
    for t in range(len(mask)):
        row = dispatched.get(t, [-1] * width)
        mode = policy.get("renormalize", "survivors")
        over = {"survivors": [e for e in row if e != -1], "original": K.get(t, []), "none": []}[mode]
        below = sum(G[t][e] for e in over) if mode != "none" else 1.0
        scale = policy.get("routed_scaling_factor", 1.0)
        weights.append([0.0 if e == -1 or below == 0 else G[t][e] / below * scale for e in row])

    lost = sum(q[t][e] for t in real for e in K[t] if e not in dispatched[t])
    result = {
        "active": sorted(active),
        "kept": sorted(kept),
        "pruned": sorted(active - kept),
        "importance": [weight_of[e] / ONE for e in experts],
        "f_before": f_of(active) / 1e12,
        "f_after": f_of(kept) / 1e12,
        "device_cost_before": [value / 1e12 for value in load(active).values()],
        "device_cost_after": [value / 1e12 for value in load(kept).values()],
        "topk_ids": [dispatched.get(t, [-1] * width) for t in range(len(mask))],
        "topk_weights": weights,
        "removed_importance": lost / ONE / len(real) if real else 0.0,
        "rerouted_slots": sum(1 for t in real for e in dispatched[t] if e != -1 and e not in K[t]),
    }
    if mandatory is not None:
        result |= {"mandatory": sorted(mandatory), "f_base": f_of(mandatory) / 1e12}
    return result


def budget(
    policy: Any,
    active: Any,
    cached: Any,
    device: Any,
    devices: Any,
    picos: Any,
    always: Any,
    worth_of: Any,
    f_of: Any,
    by: Any,
) -> set[int]:
    paid = active - cached
    if not paid:
        return set(active)
    rows = {
        d: [e for e in by(worth_of, paid & always) + by(worth_of, paid - always) if device[e] == d] for d in devices
    }
    sums = [sum(picos[e] for e in row[:n]) for row in rows.values() for n in range(1, len(row) + 1)]
    levels = {f_of(always)} | {s for s in sums if s > f_of(always)}
    mean = sum(picos[e] for e in paid) / len(paid)
    ranked = []
    for level in levels:
        kept = active & cached
        for row in rows.values():
            kept |= set(row[: max(n for n in range(len(row) + 1) if sum(picos[e] for e in row[:n]) <= level)])
        removed = sum(worth_of[e] for e in active - kept)
        ranked.append(((f_of(kept) / mean if mean else 0.0) + policy["price"] * (removed / ONE), -level, kept))
    return min(ranked, key=lambda entry: entry[:2])[2]
