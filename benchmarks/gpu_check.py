"""The steps behind ``benchmarks/gpu_check.sh``: each a command with a limit of time, and a line of the table.

A step that fails, or runs out of time, does not stop the others; the end of what it said comes before the table, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
TOTAL_SECONDS = 465.0
CPU_PATIENCE = 10.0
TIERS = ("device", "host", "disk")
SHOWN_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command, the seconds it may take, and how its standard output becomes a line of words."""

    name: str
    command: list[str]
    seconds: float
    words: Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``status``: ok, failed, out of time. ``said``: the end of its output, where it is not ok."""

    name: str
    status: str
    seconds: float
    words: str
    said: str = ""


def steps(arguments: argparse.Namespace) -> list[Step]:
    """What is run, in order. On a CPU as little as shows that each step works."""
    tests = str(HERE.parent / "tests") if arguments.tests is None else arguments.tests
    caee = str(Path(sys.executable).with_name("caee"))
    pytest = str(Path(sys.executable).with_name("pytest"))
    devices = ["--devices", "cpu:1" if arguments.cpu else "cuda:1"]
    timing = [sys.executable, str(HERE / "gpu_decision.py"), "--json", *(["--cpu"] if arguments.cpu else [])]
    model = [arguments.model] if arguments.model else []
    prompts = ["--prompts", arguments.prompts] if arguments.prompts else []
    size = ["--pairs", "1", "--batch-size", "2", "--max-new-tokens", "3"] if arguments.cpu else ["--pairs", "4"]
    run = [caee, "run", *model, *prompts, *devices, *size, "--no-quality", "--json"]
    return [
        Step(
            name="GPU tests",
            # The script, not the module: that would put the source folder before the installed packages.
            command=[pytest, "-q", "-m", "gpu", "-n", "1" if arguments.cpu else "4", tests],
            seconds=150,
            words=last_line,
        ),
        Step(name="decision, µs a layer", command=timing, seconds=90, words=decision_words),
        Step(
            name="caee probe",
            command=[caee, "probe", *devices, *(["--quick"] if arguments.cpu else []), "--json"],
            seconds=60,
            words=probe_words,
        ),
        Step(name="caee calibrate", command=[caee, "calibrate", "--json"], seconds=30, words=calibration_words),
        *(
            Step(name=f"caee run, tier {tier}", command=[*run, "--tier", tier], seconds=75, words=run_words)
            for tier in TIERS
        ),
    ]


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1].strip("= ")


def decision_words(output: str) -> str:
    """By number of tokens, what the kernels take and what torch's plain routing takes."""
    lines = []
    for result in json.loads(output)["results"]:
        figures = result["graph_microseconds"] or result["eager_microseconds"]
        host = result["eager_microseconds"]["over the host"]
        shown = {**figures, "over the host": host}
        lines.append(f"T={result['tokens']}: " + ", ".join(f"{name} {value:.1f}" for name, value in shown.items()))
    return "\n".join(lines)


def probe_words(output: str) -> str:
    """Every link that could be measured alone, with its median bandwidth."""
    links = [link for link in json.loads(output)["links"] if link["concurrency"] == "solo"]
    measured = [link for link in links if link["bandwidth_bytes_per_s"]]
    return "\n".join(
        f"{link['kind']} {link['mode'] or ''}".strip()
        + f": {link['bandwidth_bytes_per_s']['median'] / 1e9:.1f} GB/s ({link['status']})"
        for link in measured
    )


def calibration_words(output: str) -> str:
    models = json.loads(output)["models"]
    good = sum(model["status"] == "ok" for model in models)
    return f"{len(models)} cost models, {good} ok"


def run_words(output: str) -> str:
    """TPOT of the baseline, the gain with its interval, and the prediction's error."""
    document = json.loads(output)
    gain, predicted = document["gain"]["tpot"], document["predicted"]
    words = f"TPOT {document['baseline']['tpot_seconds']['median'] * 1e3:.2f} ms, × {gain['ratio']:.3f} with the policy"
    if gain["ci95"]:
        words += f" (95 %: {gain['ci95'][0]:.3f} to {gain['ci95'][1]:.3f})"
    if predicted and predicted["relative_error"] is not None:
        words += f", predicted within {abs(predicted['relative_error']):.0%}"
    return words


def execute(step: Step, folder: Path, limit: float) -> Outcome:
    """Run one step, in a process group of its own, so that nothing of it outlives ``limit`` seconds."""
    start = time.monotonic()
    name = "".join(letter if letter.isalnum() else "-" for letter in step.name)
    outputs, errors = folder / f"{name}.out", folder / f"{name}.log"
    environment = os.environ | {"CAEE_STORE": str(folder / "store.db"), "TRITON_CACHE_DIR": str(folder / "triton")}

    def outcome(status: str, words: str) -> Outcome:
        said = "" if status == "ok" else "\n".join(_last_lines(outputs) + _last_lines(errors))
        return Outcome(name=step.name, status=status, seconds=time.monotonic() - start, words=words, said=said)

    try:
        # Files, not pipes: what a step said before it ran out of time is worth reading.
        with outputs.open("w") as output, errors.open("w") as error:
            process = subprocess.Popen(
                step.command, stdout=output, stderr=error, env=environment, start_new_session=True
            )
            try:
                process.wait(timeout=limit)
            except BaseException as stopped:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(stopped, subprocess.TimeoutExpired):
                    return outcome("out of time", "")
                raise
    except OSError as refused:
        return outcome("failed", f"cannot be started: {refused}")
    if process.returncode != 0:
        ends = (_last_lines(path)[-2:] for path in (errors, outputs))
        return outcome("failed", f"exit code {process.returncode}\n" + "\n".join(line for end in ends for line in end))
    try:
        return outcome("ok", step.words(outputs.read_text()))
    except (LookupError, TypeError, ValueError) as unread:
        return outcome("failed", f"cannot read its output: {unread!r}")


def _last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:] if path.exists() else []


def table(outcomes: list[Outcome], where: str) -> Table:
    shown = Table(title=f"caee on {where}: {sum(outcome.seconds for outcome in outcomes):.0f} s", show_lines=True)
    for heading in ("step", "status", "seconds", "what it found"):
        shown.add_column(heading, justify="right" if heading == "seconds" else "left")
    for outcome in outcomes:
        shown.add_row(outcome.name, outcome.status, f"{outcome.seconds:.1f}", escape(outcome.words))
    return shown


def where_we_are(on_cpu: bool) -> str:
    """The device's name. Raises ``SystemExit`` where there is no GPU and one is wanted."""
    import torch

    if on_cpu:
        return "a CPU: whether it works, not how fast"
    if not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU that torch can use; --cpu runs the same steps without one")
    return torch.cuda.get_device_name(0)


def execute_all(wanted: list[Step], folder: Path, patience: float) -> list[Outcome]:
    """One after the other, within the total time; ``patience`` stretches every limit."""
    console = Console(stderr=True)
    deadline = time.monotonic() + patience * TOTAL_SECONDS
    outcomes: list[Outcome] = []
    for step in wanted:
        console.print(f"{step.name} …", style="dim", highlight=False)
        left = max(1.0, deadline - time.monotonic())
        outcomes.append(execute(step, folder, min(patience * step.seconds, left)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the same steps without a GPU, small")
    parser.add_argument("--model", help="what `caee run` runs; default: the model that ships with caee")
    parser.add_argument("--prompts", help="a file with one prompt per line; default: those that ship")
    parser.add_argument("--tests", help="from which file or folder to take the GPU tests; default: all")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the store, the logs and outcome.json there")
    arguments = parser.parse_args()
    where = where_we_are(arguments.cpu)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = execute_all(steps(arguments), folder, CPU_PATIENCE if arguments.cpu else 1.0)
        document: list[dict[str, Any]] = [
            {"step": each.name, "status": each.status, "seconds": each.seconds, "words": each.words, "said": each.said}
            for each in outcomes
        ]
        (folder / "outcome.json").write_text(json.dumps(document, indent=2) + "\n")
    for each in outcomes:
        if each.said:
            sys.stderr.write(f"\n{each.name}, {each.status}; the end of what it said:\n{each.said}\n")
    Console(width=max(Console().width, 120)).print(table(outcomes, where))
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
