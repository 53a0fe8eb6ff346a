"""Everything in ``benchmarks/gpu_check.sh`` that can run on a CPU runs on a CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
STEPS = (
    "GPU tests",
    "decision, µs a layer",
    "caee probe",
    "caee calibrate",
    "caee run, tier device",
    "caee run, tier host",
    "caee run, tier disk",
)


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CAEE_PYTHON": sys.executable, "COLUMNS": "120"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoints = load(Path(__file__).parent.parent / "engine" / "checkpoints.py")
    folder = tmp_path_factory.mktemp("model")
    return Path(checkpoints.save_checkpoint(folder, checkpoints.tiny_config("qwen3_moe")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_step_on_a_cpu(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    kept = tmp_path / "kept"
    tests = str(Path(__file__).with_name("test_gpu_kernels.py"))
    done = check(
        "--cpu", "--model", str(model), "--prompts", str(prompts), "--tests", tests, "--keep", str(kept)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((kept / "outcome.json").read_text())
    assert [(each["step"], each["status"]) for each in outcomes] == [(step, "ok") for step in STEPS]
    assert "skipped" in outcomes[0]["words"]
    assert "T=1: torch" in outcomes[1]["words"]
    for step in STEPS:
        assert step in done.stdout


def test_a_step_that_fails_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    check_script = load(ROOT / "benchmarks" / "gpu_check.py")

    def step(code: str, seconds: float = 60, program: str = sys.executable) -> Any:
        command = [program, "-c", code]
        return check_script.Step(name=code, command=command, seconds=seconds, words=lambda text: str(json.loads(text)))

    wanted = [
        step("raise SystemExit('no such device')"),
        step("import time; print('so far', flush=True); time.sleep(60)", 5),
        step("print(7)"),
        step("print('no JSON')"),
        step("print('FAILED test_a'); raise SystemExit('a warning')"),
        step("", program=str(tmp_path / "not there")),
        step("print(8)"),
    ]
    outcomes = check_script.execute_all(wanted, tmp_path, 1.0)
    expected = ["failed", "out of time", "ok", "failed", "failed", "failed", "ok"]
    assert [each.status for each in outcomes] == expected
    assert outcomes[0].words == "exit code 1\nno such device"
    assert outcomes[1].said == "so far"
    assert outcomes[2].said == ""
    assert "cannot read its output" in outcomes[3].words
    # What went wrong is on either of a program's outputs.
    for told in (outcomes[4].words, outcomes[4].said):
        assert "FAILED test_a" in told
        assert "a warning" in told
    assert "cannot be started" in outcomes[5].words
    shown = check_script.table(outcomes, "here")
    assert shown.row_count == len(wanted)


def test_what_is_set_up_has_every_program_of_the_steps() -> None:
    """The programs of the steps beside python must come with the targets of ``make`` that the script names."""
    check_script = load(ROOT / "benchmarks" / "gpu_check.py")
    arguments = argparse.Namespace(cpu=False, model=None, prompts=None, tests=None)
    programs = {Path(each.command[0]).name for each in check_script.steps(arguments)}
    script = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    made = {"caee": ".venv/bin/.wheel", "pytest": ".venv/bin/.tools"}
    (line,) = (line for line in script.splitlines() if line.strip().startswith("make "))
    for program in programs - {Path(sys.executable).name}:
        assert made[program] in line.split()


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is an NVIDIA GPU here")
    done = check()
    assert done.returncode == 1
    assert "--cpu runs the same steps without one" in done.stderr
