"""With nothing pruned the engine computes what transformers computes, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig

from probes.errors import CheckpointError
from runtime.demo import model_path
from runtime.models import skeleton
from runtime.policy.make import make_policy
from runtime.policy.spec import parse_policy
from runtime.worker import RankSession

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]

STEPS = 5
EVEN = [list(b"Hello there, my"), list(b"And he said, go"), list(b"Now is the time")]
UNEVEN = [list(b"Hello there, my"), list(b"And he"), list(b"N")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# One of each rule by which routers choose and weigh, and of each way in which experts are stored and computed.
CORE = [
    "qwen3_moe",  # softmax, normalised
    "qwen2_moe",  # softmax, as it is; a shared expert
    "mixtral",  # other names
    "gpt_oss",  # softmax over the chosen; biases, transposed, interleaved; fused in the file; sliding attention
    "granitemoe",  # softmax over the chosen; fused in the file under other names
    "deepseek_v3",  # sigmoid and bias, groups, a factor; latent attention
    "ernie4_5_moe",  # softmax, and a bias on the selection alone
    "nemotron_h",  # experts without a gate
    "qwen3_next",  # a recurrent state in the place of some keys and values
    "phimoe",  # sparsemixer: weights that no score explains
]
OTHERS = [
    "olmoe", "granitemoeshared", "granitemoe_swa", "granitemoehybrid", "deepseek_v2", "glm4_moe", "glm4_moe_lite",
    "dots1", "hunyuan_v1_moe", "flex_olmo", "minimax_m2", "minimax", "jamba", "qwen3_5_moe_text", "afmoe",
    "cohere2_moe", "exaone_moe", "hy_v3", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "solar_open",
    "sarvam_mla", "kolibri1", "glm_moe_dsa", "deepseek_v32", "axk1", "deepseek_v4",
]  # fmt: skip

# One of each way in which experts are stored and computed, and routed to, on every implementation that it may have.
SWEPT = [
    *(("qwen3_moe", implementation) for implementation in (None, "eager", "grouped_mm", "batched_mm")),
    ("qwen2_moe", None),  # a shared expert
    ("deepseek_v3", None),  # sigmoid, a bias, groups, a shared expert
    ("deepseek_v3", "eager"),
    ("glm4_moe", None),  # the same without groups
    *(("gpt_oss", implementation) for implementation in (None, "eager", "grouped_mm", "batched_mm")),
    ("nemotron_h", None),  # experts without a gate
]
# Two MoE layers, as the others have.
THREE_LAYERS = {"nemotron_h": {"num_hidden_layers": 3, "layer_types": ["moe", "full_attention", "moe"]}}


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor], case: str = "") -> None:
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(our, their), f"{case}: step {number} differs by {(our - their).abs().max():.2e}"


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], case: str = "") -> None:
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_transformers(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str, dtype: str
) -> None:
    folder = checkpoint(family)
    theirs = stock.stock_logits(stock.load(folder, DTYPES[dtype]), EVEN, STEPS)
    session = open_session(folder, dtype=dtype)
    ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("family", OTHERS)
def test_further_families_are_exact_as_well(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str
) -> None:
    folder = checkpoint(family)
    for dtype in DTYPES:
        theirs = stock.stock_logits(stock.load(folder, DTYPES[dtype]), EVEN, STEPS)
        session = open_session(folder, dtype=dtype, cache_experts=5)
        ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
        assert_equal(ours, theirs)


@pytest.mark.parametrize(("family", "implementation"), SWEPT)
def test_caches_and_tiers_change_nothing(
    checkpoint: Checkpoint,
    open_session: OpenSession,
    stock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    implementation: str | None,
) -> None:
    """From one slot, where most experts pass through staging in waves, to all, where none is fetched twice."""
    folder = checkpoint(family, experts=12, top_k=4, **THREE_LAYERS.get(family, {}))
    read = skeleton.read_config

    def with_implementation(path: Path) -> object:
        config = read(path)
        config._experts_implementation = implementation or config._experts_implementation
        return config

    monkeypatch.setattr(skeleton, "read_config", with_implementation)
    for dtype in DTYPES:
        theirs = stock.stock_logits(stock.load(folder, DTYPES[dtype], implementation), EVEN, STEPS)
        for tier, cache_experts in [*itertools.product(("disk", "host"), (1, 3, 8, 16, 32)), ("device", None)]:
            case = f"{dtype}, {tier}, {cache_experts} cached"
            session = open_session(folder, dtype=dtype, tier=tier, cache_experts=cache_experts)
            if tier == "device":
                session.execution.fill_caches()
            ours, records = stock.engine_logits(session.model, session.router, EVEN, STEPS)
            # torch multiplies a batch of one such row in another way: one that is alone in a wave rounds otherwise.
            if (family, implementation, dtype) == ("qwen3_moe", "batched_mm", "float32") and tier != "device":
                assert_close(ours, theirs, case)
            else:
                assert_equal(ours, theirs, case)
            fetches = [layer.misses_after_D[0] for record in records for layer in record.layers]
            if cache_experts == 1:
                assert max(fetches) > 1 + session.layout.staging_slots, f"{case}: no step needs two waves"
            elif cache_experts == 32:
                assert sum(fetches) <= 2 * session.index.num_experts, f"{case}: an expert was fetched twice"


@pytest.mark.parametrize("cache_experts", [9, 128])
def test_the_model_that_ships_is_exact(open_session: OpenSession, stock: ModuleType, cache_experts: int) -> None:
    """Stored in bfloat16 and computed in float32, as ``caee run`` does on a CPU."""
    theirs = stock.stock_logits(stock.load(model_path(), torch.float32), EVEN, STEPS)
    session = open_session(model_path(), cache_experts=cache_experts)
    ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("layout", [{"save_original_format": False}, {"max_shard_size": "20KB"}])
def test_layouts_of_the_checkpoint_change_nothing(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, layout: dict[str, object]
) -> None:
    """All experts in one tensor, and a checkpoint of many shards, against one tensor each in one file."""
    theirs = stock.stock_logits(stock.load(checkpoint("qwen3_moe"), torch.bfloat16), EVEN, STEPS)
    session = open_session(checkpoint("qwen3_moe", saving=layout), dtype="bfloat16")
    ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
def test_prompts_of_unlike_lengths(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str
) -> None:
    """Padding is not computed here, where transformers does: a matmul of fewer rows may round otherwise."""
    folder = checkpoint(family)
    session = open_session(folder)
    theirs = stock.stock_logits(stock.load(folder, torch.float32), UNEVEN, STEPS)
    ours, _ = stock.engine_logits(session.model, session.router, UNEVEN, STEPS)
    assert_close(ours, theirs)


@pytest.mark.parametrize("policy", ["caee:theta=1", "importance:theta=1", "top-k:k0=2", "oea:k0=2", "skip:beta=0"])
def test_policies_that_may_not_prune_change_nothing(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, policy: str
) -> None:
    folder = checkpoint("qwen3_moe", top_k=2)
    theirs = stock.stock_logits(stock.load(folder, torch.float32), EVEN, STEPS)
    session = open_session(folder, cache_experts=4)
    chosen = make_policy(parse_policy(policy), offloading=True)
    ours, records = stock.engine_logits(session.model, chosen, EVEN, STEPS)
    assert_equal(ours, theirs)
    assert all(layer.removed == 0 and layer.rerouted_slots == 0 for record in records for layer in record.layers)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_tokens_are_those_of_generate(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, family: str
) -> None:
    folder = checkpoint(family)
    model = stock.load(folder, torch.float32)
    session = open_session(folder, max_new_tokens=12, cache_experts=4)
    for prompt in EVEN:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()
        assert session.run_pass([prompt], session.router).token_ids == [expected]


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_checkpoint_is_converted_as_transformers_does(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, stored: str
) -> None:
    folder = checkpoint("qwen3_moe", dtype=getattr(torch, stored))
    theirs = stock.stock_logits(stock.load(folder, torch.float32), EVEN, STEPS)
    session = open_session(folder)
    assert session.index.expert_bytes == 3 * 32 * 32 * 2
    ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
    assert_equal(ours, theirs)


def test_tied_embeddings(checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType) -> None:
    folder = checkpoint("qwen3_moe", tie_word_embeddings=True)
    theirs = stock.stock_logits(stock.load(folder, torch.float32), EVEN, STEPS)
    session = open_session(folder)
    ours, _ = stock.engine_logits(session.model, session.router, EVEN, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("family", ["jetmoe", "llama4_text", "llama", "kimi_linear", "longcat_flash", "dbrx"])
def test_other_families_are_refused_by_name(checkpoint: Checkpoint, open_session: OpenSession, family: str) -> None:
    folder = checkpoint(family)
    with pytest.raises(CheckpointError, match=family) as caught:
        open_session(folder).run()
    assert caught.value.hint


@pytest.mark.parametrize("family", ["nllb-moe", "switch_transformers", "qwen3_vl_moe", "aria"])
def test_families_that_are_no_causal_language_models_are_refused_by_name(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{family} is not supported: .* no causal language model") as caught:
        skeleton.build_skeleton(tmp_path, dtype=torch.float32)
    assert "text-only" in str(caught.value.hint)
