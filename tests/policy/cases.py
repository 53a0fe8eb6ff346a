"""Random cases for the decision: every kind of router, machine and policy that the definitions speak of."""

from __future__ import annotations

from typing import Any

import numpy as np

GARBAGE = (None, "padding", [], [float("nan")], [1e999, -5], [[3]])


def make_case(rng: np.random.Generator, *, name: str | None = None, large: bool = False) -> dict[str, Any]:
    """A case in JSON form, with a policy."""
    num_experts = int(rng.integers(258, 300) if large else rng.integers(1, 25))
    top_k = int(rng.integers(9, 13) if large else rng.integers(1, min(num_experts, 9) + 1))
    tokens = int(rng.integers(0, 8))
    case: dict[str, Any] = _router(rng, tokens, num_experts, top_k)
    if rng.random() < 0.3 and tokens:
        _pad(rng, case, tokens)
    case |= _machine(rng, num_experts)
    case["policy"] = make_policy(rng, name, offloading=case.get("resident") is not None)
    for key in ("selection_scores", "resident", "link_groups", "token_mask"):
        if key not in case and rng.random() < 0.1:
            case[key] = None
    return case


def make_policy(rng: np.random.Generator, name: str | None, *, offloading: bool) -> dict[str, Any]:
    """A policy in JSON form that fits the machine."""
    name = name or str(rng.choice(list(PARAMETERS)))
    policy: dict[str, Any] = {"name": name, **PARAMETERS[name](rng)}
    compensations = ["active", "none", None] + (["resident"] if offloading else [])
    for key, choices in (
        ("compensation", compensations),
        ("reselect", ["affected", "all", None]),
        ("renormalize", ["survivors", "original", "none", None]),
        ("routed_scaling_factor", [1, 2.5, None]),
    ):
        if rng.random() < 0.5:
            policy[key] = choices[rng.integers(len(choices))]
    return policy


def _threshold(rng: np.random.Generator) -> dict[str, Any]:
    rule = [None, "cir", "score"][rng.integers(3)]
    theta = [None, 1.0, 0.5, float(rng.uniform(0.05, 1)), 0.8][rng.integers(5)]
    if rule == "score" and rng.random() < 0.3:
        theta = float(rng.uniform(0, 4))
    ceiling = float(rng.uniform(0, 0.9)) if rng.random() < 0.2 else None
    return {"rule": rule, "theta": theta, "ceiling": ceiling}


def _without_ceiling(rng: np.random.Generator) -> dict[str, Any]:
    return {key: value for key, value in _threshold(rng).items() if key != "ceiling"}


PARAMETERS: dict[str, Any] = {
    "router": lambda rng: {},
    "caee": _threshold,
    "importance": _threshold,
    "budget": lambda rng: {
        "price": float(rng.choice([0, 0.3, 1, 2, 5, rng.uniform(0, 10)])),
        "ceiling": float(rng.uniform(0, 0.9)) if rng.random() < 0.2 else None,
        "reuse": float(rng.choice([0, 0.2, rng.uniform(0, 3)])) if rng.random() < 0.4 else None,
    },
    "top-k": lambda rng: {"k0": int(rng.integers(1, 6))},
    "skip": lambda rng: {"beta": float(rng.choice([0, 1, rng.random()]))},
    "oea": lambda rng: {"k0": int(rng.integers(1, 6))},
    "xshare": lambda rng: {str(rng.choice(["budget", "per_device"])): int(rng.integers(0, 9))},
    "lynx": lambda rng: {
        "alpha": float(rng.uniform(0.1, 3)),
        "beta": int(rng.integers(0, 12)),
        "keep": int(rng.integers(0, 9)),
    },
    "max-rank": lambda rng: {"j": int(rng.integers(0, 4)), "m": int(rng.integers(1, 12))},
    "cache-prior": lambda rng: {"lambda": float(rng.uniform(0, 1.5)), "j": int(rng.integers(0, 4))},
}


def _router(rng: np.random.Generator, tokens: int, num_experts: int, top_k: int) -> dict[str, Any]:
    kind = rng.choice(["softmax", "sigmoid", "flat", "coarse", "sparse"])
    logits = rng.normal(size=(tokens, num_experts)) * rng.choice([0.5, 2, 8])
    case: dict[str, Any] = {}
    if kind == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    elif kind == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        case["selection_scores"] = (scores + rng.normal(size=num_experts) - 1).tolist()
    elif kind == "flat":
        scores = np.full((tokens, num_experts), float(rng.choice([0, 1, 1 / num_experts])))
    elif kind == "coarse":
        scores = rng.integers(0, 4, size=(tokens, num_experts)) / 4
    else:
        scores = np.where(rng.random((tokens, num_experts)) < 0.5, 0.0, np.abs(logits))
    case["scores"] = scores.tolist()
    if rng.random() < 0.4:
        case["topk_ids"] = _limited(rng, np.array(case.get("selection_scores", case["scores"])), num_experts, top_k)
        if rng.random() < 0.5 and tokens:
            return case
    return case | {"top_k": top_k}


def _limited(rng: np.random.Generator, ranks: Any, num_experts: int, top_k: int) -> list[list[int]]:
    """The choice of a router that is limited to half of its groups, in any order, with empty slots here and there."""
    ids = []
    for row in ranks:
        allowed = np.flatnonzero(rng.random(num_experts) < 0.5)
        best = list(allowed[np.argsort(-row[allowed], kind="stable")][:top_k])
        best += [-1] * (top_k - len(best))
        if rng.random() < 0.3:
            rng.shuffle(best)
        if rng.random() < 0.1:
            best[int(rng.integers(top_k))] = -1
        ids.append([int(expert) for expert in best])
    return ids


def _pad(rng: np.random.Generator, case: dict[str, Any], tokens: int) -> None:
    mask = rng.random(tokens) < 0.6
    if "top_k" not in case:
        mask[0] = True
    case["token_mask"] = [bool(real) for real in mask]
    for row in np.flatnonzero(~mask):
        for key in ("scores", "selection_scores", "topk_ids"):
            if key in case:
                case[key][row] = GARBAGE[rng.integers(len(GARBAGE))]


def _machine(rng: np.random.Generator, num_experts: int) -> dict[str, Any]:
    devices = int(rng.integers(1, 6))
    placement = rng.integers(0, devices, size=num_experts)
    cost = np.full(num_experts, 1e-3)
    if rng.random() < 0.5:
        cost = rng.choice([0, 1e-3, 1.5e-3, 2.25e-3, float(rng.random())], size=num_experts)
    machine: dict[str, Any] = {"placement": placement.tolist(), "cost": cost.tolist()}
    if rng.random() < 0.7:
        machine["resident"] = [bool(cached) for cached in rng.random(num_experts) < rng.choice([0, 0.3, 0.7, 1])]
    if rng.random() < 0.6:
        machine["rate"] = (rng.integers(0, 5, size=num_experts) / 4 * rng.choice([1, rng.random()])).tolist()
    if rng.random() < 0.4:
        known = int(placement.max()) + 1
        machine["link_groups"] = [
            {
                "devices": [int(d) for d in np.flatnonzero(rng.random(known) < 0.6)],
                "factor": float(rng.choice([1, 0.5, 1 / 3, rng.uniform(0.01, 1)])),
            }
            for _ in range(int(rng.integers(1, 3)))
        ]
    return machine
