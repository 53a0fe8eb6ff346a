"""Which tokens pass together: the batching rules, against a naive walk over whole sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.errors import TraceError, UsageError
from runtime.simulate import batches
from runtime.simulate.batches import Block, plan
from runtime.simulate.index import index_of
from runtime.trace.chunking import new_chunk
from runtime.trace.layers import FirstLayers
from runtime.trace.records import Phase, RoutingTrace, TokenKind, TraceMeta


def numbered(lengths: list[int], order: list[int] | None = None) -> RoutingTrace:
    """Sequences of ``lengths`` whose token j of sequence s chose experts s and 100 + j, so that rows tell who they are.

    ``order``: the sequences' numbers in file order, token by token.
    """
    sequence_T = np.array(order if order is not None else np.repeat(np.arange(len(lengths)), lengths), np.int32)
    position_T = np.zeros(len(sequence_T), np.int64)
    for sequence in range(len(lengths)):
        position_T[sequence_T == sequence] = np.arange(lengths[sequence])
    ids = np.stack([sequence_T, 100 + position_T], axis=-1)[:, None, :].astype(np.int16)
    return new_chunk(
        TraceMeta(model=None, num_experts=400, top_k=2, layer_numbers=(3,)),
        tuple(str(number) for number in range(len(lengths))),
        sequence_T,
        ids,
        np.full(ids.shape, 0.5, np.float32),
        position=position_T,
        phase=Phase.DECODE,
    )


def steps_of(blocks: Any) -> list[list[tuple[int, int]]]:
    """Each step's tokens as (sequence, position)."""
    steps = []
    for block in blocks:
        assert isinstance(block, Block)
        for step in range(block.steps):
            rows = block.rows.ids_RLK[block.offsets_S1[step] : block.offsets_S1[step + 1], 0]
            steps.append([(int(sequence), int(place) - 100) for sequence, place in rows])
    return steps


def walk(lengths: list[int], batch_size: int) -> list[list[tuple[int, int]]]:
    """The definition: every slot advances a token a step; an ended sequence is replaced by the next unused one."""
    waiting = [(sequence, length) for sequence, length in enumerate(lengths) if length]
    slots = [(*waiting.pop(0), 0) for _ in range(batch_size)]
    steps = []
    while True:
        steps.append([(sequence, at) for sequence, _, at in slots])
        for slot, (sequence, length, at) in enumerate(slots):
            if at + 1 < length:
                slots[slot] = (sequence, length, at + 1)
            elif waiting:
                slots[slot] = (*waiting.pop(0), 0)
            else:
                return steps


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: any(lengths))


@given(lengths=LENGTHS, data=st.data(), chunk=st.integers(1, 20), max_steps=st.integers(1, 7))
def test_sequences_fill_slots_in_file_order(
    lengths: list[int], data: Any, chunk: int, max_steps: int, in_memory: Any
) -> None:
    batch_size = data.draw(st.integers(1, sum(1 for length in lengths if length)))
    source = in_memory(numbered(lengths), chunk)
    batching = plan(source, index_of(source), batch_size)
    steps = steps_of(batching.blocks(max_steps))
    assert steps == walk(lengths, batch_size)
    assert batching.steps == len(steps)


@given(lengths=LENGTHS, data=st.data(), max_steps=st.integers(1, 7), recorded=st.booleans())
def test_fewer_steps_are_the_first_ones(
    lengths: list[int], data: Any, max_steps: int, recorded: bool, in_memory: Any
) -> None:
    trace = numbered(lengths)
    if recorded:
        trace = dataclasses.replace(trace, token_step_T=np.sort(trace.token_position_T).astype(np.int64))
    source = in_memory(trace)
    batch_size = None if recorded else data.draw(st.integers(1, sum(1 for length in lengths if length)))
    whole = plan(source, index_of(source), batch_size)
    most = data.draw(st.integers(1, whole.steps + 2))
    part = plan(source, index_of(source), batch_size, most_steps=most)
    assert steps_of(part.blocks(max_steps)) == steps_of(whole.blocks())[:most]
    assert part.steps == min(most, whole.steps)


def test_the_first_layers_are_a_trace_of_their_own(in_memory: Any, make_trace: Any) -> None:
    trace = make_trace(layers=4, scores=True)
    whole = in_memory(dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, draft_layers=(1,))))
    first = FirstLayers(whole, 2)
    assert first.meta.layer_numbers == (0, 2)
    rows, all_rows = (next(plan(each, index_of(each), 2).blocks()).rows for each in (first, whole))
    np.testing.assert_array_equal(rows.ids_RLK, all_rows.ids_RLK[:, :2])
    np.testing.assert_array_equal(rows.gates_RLK, all_rows.gates_RLK[:, :2])
    np.testing.assert_array_equal(rows.scores_RLN, all_rows.scores_RLN[:, :2])
    with pytest.raises(UsageError, match="--layers 4 is not possible: the trace has 3 MoE layers"):
        FirstLayers(whole, 4)


@given(lengths=LENGTHS, seed=st.integers(0, 99), chunk=st.integers(1, 20))
def test_the_order_of_the_file_between_sequences_does_not_matter(
    lengths: list[int], seed: int, chunk: int, in_memory: Any
) -> None:
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(lengths)), lengths)).tolist()
    source = in_memory(numbered(lengths, order), chunk)
    running = min(3, sum(1 for length in lengths if length))
    assert steps_of(plan(source, index_of(source), running).blocks()) == walk(lengths, running)


@pytest.mark.parametrize("shuffled", [False, True])
def test_recorded_steps_are_replayed_whole(shuffled: bool, in_memory: Any) -> None:
    trace = numbered([5, 3, 4], [0, 1, 2, 0, 1, 2, 0, 0, 2, 1, 0, 2])
    step_T = np.array([0, 0, 0, 2, 2, 2, 2, 5, 5, 9, 9, 9])
    if shuffled:
        step_T = step_T[::-1].copy()
    expected = [
        [(int(trace.token_sequence_T[t]), int(trace.token_position_T[t])) for t in np.flatnonzero(step_T == step)]
        for step in (0, 2, 5, 9)
    ]
    for chunk in (1, 2, 5, 100):
        for max_steps in (1, 3, 100):
            source = in_memory(dataclasses.replace(trace, token_step_T=step_T), chunk)
            batching = plan(source, index_of(source), None)
            assert steps_of(batching.blocks(max_steps)) == expected
            assert batching.steps == 4


def test_prefill_padding_and_dummies_do_not_decode(in_memory: Any) -> None:
    trace = numbered([4, 4])
    phase_T = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.int8)
    kind_T = np.array([0, 0, 0, 0, 0, 0, TokenKind.PADDING, TokenKind.DUMMY], np.int8)
    source = in_memory(dataclasses.replace(trace, token_phase_T=phase_T, token_kind_T=kind_T))
    index = index_of(source)
    assert index.left_out == 2
    assert steps_of(plan(source, index, 1).blocks()) == [[(0, 2)], [(0, 3)], [(1, 1)]]


def test_recorded_steps_hold_prefill_but_no_padding(in_memory: Any) -> None:
    trace = numbered([4])
    source = in_memory(
        dataclasses.replace(
            trace,
            token_phase_T=np.array([0, 0, 1, 1], np.int8),
            token_kind_T=np.array([0, 1, 0, 2], np.int8),
            token_step_T=np.array([7, 7, 8, 9]),
        )
    )
    # A step with nothing real in it is no step.
    assert steps_of(plan(source, index_of(source), None).blocks()) == [[(0, 0)], [(0, 2)]]


def test_tokens_of_unknown_phase_count_as_decode(in_memory: Any) -> None:
    trace = numbered([3])
    source = in_memory(dataclasses.replace(trace, token_phase_T=np.full(3, Phase.UNKNOWN, np.int8)))
    index = index_of(source)
    assert index.unknown_phase == 3
    assert len(steps_of(plan(source, index, 1).blocks())) == 3


def test_layers_of_a_draft_head_are_left_out(in_memory: Any, make_trace: Any) -> None:
    trace = make_trace(layers=4)
    meta = dataclasses.replace(trace.meta, draft_layers=(1,))
    source = in_memory(dataclasses.replace(trace, meta=meta))
    block = next(plan(source, index_of(source), 2).blocks())
    assert block.rows.ids_RLK.shape[1] == 3
    np.testing.assert_array_equal(batches.main_layers(meta), [0, 2, 3])


@pytest.mark.parametrize(
    ("lengths", "batch_size", "message"),
    [([3, 3], 3, "the trace has 2"), ([3, 0], 2, "the trace has 1"), ([3], 0, "below 1")],
)
def test_too_few_sequences(lengths: list[int], batch_size: int, message: str, in_memory: Any) -> None:
    source = in_memory(numbered(lengths))
    with pytest.raises(UsageError, match=message):
        plan(source, index_of(source), batch_size)


def test_a_trace_without_decode_says_so(in_memory: Any) -> None:
    source = in_memory(dataclasses.replace(numbered([3]), token_phase_T=np.zeros(3, np.int8)))
    with pytest.raises(UsageError, match="the trace has 0") as caught:
        plan(source, index_of(source), 1)
    assert "recorded" in str(caught.value.hint)


def test_recorded_needs_step_ids(in_memory: Any) -> None:
    source = in_memory(numbered([3]))
    with pytest.raises(UsageError, match="no recorded steps"):
        plan(source, index_of(source), None)


@pytest.mark.parametrize("kind_T", [np.zeros(0, np.int8), np.array([1, 2, 1], np.int8)])
def test_a_trace_without_a_real_token_is_refused(kind_T: Any, in_memory: Any) -> None:
    trace = numbered([len(kind_T)])
    with pytest.raises(TraceError, match=r"holds (no token|only padding)"):
        index_of(in_memory(dataclasses.replace(trace, token_kind_T=kind_T)))


def test_the_same_token_twice_is_refused(in_memory: Any) -> None:
    trace = dataclasses.replace(numbered([4, 2]), token_position_T=np.array([0, 1, 1, 2, 0, 1], np.int32))
    for chunk in (1, 2, 10):
        with pytest.raises(TraceError, match="sequence '0': position 1 comes after position 1"):
            index_of(in_memory(trace, chunk))
