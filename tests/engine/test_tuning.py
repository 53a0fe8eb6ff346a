"""Searching a policy within a limit of quality, keeping it, and using it again."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caee_cli.main import run_app
from caee_cli.tuning import check_quality, parse_share, wished
from probes.errors import CheckFailed, CheckpointError, InputError, UsageError
from runtime import tuning
from runtime.models.identity import model_identity
from runtime.passes import Pruned
from runtime.policy.make import make_policy
from runtime.quality import measure_losses, measure_quality
from runtime.recording import StepRecord
from runtime.signals.step import step_signal
from runtime.worker import RankSession
from runtime.workload import FEWEST_SEARCHED, held_out_passages
from store.records import PolicyRecord
from store.session import open_store

Checkpoint = Callable[..., Path]
OpenSession = Callable[..., RankSession]

TEXT = " ".join(f"It was the {word} of times." for word in ("best", "worst", "first", "last", "age", "end") * 4)


# Passages ------------------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 600), length=st.integers(2, 40), count=st.integers(1, 30), search=st.booleans())
def test_passages_are_of_one_length_and_never_share_a_token(size: int, length: int, count: int, search: bool) -> None:
    ids = list(range(size))
    if size < (4 * FEWEST_SEARCHED if search else 2):
        with pytest.raises(InputError, match="held-out text has"):
            held_out_passages(ids, length=length, count=count, search=search)
        return
    measured, searched = held_out_passages(ids, length=length, count=count, search=search)
    found = [*measured, *searched]
    assert len(searched) == (len(measured) if search else 0)
    assert 1 <= len(measured) <= count
    assert 2 <= len(found[0]) <= length
    assert all(passage == list(range(passage[0], passage[0] + len(found[0]))) for passage in found)
    tokens = [token for passage in found for token in passage]
    assert len(set(tokens)) == len(tokens)


def test_a_long_text_is_measured_at_the_same_places_with_a_search_and_without() -> None:
    ids = list(range(90_000))
    with_search, _ = held_out_passages(ids, length=96, count=24, search=True)
    assert with_search == held_out_passages(ids, length=96, count=24, search=False)[0]


# Losses and the search -----------------------------------------------------------------------------------------------


@pytest.fixture
def session(checkpoint: Checkpoint, open_session: OpenSession) -> RankSession:
    opened = open_session(checkpoint("qwen3_moe", top_k=4), policy="caee", cache_experts=6, batch_size=3)
    opened.run_pass([[1, 2, 3]], opened.router)
    return opened


def passages_of(session: RankSession, count: int) -> list[list[int]]:
    ids = session.loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    return held_out_passages(ids, length=8, count=count, search=False)[0]


def test_losses_are_those_of_the_whole_measurement(session: RankSession) -> None:
    passages, policy = passages_of(session, 7), session.asked_policy()
    start = session.execution.snapshot()
    quality = measure_quality(session.model, passages, session.router, policy, batch_size=3, seed=0)
    session.execution.restore(start)
    alone = measure_losses(session.model, passages, policy, batch_size=3)
    session.execution.restore(start)
    baseline = measure_losses(session.model, passages, session.router, batch_size=3, bypass_cache=True)
    assert float(alone.nll_B.mean()) == quality.nll_policy
    assert float(baseline.nll_B.mean()) == quality.nll_baseline
    for book, snapshot in zip(session.execution.books, start, strict=True):
        assert (book.snapshot().key == snapshot.key).all(), "bypassing leaves the caches alone"
    assert len(alone.steps) == 3 * 7


def test_removed_importance_is_per_token_and_layer(session: RankSession) -> None:
    """Batches of 3, 3 and 1 sequence: tokens weigh alike, not steps. A search, tasks and steps say the same of it."""
    passages, policy = passages_of(session, 7), session.asked_policy()
    losses = measure_losses(session.model, passages, policy, batch_size=3)
    assert {step.tokens for step in losses.steps} == {1, 3}
    removed = sum(layer.removed for step in losses.steps for layer in step.layers)
    expected = removed / 2**30 / (7 * 7 * 2)
    assert 0 < expected < 1
    assert tuning.policy_point(0.8, losses, losses, 0.5, seed=0).removed_importance == expected
    pruned = Pruned()
    for step in losses.steps:
        pruned.add(step)
    assert pruned.importance == expected
    told = [
        step_signal(step, step=1, pass_kind="policy", pass_number=1, policy="caee", brake=None) for step in losses.steps
    ]
    weighted = sum((each.removed_importance or 0) * each.tokens for each in told)
    assert weighted / sum(each.tokens for each in told) == pytest.approx(expected, rel=1e-12)
    nothing = StepRecord(tokens=0, prefill=False, layers=losses.steps[0].layers)
    signal = step_signal(nothing, step=1, pass_kind="policy", pass_number=1, policy="caee", brake=None)
    assert signal.removed_importance is None
    assert Pruned().importance == 0


def test_a_search_tries_settings_and_keeps_the_evidence(session: RankSession) -> None:
    passages, spec = passages_of(session, 6), session.asked_policy().spec
    start = session.execution.snapshot()
    search = tuning.search_knob(session, passages, spec, 0.5)
    assert (search.knob, search.sequences, search.tokens) == ("theta", 6, 6 * 7)
    assert 1 <= len(search.points) <= 4
    within = [point.value for point in search.points if point.within_limit]
    assert search.chosen == (min(within) if within else None)
    for point in search.points:
        assert point.within_limit == (point.loss_rise_ci95[1] <= 0.5)
        assert point.loss_rise_ci95[0] <= point.loss_rise <= point.loss_rise_ci95[1]
        # Each by itself, from the same caches, by the plain way.
        session.execution.restore(start)
        policy = make_policy(
            dataclasses.replace(spec, parameters={**spec.parameters, "theta": point.value}), offloading=True
        )
        quality = measure_quality(session.model, passages, session.router, policy, batch_size=3, seed=0)
        assert point.nll == quality.nll_policy
        scaled = np.array(quality.nll_difference_ci95) / search.nll_baseline
        assert point.loss_rise_ci95 == pytest.approx(tuple(scaled))
    session.execution.restore(start)
    assert tuning.search_knob(session, passages, spec, 0.5) == search


# The command ---------------------------------------------------------------------------------------------------------


class Caee:
    """``caee run`` on a tiny model, in this process, with a store of its own."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store, self.model = str(folder / "store.db"), str(model)
        self.held_out = folder / "held_out.txt"
        self.held_out.write_text(TEXT[:160])
        self._capsys = capsys

    def run(self, *extra: str, devices: str = "cpu:1", model: str | None = None) -> tuple[int, Any, str]:
        options = {"devices": devices, "store": self.store, "pairs": 1, "held-out": self.held_out, "batch-size": 4}
        written = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if "--cache-experts" not in extra:
            written += ["--cache-experts", "6"]
        code = run_app(["run", model or self.model, "--json", "--output-len", "3", *written, *extra])
        output, errors = self._capsys.readouterr()
        return code, json.loads(output) if output else None, errors


@pytest.fixture
def caee(tmp_path: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> Caee:
    return Caee(tmp_path, checkpoint("qwen3_moe", top_k=4), capsys)


def test_a_policy_is_searched_stored_and_used_again(caee: Caee, checkpoint: Checkpoint, tmp_path: Path) -> None:
    code, document, errors = caee.run("--max-quality-drop", "90%")
    assert code == 0, errors
    with open_store(caee.store) as store:
        policy, run = store.policy(), store.run()
        assert store.check() == ()
    origin = run.policy_origin
    assert origin is not None
    assert origin.searched_here
    assert (origin.policy_id, origin.search) == (policy.policy_id, policy.search)
    assert document["policy_origin"]["policy_id"] == policy.policy_id
    assert f"Stored policy {policy.policy_id}" in errors
    assert (policy.run_id, policy.measured, policy.gain_tpot) == (run.run_id, run.quality, run.gain_tpot)
    assert policy.search.chosen == run.policy.parameters["theta"] == policy.search.points[-1].value
    assert run.max_quality_drop == policy.search.max_quality_drop == 0.9
    assert policy.policy == run.policy
    check_the_limit_is_checked(run)

    code, again, errors = caee.run("--policy", "stored", "--no-quality", "--phases", "decode")
    assert code == 0, errors
    assert again["policy"] == document["policy"]
    assert (again["policy_origin"]["policy_id"], again["policy_origin"]["searched_here"]) == (policy.policy_id, False)

    (note,) = (warning for warning in again["warnings"] if policy.policy_id in warning)
    assert note.endswith("was found with phases all, not decode: its loss may differ here")

    refused = {
        "tier disk where this run has host": caee.run("--policy", "stored", "--tier", "host"),
        "device count 1 where this run has 2": caee.run("--policy", "stored", devices="cpu:2"),
        "cache lfu where this run has lru": caee.run("--policy", "stored", "--cache", "lru"),
        "cached experts per device 6 where this run has 5": caee.run("--policy", "stored", "--cache-experts", "5"),
        "no policy is stored for this model; those kept are of": caee.run(
            "--policy", "stored", model=str(checkpoint("qwen3_moe"))
        ),
    }
    for message, (code, document, errors) in refused.items():
        assert (code, document) == (1, None)
        assert message in errors
        assert "--max-quality-drop 1%" in errors


def check_the_limit_is_checked(run: Any) -> None:
    rise = run.quality.nll_policy / run.quality.nll_baseline - 1
    check_quality(dataclasses.replace(run, max_quality_drop=None))
    check_quality(dataclasses.replace(run, max_quality_drop=rise + 1e-9))
    with pytest.raises(CheckFailed, match="more than the") as caught:
        check_quality(dataclasses.replace(run, max_quality_drop=rise - 1e-9))
    assert caught.value.exit_code == 3


def test_where_nothing_is_within_the_limit_the_search_is_kept_and_says_so(
    caee: Caee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "furthest", lambda settings, acceptable: (acceptable(settings[0]), None)[1])
    code, document, errors = caee.run("--max-quality-drop", "0.001")
    assert code == 3
    assert "nothing to gain at this limit: no setting of theta" in errors
    assert document["schema"] == "caee.policy/1"
    assert (document["policy"], document["run_id"], document["search"]["chosen"]) == (None, None, None)
    with open_store(caee.store) as store:
        assert store.runs(1) == ()
        found: PolicyRecord = store.policy()
    assert len(found.search.points) == 1
    code, document, errors = caee.run("--policy", "stored")
    assert (code, document) == (1, None)
    assert "found nothing to gain" in errors


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--max-quality-drop", "1"), "out of range"),
        (("--max-quality-drop", "much"), "is not a share"),
        (("--max-quality-drop", "1%", "--no-quality"), "needs quality to be measured"),
        (("--policy", "stored", "--theta", "0.5"), "exclude each other"),
    ],
)
def test_wrong_wishes_are_refused(caee: Caee, extra: tuple[str, ...], message: str) -> None:
    code, document, errors = caee.run(*extra)
    assert (code, document) == (2, None)
    assert message in errors


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), (" 0.5 % ", 0.005), ("0", 0.0), ("1e-3", 0.001), ("99%", 0.99)]
)
def test_a_share_is_written_in_two_ways(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "1%%", "1%x", "nan", "inf", "-1%", "100%", "1 percent"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-quality-drop"):
        parse_share(text)


def test_a_policy_given_in_full_is_only_checked() -> None:
    assert wished("caee", None, "1%", quality=True).search
    assert wished("budget", None, "1%", quality=True).search
    assert not wished("caee", 0.7, "1%", quality=True).search
    assert not wished("caee:theta=0.7", None, "1%", quality=True).search
    assert not wished("oea:k0=2", None, "1%", quality=True).search
    assert not wished("caee", None, None, quality=True).search
    stored = wished("stored", None, "1%", quality=True)
    assert (stored.spec, stored.search, stored.limit) == (None, False, 0.01)


# Which model ----------------------------------------------------------------------------------------------------------


def test_a_model_is_known_by_its_content(checkpoint: Checkpoint, tmp_path: Path) -> None:
    original = checkpoint("qwen3_moe", top_k=4)
    copy = tmp_path / "another name"
    shutil.copytree(original, copy)
    identity = model_identity(original)
    assert re.fullmatch("[0-9a-f]{32}", identity)
    assert model_identity(copy) == identity != model_identity(checkpoint("qwen3_moe"))

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere", "use_cache": False}))
    assert model_identity(copy) == identity
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_identity(copy) != identity
    (copy / "config.json").write_text(json.dumps(config))

    weights = copy / "model.safetensors"
    trained = bytearray(weights.read_bytes())
    trained[-1] ^= 1
    weights.write_bytes(trained)
    assert model_identity(copy) != identity
    weights.write_bytes(trained[:-1])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        model_identity(copy)
