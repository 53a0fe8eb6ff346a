"""Whatever is done to a file's bytes, it is read, or refused with a clear error: never a traceback."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from probes.errors import CaeeError
from runtime.trace.importers.detect import detect_and_open
from runtime.trace.importers.formats import ImportOptions
from runtime.trace.importing import import_trace
from runtime.trace.show import show_info
from runtime.trace.writer import TraceWriter

CASES = 25


def _topk(trace: Any) -> bytes:
    rows = [
        {"seq": "a", "pos": token, "ids": trace.ids_TLK[token].tolist(), "p": trace.gates_TLK[token].tolist()}
        for token in range(trace.tokens)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _vllm(trace: Any) -> bytes:
    rows: list[Any] = [{"type": "meta", "model_id": "m", "layers_logged": [0], "top_k": 4, "num_experts": 16}]
    rows += [
        {
            "type": "route", "req_id": "r", "token_idx": token, "layer": 0,
            "topk_ids": trace.ids_TLK[token, 0].tolist(), "topk_weights": trace.gates_TLK[token, 0].tolist(),
        }
        for token in range(trace.tokens)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _numpy(save: Any, trace: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, trace.ids_TLK)
    return stream.getvalue()


def _torch(trace: Any) -> bytes:
    import torch

    record = {
        "forward_pass_id": 1, "rank": 0, "positions": list(range(trace.tokens)), "forward_mode": 2,
        "extend_seq_lens": None, "topk_ids_of_layer": torch.from_numpy(trace.ids_TLK.astype(np.int32).swapaxes(0, 1)),
    }  # fmt: skip
    stream = io.BytesIO()
    torch.save({"records": [record], "last_physical_to_logical_map": torch.arange(16).repeat(3, 1)}, stream)
    return stream.getvalue()


def _parquet(trace: Any, folder: Path) -> bytes:
    with TraceWriter(folder / "t.parquet", trace.meta) as writer:
        writer.write(trace)
    return (folder / "t.parquet").read_bytes()


def _damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut off, overwritten, digits replaced, or a piece taken out."""
    start, stop = sorted(int(place) for place in rng.integers(0, len(data), 2))
    match rng.integers(0, 4):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + rng.bytes(min(4, stop - start)) + data[min(start + 4, stop) :]
        case 2:
            digits = bytes(rng.integers(48, 58, int(rng.integers(0, 8))).tolist())
            return data[:start] + digits + data[start + 4 :]
        case _:
            return data[:start] + data[stop:]


@pytest.mark.parametrize("name", ["topk", "gzip", "zstd", "vllm", "npy", "npz", "torch", "parquet"])
def test_damage_is_never_a_traceback(make_trace: Any, tmp_path: Path, name: str) -> None:
    trace = make_trace(tokens=20, sequences=1)
    data = {
        "topk": lambda: _topk(trace),
        "gzip": lambda: gzip.compress(_topk(trace)),
        "zstd": lambda: zstandard.compress(_topk(trace)),
        "vllm": lambda: _vllm(trace),
        "npy": lambda: _numpy(np.save, trace),
        "npz": lambda: _numpy(np.savez, trace),
        "torch": lambda: _torch(trace),
        "parquet": lambda: _parquet(trace, tmp_path),
    }[name]()
    path, target = tmp_path / "f", tmp_path / "o.parquet"
    path.write_bytes(data)
    assert import_trace(path, target, ImportOptions()).tokens == 20
    rng = np.random.default_rng(7)
    for _ in range(CASES):
        path.write_bytes(_damaged(data, rng))
        target.unlink(missing_ok=True)
        with contextlib.suppress(CaeeError):
            import_trace(path, target, ImportOptions())
            show_info(path, detect_and_open(path))
        assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".part")]
