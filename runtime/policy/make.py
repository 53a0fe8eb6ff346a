"""From a policy's name and parameters to a policy that decides."""

from __future__ import annotations

from runtime.policy.spec import resolve
from runtime.policy.types import Policy, PolicySpec


def make_policy(spec: PolicySpec, *, offloading: bool, compiled: bool = True) -> Policy:
    """A policy with a state of its own. ``offloading``: whether machines will say what is resident.

    ``compiled``: use the compiled implementation where there is one (both decide alike; the first call may compile for
    some seconds). Raises ``UsageError`` where ``spec`` does not fit the machine.
    """
    from runtime.policy import baselines, reference

    plain: dict[str, type[reference.SetPolicy]] = {
        "router": reference.Router,
        "caee": reference.Caee,
        "importance": reference.Importance,
        "budget": reference.Budget,
        "top-k": baselines.TopK,
        "skip": baselines.Skip,
        "oea": baselines.Oea,
        "xshare": baselines.XShare,
        "lynx": baselines.Lynx,
        "max-rank": baselines.MaxRank,
        "cache-prior": baselines.CachePrior,
        "random": baselines.Random,
    }
    resolved = resolve(spec, offloading=offloading)
    if compiled:
        from runtime.policy import fast

        quick: dict[str, type[fast.Router]] = {
            "router": fast.Router,
            "caee": fast.Caee,
            "importance": fast.Importance,
            "budget": fast.Budget,
            "top-k": fast.TopK,
            "skip": fast.Skip,
            "oea": fast.Oea,
        }
        if spec.name in quick:
            return quick[spec.name](resolved)
    return plain[spec.name](resolved)
