"""Numbers in words, tables and CSV."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.info.table import Column, DataTable, table
from reports.info.words import change, change_with_interval, number, percent, plural
from store.records import Ratio


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (36.953, "37.0"),
        (1432.4, "1,432"),
        (0.00612, "0.00612"),
        (-2.5, "−2.50"),
        (1204, "1,204"),
        (999.6, "1,000"),
        (3.2e-7, "3.2e−07"),
    ],
)
def test_number_has_three_significant_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("share", "plain", "signed"),
    [
        (0.14, "14.0 %", "+14.0 %"),
        (-0.0042, "−0.42 %", "−0.42 %"),
        (0.0, "0.00 %", "0.00 %"),
        (-1e-9, "0.00 %", "0.00 %"),
        (1.5, "150 %", "+150 %"),
        (0.00998, "1.0 %", "+1.0 %"),
        (None, "–", "–"),
    ],
)
def test_percent(share: float | None, plain: str, signed: str) -> None:
    assert percent(share) == plain
    assert percent(share, signed=True) == signed


def test_a_ratio_reads_as_a_change_with_its_interval() -> None:
    assert change(0.86) == "−14.0 %"
    ratio = Ratio(ratio=0.86, ci95=(0.84, 1.02))
    assert change_with_interval(ratio) == "−14.0 % (95 % interval −16.0 % to +2.0 %)"


def test_plural() -> None:
    assert (plural(1, "device"), plural(0, "pair"), plural(8192, "token")) == ("1 device", "0 pairs", "8,192 tokens")


@given(st.floats(min_value=1e-4, max_value=1e12))
def test_number_loses_at_most_half_a_unit_of_the_third_digit(value: float) -> None:
    shown = float(number(value).replace(",", ""))
    assert abs(shown - value) <= max(0.005 * value, 0.5 if value >= 100 else 0) * 1.0001


@pytest.mark.parametrize(
    ("unit", "cell", "shown"),
    [
        ("s", 0.0000521, "52.1 µs"),
        ("B/s", 1.9e9, "1.90 GB/s"),
        ("B", 98_304, "98.3 kB"),
        ("share", 0.048, "4.8 %"),
        ("", 1234567, "1,234,567"),
        ("", -0.5, "−0.5"),
        ("", True, "yes"),
        ("s", None, "–"),
        ("s", "text", "text"),
    ],
)
def test_cells_are_shown_in_their_unit(unit: str, cell: object, shown: str) -> None:
    assert Column(key="k", title="t", unit=unit).shown(cell) == shown  # type: ignore[arg-type]  # every kind of cell


def test_csv_has_keys_full_precision_and_empty_unknowns() -> None:
    made = table(("name", "Name"), ("seconds", "time", "s"), rows=[("a,b", 0.1 + 0.2), ('say "so"', None)])
    assert made.csv() == 'name,seconds\r\n"a,b",0.30000000000000004\r\n"say ""so""",\r\n'


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_text_is_never_a_formula(start: str) -> None:
    made = DataTable(columns=(Column(key="k", title="t"),), rows=((f"{start}HYPERLINK(1)",), (-3.5,)))
    rows = list(csv.reader(io.StringIO(made.csv(), newline="")))
    assert rows[1] == [f"'{start}HYPERLINK(1)"]
    assert rows[2] == ["-3.5"]


@given(
    st.lists(
        st.tuples(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False)), max_size=5
    )
)
def test_csv_gives_back_what_went_in(rows: list[tuple[str, float]]) -> None:
    made = DataTable(columns=(Column(key="a", title="a"), Column(key="b", title="b")), rows=tuple(rows))
    read = list(csv.reader(io.StringIO(made.csv(), newline="")))[1:]
    assert [float(value) for _, value in read] == [value for _, value in rows]
    assert [text.removeprefix("'") for text, _ in read] == [text.removeprefix("'") for text, _ in rows]
