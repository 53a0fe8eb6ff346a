"""The settings that a search for a policy tried, as a table."""

from __future__ import annotations

from reports.figures.card import Card
from reports.info.origin import KNOBS, search_words
from reports.info.table import table
from reports.info.words import plural
from store.records import PolicySearch


def search_card(search: PolicySearch, noun: str) -> Card:
    """Evidence for the policy: loss and movements at every setting tried, from the mildest to the most aggressive."""
    knob = KNOBS.get(search.knob, search.knob)
    points = sorted(search.points, key=lambda point: point.loss_rise)
    words = search_words(search)
    return Card(
        key="policy-search",
        title="Where the policy came from",
        lede=(
            f"{words[0].upper()}{words[1:]}. Each was tried from the same caches on "
            f"{plural(search.sequences, 'passage')} of held-out text, on which nothing else in this report was "
            "measured. The interval is a paired bootstrap over passages."
        ),
        table=table(
            ("setting", knob),
            ("loss_rise", "rise of loss", "share"),
            ("low", "95 % low", "share"),
            ("high", "95 % high", "share"),
            ("removed_importance", "removed importance, per token and layer"),
            ("movements", f"{noun} of the busiest device, per step"),
            ("verdict", "within the limit"),
            rows=(
                (
                    point.value,
                    point.loss_rise,
                    point.loss_rise_ci95[0],
                    point.loss_rise_ci95[1],
                    point.removed_importance,
                    point.max_device_misses_per_step,
                    ("yes, chosen" if point.value == search.chosen else "yes") if point.within_limit else "no",
                )
                for point in points
            ),
        ),
    )
