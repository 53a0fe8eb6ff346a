"""Loading a checkpoint takes the dense part, the cache and the staging, whatever the experts weigh."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
SHARE = 0.15
"""Index, tokenizer, keys and values, activations, and what the allocator keeps, of what is expected."""


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    """The benchmarks' module ``checkpoints``, which writes checkpoints of any size."""
    spec = importlib.util.spec_from_file_location("benchmark_checkpoints", ROOT / "benchmarks" / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured(*arguments: object) -> list[dict[str, int]]:
    program = Path(__file__).with_name("memory_program.py")
    command = [sys.executable, str(program), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(700)
def test_peak_memory_is_dense_part_cache_and_staging(synthetic: ModuleType, tmp_path: Path) -> None:
    sizes = {"layers": 2, "top_k": 4, "hidden": 512, "intermediate": 512, "vocabulary": 20_000}
    shapes = {name: synthetic.Shape(**sizes, experts=experts) for name, experts in (("light", 48), ("heavy", 144))}
    shapes["halves"] = synthetic.Shape(**sizes, experts=48, dtype="bfloat16")
    warm = synthetic.Shape(layers=1, experts=8, top_k=2, hidden=64, intermediate=32)
    synthetic.write_checkpoint(tmp_path / "warm", warm)
    for name, shape in shapes.items():
        # Experts of zeros are holes in the file, but take as much memory as any.
        synthetic.write_checkpoint(tmp_path / name, shape, zeros=True)
    found = dict(zip(shapes, measured(24, tmp_path / "warm", *(tmp_path / name for name in shapes)), strict=True))
    for name, peak in found.items():
        assert peak["experts"] == shapes[name].experts_bytes
        assert peak["dense"] == synthetic.dense_bytes(shapes[name])
        expected = peak["dense"] + peak["cache"] + peak["staging"]
        assert expected < 0.9 * peak["experts"]
        assert abs(peak["peak"] / expected - 1.0) < SHARE, (name, peak)
    assert found["heavy"]["experts"] == 3 * found["light"]["experts"]
    assert abs(found["heavy"]["peak"] / found["light"]["peak"] - 1.0) < SHARE / 2
