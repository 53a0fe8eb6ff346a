"""Tables for the terminal: nothing is lost at any width, columns that fit stay a table, others are stacked."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from caee_cli import output
from reports.simulation import simulation_tables
from reports.tables import Sheet
from reports.terminal import run_summary
from reports.trace import SHOWN_LAYERS, trace_tables
from runtime.trace.records import LoadProfile, TraceMeta
from runtime.trace.show import show_info

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=9)


def printed(*shown: RenderableType, width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    for each in shown:
        console.print(each)
    return stream.getvalue()


def sheet(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Sheet:
    made = Sheet(title, headings)
    for row in rows:
        made.add_row(*row)
    return made


@settings(deadline=None, max_examples=60)
@given(data=st.data(), width=st.integers(20, 200), ruled=st.booleans())
def test_every_cell_is_there_at_any_width(data: Any, width: int, ruled: bool) -> None:
    columns = data.draw(st.integers(1, 8))
    headings = data.draw(st.lists(WORDS, min_size=columns, max_size=columns))
    cells = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
    rows = data.draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=1, max_size=4))
    made = Sheet("title", headings, ruled=ruled)
    for row in rows:
        made.add_row(*row)
    text = printed(made, width=width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    # A folded word is in pieces, so letters are counted.
    letters = Counter("".join(cell for row in rows for cell in row).replace(" ", ""))
    assert letters <= Counter(text)
    if all(cell_len(cell) < 6 for row in [headings, *rows] for cell in row) and columns * 9 <= width:
        assert len(text.splitlines()) == 1 + len(rows) + (4 if ruled else 1)


def test_a_table_that_fits_is_one_and_else_it_is_stacked() -> None:
    made = sheet(("kind", "id", "what"), [("run", "a1", "x" * 30), ("probe", "b2", "y" * 30)], "two kept")
    wide, narrow = printed(made, width=60), printed(made, width=36)
    assert wide.splitlines()[0] == "two kept"
    assert [line.split() for line in wide.splitlines() if "run" in line] == [["run", "a1", "x" * 30]]
    assert [line.split() for line in narrow.splitlines() if line.strip()] == [
        ["two", "kept"],
        ["kind", "run"], ["id", "a1"], ["what", "x" * 28], ["xx"],
        ["kind", "probe"], ["id", "b2"], ["what", "y" * 28], ["yy"],
    ]  # fmt: skip


def test_prose_is_folded_before_a_table_is_stacked() -> None:
    made = sheet(("id", "what"), [("a1", "several words that make up a sentence of some length")])
    lines = printed(made, width=40).splitlines()
    assert "─" in "".join(lines)
    assert max(map(len, lines)) <= 40
    assert " ".join("".join(lines[3:]).split()) == "a1 several words that make up a sentence of some length"


def test_a_cell_without_a_heading_names_its_block() -> None:
    made = sheet(("", "before", ""), [("Time per output token", "24.7 ms", "a remark of its own"), ("Loss", "1.5", "")])
    assert [line.rstrip() for line in printed(made, width=30).splitlines()] == [
        "", "Time per output token", "  before  24.7 ms", "          a remark of its own",
        "", "Loss", "  before  1.5", "",
    ]  # fmt: skip


def test_markup_and_control_sequences_are_text() -> None:
    made = sheet(("[b]a[/b]", ":fire:"), [("[red]x[/red]", "\x1b[31my")], "[i]t[/i]")
    for width in (24, 100):
        text = "".join(printed(made, width=width).split())
        assert all(part in text for part in ("[i]t[/i]", "[b]a[/b]", ":fire:", "[red]x[/red]", "\\x1b[31my"))


def test_a_row_has_a_cell_for_each_heading() -> None:
    with pytest.raises(ValueError, match="2 cells under 3 headings"):
        sheet(("a", "b", "c"), [("1", "2")])


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_what_commands_print_stays_within_the_terminal(build: ModuleType, width: int) -> None:
    text = printed(*run_summary(build.make_run()), *simulation_tables(simulation(build)), width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for figure in ("Time to first token", "importance:rule=cir,theta=0.8"):
        assert "".join(figure.split()) in "".join(text.split())


def simulation(build: ModuleType) -> dict[str, Any]:
    document: dict[str, Any] = build.make_simulation()
    document["trace"]["batch_size"] = 8
    for each in document["policies"]:
        each.setdefault("tier", "host")
        each.setdefault("placement", "contiguous")
    return document


@pytest.mark.parametrize(
    ("columns", "width"),
    [("60", 60), ("300", 300), ("3", 20), ("", 160), ("0", 160), ("-5", 160), ("many", 160), ("٣٠", 160)],
)
def test_columns_says_how_wide_piped_output_is(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    output.show(sheet(("a", "b"), [("x", "word " * 100)]))
    lines = stream.getvalue().splitlines()
    assert width - 8 < max(map(len, lines)) <= width


def test_of_many_layers_the_least_even_are_shown(tmp_path: Any) -> None:
    layers = 20
    counts = np.ones((layers, 8)) * 10.0
    uneven = [1, 3, 4, 9, 12, 15, 18, 19]
    assert len(uneven) == SHOWN_LAYERS
    counts[uneven, 0] += np.arange(1, 9)
    meta = TraceMeta(model="m", num_experts=8, top_k=2, layer_numbers=tuple(range(100, 100 + layers)))
    info = show_info(tmp_path / "t", LoadProfile(meta=meta, counts_LN=counts, tokens=None), 4)
    few, every = printed(*trace_tables(info), width=160), printed(*trace_tables(info, all_layers=True), width=160)
    assert "8 of 20 layers: those whose devices are least even" in few
    assert "--all-layers" in few
    assert "--all-layers" not in every
    assert numbers_of(few) == [100 + layer for layer in uneven]
    assert numbers_of(every) == list(range(100, 100 + layers))


def numbers_of(text: str) -> list[int]:
    """The layers' numbers, from 100 on, that rows begin with."""
    found = [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0].isdigit()]
    return [int(cell) for cell in found if int(cell) >= 100]
