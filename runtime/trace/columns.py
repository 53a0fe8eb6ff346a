"""A chunk of a trace as a Parquet table, and back: one row per token and layer.

Shape legend: T tokens, L layers, K slots, N experts. Rows go by token, then by layer, so row r is token r // L.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from probes.errors import TraceError
from runtime.trace.chunking import SequenceTable, equal_shares, new_chunk
from runtime.trace.records import Float32s, Int32s, RoutingTrace, TraceMeta

_TOKEN_COLUMNS = {
    "position": pa.int32(),
    "step": pa.int64(),
    "phase": pa.int8(),
    "kind": pa.int8(),
    "rank": pa.int16(),
}
# Up to so many distinct weights a dictionary is smaller than splitting the bytes (measured: bfloat16 weights).
_MAX_DICTIONARY = 1 << 13
_SAMPLE = 1 << 16


def schema_of(meta: TraceMeta, metadata: dict[bytes, bytes]) -> pa.Schema:
    """Columns of the file: what a token is, then its layer, its K ids, its K gate weights, and scores if recorded."""
    fields = [pa.field("sequence", pa.dictionary(pa.int32(), pa.string()))]
    fields += [pa.field(name, kind) for name, kind in _TOKEN_COLUMNS.items()]
    fields += [pa.field("layer", pa.int16())]
    fields += [pa.field(name, pa.int16()) for name in id_columns(meta)]
    fields += [pa.field(name, pa.float32()) for name in gate_columns(meta)]
    fields += [pa.field(name, pa.list_(pa.float32(), meta.num_experts)) for name in score_columns(meta)]
    return pa.schema(fields, metadata=metadata)


def id_columns(meta: TraceMeta) -> list[str]:
    """Names of the columns that hold the chosen experts, one per slot."""
    return [f"id_{slot}" for slot in range(meta.top_k)]


def gate_columns(meta: TraceMeta) -> list[str]:
    """Names of the columns that hold the gate weights; none where they were not recorded."""
    return [f"gate_{slot}" for slot in range(meta.top_k)] if meta.gates_recorded else []


def score_columns(meta: TraceMeta) -> list[str]:
    """Names of the columns that hold all N scores of a token and layer; none where they were not recorded."""
    recorded = {"scores": meta.scores_recorded, "selection_scores": meta.selection_recorded}
    return [name for name, is_recorded in recorded.items() if is_recorded]


def encodings(first: RoutingTrace) -> dict[str, Any]:
    """Arguments of ``pyarrow.parquet.ParquetWriter``, chosen by the first chunk's weights.

    Weights that a model rounded (bfloat16) take few values and go into a dictionary; others are split into bytes.
    """
    meta = first.meta
    gates = gate_columns(meta)
    dictionary = ["sequence", *_TOKEN_COLUMNS, "layer", *id_columns(meta)]
    split = [f"{name}.list.element" for name in score_columns(meta)]
    if len(np.unique(first.gates_TLK.ravel()[:_SAMPLE])) <= _MAX_DICTIONARY:
        dictionary += gates
    else:
        split += gates
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": dictionary,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
        "write_statistics": False,
        "write_page_checksum": True,
    }


def to_table(chunk: RoutingTrace, schema: pa.Schema) -> pa.Table:
    """The chunk's rows, T·L of them."""
    layers, slots = chunk.meta.moe_layers, chunk.meta.top_k
    used, number_T = np.unique(chunk.token_sequence_T, return_inverse=True)
    names = pa.array([chunk.sequence_names[number] for number in used], pa.string())
    columns: list[Any] = [pa.DictionaryArray.from_arrays(np.repeat(number_T.astype(np.int32), layers), names)]
    columns += [np.repeat(getattr(chunk, f"token_{name}_T"), layers) for name in _TOKEN_COLUMNS]
    columns += [np.tile(np.asarray(chunk.meta.layer_numbers, dtype=np.int16), chunk.tokens)]
    columns += [chunk.ids_TLK[:, :, slot].ravel() for slot in range(slots)]
    if chunk.meta.gates_recorded:
        gates_TLK = np.where(chunk.ids_TLK >= 0, chunk.gates_TLK, np.float32(0))
        columns += [gates_TLK[:, :, slot].ravel() for slot in range(slots)]
    for scores in (chunk.scores_TLN, chunk.selection_TLN):
        if scores is not None:
            columns += [pa.FixedSizeListArray.from_arrays(pa.array(scores.ravel()), chunk.meta.num_experts)]
    return pa.Table.from_arrays(
        [_array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def from_table(table: pa.Table, meta: TraceMeta, sequences: SequenceTable, where: str) -> RoutingTrace:
    """The chunk that the rows hold; ``sequences`` goes on numbering from the chunks before.

    Raises ``TraceError`` naming ``where`` if rows of a token are missing.
    """
    layers = meta.moe_layers
    tokens, left_over = divmod(table.num_rows, layers)
    if left_over or not np.array_equal(
        _numpy(table, "layer").reshape(tokens, layers), np.tile(np.asarray(meta.layer_numbers), (tokens, 1))
    ):
        raise TraceError(f"{where}: a token does not have one row for each of its {layers} layers, in their order")
    ids_TLK = _stack(table, id_columns(meta), tokens, layers)
    gates_TLK = _stack(table, gate_columns(meta), tokens, layers) if meta.gates_recorded else equal_shares(ids_TLK)
    scores: dict[str, Float32s] = {
        name: _list_values(table, name).reshape(tokens, layers, meta.num_experts) for name in score_columns(meta)
    }
    return new_chunk(
        meta,
        sequence_T=_sequence_numbers(table, layers, sequences),
        names=sequences.names,
        ids_TLK=ids_TLK,
        gates_TLK=gates_TLK,
        scores_TLN=scores.get("scores"),
        selection_TLN=scores.get("selection_scores"),
        **{name: _numpy(table, name)[::layers] for name in _TOKEN_COLUMNS},
    )


def token_columns() -> list[str]:
    """Names of the columns that say what a token is, routing apart."""
    return ["sequence", *_TOKEN_COLUMNS]


def tokens_from_table(table: pa.Table, meta: TraceMeta, sequences: SequenceTable) -> RoutingTrace:
    """The chunk that the token columns hold, with no layer of routing."""
    tokens = table.num_rows // meta.moe_layers
    return new_chunk(
        meta,
        sequence_T=_sequence_numbers(table, meta.moe_layers, sequences),
        names=sequences.names,
        ids_TLK=np.zeros((tokens, 0, meta.top_k), np.int16),
        gates_TLK=np.zeros((tokens, 0, meta.top_k), np.float32),
        **{name: _numpy(table, name)[:: meta.moe_layers] for name in _TOKEN_COLUMNS},
    )


def _sequence_numbers(table: pa.Table, layers: int, sequences: SequenceTable) -> Int32s:
    column = table.column("sequence").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    place_T = column.indices.to_numpy(zero_copy_only=False)[::layers]
    names = column.dictionary.to_pylist()
    numbers = np.zeros(len(names), dtype=np.int32)
    places, first = np.unique(place_T, return_index=True)
    for place in places[np.argsort(first)]:
        numbers[place] = sequences.number(names[place])
    return numbers[place_T] if len(names) else np.zeros(0, dtype=np.int32)


def _stack(table: pa.Table, names: list[str], tokens: int, layers: int) -> Any:
    return np.stack([_numpy(table, name).reshape(tokens, layers) for name in names], axis=-1)


def _numpy(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()


def _list_values(table: pa.Table, name: str) -> Any:
    return np.concatenate(
        [part.flatten().to_numpy() for part in table.column(name).chunks] or [np.zeros(0, np.float32)]
    )


def _array(column: Any, kind: pa.DataType) -> Any:
    return column if isinstance(column, pa.Array) else pa.array(column, kind)
