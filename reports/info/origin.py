"""Where a run's policy came from, and whether the loss stayed within what was allowed."""

from __future__ import annotations

from reports.info.keyfigures import loss_rise
from reports.info.words import percent, plural
from store.records import PolicySearch, RunRecord

KNOBS = {"theta": "θ", "epsilon": "ε"}


def origin_sentence(run: RunRecord) -> str | None:
    """None where the policy was given and nothing was asked of its quality."""
    parts = []
    if run.policy_origin is not None:
        origin = run.policy_origin
        where = (
            f"The policy was searched for in this run and is stored as {origin.policy_id}"
            if origin.searched_here
            else f"The policy is the stored {origin.policy_id}, found on {origin.created_at[:10]}"
        )
        parts.append(f"{where}: {search_words(origin.search)}.")
    if run.max_quality_drop is not None and run.quality is not None:
        rise = loss_rise(run.quality)
        verdict = "within" if rise <= run.max_quality_drop else "above"
        searched = run.policy_origin is not None and run.policy_origin.searched_here
        start = "Measured afterwards, on other passages, the loss" if searched else "Held-out loss"
        parts.append(
            f"{start} changed by {percent(rise, signed=True)}, {verdict} the {percent(run.max_quality_drop)} allowed."
        )
    return " ".join(parts) or None


def search_words(search: PolicySearch) -> str:
    """What a search found, as half a sentence."""
    knob, tried = KNOBS.get(search.knob, search.knob), plural(len(search.points), "setting")
    limit = f"the rise of held-out loss within {percent(search.max_quality_drop)}"
    if search.chosen is None:
        return f"of {tried} of {knob} tried, none keeps the upper end of {limit}"
    return f"{knob} = {search.chosen:g} is the most aggressive of {tried} tried that keeps the upper end of {limit}"
