"""Synthetic Mixture-of-Experts checkpoints of any size, and engines on them, for the benchmarks and their tests.

Files are written tensor by tensor, so that a checkpoint larger than the memory can be made; filled with zeros they are
sparse, and cost the disk next to nothing.

    python benchmarks/checkpoints.py FOLDER [--layers L --experts N --top-k K --hidden H --intermediate I] [--zeros]
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}
SPREAD = 0.02
"""Standard deviation of random weights: what transformers initialises with."""
BLOCK = 1 << 22
"""Random numbers are made once, this many, and every tensor begins at another place among them."""

Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of family qwen3_moe. ``vocabulary``: at least the 257 tokens of its tokenizer."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int = 8
    vocabulary: int = 257
    dtype: str = "float32"

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert: three matrices."""
        return 3 * self.hidden * self.intermediate * DTYPES[self.dtype][1].itemsize

    @property
    def experts_bytes(self) -> int:
        """Of all experts of all layers."""
        return self.layers * self.experts * self.expert_bytes

    def config(self) -> Any:
        """The config of transformers."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.intermediate,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 4),
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=256,
            dtype=self.dtype,
        )


def write_checkpoint(folder: Path, shape: Shape, *, zeros: bool = False, seed: int = 0) -> Path:
    """A folder that transformers loads: config, tokenizer, and one safetensors file for each layer and for the rest.

    ``zeros``: all experts are zeros, as holes in the files; the dense part is random in any case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config()
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder)
    dense = list(_dense_tensors(config))
    random = _Random(shape, seed)
    weight_map: dict[str, str] = {}
    for number in range(-1, shape.layers):
        prefix = f"model.layers.{number}."
        own = [t for t in dense if (t[0].startswith(prefix) if number >= 0 else ".layers." not in t[0])]
        experts = [] if number < 0 else list(_expert_tensors(shape, prefix))
        name = f"model-{number + 2:05d}-of-{shape.layers + 1:05d}.safetensors"
        _write_file(folder / name, own, experts, shape, random, zeros=zeros)
        weight_map |= dict.fromkeys((tensor for tensor, _ in own + experts), name)
    listing = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    return folder


def dense_bytes(shape: Shape) -> int:
    """Of everything but the experts, as stored."""
    item = DTYPES[shape.dtype][1].itemsize
    return sum(torch.Size(size).numel() for _, size in _dense_tensors(shape.config())) * item


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and one for padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def open_session(folder: Path, **options: Any) -> Any:
    """An engine of one CPU rank on ``folder``, which runs the router's own choice unless told otherwise."""
    from probes.devices import find_devices
    from runtime.options import RunOptions
    from runtime.parallel import Ranks
    from runtime.policy.spec import parse_policy
    from runtime.worker import RankSession

    given: dict[str, Any] = {
        "devices": find_devices("cpu:1"),
        "policy": parse_policy("router"),
        "cache": "lfu",
        "held_out": None,
        "calibration": None,
    }
    return RankSession(RunOptions(model=folder, **(given | options)), Ranks(rank=0, world=1))


def _dense_tensors(config: Any) -> Iterator[Tensor]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            yield name, tuple(parameter.shape)


def _expert_tensors(shape: Shape, prefix: str) -> Iterator[Tensor]:
    """An expert's three matrices lie next to each other, as in published checkpoints."""
    up, down = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    for expert in range(shape.experts):
        for name, size in (("down_proj", down), ("gate_proj", up), ("up_proj", up)):
            yield f"{prefix}mlp.experts.{expert}.{name}.weight", size


class _Random:
    """Weights as bytes: the same few million numbers, from ever another place on."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._dtype = DTYPES[shape.dtype][1]
        self._generator = torch.Generator().manual_seed(seed)
        self._block = (torch.randn(BLOCK, generator=self._generator) * SPREAD).to(self._dtype)

    def write(self, stream: IO[bytes], name: str, size: tuple[int, ...]) -> None:
        left = torch.Size(size).numel()
        if len(size) == 1:  # the scale of a norm
            stream.write(torch.ones(left, dtype=self._dtype).view(torch.uint8).numpy().data)
            return
        at = int(torch.randint(BLOCK, (1,), generator=self._generator))
        # Tokens as unlike as in a trained model: what the layers add alike to all would decide their routing otherwise.
        scale = 1.0 / SPREAD if "embed_tokens" in name else 1.0
        while left:
            part = self._block[at : at + left] * scale
            stream.write(part.view(torch.uint8).numpy().data)
            left -= len(part)
            at = 0


def _write_file(
    path: Path, dense: list[Tensor], experts: list[Tensor], shape: Shape, random: _Random, *, zeros: bool
) -> None:
    code, dtype = DTYPES[shape.dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in dense + experts:
        start, end = end, end + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, size in dense if zeros else dense + experts:
            random.write(stream, name, size)
        stream.truncate(8 + len(text) + end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 10), ("experts", 64), ("top-k", 8), ("hidden", 1024), ("intermediate", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--zeros", action="store_true", help="experts of zeros, as holes in the files")
    given = vars(parser.parse_args())
    folder, zeros = given.pop("folder"), given.pop("zeros")
    shape = Shape(**given)
    write_checkpoint(folder, shape, zeros=zeros)
    sys.stdout.write(f"Wrote {folder}: {shape.experts_bytes / 1e9:.2f} GB of experts of {shape.expert_bytes} bytes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
