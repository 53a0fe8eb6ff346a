"""``caee trace synth``: from a load profile and a token-level trace to a synthetic trace for another model.

Shape legend: L layers, N experts, K slots, G lags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probes.errors import TraceError, UsageError
from probes.text import plural, verb
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.records import Float32s, Float64s, Int64s, LoadProfile, TraceMeta, TraceSource
from runtime.trace.synth.calibrate import levels_for, noise_parts, order_offsets, repeat_curve
from runtime.trace.synth.fit import LAGS, Rhythm, fit_rhythm
from runtime.trace.synth.generate import LatentModel, SyntheticTrace
from runtime.trace.synth.loads import counts_of, loads_of, same_depth
from runtime.trace.writer import write_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """The trace to make; None: as the profile, or else as the token-level trace, has it.

    ``tokens``: decode tokens of all sequences together.
    """

    sequences: int | None = None
    tokens: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    layers: int | None = None
    model: str | None = None
    seed: int = 0


def synthesise(
    like: TraceSource | LoadProfile, profile: TraceSource | LoadProfile | None, options: SynthOptions
) -> SyntheticTrace:
    """A trace with the marginals of ``profile`` (default: of ``like``) and the rhythm of ``like``.

    Layers of ``like`` stand for layers at the same relative depth. The trace's metadata tell all parameters under
    ``synthetic``. Raises ``TraceError`` where an input lacks what is needed, ``UsageError`` where an option disagrees.
    """
    rhythm = fit_rhythm(like)
    rng = np.random.default_rng(options.seed)
    top_k = _top_k(options, profile, like)
    source = like if profile is None else profile
    loads = loads_of(
        rhythm.counts_LN if profile is None else counts_of(profile),
        source.meta.layer_numbers,
        layers=options.layers,
        experts=options.num_experts,
        top_k=top_k,
        rng=rng,
    )
    lengths = _lengths(rhythm.lengths_S, options, rng)
    model, targets = _calibrated(loads.chance_LN, top_k, rhythm, rng)
    profile_meta = like.meta if profile is None else profile.meta
    meta = TraceMeta(
        model=options.model or (None if profile is None else profile_meta.model),
        num_experts=loads.chance_LN.shape[1],
        top_k=top_k,
        layer_numbers=loads.layer_numbers,
        normalised=True,
        engine="caee trace synth",
        parameters={
            "synthetic": {
                "seed": options.seed,
                "like": {"model": like.meta.model, "tokens": rhythm.tokens, "layers": like.meta.moe_layers},
                "profile": None if profile is None else {"model": profile_meta.model, "engine": profile_meta.engine},
                "decays": model.decays_LA.tolist(),
                "variances": model.variances_LA.round(6).tolist(),
                **targets,
            }
        },
    )
    were = verb(loads.capped, "was", "were")
    capped = f"{plural(loads.capped, 'expert load')} above one choice per token {were} capped: is top-k right?"
    return SyntheticTrace(meta, model, lengths, options.seed + 1, notes=(capped,) if loads.capped else ())


def _calibrated(
    chance_LN: Float64s, top_k: int, rhythm: Rhythm, rng: np.random.Generator
) -> tuple[LatentModel, dict[str, Any]]:
    layers = len(chance_LN)
    by_chance_L = np.square(chance_LN).sum(axis=1) / top_k
    depth = same_depth(layers, rhythm.persistence_GL.shape[1])
    repeat_GL = by_chance_L + rhythm.persistence_GL[:, depth] * (1.0 - by_chance_L)
    shares_LMK = _rounded(_stretched(rhythm.shares_LMK, top_k))[depth]
    levels, offsets, parts = [], [], []
    for layer in range(layers):
        level_N = levels_for(chance_LN[layer], top_k, rng)
        levels.append(level_N)
        mean_share_K = shares_LMK[layer].mean(axis=0, dtype=np.float64)
        offsets.append(order_offsets(level_N, top_k, mean_share_K, float(rhythm.spread_L[depth[layer]]), rng))
        parts.append(noise_parts(repeat_GL[:, layer], LAGS, repeat_curve(level_N, top_k, rng)))
    model = LatentModel(
        levels_LN=np.stack(levels),
        offsets_LN=np.stack(offsets),
        decays_LA=np.stack([decays for decays, _ in parts]),
        variances_LA=np.stack([variances for _, variances in parts]),
        shares_LMK=shares_LMK,
    )
    targets = {
        "lags": list(LAGS),
        "repeat_probability": repeat_GL.T.round(6).tolist(),
        "repeat_probability_between_sequences": by_chance_L.round(6).tolist(),
        "share_spread": rhythm.spread_L[depth].round(6).tolist(),
    }
    return model, targets


def _stretched(shares_LMK: Float32s, top_k: int) -> Float32s:
    """Share vectors for another number of slots: the logarithm of the curve over relative rank, read at ``top_k``
    ranks, so that highest ÷ lowest stays."""
    known = shares_LMK.shape[2]
    if known == top_k:
        return shares_LMK
    if known == 1:
        raise TraceError("a top-1 trace does not tell how shares fall", hint="give --like a trace with top-2 or more")
    place = np.linspace(0, known - 1, top_k) if top_k > 1 else np.zeros(1)
    left = np.minimum(place.astype(np.int64), known - 2)
    part = place - left
    logs = np.log(shares_LMK)
    shares = np.exp(logs[:, :, left] * (1 - part) + logs[:, :, left + 1] * part)
    stretched: Float32s = (shares / shares.sum(axis=2, keepdims=True)).astype(np.float32)
    return stretched


def _rounded(shares: Float32s) -> Float32s:
    """To the nearest bfloat16, as engines compute gate weights: such a trace's file is less than half as large."""
    bits = shares.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def _lengths(known_S: Int64s, options: SynthOptions, rng: np.random.Generator) -> Int64s:
    """Tokens by sequence: drawn from the known lengths and scaled to the total, at least one each."""
    sequences = options.sequences or len(known_S)
    drawn = known_S if sequences == len(known_S) else rng.choice(known_S, sequences)
    total = options.tokens or int(drawn.sum())
    if total < sequences:
        raise UsageError(f"--tokens {total} is fewer than --sequences {sequences}")
    ends = np.rint(np.cumsum(drawn) / drawn.sum() * (total - sequences)).astype(np.int64)
    lengths: Int64s = np.diff(ends, prepend=0) + 1
    return lengths


def _top_k(options: SynthOptions, profile: TraceSource | LoadProfile | None, like: TraceSource | LoadProfile) -> int:
    top_k = options.top_k or (like if profile is None else profile).meta.top_k
    if not top_k:
        raise UsageError("the profile does not say top-k", hint="give --top-k")
    return top_k


def synthesise_file(
    like: Path,
    profile: Path | None,
    output: Path,
    options: SynthOptions,
    *,
    force: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Write the synthetic trace; returns the document of ``caee trace synth --json``. Files of any known format."""
    source = detect_and_open(like)
    counts = None if profile is None else detect_and_open(profile, ImportOptions(top_k=options.top_k))
    trace = synthesise(source, counts, options)
    tokens = write_trace(output, trace, force=force, on_progress=on_progress)
    return {
        "schema": "caee.trace.synth/1",
        "output": str(output),
        "tokens": tokens,
        "sequences": trace.sequences,
        "size_bytes": output.stat().st_size,
        "meta": dataclasses.asdict(trace.meta),
        "notes": list(trace.notes),
    }
