"""Every command's help, at the width of an ordinary terminal."""

from __future__ import annotations

import pytest

from caee_cli.main import command_line, run_app

COMMANDS = [
    "",
    *("probe", "calibrate", "simulate", "run", "report", "explain", "doctor"),
    *(f"trace {name}" for name in ("record", "import", "show", "synth")),
    *(f"store {name}" for name in ("list", "show", "export", "import", "delete", "check")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_flags_have_no_type(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run_app([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "<bool>" in line and "--help" not in line]
    assert not any(str(2**32 - 1) in line for line in lines)


def test_paragraphs_are_wrapped_to_the_terminal_not_as_the_source_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_app(["probe", "--help"]) == 0
    text = capsys.readouterr().out
    assert "stored; `caee calibrate` fits them. Takes at most 30 seconds without" in text
    probe = command_line().commands["probe"]
    assert probe.help.count("\n\n") == 1
    assert "\n" not in probe.help.replace("\n\n", "")


@pytest.mark.parametrize("seed", ["-1", str(2**32), "x"])
def test_a_seed_out_of_range_is_a_usage_error(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["probe", "--seed", seed]) == 2
    assert "--seed" in capsys.readouterr().err
