"""Everything in ``benchmarks/gpu_check.sh`` that can run on a CPU runs on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(__file__).parent.parent / "engine" / "checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    checkpoints = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checkpoints)
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


@pytest.mark.slow
def test_a_step_that_fails_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    tests = str(tmp_path / "none")
    done = check("--cpu", "--model", str(tmp_path / "none"), "--tests", tests, "--keep", str(kept))
    assert done.returncode == 1
    outcomes = {each["step"]: each for each in json.loads((kept / "outcome.json").read_text())}
    assert [outcomes[step]["status"] for step in STEPS] == ["failed", "ok", "ok", "ok", "failed", "failed", "failed"]
    assert "none" in outcomes["caee run, tier host"]["words"]


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is an NVIDIA GPU here")
    done = check()
    assert done.returncode == 1
    assert "--cpu runs the same steps without one" in done.stderr
