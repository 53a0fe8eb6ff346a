"""The live engine against what it stands on, everything in turn with its peer.

    python benchmarks/engine.py [--rounds N]

1. Time per output token with the adapter attached, all experts on the device and nothing pruned, against the stock
   model of transformers, in pairs of short passes on the same prompts, on layers of 5 ms or more. Both are given the
   same arguments, attention mask and positions among them, as transformers' own ``generate`` does. It is said twice:
   against a stock model with memory of its own, and against one whose experts are the engine's slots, since where
   weights lie shows in the time of both.
2. A decode step whose fetches run beside the experts already there, against the same step with fetch and computation
   one after the other.
3. Bytes per second of the transfer engine, from disk and from host memory into slots, against the raw path that `caee
   probe` measures, over the same bytes, for experts of 1 MB and more.

Prints medians of paired ratios with 95 % intervals. Exit code 1 where the two models' tokens differ, or where an
interval lies wholly beyond what is wanted: 1.05 for the first, 0.9 for the third.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import Shape, open_session, write_checkpoint

from probes.disk import DirectFile, aligned_buffer
from probes.sampling import median_interval
from runtime.experts.memory import tensor_of
from runtime.experts.transfer import ExpertSource, HostSource, Request, Ticket, TransferEngine

LAYERS, EXPERTS = 4, 16
SMALL = Shape(layers=LAYERS, experts=EXPERTS, top_k=4, hidden=384, intermediate=384)
LARGE = Shape(layers=LAYERS, experts=EXPERTS, top_k=4, hidden=1024, intermediate=384)
BATCH, STEPS = 8, 80
PASS_STEPS, PASS_WARMUP = 24, 4
PROMPTS = tuple("ABCDEFGH"[n] * 16 for n in range(BATCH))
MOST_RATIO = 1.05
LEAST_BANDWIDTH = 0.9
READS = SLOTS = 48
"""More bytes than caches hold, each read into a place of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="of reads and of passes")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        small, large = Path(temporary) / "small", Path(temporary) / "large"
        write_checkpoint(small, SMALL)
        write_checkpoint(large, LARGE)
        good = [compare_models(folder, rounds) for folder in (small, large)]
        for tier in ("disk", "host"):
            compare_overlap(large, tier, max(2, rounds // 8))
        good += [compare_reads(folder, tier, rounds) for folder in (small, large) for tier in ("disk", "host")]
    return 0 if all(good) else 1


def shown(ratios: Sequence[float]) -> tuple[float, tuple[float, float], str]:
    """Median, its interval, and both in words."""
    median = statistics.median(ratios)
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return median, (low, high), f"{median:.3f} [{low:.3f}, {high:.3f}] over {len(ratios)} pairs"


# 1 --------------------------------------------------------------------------------------------------------------------


def compare_models(folder: Path, rounds: int) -> bool:
    """Print TPOT with the adapter ÷ that of the stock model; whether both say the same and it is near 1."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    session = open_session(folder, tier="device", prompts=PROMPTS, batch_size=BATCH)
    try:
        session.execution.fill_caches()
        places = weights_of(stock, session)
        prompts = torch.tensor(session.encoded_prompts())
        same, turns, chance = True, [], random.Random(0)
        for number in range(rounds + 1):
            seconds, written = {}, []
            for side in chance.sample(["ours", *places], 1 + len(places)):
                if side in places:
                    for module, weights in places[side]:
                        module._parameters.update(weights)
                step = our_step(session) if side == "ours" else their_step(stock)
                seconds[side], tokens = decoded(step, prompts)
                written.append(tokens)
            same = same and all(tokens == written[0] for tokens in written)
            if number > 0:
                turns.append(seconds)
    finally:
        session.close()
    good = same
    for side in places:
        layer = statistics.median(turn[side] for turn in turns) / LAYERS
        _, (low, _), words = shown([turn["ours"] / turn[side] for turn in turns])
        good = good and low <= MOST_RATIO
        print(
            f"TPOT, adapter ÷ stock, {side}: {words}, batch {BATCH}, {layer * 1e3:.1f} ms a layer; same tokens: {same}"
        )
    return good


Weights = list[tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]]


def weights_of(stock: Any, session: Any) -> dict[str, Weights]:
    """Every expert module of ``stock`` with its parameters: its own ones, and the engine's slots, which hold the same
    experts of a layer one after the other."""
    modules, own, slots = dict(stock.named_modules()), [], []
    names = {id(module): name for name, module in session.loaded.model.named_modules()}
    for layer, module in enumerate(session.loaded.experts):
        theirs = modules[names[id(module)]]
        first, *others = session.execution.books[0].slots_of(layer, np.arange(EXPERTS))
        assert others == list(range(first + 1, first + EXPERTS)), "filled in order"
        own.append((theirs, dict(theirs._parameters)))
        shared = {name: pool[first : first + EXPERTS] for name, pool in session.pool.parameters.items()}
        assert all(torch.equal(shared[name], theirs._parameters[name]) for name in shared)
        slots.append((theirs, {name: torch.nn.Parameter(each, requires_grad=False) for name, each in shared.items()}))
    return {"memory of its own": own, "the same memory": slots}


def decoded(step: Callable[[torch.Tensor], list[int]], prompts: torch.Tensor) -> tuple[float, list[list[int]]]:
    """Seconds per token of one pass, after some for warming up, and what it wrote."""
    tokens, ids, start = [], prompts, 0.0
    for number in range(PASS_WARMUP + PASS_STEPS):
        if number == PASS_WARMUP:
            start = time.perf_counter()
        tokens.append(step(ids))
        ids = torch.tensor(tokens[-1])[:, None]
    return (time.perf_counter() - start) / PASS_STEPS, tokens


def our_step(session: Any) -> Callable[[torch.Tensor], list[int]]:
    """The engine's next step on given ids [B, S]: the likeliest tokens."""
    key_values, length = session.model.begin(), 0

    @torch.inference_mode()
    def step(ids: torch.Tensor) -> list[int]:
        nonlocal length
        prefill, length = length == 0, length + ids.shape[1]
        mask = torch.ones((len(ids), length), dtype=torch.int64)
        logits, _ = session.model.step(ids, mask, key_values, session.router, prefill=prefill)
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    return step


def their_step(model: Any) -> Callable[[torch.Tensor], list[int]]:
    from transformers import DynamicCache

    # Newer families of transformers call it `cache`.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept, length = {name: DynamicCache()}, 0

    @torch.inference_mode()
    def step(ids: torch.Tensor) -> list[int]:
        nonlocal length
        length += ids.shape[1]
        mask = torch.ones((len(ids), length), dtype=torch.int64)
        positions = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **kept).logits
        chosen: list[int] = logits[:, -1].argmax(-1).tolist()
        return chosen

    return step


# 2 --------------------------------------------------------------------------------------------------------------------


class InTurn:
    """The transfer engine, which waits for every fetch before anything computes where ``in_turn`` is set."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self.in_turn = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def fetch(self, requests: Sequence[Request]) -> Ticket:
        ticket = self._engine.fetch(requests)
        if self.in_turn:
            ticket.wait()
        return ticket


def compare_overlap(folder: Path, tier: str, rounds: int) -> None:
    """Print a step's time with overlap ÷ in turn: every step twice from the same caches, once in each way."""
    experts = LAYERS * EXPERTS // 2
    session = open_session(folder, tier=tier, prompts=PROMPTS, batch_size=BATCH, cache_experts=experts)
    try:
        transfers = InTurn(session.transfers)
        session.execution._transfers = transfers
        prompts = torch.tensor(session.encoded_prompts())
        our_step(session)(prompts)  # fills the caches
        ratios, seconds = [], []
        for number in range(rounds):
            snapshot = session.execution.snapshot()
            passes = []
            for first in (number % 2, 1 - number % 2):
                session.execution.restore(snapshot)
                transfers.in_turn = False
                passes.append(decode_in_turn(our_step(session), prompts, transfers, first))
            for one, other in zip(*passes, strict=True):
                beside, after = (one, other) if not one[0] else (other, one)
                ratios.append(beside[1] / after[1])
                seconds.append(after[1])
    finally:
        session.close()
    _, _, words = shown(ratios)
    layer = statistics.median(seconds) / LAYERS
    print(f"layer, fetches beside ÷ before what is there, {tier}: {words}, {layer * 1e3:.1f} ms in turn")


def decode_in_turn(
    step: Callable[[torch.Tensor], list[int]], prompts: torch.Tensor, transfers: InTurn, first: int
) -> list[tuple[bool, float]]:
    """Seconds of every decode step, every other of which fetches before it computes."""
    chosen, found = step(prompts), []
    for number in range(STEPS // 4):
        transfers.in_turn = number % 2 == first
        start = time.perf_counter()
        chosen = step(torch.tensor(chosen)[:, None])
        found.append((transfers.in_turn, time.perf_counter() - start))
    return found


# 3 --------------------------------------------------------------------------------------------------------------------


def compare_reads(folder: Path, tier: str, rounds: int) -> bool:
    """Print the transfer engine's bytes per second ÷ those of the raw path; whether they are near enough."""
    session = open_session(folder, tier="disk", prompts=PROMPTS, batch_size=BATCH, cache_experts=SLOTS)
    index, wanted = session.index, [(number % LAYERS, number % EXPERTS) for number in range(READS)]
    with ExitStack() as stack:
        stack.callback(session.close)
        source: ExpertSource = session._source()
        raw = raw_reads(session, wanted, stack)
        if tier == "host":
            source = HostSource(index, session.backend, sorted(set(wanted)))
            raw = raw_copies(session, source, wanted)
        engine = TransferEngine(session.backend, source, session.pool)
        stack.callback(engine.close)
        requests = [Request(layer, expert, number % SLOTS) for number, (layer, expert) in enumerate(wanted)]
        contenders = [raw, lambda: engine.fetch(requests).wait()]
        chance, pairs = random.Random(0), []
        for number in range(rounds + 2):
            order, seconds = [0, 1], [0.0, 0.0]
            chance.shuffle(order)
            for contender in order:
                start = time.perf_counter()
                contenders[contender]()
                seconds[contender] = time.perf_counter() - start
            if number >= 2:
                pairs.append(seconds)
    rate = READS * index.expert_bytes / statistics.median(plain for plain, _ in pairs) / 1e9
    _, (_, high), words = shown([plain / ours for plain, ours in pairs])
    print(
        f"bandwidth, engine ÷ raw, {tier}: {words}, experts of {index.expert_bytes / 1e6:.1f} MB, raw {rate:.2f} GB/s "
        f"({source.mode or 'memory'})"
    )
    return high >= LEAST_BANDWIDTH


def raw_reads(session: Any, wanted: list[tuple[int, int]], stack: ExitStack) -> Callable[[], None]:
    """The probe's reads of the very bytes that the engine fetches, each into memory of its own, as the engine's slots
    are: a buffer that is read into again and again never leaves the processor's caches."""
    reads = [read for layer, expert in wanted for read in session.index.reads[layer][expert]]
    files = {path: stack.enter_context(DirectFile(path)) for path in {read.path for read in reads}}
    size = max(files[read.path].span_bytes(read.offset, read.size_bytes) for read in reads)
    buffers = [aligned_buffer(size) for _ in range(SLOTS)]

    def read_all() -> None:
        for number, read in enumerate(reads):
            files[read.path].read_into(read.offset, read.size_bytes, buffers[number % SLOTS])

    return read_all


def raw_copies(session: Any, source: ExpertSource, wanted: list[tuple[int, int]]) -> Callable[[], None]:
    """The probe's copies, from where the experts wait to as many places as the engine has slots."""
    backend, size = session.backend, session.index.expert_bytes
    places = [backend.device_buffer(size) for _ in range(SLOTS)]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (layer, expert) in enumerate(wanted):
        parts: list[torch.Tensor] = []
        source.deliver(layer, expert, None, lambda _, data, start, parts=parts: parts.append(tensor_of(data)))
        for part, place in zip(parts, places[number % SLOTS].split([len(part) for part in parts]), strict=True):
            pairs.append((place, part))

    def copy_all() -> None:
        for place, part in pairs:
            backend.copy(place, part)
        backend.synchronize()

    return copy_all


if __name__ == "__main__":
    sys.exit(main())
