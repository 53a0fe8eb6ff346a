"""A whole run of one rank in this process: quality, the record that is stored, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from probes.errors import InputError, UsageError
from probes.records import Calibration, Concurrency, LinkKind, LinkMode, LinkModel, ModelForm
from runtime.quality import measure_quality
from runtime.worker import RankSession
from store.documents import run_document
from store.records import RunRecord
from store.session import open_store

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]
Recorded = Callable[..., RunRecord]

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."
SECONDS_PER_EXPERT = 2e-3


def calibration(*, disk_bytes_per_s: float) -> Calibration:
    """The disk's cost model alone, without a constant part."""
    model = LinkModel(
        model_id="disk",
        kind=LinkKind.DISK_TO_HOST,
        source="disk",
        destination="host",
        mode=LinkMode.DIRECT,
        concurrency=Concurrency.SOLO,
        form=ModelForm.AFFINE,
        alpha=1.0,
        bandwidth_bytes_per_s=disk_bytes_per_s,
        beta_seconds=0.0,
        n_half_bytes=0.0,
        segments=None,
        ci95=None,
        holdout_mape=None,
        max_relative_error=None,
        status="ok",
    )
    return Calibration(
        calibration_id="calibration-1",
        created_at="2026-03-01T12:00:00+00:00",
        probe_id=None,
        origin="test",
        fingerprint=None,
        devices=(),
        models=(model,),
        link_groups=(),
    )


@pytest.fixture(scope="module")
def record(checkpoint: Checkpoint, recorded: Recorded) -> RunRecord:
    """Three pairs on the disk tier, with a calibration and quality."""
    expert_bytes = 3 * 32 * 32 * 4
    return recorded(
        checkpoint("qwen3_moe", top_k=4),
        policy="caee:theta=0.6",
        prompts=tuple(TEXT[at : at + 9] for at in range(5)),
        held_out=TEXT,
        calibration=calibration(disk_bytes_per_s=expert_bytes / SECONDS_PER_EXPERT),
        dtype="auto",
        batch_size=4,
        max_new_tokens=6,
        pairs=3,
        quality_tokens=12,
        quality_sequences=4,
    )


def test_the_record_adds_up(record: RunRecord) -> None:
    work = record.workload
    assert (work.pairs, work.batch_size, work.prompts, work.moe_layers) == (3, 4, 5, 2)
    assert (work.num_experts, work.top_k, work.expert_bytes) == (8, 4, 3 * 32 * 32 * 4)
    assert (work.experts_per_device, work.cache_experts) == (16, 8)
    for statistics in (record.baseline, record.with_policy):
        assert statistics.steps == 3 * 5
        assert statistics.tokens == 4 * 6
        assert len(statistics.ttft_seconds.samples) == len(statistics.tpot_seconds.samples) == 3
        parts = dataclasses.asdict(statistics.step_times)
        assert sum(parts.values()) == pytest.approx(2 * parts["total"])
        assert 0 <= statistics.hit_rate <= 1
        assert statistics.misses_per_device[0] == pytest.approx(statistics.max_device_misses_per_step * 15)
    assert record.baseline.removed_importance == 0 < record.with_policy.removed_importance
    assert record.with_policy.max_device_misses_per_step < record.baseline.max_device_misses_per_step
    assert record.policy.parameters["theta"] == 0.6
    assert record.policy.parameters["renormalize"] == "survivors"
    assert any("the first 4 of 5 prompts" in warning for warning in record.warnings)
    assert record.samples[0].prompt == TEXT[:9]


def test_what_is_not_as_asked_is_said(
    checkpoint: Checkpoint, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.disk._open_direct", lambda path: (-1, "refused"))
    warnings = recorded(checkpoint("qwen3_moe", top_k=4), pairs=2, cache_experts=99, max_new_tokens=2).warnings
    assert [each for each in warnings if each.startswith("fewer than 3 pairs")]
    assert "--cache-experts 99: a device holds 16, all cached" in warnings
    assert [each for each in warnings if each.startswith("reads were not direct (refused)")]


def test_costs_before_and_after_are_fetches_times_seconds(record: RunRecord) -> None:
    assert len(record.layers) == 2
    for layer in record.layers:
        for cost, misses in (
            (layer.device_cost_before, layer.device_misses_before),
            (layer.device_cost_after, layer.device_misses_after),
        ):
            assert cost == pytest.approx([count * SECONDS_PER_EXPERT for count in misses])
        assert sum(layer.gap_histogram_before) == sum(layer.gap_histogram_after) == 15
        assert layer.device_misses_after[0] <= layer.device_misses_before[0]
        assert 0 < layer.importance_lowest <= layer.importance_highest <= 1
    after = sum(layer.device_misses_after[0] for layer in record.layers)
    assert after == pytest.approx(record.with_policy.max_device_misses_per_step)


def test_the_prediction_stands_beside_what_was_measured(record: RunRecord) -> None:
    predicted = record.predicted
    assert predicted is not None
    assert predicted.seconds_per_expert == pytest.approx((SECONDS_PER_EXPERT,))
    assert predicted.tpot_seconds > record.with_policy.max_device_misses_per_step * SECONDS_PER_EXPERT
    assert predicted.relative_error == pytest.approx(
        predicted.tpot_seconds / record.with_policy.tpot_seconds.median - 1
    )


def test_the_record_survives_the_store_and_becomes_json(record: RunRecord, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "store.db")) as store:
        # The run names its calibration, which has to be there.
        store.save_calibration(calibration(disk_bytes_per_s=1e9))
        store.save_run(record)
        assert store.run(record.run_id) == record
        assert store.check() == ()
    document = json.loads(json.dumps(run_document(record), allow_nan=False))
    assert document["schema"] == "caee.run/1"
    assert document["policy"]["name"] == "caee"
    assert document["gain"]["tpot"]["ratio"] == record.gain_tpot.ratio


def test_quality_is_finite_and_decode_shaped(record: RunRecord) -> None:
    quality = record.quality
    assert quality is not None
    assert (quality.sequences, quality.tokens) == (4, 4 * 11)
    assert quality.perplexity_ratio == pytest.approx(math.exp(quality.nll_policy - quality.nll_baseline))
    assert quality.nll_difference_ci95[0] <= quality.nll_policy - quality.nll_baseline <= quality.nll_difference_ci95[1]
    assert quality.mean_kl > 0
    assert 0 < quality.top1_agreement <= 1


def sequences_of(session: RankSession, count: int, length: int) -> list[list[int]]:
    ids = session.loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    return [ids[at : at + length] for at in range(count)]


def test_a_policy_that_prunes_nothing_costs_nothing(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe", top_k=4), policy="caee:theta=1", cache_experts=5)
    session.run_pass([[1, 2, 3]], session.router)
    quality = measure_quality(
        session.model, sequences_of(session, 5, 10), session.router, session.asked_policy(), batch_size=2, seed=0
    )
    assert quality.nll_policy == quality.nll_baseline
    assert quality.nll_difference_ci95 == (0.0, 0.0)
    assert (quality.mean_kl, quality.top1_agreement, quality.perplexity_ratio) == (0.0, 1.0, 1.0)


def test_the_loss_is_that_of_transformers(checkpoint: Checkpoint, open_session: OpenSession, stock: object) -> None:
    """One token a step gives the loss of a whole forward, to rounding."""
    folder = checkpoint("qwen3_moe", top_k=4)
    session = open_session(folder, cache_experts=5)
    session.run_pass([[1, 2, 3]], session.router)
    sequences = sequences_of(session, 3, 14)
    steps = []
    step = session.model.step

    def watched(ids: torch.Tensor, *arguments: object, **options: object) -> object:
        steps.append(tuple(ids.shape))
        return step(ids, *arguments, **options)  # type: ignore[arg-type]  # passed on as they are

    session.model.step = watched  # type: ignore[method-assign, assignment]  # to see the shapes of its inputs
    quality = measure_quality(session.model, sequences, session.router, session.router, batch_size=2, seed=0)
    ids = torch.tensor(sequences)
    with torch.inference_mode():
        logits = stock.load(folder, torch.float32)(input_ids=ids).logits  # type: ignore[attr-defined]  # a helper module
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    assert quality.nll_baseline == pytest.approx(float(loss), abs=1e-5)
    assert set(steps) == {(2, 1), (1, 1)}


@pytest.mark.parametrize("text", ["", "a"])
def test_a_held_out_text_without_a_token_to_predict_is_refused(
    checkpoint: Checkpoint, open_session: OpenSession, text: str
) -> None:
    session = open_session(checkpoint("qwen3_moe"), held_out=text)
    with pytest.raises(InputError, match="held-out text has"):
        session.run()


def test_a_short_held_out_text_is_used_whole(checkpoint: Checkpoint, open_session: OpenSession) -> None:
    session = open_session(checkpoint("qwen3_moe"), held_out="Hello", pairs=1, max_new_tokens=2)
    quality = session.run().quality
    assert quality is not None
    assert (quality.sequences, quality.tokens) == (1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "caee:theta=1.5"}, "out of range"),
        ({"policy": "caee:rule=cir,theta=1.5"}, "out of range"),
        ({"policy": "caee:compensation=resident", "tier": "device"}, "needs expert caches"),
        ({"cache": "belady"}, "looks ahead"),
        ({"cache": "mru"}, "unknown cache"),
        ({"tier": "tape"}, "--tier tape is unknown"),
        ({"dtype": "int4"}, "--dtype int4 is unknown"),
        ({"phases": "never"}, "--phases never is unknown"),
        ({"batch_size": 0}, "--batch-size 0 is too small"),
        ({"max_new_tokens": 1}, "--max-new-tokens 1 is too small"),
        ({"cache_experts": 0}, "--cache-experts 0 is too small"),
        ({"pairs": 0}, "--pairs 0 is too small"),
        ({"prompts": ()}, "there is no prompt"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_loaded(
    open_session: OpenSession, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_session(tmp_path / "absent", **options)
