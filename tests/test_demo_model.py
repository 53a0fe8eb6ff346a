"""The demo model is what its card says: ordinary, small, offline, literate, with every expert in use."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from runtime import demo

LAYERS, EXPERTS, CHOSEN, WINDOW = 4, 32, 4, 512
SLICE_WINDOWS = 16  # 8 KiB of the held-out text


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(demo.model_path(), local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    path = Path(__file__).parent.parent / "tools" / "train_demo_model.py"
    spec = importlib.util.spec_from_file_location("train_demo_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def card() -> str:
    return (demo.model_path().parent / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def measured(model: PreTrainedModel) -> tuple[list[float], torch.Tensor]:
    """Nats per byte of each of the first windows of the held-out text, and how often each expert was chosen there."""
    data = torch.tensor(list(demo.held_out_path().read_bytes()[: SLICE_WINDOWS * WINDOW + 1]))
    counts_LE = torch.zeros(LAYERS, EXPERTS)

    def count(layer: int):  # type: ignore[no-untyped-def]
        def hook(_module: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            counts_LE[layer] += torch.bincount(output[2].flatten(), minlength=EXPERTS)

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    try:
        with torch.no_grad():
            logits = model(data[:-1].view(SLICE_WINDOWS, WINDOW)).logits
    finally:
        for hook in hooks:
            hook.remove()
    losses = F.cross_entropy(logits.flatten(0, 1), data[1:], reduction="none").view(SLICE_WINDOWS, WINDOW)
    return losses.mean(1).tolist(), counts_LE


def number_in(card: str, what: str) -> float:
    found = re.search(rf"^\| {re.escape(what)} \| ([\d.]+) \|$", card, flags=re.MULTILINE)
    assert found is not None, f"the model card has no row {what!r}"
    return float(found[1])


def test_the_whole_demo_fits_in_twelve_megabytes() -> None:
    files = [p for p in demo.model_path().parent.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 12_000_000
    assert not [
        p for p in files if p.suffix in {".py", ".bin", ".pt"} and p.name != "__init__.py"
    ]  # no code, no pickle


def test_the_configuration_is_an_ordinary_qwen3_moe() -> None:
    config = AutoConfig.from_pretrained(demo.model_path(), local_files_only=True)
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (LAYERS, EXPERTS, CHOSEN)
    assert config.norm_topk_prob
    assert config.mlp_only_layers == []
    assert config.decoder_sparse_step == 1
    assert config.vocab_size == 258


def test_each_expert_lies_in_one_piece_of_the_checkpoint() -> None:
    path = demo.model_path() / "model.safetensors"
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            names = [f"model.layers.{layer}.mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up", "down")]
            spans = sorted(header[name]["data_offsets"] for name in names)
            assert all(before[1] == after[0] for before, after in pairwise(spans))
    with safe_open(path, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_every_weight_of_the_checkpoint_is_used() -> None:
    _, info = AutoModelForCausalLM.from_pretrained(demo.model_path(), local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info


@settings(deadline=None)
@given(text=st.text())
def test_the_tokenizer_gives_back_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if "<|" not in text:
        assert ids == list(text.encode())


def test_special_tokens_stand_after_the_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)
    assert tokenizer.decode([72, 105, 256], skip_special_tokens=True) == "Hi"


def test_the_prompts_are_lines_of_the_held_out_text() -> None:
    prompts = demo.prompts_path().read_text(encoding="utf-8").splitlines()
    held_out = demo.held_out_path().read_text(encoding="utf-8").splitlines()
    assert len(prompts) >= 16
    assert len(set(prompts)) == len(prompts)
    assert all(40 <= len(prompt.encode()) <= 120 for prompt in prompts)
    assert set(prompts) <= set(held_out)
    assert 60_000 <= demo.held_out_path().stat().st_size <= 100_000


def test_the_held_out_loss_is_the_card_s(card: str, measured: tuple[list[float], torch.Tensor]) -> None:
    losses, _ = measured
    value = sum(losses) / len(losses)
    assert value == pytest.approx(number_in(card, "held-out loss of the first 8 KiB, nats per byte"), abs=2e-3)
    assert value == pytest.approx(number_in(card, "held-out loss, nats per byte"), abs=0.15)


def test_no_expert_is_dead(measured: tuple[list[float], torch.Tensor]) -> None:
    _, counts_LE = measured
    share_LE = counts_LE / counts_LE.sum(1, keepdim=True) * EXPERTS
    assert share_LE.min() > 0.02, share_LE
    assert share_LE.max() > 1.2  # specialised: far from uniform noise


def test_greedy_text_is_made_of_words(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = demo.prompts_path().read_text(encoding="utf-8").splitlines()[:4]
    inputs = tokenizer([p + "\n" for p in prompts], return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    known = set(re.findall(r"[a-z']+", demo.held_out_path().read_text(encoding="utf-8").lower()))
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())[:-1]]  # the last may be cut off
    assert len(words) > 60
    assert sum(word in known for word in words) / len(words) >= 0.8, texts


def test_the_trainer_writes_the_model_it_trains(trainer: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape = trainer.Shape(layers=2, hidden=32, heads=2, head_dim=16, experts=8, chosen=2, expert_width=16)
    ours = trainer.Model(shape)
    ours.compute_in(torch.float32)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).to(torch.bfloat16))
    trainer.write_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype=torch.float32)
    ids = torch.randint(256, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits.flatten(0, 1), atol=2e-4, rtol=2e-4)


def test_the_trainer_s_experts_have_the_gradients_of_the_plain_formula(trainer: ModuleType) -> None:
    torch.manual_seed(2)
    T, K, E, H, I = 50, 4, 8, 16, 12  # noqa: E741
    chosen_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    inputs = [torch.randn(T, H), torch.rand(T, K), torch.randn(E, 2 * I, H) / 4, torch.randn(E, H, I) / 4]
    ours, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    trainer.GroupedExperts.apply(ours[0], ours[1], chosen_TK, ours[2], ours[3]).square().sum().backward()
    gate, up = torch.einsum("th,tkjh->tkj", plain[0], plain[2][chosen_TK]).chunk(2, -1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, plain[3][chosen_TK])
    (y * plain[1][..., None]).sum(1).square().sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_legal_boilerplate_and_layout_are_normalised_away(trainer: ModuleType) -> None:
    raw = "Licence\n*** START OF IT ***\n\n\n  HAMLET.\n\n\n\nWords,  words.\t\n*** END OF IT ***\nx"
    assert trainer.normalise(raw.replace("\n", "\r\n")) == trainer.normalise(raw)
    assert trainer.normalise(raw) == "HAMLET.\n\nWords, words.\n"
