"""One, two and four processes compute the same, take the same decisions, and repeat themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from runtime.policy.types import SHARE_UNIT

Checkpoint = Callable[..., Path]
Results = dict[int, dict[tuple[str, str, str], list[dict[str, Any]]]]

PROGRAM = Path(__file__).with_name("ranks_program.py")
WORLDS = (1, 2, 4)
ENOUGH_SECONDS = 900
# One process runs them all: what they share takes a minute and a half.
pytestmark = [pytest.mark.timeout(ENOUGH_SECONDS + 60), pytest.mark.xdist_group("ranks")]

SHARED: dict[int, dict[tuple[str, bool], dict[str, Any]]] = {}
"""By number of ranks, then by policy and whether tokens are data-parallel; filled with ``results``."""


@pytest.fixture(scope="module")
def results(checkpoint: Checkpoint, quantised: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By number of ranks, then by model, data type and policy. Ten experts do not divide by four ranks."""
    models = [checkpoint("qwen3_moe", top_k=4, experts=10), checkpoint("deepseek_v3", top_k=4)]
    models += [quantised("qwen3_moe-fp8", top_k=4), quantised("gpt_oss-mxfp4", top_k=4)]
    output = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(output), *map(str, models)],
        capture_output=True,
        text=True,
        timeout=ENOUGH_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for world in WORLDS[1:]:
        SHARED[world] = torch.load(output / f"{world}-shared.pt", weights_only=True)
    return {world: torch.load(output / f"{world}.pt", weights_only=True) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_a_pass_repeats_itself(results: Results, world: int) -> None:
    assert len(results[world]) == 9
    for case, (first, second) in results[world].items():
        assert torch.equal(first["logits"], second["logits"]), case
        assert first["misses"] == second["misses"], case
        assert first["removed"] == second["removed"], case


@pytest.mark.parametrize("world", WORLDS[1:])
def test_without_pruning_all_numbers_of_ranks_compute_the_same_bits(results: Results, world: int) -> None:
    for case, (first, _) in results[world].items():
        if case[2] == "router":
            alone = results[1][case][0]
            assert torch.equal(first["logits"], alone["logits"]), case
            assert first["dispatched"] == alone["dispatched"], case


@pytest.mark.parametrize("world", WORLDS)
def test_the_policy_prunes_and_fetches_less(results: Results, world: int) -> None:
    for case, (first, _) in results[world].items():
        assert all(len(per_device) == world for per_device in first["misses"])
        if case[2] != "router":
            plain = results[world][(*case[:2], "router")][0]
            assert sum(first["removed"]) > 0 == sum(plain["removed"])
            assert _slowest(first["misses"]) < _slowest(plain["misses"]), case


@pytest.mark.parametrize("world", WORLDS)
def test_all_numbers_of_ranks_brake_alike(results: Results, world: int) -> None:
    (case,) = (case for case in results[1] if case[2].startswith("importance"))
    (first, second), (alone, _) = results[world][case], results[1][case]
    assert sum(alone["tripped"]) > 1
    assert 0 < sum(alone["braked"]) < len(alone["braked"])
    for name in ("errors", "braked", "tripped", "removed"):
        assert first[name] == second[name] == alone[name], name
    assert torch.equal(first["logits"], alone["logits"])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_data_parallel_tokens_give_what_replicated_ones_give(results: Results, world: int) -> None:
    """Dense layers of fewer rows at a time may round the last bit otherwise, and nothing else differs: at two ranks
    nothing does here, at four, where a rank decodes one row, logits of up to 5 do by up to 4e-6."""
    shared = SHARED[world]
    assert len(shared) == (4 if world == 2 else 2)
    for policy in {policy for policy, _ in shared}:
        replicated, shares = shared[policy, False], shared[policy, True]
        assert torch.allclose(shares["logits"], replicated["logits"], rtol=0, atol=1e-5), policy
        for count in ("token_ids", "tokens", "misses", "dispatched", "rerouted", "ids"):
            assert shares[count] == replicated[count], (policy, count)
        assert shares["removed"] == pytest.approx(replicated["removed"], abs=1e-5 * SHARE_UNIT), policy
        assert shares["losses"] == pytest.approx(replicated["losses"], abs=1e-5), policy
        assert shares["losses"][2] > 0
        assert shares["ranks_agree"]
        assert replicated["ranks_agree"]


@pytest.mark.parametrize("world", WORLDS[1:])
def test_what_several_ranks_prune_gives_a_masked_forward(
    results: Results, checkpoint: Checkpoint, stock: ModuleType, world: int
) -> None:
    """Replicated or data-parallel, braked or not: of one process, which has all tokens and all experts."""
    folder = checkpoint("qwen3_moe", top_k=4, experts=10)
    for case, found in SHARED[world].items():
        assert sum(found["removed"]) > 0, case
        ids = [torch.tensor(layer_step) for layer_step in found["ids"]]
        layers = len(ids) // len(found["logits"])
        dispatched = [ids[at : at + layers] for at in range(0, len(ids), layers)]
        model = stock.load(folder, torch.float32)
        plain = stock.masked_logits(model, found["prompts"], dispatched, stock.RULES["qwen3_moe"])
        assert torch.allclose(found["logits"], torch.stack(plain), rtol=0, atol=1e-5), case


def _slowest(misses: list[list[int]]) -> int:
    return sum(max(per_device) for per_device in misses)
