"""How much faster at which loss: ``caee`` and ``budget`` on the demo model, and what re-routing is worth.

    python benchmarks/frontier.py [--rounds N] [--passages N] [--no-times] [--devices cpu:2]

One session for everything. Loss, divergence and fetches come from held-out passages, teacher-forced in lockstep on each
policy's own caches, and do not depend on the machine's load. Times come from rounds in which the router's own choice
and every setting decode the same prompts once, in an order that turns from round to round; intervals are over rounds.

Writes Markdown tables to standard output, and what is done to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from probes.devices import find_devices
from runtime.demo import held_out_path, model_path, prompts_path
from runtime.launch import launch
from runtime.options import RunOptions, read_prompts, read_text
from runtime.parallel import join, leave
from runtime.policy.spec import parse_policy
from runtime.policy.types import SHARE_UNIT, Policy
from runtime.recording import StepRecord
from runtime.statistics import mean_difference_interval, paired_ratio
from runtime.worker import RankSession
from runtime.workload import held_out_passages
from store.records import Ratio

LIMIT = 0.01
ROUTER = "router"
THETAS = (0.8, 0.7, 0.6, 0.5, 0.4)
EPSILONS = (0.01, 0.02, 0.04, 0.08)
ABLATED = (0.8, 0.6, 0.4)
FRONTIER = {
    "caee": tuple(f"caee:theta={theta}" for theta in THETAS),
    "budget": tuple(f"budget:epsilon={epsilon}" for epsilon in EPSILONS),
}
SLOTS = {
    "re-routed by score": "caee:theta={}",
    "a random kept expert": "random:theta={}",
    "dropped": "caee:theta={},compensation=none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every rank is told. ``rounds`` 0: no times."""

    options: RunOptions
    settings: tuple[str, ...]
    timed: tuple[str, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One policy on the held-out passages. ``loss_B`` nats per token, by passage; ``kl``: from the router's choice."""

    loss_B: np.ndarray
    kl: float
    fetches: float
    removed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """By policy as written. ``tpot``: seconds, by round."""

    settings: dict[str, Setting]
    tpot: dict[str, list[float]]


def measure_rank(request: Request) -> Figures:
    """The program of one rank."""
    ranks = join("cpu")
    try:
        session = RankSession(request.options, ranks)
        try:
            return measure(session, request)
        finally:
            session.close()
    finally:
        leave(ranks)


def measure(session: RankSession, request: Request) -> Figures:
    """Losses of all settings, then rounds of timed passes."""
    options = request.options
    prompts, size = session.encoded_prompts(), options.batch_size
    batches = [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]
    assert options.held_out is not None
    passages, _ = held_out_passages(
        session.loaded.tokenizer.encode(options.held_out, add_special_tokens=False),
        length=options.quality_tokens,
        count=options.quality_sequences,
        search=False,
    )
    session.run_pass(batches[0], session.router)
    start = session.execution.snapshot()
    reference: list[torch.Tensor] = []
    settings = {}
    for at, text in enumerate((ROUTER, *request.settings)):
        began = time.perf_counter()
        session.execution.restore(start)
        settings[text] = on_passages(session, passages, session.policy_of(parse_policy(text)), reference)
        found, seconds = settings[text], time.perf_counter() - began
        tell(
            session,
            f"{at + 1}/{len(request.settings) + 1} {text}: loss {found.loss_B.mean():.4f}, KL {found.kl:.4f}, fetches "
            f"{found.fetches:.2f}, removed {found.removed:.5f} ({seconds:.0f} s)",
        )
    tpot: dict[str, list[float]] = {text: [] for text in (ROUTER, *request.timed)}
    policies = {text: session.policy_of(parse_policy(text)) for text in tpot}
    for number in range(request.rounds):
        turned = [*tpot][number % len(tpot) :] + [*tpot][: number % len(tpot)]
        for text in turned:
            session.execution.restore(start)
            done = session.run_pass(batches[number % len(batches)], policies[text])
            tpot[text].append(done.tpot_seconds)
        tell(session, f"round {number + 1}/{request.rounds}")
    return Figures(settings=settings, tpot=tpot)


@torch.inference_mode()
def on_passages(
    session: RankSession, passages: list[list[int]], policy: Policy, reference: list[torch.Tensor]
) -> Setting:
    """The first call fills ``reference`` with log-probabilities, step by step; later ones are compared with it."""
    size, first = session.options.batch_size, not reference
    steps: list[StepRecord] = []
    losses, divergences, at = [], [], 0
    for begin in range(0, len(passages), size):
        ids = torch.tensor(passages[begin : begin + size])
        key_values, mask, rows = session.model.begin(), torch.zeros_like(ids[:, :0]), []
        for position in range(ids.shape[1] - 1):
            mask = torch.cat([mask, mask.new_ones((len(ids), 1))], 1)
            token = ids[:, position : position + 1]
            logits, step = session.model.step(token, mask, key_values, policy, prefill=False)
            log_shares = logits.float().log_softmax(-1)
            if first:
                reference.append(log_shares)
            expected, at = reference[at], at + 1
            divergences.append(float((expected.exp() * (expected - log_shares)).sum(-1).mean()))
            rows.append(-log_shares.gather(1, ids[:, position + 1 : position + 2])[:, 0])
            steps.append(step)
        losses.append(torch.stack(rows).mean(0).double().numpy())
    layers = [layer for step in steps for layer in step.layers]
    return Setting(
        loss_B=np.concatenate(losses),
        kl=float(np.mean(divergences)),
        fetches=sum(int(layer.misses_after_D.max()) for layer in layers) / len(steps),
        removed=sum(layer.removed for layer in layers) / SHARE_UNIT / sum(s.tokens * len(s.layers) for s in steps),
    )


def tell(session: RankSession, text: str) -> None:
    """One line, from rank 0 alone."""
    if session.ranks.rank == 0:
        sys.stderr.write(f"{text}\n")


def rise(figures: Figures, text: str) -> tuple[float, float, float]:
    """Rise of the loss as a share of the router's, and the ends of its 95 % interval over passages."""
    before, after = figures.settings[ROUTER].loss_B, figures.settings[text].loss_B
    low, high = mean_difference_interval(after - before, seed=0)
    return tuple(float(value / before.mean()) for value in ((after - before).mean(), low, high))  # type: ignore[return-value]


def gain(figures: Figures, text: str) -> Ratio | None:
    """TPOT against the router's, over rounds."""
    if not figures.tpot.get(text):
        return None
    return paired_ratio(figures.tpot[ROUTER], figures.tpot[text], seed=0)


def shown(share: float, digits: int = 2) -> str:
    """A signed percentage."""
    return f"{100 * share:+.{digits}f} %".replace("-", "−")


def with_interval(middle: float, low: float, high: float, digits: int = 2) -> str:
    return f"{shown(middle, digits)} [{shown(low, digits)}, {shown(high, digits)}]"


def shown_ratio(ratio: Ratio) -> str:
    if ratio.ci95 is None:  # too few pairs
        return shown(ratio.ratio - 1, 1)
    return with_interval(ratio.ratio - 1, ratio.ci95[0] - 1, ratio.ci95[1] - 1, 1)


def row(figures: Figures, text: str, *, timed: bool) -> str:
    """One setting as a line of a Markdown table."""
    setting, router = figures.settings[text], figures.settings[ROUTER]
    cells = [
        f"`{text}`",
        f"{setting.fetches:.1f}",
        shown(setting.fetches / router.fetches - 1, 1),
        f"{1000 * setting.removed:.1f}",
        with_interval(*rise(figures, text)),
        f"{setting.kl:.4f}",
    ]
    if timed and (ratio := gain(figures, text)):
        cells.append(shown_ratio(ratio))
    return f"| {' | '.join(cells)} |"


def frontier_table(figures: Figures) -> list[str]:
    """All settings of both policies."""
    timed = bool(figures.tpot[ROUTER])
    heads = ["policy", "fetches per step", "change", "removed, ‰", "held-out loss", "KL, nats"]
    heads += ["time per output token"] if timed else []
    router = figures.settings[ROUTER]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    own = [f"{np.median(figures.tpot[ROUTER]) * 1e3:.1f} ms"] if timed else []
    cells = [f"`{ROUTER}`", f"{router.fetches:.1f}", "", "0", f"{router.loss_B.mean():.4f} nats per token", "0", *own]
    lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *(row(figures, text, timed=timed) for texts in FRONTIER.values() for text in texts)]


def ablation_table(figures: Figures) -> list[str]:
    """What becomes of lost slots: rise of loss, and divergence, by θ."""
    heads = ["lost slots", *(f"θ = {theta}" for theta in ABLATED)]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * len(ABLATED)}"]
    for name, pattern in SLOTS.items():
        texts = [pattern.format(theta) for theta in ABLATED]
        cells = [f"{with_interval(*rise(figures, text))}, KL {figures.settings[text].kl:.4f}" for text in texts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def answers(figures: Figures) -> list[str]:
    """What is to be had within the limit: by policy, the most aggressive setting tried, chosen by its loss alone."""
    lines = []
    for name, texts in FRONTIER.items():
        within = [text for text in texts if rise(figures, text)[2] <= LIMIT]
        if not within:
            lines.append(f"- `{name}`: no setting tried keeps the loss within {100 * LIMIT:g} %.")
            continue
        setting, ratio = figures.settings[within[-1]], gain(figures, within[-1])
        fetches = shown(setting.fetches / figures.settings[ROUTER].fetches - 1, 1)
        times = "" if ratio is None else f"time per output token {shown_ratio(ratio)}, "
        lines.append(
            f"- At a rise of loss of at most {100 * LIMIT:g} % (upper end of its interval), `{within[-1]}`: {times}"
            f"fetches of the busiest device {fetches}, loss {with_interval(*rise(figures, within[-1]))}."
        )
    return lines


def request_of(given: argparse.Namespace) -> Request:
    """The demo model with the defaults of ``caee run``."""
    ablated = [pattern.format(theta) for pattern in SLOTS.values() for theta in ABLATED]
    timed = tuple(text for texts in FRONTIER.values() for text in texts)
    options = RunOptions(
        model=model_path(),
        devices=find_devices(given.devices),
        tier="disk",
        policy=parse_policy(ROUTER),
        cache="lfu",
        prompts=read_prompts(prompts_path()),
        held_out=read_text(held_out_path()),
        calibration=None,
        quality_sequences=given.passages,
    )
    rounds = 0 if given.no_times else given.rounds
    return Request(options=options, settings=tuple(dict.fromkeys([*timed, *ablated])), timed=timed, rounds=rounds)


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--passages", type=int, default=24)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--devices", default="cpu:2")
    request = request_of(parser.parse_args())
    figures: Figures = launch(measure_rank, request, processes=len(request.options.devices))
    parts: Sequence[Sequence[str]] = (frontier_table(figures), ablation_table(figures), answers(figures))
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
