"""Remarks about many links: one line for each cause, with every link that has it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.records import Concurrency, LinkKind, LinkMeasurement, LinkMode, LinkStatus
from reports.remarks import MOST_NAMES, grouped_remarks, link_name


def link(source: str = "host", concurrency: Concurrency = Concurrency.SOLO, **changes: Any) -> LinkMeasurement:
    fields: dict[str, Any] = {
        "kind": LinkKind.HOST_TO_DEVICE,
        "source": source,
        "destination": "cuda:0",
        "mode": LinkMode.PINNED,
        "concurrency": concurrency,
        "status": LinkStatus.UNSTABLE,
    }
    return LinkMeasurement(**(fields | changes))


def unknown(wide: int, of: int, worst: str) -> str:
    return f"the medians of {wide} of {of} sizes are not known to ± 5% (worst: {worst}); let the machine idle"


def test_one_link_keeps_its_details() -> None:
    assert grouped_remarks([(link(), [unknown(2, 8, "4.19 MB, ± 44%")])]) == [
        "host to device host → cuda:0 (pinned), solo: the medians of 2 of 8 sizes are not known to ± 5% (worst: "
        "4.19 MB, ± 44%); let the machine idle"
    ]


def test_one_cause_is_one_line_with_the_range_of_its_figures() -> None:
    remarks = [
        (link(), [unknown(2, 8, "4.19 MB, ± 44%"), "short bursts reach 900 MB/s; wait"]),
        (link(concurrency=Concurrency.ALL), [unknown(6, 8, "too few samples"), "short bursts reach 4.10 GB/s; wait"]),
        (link(mode=None), [unknown(4, 6, "1 B, ± 6%"), "something else"]),
    ]
    assert grouped_remarks(remarks) == [
        "3 links: the medians of 2 to 6 of 6 to 8 sizes are not known to ± 5%; let the machine idle – host to device "
        "host → cuda:0 (pinned), solo and all; host to device host → cuda:0, solo",
        "2 links: short bursts reach 900 MB/s to 4.10 GB/s; wait – host to device host → cuda:0 (pinned), solo and all",
        "host to device host → cuda:0, solo: something else",
    ]


def test_of_many_links_some_are_named_and_the_others_counted() -> None:
    links = [link(source=f"cuda:{number}") for number in range(MOST_NAMES + 3)]
    (line,) = grouped_remarks((each, ["it shook"]) for each in links)
    assert line.startswith(f"{len(links)} links: it shook – host to device cuda:0 → cuda:0 (pinned), solo; ")
    assert line.endswith("; and 3 more")


@pytest.mark.parametrize("texts", [[], [""], ["a (b"], ["1.5.2 and 3,000", "2.0.1 and 4,000"]])
def test_odd_remarks_do_no_harm(texts: list[str]) -> None:
    lines = grouped_remarks([(link(), texts), (link(concurrency=Concurrency.ALL), texts)])
    assert len(lines) <= len(texts)


@given(st.lists(st.lists(st.text(max_size=30), max_size=4), max_size=5))
def test_every_remark_of_every_link_is_counted_once(texts: list[list[str]]) -> None:
    links = [link(source=f"s{number}") for number in range(len(texts))]
    lines = grouped_remarks(zip(links, texts, strict=True))
    counted = sum(int(line.split(" links: ")[0]) if is_group(line, links) else 1 for line in lines)
    assert counted == sum(len(dict.fromkeys(of)) for of in texts)


def is_group(line: str, links: list[LinkMeasurement]) -> bool:
    return not any(line.startswith(f"{link_name(each)}, solo: ") for each in links)
