"""What each policy does and what each of its parameters means, for who has not read of it (docs/policies.md)."""

from __future__ import annotations

from collections.abc import Sequence

POLICIES = {
    "router": "runs every expert that the router chose",
    "caee": "skips an expert where a token can do without it and moving it would make the slowest device slower",
    "importance": "skips the experts that tokens can do without, whatever moving them takes",
    "budget": "skips the experts whose moving takes most time for what they add, up to an allowed loss",
    "top-k": "runs only the best few experts of each token",
    "skip": "skips a token's experts that weigh little beside its best one",
    "oea": "runs only experts that are among the best few of some token, and gives them the other tokens too",
    "xshare": "runs a limited number of experts, those with the highest scores over all tokens",
    "lynx": "runs a limited number of experts, those that most tokens vote for",
    "max-rank": "takes an expert that is cached already where one ranks high enough",
    "cache-prior": "gives experts that are cached already a bonus when a token ranks them",
    "random": "skips what caee skips, and gives the places to other experts at random",
}

PARAMETERS = {
    "rule": "how it finds the experts that must run: cir, token by token; score, by what one adds over all tokens",
    "theta": "with the rule cir the share of each token's weights that must run, so that a lower one skips more; with "
    "score what an expert must add to be sure to run, so that a higher one skips more",
    "ceiling": "the largest share of its weights that a token may lose",
    "epsilon": "the share of all weights that may be skipped, on average",
    "price": "how much time a skipped share of weights has to save",
    "reuse": "how much a fetch counts for later uses of the same expert",
    "k0": "how many experts are a token's best",
    "beta": "the share of the best expert's weight below which one is skipped",
    "budget": "how many experts of a layer may run",
    "per_device": "how many experts of a layer may run on each device",
    "keep": "how many experts are kept by votes",
    "alpha": "how much a lower weight lowers a vote",
    "j": "how many of a token's best experts are never replaced",
    "m": "how far down its ranking a token looks for a cached expert",
    "lambda": "how large the bonus of cached experts is",
    "seed": "where the random draws start",
    "compensation": "who takes a skipped expert's place: active, an expert that runs anyway; resident, any cached one "
    "too; none, nobody",
    "reselect": "which tokens choose again among the experts that run: affected, those that lost one; all, every token",
    "renormalize": "what the remaining weights are divided by: survivors, their own sum; original, the sum of the "
    "router's choice; none, nothing",
    "routed_scaling_factor": "the model's own factor on the weights",
}
_OF_POLICY = {("lynx", "beta"): "how low the lowest vote is"}


_SHARED = ("compensation", "reselect", "renormalize", "routed_scaling_factor")


def shortened(written: Sequence[str]) -> tuple[str, ...]:
    """Policies as they are written, without the settings of all policies in which these ones agree."""
    pairs = [each.partition(":")[2].split(",") for each in written]
    common = {pair for pair in pairs[0] if pair.startswith(_SHARED) and all(pair in other for other in pairs)}
    found = []
    for each, own in zip(written, pairs, strict=True):
        kept = ",".join(pair for pair in own if pair not in common)
        found.append(each.partition(":")[0] + (f":{kept}" if kept else ""))
    return tuple(found)


def policy_words(name: str) -> str:
    """What the policy does, to come after “which”."""
    return POLICIES.get(name, "leaves out some of the experts that the router chose")


def explained(written: Sequence[str]) -> tuple[str, ...]:
    """Policies as they are written (``caee:theta=0.8``): what each does, then what each parameter means."""
    by_name: dict[str, list[str]] = {}
    meanings: dict[str, None] = {}
    for each in dict.fromkeys(written):
        name, _, pairs = each.partition(":")
        by_name.setdefault(name, []).append(each)
        for key in (pair.partition("=")[0] for pair in pairs.split(",")):
            if meaning := _OF_POLICY.get((name, key)) or PARAMETERS.get(key):
                meanings[f"{key}: {meaning}."] = None
    does = [f"{name} {policy_words(name)}. As written: {'; '.join(these)}." for name, these in by_name.items()]
    return (*does, *meanings)
