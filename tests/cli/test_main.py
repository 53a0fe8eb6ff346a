"""What every command promises: exit codes, messages, clean output, a quick start."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from caee_cli.guard import PACKAGES, installed_in
from caee_cli.main import app, run_app
from caee_cli.options import size_option
from caee_cli.output import complain, emit_json, note, show
from probes import errors
from probes.errors import CaeeError
from store.session import open_store

CAEE = str(Path(sys.executable).with_name("caee"))
ANSI = re.compile(r"\x1b")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])(?:;\d+)*m")


def _all_errors() -> list[type[CaeeError]]:
    """The tree as the source has it: ``__subclasses__`` knows only what other tests have imported by now."""
    home = installed_in()
    classes = {
        node.name: (file, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for package in PACKAGES
        for file in sorted((home / package).rglob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    found = [CaeeError.__name__]
    for parent in found:
        found += [name for name, (_, bases) in classes.items() if parent in bases]
    modules = [".".join(classes[name][0].relative_to(home).with_suffix("").parts) for name in found]
    return [getattr(importlib.import_module(module), name) for module, name in zip(modules, found, strict=True)]


def _documented_exit_code(kind: type[CaeeError]) -> int:
    for parent, code in ((errors.UsageError, 2), (errors.CheckFailed, 3), (errors.Interrupted, 130)):
        if issubclass(kind, parent):
            return code
    return 1


@pytest.fixture
def command() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Adds a command named ``try`` to the command line for one test."""
    registered = list(app.registered_commands)
    yield lambda function: app.command("try")(function) and None
    app.registered_commands[:] = registered


def _raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_says_what_why_and_what_next(
    kind: type[CaeeError], command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(_raises(kind("what\nand   why", hint="what next")))
    assert run_app(["try"]) == _documented_exit_code(kind) == kind.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "caee: what and why\n  → what next\n")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RecursionError(), MemoryError(), OSError(5, "x")])
def test_an_unexpected_error_is_no_traceback(
    error: Exception, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(_raises(error))
    assert run_app(["try"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caee: unexpected {type(error).__name__}")
    assert "CAEE_DEBUG=1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "code"), [(ValueError("x"), 1), (errors.CheckFailed("x"), 3)])
def test_debugging_adds_the_traceback_and_changes_no_exit_code(
    error: Exception, code: int, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAEE_DEBUG", "1")
    command(_raises(error))
    assert run_app(["try"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_inside_a_command(error: BaseException, command: Any, capsys: Any) -> None:
    command(_raises(error))
    assert run_app(["try"]) == 130
    assert capsys.readouterr().err == "caee: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["bogus"], "No such command 'bogus'"),
        (["store", "bogus"], "No such command 'bogus'"),
        (["store", "list", "--bogus"], "No such option: --bogus"),
        (["store", "show"], "Missing argument 'ID'"),
        (["store", "show", "one", "two"], "unexpected extra argument"),
        (["store", "list", "--store"], "requires an argument"),
        (["try", "--count", "many"], "Invalid value for '--count'"),
        (["try", "--size", "43 fathoms"], "'43 fathoms' is not a size"),
        (["try", "--size", "9" * 400 + "GB"], "is not a size"),
        (["try", "--count"], "requires an argument"),
    ],
)
def test_wrong_usage_is_said_in_two_lines(arguments: list[str], expected: str, command: Any, capsys: Any) -> None:
    @command
    def function(
        count: Annotated[int, typer.Option("--count")] = 1,
        size: Annotated[int, typer.Option("--size", parser=size_option)] = 1,
    ) -> None:
        raise AssertionError("must not run")

    assert run_app(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    what, next_step = err.splitlines()
    assert what.startswith("caee: ")
    assert expected in what
    assert "--help" in next_step


@pytest.mark.parametrize("arguments", [[], ["store"], ["trace"]])
def test_a_group_alone_shows_its_help_and_is_wrong_usage(arguments: list[str], capsys: Any) -> None:
    assert run_app(arguments) == 2
    out, err = capsys.readouterr()
    assert "Usage: caee" in out + err
    assert "Traceback" not in err


def test_a_command_may_exit_with_a_code_of_its_own(command: Any) -> None:
    command(_raises(typer.Exit(3)))
    assert run_app(["try"]) == 3


def test_version(capsys: Any) -> None:
    from importlib.metadata import version

    assert run_app(["--version"]) == 0
    assert capsys.readouterr().out == f"caee {version('caee')}\n"


def _every_command() -> list[list[str]]:
    names: list[list[str]] = [[]]
    for group in [app, *(entry.typer_instance for entry in app.registered_groups)]:
        prefix = [entry.name for entry in app.registered_groups if entry.typer_instance is group]
        names.append([str(name) for name in prefix])
        names += [[*names[-1], str(entry.name or entry.callback.__name__)] for entry in group.registered_commands]
    return names


@pytest.mark.parametrize("arguments", _every_command(), ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(arguments: list[str], option: str, capsys: Any) -> None:
    assert run_app([*arguments, option]) == 0
    out, err = capsys.readouterr()
    assert " ".join(["Usage: caee", *arguments]) in out
    assert err == ""


def _run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "CAEE_DEBUG", "CAEE_STORE")
    }
    environment |= {"TERM": "xterm-256color"} | options.pop("environment", {})
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=60, **options)


INTERRUPTED = """
import sys, time
import caee_cli.main

@caee_cli.main.app.command("try")
def function() -> None:
    print("started", flush=True)
    time.sleep(60)

sys.argv = ["caee", "try"]
caee_cli.main.main()
"""


def test_ctrl_c_stops_with_130_and_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "caee: interrupted\n"


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("store") / "caee.db")
    with open_store(path) as store:
        store.save_simulation("one", "2026-03-01T12:00:00Z", {})
    return path


@pytest.mark.parametrize("arguments", ["--help", "store list", "store list --json"])
def test_a_reader_that_leaves_and_a_full_disk(arguments: str, location: str) -> None:
    command, environment = f"'{CAEE}' {arguments}", {"CAEE_STORE": location}
    left = _run("bash", "-o", "pipefail", "-c", f"{command} | true", environment=environment)
    assert (left.returncode, left.stderr) == (0, "")
    full = _run("bash", "-c", f"{command} > /dev/full", environment=environment)
    assert full.returncode == 1
    assert full.stderr.startswith("caee: no space left")


def test_what_goes_into_a_pipe_has_no_colour(location: str) -> None:
    for arguments in (["--help"], ["store", "list", "--store", location], ["--bogus"]):
        done = _run(CAEE, *arguments)
        assert done.stdout + done.stderr
        assert not ANSI.search(done.stdout + done.stderr), arguments


def _on_a_terminal(arguments: list[str], environment: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=os.environ | environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:
        pass  # Linux says EIO where the other end is closed
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return output.decode()


def test_a_terminal_gets_colour_unless_no_color_is_set() -> None:
    script = "from rich.text import Text\nfrom caee_cli.output import show\nshow(Text('x', style='red'))"
    for command in ([CAEE, "--help"], [sys.executable, "-c", script]):
        plain = {"TERM": "xterm-256color", "COLUMNS": "80"}
        assert COLOUR.search(_on_a_terminal(command, plain)), command
        assert not COLOUR.search(_on_a_terminal(command, plain | {"NO_COLOR": "1"})), command


def test_json_is_one_document_without_nan(capsys: Any) -> None:
    emit_json({"a": math.nan, "b": [1.5, (math.inf, -math.inf)], 3: {"c": "é\n"}})
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {"a": None, "b": [1.5, [None, None]], "3": {"c": "é\n"}}
    assert out.endswith("}\n")


def test_compact_json_is_one_line(capsys: Any) -> None:
    emit_json({"a": {"b": [1, 2]}, "c": "x\ny"}, compact=True)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_comes_out_whatever_the_terminal_can_show(encoding: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "import caee_cli.main\n"
        "from caee_cli.output import emit_json, show\n"
        "@caee_cli.main.app.command('try')\n"
        "def function(json: bool = False) -> None:\n"
        "    text = 'é → θ ' + chr(0xdce9)\n"
        "    emit_json({'text': text}) if json else show(text)\n"
        "caee_cli.main.main()\n"
    )
    environment = {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", script, "try"]
    plain = subprocess.run(command, capture_output=True, env=os.environ | environment, cwd=tmp_path)
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert "é → θ".encode(encoding, "backslashreplace") in plain.stdout
    document = subprocess.run([*command, "--json"], capture_output=True, env=os.environ | environment, cwd=tmp_path)
    assert (document.returncode, document.stderr) == (0, b"")
    assert json.loads(document.stdout.decode(encoding)) == {"text": "é → θ \udce9"}


def test_text_from_outside_is_shown_and_not_obeyed(capsys: Any) -> None:
    from rich.table import Table

    table = Table("[bold]name")
    table.add_row("[red]x[/red] [/] :smile:")
    show(table, "[link=x] :bomb:")
    note("a\x1b]0;title\x07b [red]")
    complain("a\x1b[2Jb")
    out, err = capsys.readouterr()
    assert "[red]x[/red] [/] :smile:" in out
    assert "[link=x] :bomb:" in out
    assert err == "a\\x1b]0;title\\x07b [red]\ncaee: a\\x1b[2Jb\n"


def test_nothing_heavy_is_imported_for_the_command_line_itself(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from caee_cli.main import run_app\n"
        "assert run_app(['store', 'list', '--help']) == 0\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = _run(sys.executable, "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    heavy = {
        *("numpy", "torch", "numba", "scipy", "pandas", "plotly", "sqlalchemy", "transformers", "pyarrow", "cattrs"),
        *("safetensors", "psutil", "pynvml", "jinja2", "yaml", "zstandard", "triton", "reports", "store", "runtime"),
    }
    assert heavy & set(done.stderr.split()) == set()


def _cpu_seconds(*command: str) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


EMPTY_APP = """
import typer
app = typer.Typer()
for n in range(9):
    app.command(name=f"command-{n}")(lambda: None)
app()
"""


def test_help_costs_less_than_a_quarter_second_of_cpu_time_above_a_bare_interpreter() -> None:
    """A promise to users, so a test in spite of being a timing: CPU time, best of five, and again if others disturb.

    The help of nine empty commands costs 0.15 s on the machine that the promise was made for. A slower one, or one
    whose cores are shared, may take as many times longer as it takes for those.
    """
    best_help = best_bare = best_empty = math.inf
    for _ in range(3):
        best_help = min([best_help, *(_cpu_seconds(CAEE, "--help") for _ in range(5))])
        best_empty = min([best_empty, *(_cpu_seconds(sys.executable, "-c", EMPTY_APP, "--help") for _ in range(5))])
        best_bare = min([best_bare, *(_cpu_seconds(sys.executable, "-c", "pass") for _ in range(5))])
        allowed = 0.25 * max(1.0, (best_empty - best_bare) / 0.15)
        if best_help - best_bare < allowed:
            break
    assert best_help - best_bare < allowed
