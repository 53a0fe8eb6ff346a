"""Synthesis: the trace has the marginals, the repeats and the shares that were asked for, within stated tolerances."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caee_cli.main import run_app
from probes.errors import TraceError, UsageError
from runtime.trace.chunking import join, new_chunk
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.profile import write_profile
from runtime.trace.reader import TraceReader, read_trace
from runtime.trace.records import LoadProfile, Phase, RoutingTrace, TraceMeta
from runtime.trace.synth.calibrate import chosen, levels_for, noise_parts, repeat_curve
from runtime.trace.synth.fit import LAGS, fit_rhythm, repeats, repeats_between_sequences, share_spread, sorted_shares
from runtime.trace.synth.synthesise import SynthOptions, synthesise
from runtime.trace.writer import TraceWriter, write_trace


class Source:
    """A trace in memory as a source of chunks."""

    notes: tuple[str, ...] = ()
    fraction_read = 1.0

    def __init__(self, trace: RoutingTrace) -> None:
        self.meta = trace.meta
        self._trace = trace

    def chunks(self) -> Any:
        return iter([self._trace])


def sticky_trace(sequences: int = 8, length: int = 200, stay: float = 0.2) -> RoutingTrace:
    """2 layers × 12 experts, top-3; each sequence prefers experts of its own, and a token may repeat the one before."""
    rng = np.random.default_rng(0)
    ids = np.zeros((sequences * length, 2, 3), dtype=np.int16)
    for sequence in range(sequences):
        liking = rng.normal(size=(2, 12))
        for token in range(length):
            at = sequence * length + token
            for layer in range(2):
                if token and rng.random() < stay:
                    ids[at, layer] = ids[at - 1, layer]
                else:
                    ids[at, layer] = np.argsort(-(liking[layer] + rng.gumbel(size=12)))[:3]
    # Weights follow each expert's own favour, so that experts differ in their mean share.
    gates = rng.gamma(2.0, 1.0, ids.shape) * np.exp(rng.normal(0, 0.6, (2, 12)))[[[0], [1]], ids]
    gates = (gates / gates.sum(axis=2, keepdims=True)).astype(np.float32)
    meta = TraceMeta(model="sticky", num_experts=12, top_k=3, layer_numbers=(0, 1))
    number = np.repeat(np.arange(sequences, dtype=np.int32), length)
    names = tuple(map(str, range(sequences)))
    return new_chunk(
        meta, names, number, ids, gates, position=np.tile(np.arange(length), sequences), phase=Phase.DECODE
    )


def test_repeats_equal_plain_counting() -> None:
    trace = sticky_trace(sequences=3, length=20)
    for lag in (1, 4):
        for layer in range(2):
            overlaps = [
                len(set(trace.ids_TLK[t, layer]) & set(trace.ids_TLK[t + lag, layer])) / 3
                for t in range(60 - lag)
                if trace.token_sequence_T[t] == trace.token_sequence_T[t + lag]
            ]
            assert repeats(trace, lag)[layer] == pytest.approx(np.mean(overlaps))
    assert np.isnan(repeats(trace, 20)).all()
    for layer in range(2):
        pairs = [
            len(set(trace.ids_TLK[a, layer]) & set(trace.ids_TLK[b, layer])) / 3
            for a in range(60)
            for b in range(60)
            if trace.token_sequence_T[a] != trace.token_sequence_T[b]
        ]
        assert repeats_between_sequences(trace)[layer] == pytest.approx(np.mean(pairs))


def test_the_fit_does_not_depend_on_how_sequences_are_interleaved() -> None:
    trace = sticky_trace(sequences=4, length=50)
    order = np.argsort(np.tile(np.arange(50), 4), kind="stable")
    arrays = {
        name: getattr(trace, name)[order] for name in ("token_sequence_T", "token_position_T", "ids_TLK", "gates_TLK")
    }
    mixed = fit_rhythm(Source(dataclasses.replace(trace, **arrays)))
    np.testing.assert_allclose(mixed.persistence_GL, fit_rhythm(Source(trace)).persistence_GL)


@pytest.mark.parametrize(("experts", "top_k"), [(12, 3), (256, 8), (5, 5), (4, 1)])
def test_levels_reach_any_marginals(experts: int, top_k: int) -> None:
    rng = np.random.default_rng(2)
    weights = rng.pareto(1.5, experts) + 0.05
    weights[0] = 0 if experts > top_k else weights[0]
    chance = top_k * weights / weights.sum()
    for _ in range(20):
        chance = np.minimum(chance, 1) * top_k / np.minimum(chance, 1).sum()
    level = levels_for(np.minimum(chance, 1), top_k, rng)
    draws = level + rng.standard_normal((20_000, experts), dtype=np.float32)
    reached = chosen(draws, top_k).mean(axis=0)
    assert np.abs(reached - chance).max() < 0.02
    if experts > top_k:
        assert reached[0] == 0


def test_chosen_equals_a_plain_sort() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, (200, 9)).astype(np.float32)  # ties everywhere
    for row, marked in zip(values, chosen(values, 4), strict=True):
        assert set(np.flatnonzero(marked)) == set(np.argsort(-row, kind="stable")[:4])


def test_noise_parts_are_a_distribution() -> None:
    rng = np.random.default_rng(0)
    level = levels_for(np.full(16, 0.25), 4, rng)
    curve = repeat_curve(level, 4, rng)
    assert curve[0] == pytest.approx(0.25, abs=0.03)
    assert curve[-1] == 1.0
    for repeat in (np.full(8, 0.25), np.full(8, 1.0), np.linspace(0.9, 0.3, 8)):
        decays, variances = noise_parts(repeat, LAGS, curve)
        assert (variances >= 0).all()
        assert variances.sum() == pytest.approx(1)
        assert (decays[0], decays[-1]) == (0, 1)


def test_the_synthetic_trace_has_what_was_asked_for(tmp_path: Path) -> None:
    like = sticky_trace()
    rng = np.random.default_rng(5)
    counts = np.round(1e6 * rng.dirichlet(np.full(48, 2.0), 3))
    profile = LoadProfile(
        meta=TraceMeta(model="big", num_experts=48, top_k=5, layer_numbers=(3, 4, 5), gates_recorded=False),
        counts_LN=counts,
        tokens=None,
    )
    source = synthesise(Source(like), profile, SynthOptions(sequences=64, tokens=12_000, seed=3))
    path = tmp_path / "s.parquet"
    assert write_trace(path, source) == 12_000
    trace = read_trace(path)
    assert (trace.meta.model, trace.meta.top_k, trace.meta.layer_numbers) == ("big", 5, (3, 4, 5))
    assert len(trace.sequence_names) == 64
    assert (trace.token_phase_T == Phase.DECODE).all()
    told: Any = trace.meta.parameters["synthetic"]
    assert told["seed"] == 3
    assert told["like"]["model"] == "sticky"
    # Marginals: total variation of each layer's loads from the profile's within 4 %.
    for layer in range(3):
        loads = np.bincount(trace.ids_TLK[:, layer].ravel(), minlength=48) / trace.ids_TLK[:, layer].size
        assert np.abs(loads - counts[layer] / counts[layer].sum()).sum() / 2 < 0.04
    # Repeats at every lag within 0.03, between sequences within 0.015 (absolute, of the probability).
    for place, lag in enumerate(told["lags"]):
        wanted = [row[place] for row in told["repeat_probability"]]
        np.testing.assert_allclose(repeats(trace, lag), wanted, atol=0.03)
    np.testing.assert_allclose(
        repeats_between_sequences(trace), told["repeat_probability_between_sequences"], atol=0.015
    )
    # Choices persist: the targets are far from chance, so that the check above means something.
    assert told["repeat_probability"][0][0] > told["repeat_probability_between_sequences"][0] + 0.2
    # How much experts differ in their mean share, within a fifth.
    np.testing.assert_allclose(share_spread(trace), told["share_spread"], rtol=0.2, atol=0.02)
    # Shares: quantiles of highest ÷ lowest, which do not change with top-k, within 5 %.
    real, made = sorted_shares(like, 1 << 14), sorted_shares(trace, 1 << 14)
    for quantile in (0.1, 0.5, 0.9):
        a = np.quantile(real[:, :, 0] / real[:, :, -1], quantile)
        b = np.quantile(made[:, :, 0] / made[:, :, -1], quantile)
        assert b == pytest.approx(a, rel=0.05)


def test_the_same_top_k_keeps_the_share_quantiles(tmp_path: Path) -> None:
    like = sticky_trace()
    trace = join(list(synthesise(Source(like), None, SynthOptions(seed=1)).chunks()))
    real, made = sorted_shares(like, 1 << 14), sorted_shares(trace, 1 << 14)
    for slot in range(3):
        for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
            wanted = np.quantile(real[:, :, slot], quantile)
            assert np.quantile(made[:, :, slot], quantile) == pytest.approx(wanted, abs=0.02)
    assert Counter(trace.token_sequence_T.tolist()) == Counter(like.token_sequence_T.tolist())


def test_same_seed_same_trace_at_every_pass() -> None:
    like = Source(sticky_trace())
    options = SynthOptions(seed=4, tokens=900, sequences=5, layers=3, num_experts=20, top_k=2)
    source = synthesise(like, None, options)
    first, second = join(list(source.chunks())), join(list(source.chunks()))
    again = join(list(synthesise(like, None, options).chunks()))
    other = join(list(synthesise(like, None, dataclasses.replace(options, seed=5)).chunks()))
    assert first.ids_TLK.shape == (900, 3, 2)
    for trace in (second, again):
        np.testing.assert_array_equal(first.ids_TLK, trace.ids_TLK)
        np.testing.assert_array_equal(first.gates_TLK, trace.gates_TLK)
    assert not np.array_equal(first.ids_TLK, other.ids_TLK)


def test_a_load_that_no_token_could_make_is_capped_and_said() -> None:
    meta = TraceMeta(model=None, num_experts=4, top_k=2, layer_numbers=(0,))
    profile = LoadProfile(meta=meta, counts_LN=np.array([[90.0, 4, 3, 3]]), tokens=None)
    source = synthesise(Source(sticky_trace(sequences=2, length=20)), profile, SynthOptions(tokens=3000, sequences=60))
    assert any("1 expert load above one choice per token was capped" in note for note in source.notes)
    trace = join(list(source.chunks()))
    reached = np.bincount(trace.ids_TLK.ravel(), minlength=4) / 3000
    assert reached == pytest.approx([1, 0.4, 0.3, 0.3], abs=0.15)
    assert reached[0] > 0.99


def test_what_cannot_be_synthesised_is_said(make_trace: Any) -> None:
    like = Source(sticky_trace(sequences=2, length=10))
    few = LoadProfile(
        meta=TraceMeta(model=None, num_experts=4, top_k=0, layer_numbers=(0,)),
        counts_LN=np.array([[1.0, 0, 0, 1]]),
        tokens=None,
    )
    with pytest.raises(UsageError, match="does not say top-k"):
        synthesise(like, few, SynthOptions())
    with pytest.raises(TraceError, match="fewer than top-k = 3"):
        synthesise(like, few, SynthOptions(top_k=3))
    with pytest.raises(UsageError, match="--top-k 5 is more than the 4"):
        synthesise(like, few, SynthOptions(top_k=5))
    with pytest.raises(UsageError, match="--tokens 3 is fewer than --sequences 9"):
        synthesise(like, None, SynthOptions(tokens=3, sequences=9))
    with pytest.raises(TraceError, match="no tokens to fit on"):
        synthesise(few, None, SynthOptions())
    with pytest.raises(TraceError, match="no gate weights"):
        synthesise(Source(make_trace(gates_recorded=False)), None, SynthOptions())
    with pytest.raises(TraceError, match="no sequence of the trace has two tokens"):
        synthesise(Source(make_trace(tokens=1)), None, SynthOptions())
    with pytest.raises(TraceError, match="top-1 trace"):
        synthesise(Source(make_trace(top_k=1, sequences=1)), None, SynthOptions(top_k=2))


def tiny_trace(draw: st.DataObject) -> RoutingTrace:
    """Any trace of a few tokens: uniform, with empty slots and layers, with weights that are all zero."""
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32 - 1)))
    tokens, layers, experts, sequences = (draw.draw(st.integers(1, most)) for most in (6, 2, 6, 3))
    top_k = draw.draw(st.integers(1, experts))
    ids = np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :top_k].astype(np.int16)
    if draw.draw(st.booleans()):
        ids[:] = ids[:1]
    ids[rng.random(ids.shape) < draw.draw(st.sampled_from([0.0, 0.0, 0.4, 1.0]))] = -1
    gates = np.where((ids >= 0) & (rng.random(ids.shape) >= draw.draw(st.sampled_from([0.0, 0.2, 1.0]))), 0.3, 0)
    _, number = np.unique(np.sort(rng.integers(0, sequences, tokens)), return_inverse=True)
    meta = TraceMeta(model=None, num_experts=experts, top_k=top_k, layer_numbers=tuple(range(layers)))
    names = tuple(map(str, range(int(number.max()) + 1)))
    return new_chunk(meta, names, number.astype(np.int32), ids, gates.astype(np.float32), position=np.arange(tokens))


@pytest.mark.filterwarnings("error")
@given(draw=st.data())
def test_a_short_or_uniform_trace_is_fitted_or_refused(draw: st.DataObject) -> None:
    try:
        source = synthesise(Source(tiny_trace(draw)), None, SynthOptions(tokens=20))
    except TraceError:
        return
    for chunk in source.chunks():
        assert (np.isfinite(chunk.gates_TLK) & (chunk.gates_TLK >= 0)).all()
        assert (chunk.ids_TLK >= 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tokens", [2, 300])
def test_what_a_uniform_trace_lacks_is_said(tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = sticky_trace(sequences=1, length=tokens)
    trace.ids_TLK[0, 0], trace.ids_TLK[1, 0] = [1, 2, 3], [2, 3, 4]
    trace.ids_TLK[:, 1] = [2, 3, 5]
    write_trace(tmp_path / "like.parquet", Source(trace))
    command = ["trace", "synth", "--like", str(tmp_path / "like.parquet"), "-o", str(tmp_path / "s.parquet")]
    assert run_app([*command, "--tokens", "100"]) == 1
    error = capsys.readouterr().err
    assert f"too short or too uniform to fit: in layer 1 all {tokens} tokens choose the same experts" in error
    assert "→ give --like a trace of more tokens" in error
    assert not (tmp_path / "s.parquet").exists()


def test_a_trace_without_tokens_is_refused(tmp_path: Path, make_trace: Any) -> None:
    with TraceWriter(tmp_path / "empty.parquet", make_trace().meta):
        pass
    with pytest.raises(TraceError, match="holds no token"):
        synthesise(TraceReader(tmp_path / "empty.parquet"), None, SynthOptions())


def test_synth_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "like.parquet", Source(sticky_trace()))
    meta = TraceMeta(model=None, num_experts=10, top_k=0, layer_numbers=(1, 2), gates_recorded=False)
    write_profile(
        tmp_path / "p.parquet", LoadProfile(meta=meta, counts_LN=np.arange(1.0, 21).reshape(2, 10), tokens=None)
    )
    target = str(tmp_path / "s.parquet")
    command = ["trace", "synth", "--like", str(tmp_path / "like.parquet"), "--profile", str(tmp_path / "p.parquet")]
    command += ["--top-k", "4", "--tokens", "300", "--sequences", "3", "--seed", "7", "-o", target, "--json"]
    assert run_app(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "caee.trace.synth/1"
    assert (document["tokens"], document["sequences"]) == (300, 3)
    reader = TraceReader(Path(target))
    assert (reader.meta.num_experts, reader.meta.top_k, reader.meta.layer_numbers) == (10, 4, (1, 2))
    assert run_app(["trace", "synth", "--like", str(tmp_path / "p.parquet"), "-o", target, "--force"]) == 1
    assert "no tokens to fit on" in capsys.readouterr().err


def test_a_look_alike_of_the_real_trace(shared_data: Path) -> None:
    path = shared_data / "routing" / "gpt_oss_20b" / "decode.jsonl.gz"
    real = detect_and_open(path, ImportOptions(num_experts=32))
    assert not isinstance(real, LoadProfile)
    source = synthesise(real, None, SynthOptions(tokens=6000, layers=6, seed=1))
    told: Any = source.meta.parameters["synthetic"]
    trace = join(list(source.chunks()))
    for place, lag in enumerate(told["lags"]):
        wanted = [row[place] for row in told["repeat_probability"]]
        np.testing.assert_allclose(repeats(trace, lag), wanted, atol=0.04)
