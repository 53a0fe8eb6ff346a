"""Load profiles as Parquet files: one row per layer and expert, the same metadata key as a trace, another kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from probes.errors import TraceError
from probes.files import written_whole
from runtime.trace.metadata import LOAD_PROFILE, METADATA_KEY, meta_to_json
from runtime.trace.reader import metadata_of, open_parquet
from runtime.trace.records import Float64s, LoadProfile

_SUMS = {"gate_sum": "gate_sums_LN", "saliency_sum": "saliency_sums_LN"}


def check_profile(profile: LoadProfile) -> None:
    """Raise ``TraceError`` naming layer and expert where a count or a sum is negative or not finite."""
    shape = (profile.meta.moe_layers, profile.meta.num_experts)
    for what, values in (("count", profile.counts_LN), *((key, getattr(profile, name)) for key, name in _SUMS.items())):
        if values is None:
            continue
        if values.shape != shape:
            raise TraceError(f"{what}s have shape {values.shape}, not {shape} (layers, experts)")
        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            layer, expert = np.argwhere(bad)[0]
            raise TraceError(
                f"layer {profile.meta.layer_numbers[layer]}, expert {expert}: {what} {values[layer, expert]} "
                "is negative or not finite"
            )


def write_profile(path: Path, profile: LoadProfile, *, force: bool = False) -> None:
    """Write the profile, whole or not at all. Raises ``TraceError``, ``UsageError``."""
    check_profile(profile)
    layers, experts = profile.counts_LN.shape
    columns = {
        "layer": np.repeat(np.asarray(profile.meta.layer_numbers, dtype=np.int16), experts),
        "expert": np.tile(np.arange(experts, dtype=np.int16), layers),
        "count": profile.counts_LN.ravel(),
    }
    columns |= {
        key: getattr(profile, name).ravel() for key, name in _SUMS.items() if getattr(profile, name) is not None
    }
    metadata = {METADATA_KEY: meta_to_json(profile.meta, LOAD_PROFILE, {"tokens": profile.tokens})}
    with written_whole(path, force=force) as stream:
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), stream, compression="zstd")


def read_profile(path: Path) -> LoadProfile:
    """The profile in a file that ``write_profile`` wrote. Raises ``TraceError``."""
    with open_parquet(path) as parquet:
        kind, meta, extra = metadata_of(parquet, path)
        if kind != LOAD_PROFILE:
            raise TraceError(f"{path} is a routing trace, not a load profile", hint="name a file of counts")
        try:
            table = parquet.read()
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{path}: damaged ({error})", hint="import the original again") from error
    shape = (meta.moe_layers, meta.num_experts)
    if table.num_rows != shape[0] * shape[1] or "count" not in table.column_names:
        raise TraceError(f"{path}: not one row for each of {shape[0]} layers × {shape[1]} experts")

    def matrix(name: str) -> Float64s | None:
        if name not in table.column_names:
            return None
        values: Float64s = table.column(name).to_numpy().astype(np.float64).reshape(shape)
        return values

    counts = matrix("count")
    assert counts is not None
    sums = {field: matrix(key) for key, field in _SUMS.items()}
    tokens = extra.get("tokens")
    profile = LoadProfile(meta=meta, counts_LN=counts, tokens=None if tokens is None else int(tokens), **sums)
    check_profile(profile)
    return profile
