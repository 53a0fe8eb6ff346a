"""The automatic brake at work in the live engine: what it samples, what that leaves alone, and when it acts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import runtime.execution
from reports.info.brake import brake_sentence
from runtime.cache import CacheSnapshot
from runtime.policy.guard import Brake, BrakeSettings
from runtime.policy.types import Policy
from runtime.recording import BrakeStep, StepRecord
from runtime.shadow import relative_error
from runtime.worker import RankSession
from store.codec import decode, encode
from store.documents import run_document
from store.records import BrakeStatistics, RunRecord

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]
Recorded = Callable[..., RunRecord]

STEPS = 8
LAYERS = 2
PROMPTS = [list(b"Hello there, my"), list(b"And he said"), list(b"Now is"), list(b"the time for")]
DAMAGING = "importance:theta=0.2,compensation=none"
ALWAYS = BrakeSettings(budget=1e6, sample_every=1)


def opened(open_session: OpenSession, folder: Path, **options: Any) -> tuple[RankSession, Policy]:
    """A session whose caches a prompt has filled, and its policy; the brake has seen nothing."""
    session = open_session(folder, **{"cache_experts": 5, "policy": DAMAGING, **options})
    if session.options.tier == "device":
        session.execution.fill_caches()
    session.run_pass(PROMPTS, session.router, new_tokens=2)
    return session, session.asked_policy()


def brake_steps(records: list[StepRecord]) -> list[BrakeStep]:
    steps = [layer.brake for record in records for layer in record.layers]
    assert all(step is not None for step in steps)
    return [step for step in steps if step is not None]


def same_caches(ours: tuple[CacheSnapshot, ...], theirs: tuple[CacheSnapshot, ...]) -> bool:
    return all(
        np.array_equal(getattr(our, name), getattr(their, name))
        for our, their in zip(ours, theirs, strict=True)
        for name in ("moment", "used", "count", "slot_of", "key", "last")
    )


@pytest.mark.parametrize("tier", ["disk", "device"])
@pytest.mark.parametrize("cache", ["lfu", "forecast:decay=0.9,prefetch=1"])
def test_samples_change_nothing(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType, tier: str, cache: str
) -> None:
    session, policy = opened(open_session, checkpoint("qwen3_moe", top_k=4), tier=tier, cache=cache)
    start = session.execution.snapshot()
    plain, plain_records = stock.engine_logits(session.model, policy, PROMPTS, STEPS)
    end = session.execution.snapshot()
    assert all(layer.brake is None for record in plain_records for layer in record.layers)

    session.execution.restore(start)
    session.execution.brake = Brake(ALWAYS, layers=LAYERS)
    sampled, records = stock.engine_logits(session.model, policy, PROMPTS, STEPS)
    assert torch.equal(torch.stack(sampled), torch.stack(plain))
    assert same_caches(session.execution.snapshot(), end)
    for record, expected in zip(records, plain_records, strict=True):
        for ours, theirs in zip(record.layers, expected.layers, strict=True):
            assert ours.misses_after_D.tolist() == theirs.misses_after_D.tolist()
            assert (ours.removed, ours.rerouted_slots) == (theirs.removed, theirs.rerouted_slots)
    steps = brake_steps(records[1:])
    assert session.execution.brake.samples == len(steps) == (STEPS - 1) * LAYERS
    assert any(step.error > 0 and step.fetches > 0 for step in steps if step.error is not None)
    assert all(record.timers.shadow > 0 for record in records[1:])


def test_while_decoding_only(checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType) -> None:
    session, policy = opened(open_session, checkpoint("qwen3_moe", top_k=4))
    session.execution.brake = Brake(ALWAYS, layers=LAYERS)
    _, (prefill, *_) = stock.engine_logits(session.model, policy, PROMPTS, 2)
    assert [step.error for step in brake_steps([prefill])] == [None] * LAYERS
    assert prefill.timers.shadow == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_sample_is_the_layer_as_the_router_computes_it(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The first MoE layer of a step that begins alike: there, the router's own pass is at hand to compare with."""
    session, policy = opened(open_session, checkpoint(family, top_k=4), cache_experts=3)
    seen: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def spied(policy_TH: torch.Tensor, router_TH: torch.Tensor, real_T: Any) -> float:
        error = relative_error(policy_TH, router_TH, real_T)
        seen.append((policy_TH.clone(), router_TH.clone(), error))
        return error

    monkeypatch.setattr(runtime.execution, "relative_error", spied)
    outputs: list[torch.Tensor] = []
    session.loaded.experts[0].register_forward_hook(lambda *given: outputs.append(given[2].clone()))
    ids = torch.tensor([[5], [77], [12]])
    start = session.execution.snapshot()
    session.execution.brake = Brake(ALWAYS, layers=LAYERS)
    for chosen in (policy, session.router):
        session.execution.restore(start)
        with torch.inference_mode():
            session.model.step(ids, torch.ones_like(ids), session.model.begin(), chosen, prefill=False)
    by_policy, by_router = outputs
    policy_TH, router_TH, error = seen[0]
    assert torch.equal(policy_TH, by_policy)
    assert torch.equal(router_TH, by_router)
    plain = math.sqrt(float(((by_policy - by_router).double() ** 2).sum() / (by_router.double() ** 2).sum()))
    assert error == pytest.approx(plain, rel=1e-6)
    assert error > 0.01


def test_an_engaged_brake_is_the_router_to_the_last_bit(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    session, policy = opened(open_session, checkpoint("qwen3_moe", top_k=4))
    start = session.execution.snapshot()
    router, router_records = stock.engine_logits(session.model, session.router, PROMPTS, STEPS)
    end = session.execution.snapshot()
    session.execution.restore(start)
    session.execution.brake = Brake(BrakeSettings(budget=0.1), layers=LAYERS)
    session.execution.brake.observe(math.inf)
    braked, records = stock.engine_logits(session.model, policy, PROMPTS, STEPS)
    assert torch.equal(torch.stack(braked), torch.stack(router))
    assert same_caches(session.execution.snapshot(), end)
    assert all(step == BrakeStep(braked=True) for step in brake_steps(records))
    assert session.execution.brake.braked_steps == STEPS * LAYERS
    for record, expected in zip(records, router_records, strict=True):
        for ours, theirs in zip(record.layers, expected.layers, strict=True):
            assert ours.removed == 0
            assert ours.misses_after_D.tolist() == theirs.misses_after_D.tolist()


def test_a_policy_that_damages_the_output_trips_it_and_a_benign_one_does_not(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    folder = checkpoint("qwen3_moe", top_k=4)
    settings = BrakeSettings(budget=0.05, sample_every=3, mean_over=2, hold=6, longest_hold=6)
    for text, trips in ((DAMAGING, True), ("caee:theta=1", False)):
        session, policy = opened(open_session, folder, policy=text)
        session.execution.brake = Brake(settings, layers=LAYERS)
        _, records = stock.engine_logits(session.model, policy, PROMPTS, 3 * STEPS)
        layers = [layer for record in records for layer in record.layers]
        steps = brake_steps(records)
        brake = session.execution.brake
        assert sum(step.tripped for step in steps) == brake.trips
        assert sum(step.braked for step in steps) == brake.braked_steps
        assert (brake.trips > 1) == trips
        assert brake.samples > 0
        for layer, step in zip(layers, steps, strict=True):
            assert not (step.braked and layer.removed > 0)
        for at, step in enumerate(steps):
            if step.tripped:
                held = steps[at + 1 : at + 1 + settings.hold]
                assert all(each.braked for each in held)
        if trips:
            # Between two brakes the policy is given another chance.
            assert sum(layer.removed > 0 for layer, step in zip(layers, steps, strict=True) if not step.braked) > 2


def test_scores_that_are_no_numbers_are_no_sample(
    checkpoint: Checkpoint, open_session: OpenSession, stock: ModuleType
) -> None:
    session, policy = opened(open_session, checkpoint("qwen3_moe", top_k=4))
    session.execution.brake = Brake(ALWAYS, layers=LAYERS)
    with torch.no_grad():
        session.loaded.model.model.layers[1].mlp.gate.weight[3] = float("nan")
    _, records = stock.engine_logits(session.model, policy, PROMPTS, 2)
    first, second = brake_steps(records[1:])
    assert first.error is not None
    assert second == BrakeStep(braked=False)


def test_errors_are_of_real_tokens_and_of_what_is_not_zero() -> None:
    router = torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 0.0]])
    policy = torch.tensor([[3.0, 3.0], [9.0, 9.0], [0.0, 0.0]])
    assert relative_error(policy, router, np.array([True, False, True])) == pytest.approx(0.2)
    assert relative_error(policy, router, np.array([False, False, True])) == 0.0
    assert relative_error(policy + 1, router, np.array([False, False, True])) == math.inf
    assert math.isnan(relative_error(policy, router * math.nan, np.array([True, True, True])))


def test_the_samples_time_is_in_no_figure(
    checkpoint: Checkpoint, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shadow samples of a minute each, by a clock that only they move, leave TPOT and steps as they are."""
    session, policy = opened(open_session, checkpoint("qwen3_moe", top_k=4))
    session.execution.brake = Brake(ALWAYS, layers=LAYERS)
    import time

    ahead = [0.0]
    plain = time.perf_counter

    def slow(policy_TH: torch.Tensor, router_TH: torch.Tensor, real_T: Any) -> float:
        ahead[0] += 60.0
        return relative_error(policy_TH, router_TH, real_T)

    monkeypatch.setattr(time, "perf_counter", lambda: plain() + ahead[0])
    monkeypatch.setattr(runtime.execution, "relative_error", slow)
    record = session.run_pass(PROMPTS, policy, new_tokens=4)
    assert sum(step.timers.shadow for step in record.steps) > 60.0
    assert record.tpot_seconds < 60.0
    assert all(step.seconds < 60.0 for step in record.steps)
    for step in record.steps:
        timers = step.timers
        assert timers.decide + timers.fetch_wait + timers.experts + timers.exchange < 60.0


WHOLE_RUN = {"policy": DAMAGING, "batch_size": 2, "max_new_tokens": 8, "pairs": 1}


def test_the_record_says_what_the_brake_did(checkpoint: Checkpoint, recorded: Recorded) -> None:
    settings = BrakeSettings(budget=0.01, sample_every=3, mean_over=1, hold=2, longest_hold=2)
    held_out = "It was the best of times, it was the worst of times."
    quality = {"held_out": held_out, "quality_tokens": 8, "quality_sequences": 2}
    record = recorded(checkpoint("qwen3_moe", top_k=4), brake=settings, **WHOLE_RUN, **quality)
    brake = record.brake
    assert isinstance(brake, BrakeStatistics)
    assert (brake.budget, brake.sample_every, brake.layer_steps) == (0.01, 3, 8 * LAYERS)
    assert 0 < brake.trips == brake.samples
    assert brake.trips < brake.braked_layer_steps <= 2 * brake.trips
    assert brake.mean_error is not None
    assert brake.highest_error is not None
    assert 0.01 < brake.mean_error <= brake.highest_error
    assert brake.shadow_fetches > 0
    assert brake.shadow_seconds > 0
    assert brake.quality_layer_steps == 7 * LAYERS
    assert brake.quality_trips
    assert brake.quality_braked_layer_steps
    assert run_document(record)["brake"]["trips"] == brake.trips
    assert decode(encode(record), RunRecord) == record
    assert f"acted {brake.trips} time" in brake_sentence(brake)


def test_no_brake_is_no_figure_and_older_records_have_none(checkpoint: Checkpoint, recorded: Recorded) -> None:
    record = recorded(checkpoint("qwen3_moe", top_k=4), **WHOLE_RUN)
    assert record.brake is None
    assert run_document(record)["brake"] is None
    older = encode(record)
    del older["brake"]
    assert decode(older, RunRecord) == record
