"""The GPU kernels: what they decide, interpreted on the CPU and on a GPU; that they compile; what they refuse."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.errors import CaseError, UsageError
from runtime.policy.inputs import make_machine
from runtime.policy.spec import parse_policy
from runtime.policy.types import Machine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'caee[triton]'"
)

Agree = Callable[..., str]


@pytest.fixture
def interpreted() -> Agree:
    """Runs of ``gpu_agreement.py`` in Triton's interpreter, on the CPU."""
    return lambda *runs: _agree(runs, {"TRITON_INTERPRET": "1"})


@pytest.fixture
def on_gpu() -> Agree:
    """Runs of ``gpu_agreement.py`` compiled, on the first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    return lambda *runs: _agree(runs, {"TRITON_INTERPRET": "0"})


def _agree(runs: tuple[str, ...], environment: dict[str, str]) -> str:
    program = Path(__file__).with_name("gpu_agreement.py")
    done = subprocess.run(
        [sys.executable, str(program), *runs],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_interpreted_on_random_cases(interpreted: Agree, seed: int) -> None:
    assert interpreted(f"random:100:{seed}") == "100 random cases agree\n"


def test_interpreted_on_edge_cases(interpreted: Agree) -> None:
    lines = interpreted("edges:3:1", "ties:20:1", "largest:3:1").splitlines()
    assert lines == ["51 edges cases agree", "24 ties cases agree", "3 largest cases agree"]


def test_interpreted_on_faults_narrow_scores_and_used_buffers(interpreted: Agree) -> None:
    lines = interpreted("faults:9:1", "narrow:8:1", "again:4:1").splitlines()
    assert lines == ["45 faults cases agree", "24 narrow cases agree", "8 again cases agree"]


# Every shape and policy is compiled once, so there are many cases of few shapes.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "run", ["edges:45:1", "ties:100:1", "largest:3:1", "faults:3:1", "narrow:2:1", "again:20:1", "graphs:20:1"]
)
def test_on_a_gpu(on_gpu: Agree, run: str) -> None:
    assert on_gpu(run).endswith(f"{run.partition(':')[0]} cases agree\n")


# ---- compiled ahead of time


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("text", ["caee", "budget:price=1,compensation=resident,reselect=all"])
def test_compile_ahead_of_time(text: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.kernels.decision import DeviceDecision

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    machine = a_machine(groups=[([0, 1], 0.5)] if text.startswith("budget") else [])
    decision = DeviceDecision(parse_policy(text), machine, top_k=4, max_tokens=2, device="cpu")
    launches = decision.launches(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_ahead(launch, architecture)
        assert f".target sm_{architecture}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]
        # As the reference rounds: divisions to the nearest, no product fused into a sum.
        assert "fma.rn.f64" not in compiled.asm["ptx"]
        assert "div.full.f" not in compiled.asm["ptx"]


def compile_ahead(launch: Any, architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
        torch.float64: "*fp64",
        torch.bool: "*i1",
        torch.int8: "*i8",
        torch.int32: "*i32",
        torch.int64: "*i64",
    }
    signature = dict.fromkeys(launch.constants, "constexpr")
    for name, value in launch.arguments.items():
        signature[name] = pointers[value.dtype] if isinstance(value, torch.Tensor) else "i64"
    constants = {(launch.kernel.arg_names.index(name),): value for name, value in launch.constants.items()}
    return triton.compile(
        ASTSource(launch.kernel, signature, constants),
        target=GPUTarget("cuda", architecture, 32),
        options=launch.options,
    )


# ---- refused


def a_machine(*, experts: int = 64, devices: int = 4, groups: Any = ()) -> Machine:
    return make_machine(
        placement=np.arange(experts) * devices // experts,
        cost_seconds=np.full(experts, 1e-3),
        resident=np.zeros(experts, dtype=bool),
        link_groups=groups,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lynx:keep=3", "policy lynx has no GPU kernel"),
        ("budget:epsilon=0.01", "needs a price on the GPU"),
        ("budget:price=1,reuse=0.2", "no reuse on the GPU"),
    ],
)
def test_refuses_a_policy_without_a_kernel(text: str, words: str) -> None:
    from runtime.kernels.decision import DeviceDecision

    with pytest.raises(UsageError, match=words):
        DeviceDecision(parse_policy(text), a_machine(), top_k=4, max_tokens=2, device="cpu")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"experts": 513}, "number of experts: 513"),
        ({"devices": 65, "experts": 130}, "number of devices: 65"),
        ({"top_k": 17}, "top_k: 17"),
        ({"top_k": 3, "experts": 2, "devices": 1}, "top_k: 3 is not between 1 and 2"),
        ({"max_tokens": 16385}, "max_tokens: 16385"),
        ({"groups": [([0], 0.5)] * 125}, "devices and link groups: 129"),
    ],
)
def test_refuses_what_the_kernels_are_not_made_for(sizes: dict[str, Any], words: str) -> None:
    from runtime.kernels.decision import DeviceDecision

    top_k, max_tokens = sizes.pop("top_k", 2), sizes.pop("max_tokens", 2)
    with pytest.raises(CaseError, match=words):
        DeviceDecision(parse_policy("caee"), a_machine(**sizes), top_k=top_k, max_tokens=max_tokens, device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores_TN": torch.zeros(3, 64)}, "scores: 3 tokens, and max_tokens is 2"),
        ({"scores_TN": torch.zeros(2, 63)}, "scores has shape"),
        ({"scores_TN": torch.zeros(64, 2).T}, "contiguous rows"),
        ({"scores_TN": torch.zeros(2, 64, dtype=torch.int32)}, "scores has type torch.int32"),
        ({"selection_scores_TN": torch.zeros(1, 64)}, "selection_scores has shape"),
        ({"topk_ids_TK": torch.zeros(2, 3, dtype=torch.int64)}, "topk_ids has shape"),
        ({"topk_ids_TK": torch.zeros(2, 4)}, "topk_ids has type torch.float32"),
        ({"token_mask_T": torch.ones(1, dtype=torch.bool)}, "token_mask has shape"),
        ({"token_mask_T": torch.ones(2)}, "token_mask has type"),
        ({"resident_NR": torch.zeros(63, dtype=torch.bool)}, "resident has shape"),
        ({"resident_NR": torch.zeros(64)}, "resident has type"),
        ({"scores_TN": torch.zeros(2, 64, device="meta")}, "is on meta"),
    ],
)
def test_refuses_tensors_that_do_not_fit(change: dict[str, torch.Tensor], words: str) -> None:
    from runtime.kernels.decision import DeviceDecision

    decision = DeviceDecision(parse_policy("caee"), a_machine(), top_k=4, max_tokens=2, device="cpu")
    with pytest.raises(CaseError, match=words):
        decision.launches(**({"scores_TN": torch.zeros(2, 64)} | change))


# ---- launched


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be that of the tensors."""
    from runtime.kernels.launch import Launch

    current: list[object] = ["another"]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            current.append(self._device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Kernel:
        def __init__(self) -> None:
            self.launched_on: list[object] = []

        def __getitem__(self, programs: tuple[int]) -> Callable[..., None]:
            return lambda **_: self.launched_on.append(current[-1])

    class ElsewhereTensor(torch.Tensor):
        device = torch.device("cuda:1")  # type: ignore[misc]  # there need be no such device

    monkeypatch.setattr(torch.cuda, "device", Device)
    kernel = Kernel()
    for scores in (torch.zeros(1), torch.zeros(1).as_subclass(ElsewhereTensor)):
        Launch(kernel=kernel, programs=1, warps=1, arguments={"least": 3, "scores": scores}, constants={})()
    assert kernel.launched_on == ["another", torch.device("cuda:1")]
    assert current == ["another"]
