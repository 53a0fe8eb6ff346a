"""Replay a trace: all passes advance together, block by block, from one read of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from probes.errors import TraceError, UsageError
from probes.text import plural, verb
from runtime.simulate.batches import MAX_BLOCK_STEPS, Batching, main_layers, plan
from runtime.simulate.figures import figures_of
from runtime.simulate.index import TraceIndex, index_of
from runtime.simulate.lookahead import NextUse
from runtime.simulate.passes import Pass, can_compile, make_pass
from runtime.simulate.records import PassSpec, Simulation
from runtime.trace.records import IdSpace, TraceMeta, TraceSource

SLOW_BLOCK_STEPS = 8


def simulate(
    source: TraceSource,
    passes: Sequence[PassSpec],
    *,
    batch_size: int | None = None,
    warmup_steps: int = 0,
    steps: int | None = None,
    index: TraceIndex | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Simulation:
    """Every pass's figures over the same steps.

    ``batch_size`` None replays the recorded steps. Warm-up steps run and count in no figure; ``steps``: how many count
    at most, None: all. ``index``: of this source, if it is known already. ``progress`` is told steps done and steps in
    all. ``stop`` is asked between blocks: once it says so, what was replayed is complete and is returned as
    ``interrupted``.

    Raises ``UsageError`` for a batch size or warm-up that leaves no step, and ``TraceError`` for a trace that cannot
    be replayed.
    """
    check_trace(source.meta)
    index = index or index_of(source)
    batching = plan(source, index, batch_size, most_steps=None if steps is None else max(0, warmup_steps) + steps)
    if warmup_steps < 0 or batching.steps <= warmup_steps:
        smaller = "; a smaller --batch-size makes more steps" if batch_size is not None and batch_size > 1 else ""
        raise UsageError(
            f"no step is left after {plural(warmup_steps, 'warm-up step')}: the run has {batching.steps:,}",
            hint=f"use --warmup-steps from 0 to {batching.steps - 1}{smaller}",
        )
    meta = source.meta
    running = [make_pass(each, top_k=meta.top_k, has_scores=meta.scores_recorded) for each in passes]
    replayed = _replay(batching, passes, running, warmup_steps, progress, stop)
    if replayed <= warmup_steps:
        raise UsageError(
            "stopped during the warm-up: nothing was measured yet", hint="replay with fewer --warmup-steps"
        )
    layers = [meta.layer_numbers[layer] for layer in main_layers(meta)]
    return Simulation(
        model=meta.model,
        tokens=index.tokens,
        sequences=len(index.decode_tokens_S),
        moe_layers=len(layers),
        num_experts=meta.num_experts,
        top_k=meta.top_k,
        has_scores=meta.scores_recorded,
        batch_size=batch_size,
        warmup_steps=warmup_steps,
        planned_steps=batching.steps,
        interrupted=replayed < batching.steps,
        passes=tuple(
            figures_of(each, done.counts(), layers, has_scores=meta.scores_recorded)
            for each, done in zip(passes, running, strict=True)
        ),
        notes=(*source.notes, *_notes(source, index, batch_size, passes)),
    )


def check_trace(meta: TraceMeta) -> None:
    """Raise ``TraceError`` where the metadata alone says that the trace cannot be replayed."""
    if meta.id_space is IdSpace.PHYSICAL:
        raise TraceError(
            "the trace holds physical expert ids, of a placement with redundant experts",
            hint="import it with its physical-to-logical map",
        )
    if not len(main_layers(meta)):
        raise TraceError(
            "the trace holds only layers of a draft head", hint="record the model's own MoE layers, and import those"
        )


def _replay(
    batching: Batching,
    passes: Sequence[PassSpec],
    running: Sequence[Pass],
    warmup_steps: int,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
) -> int:
    """Run all blocks through all passes; returns the steps that were replayed."""
    from runtime.simulate.prepare import prepare

    done = 0
    looking_ahead = [each.cache is not None and each.cache.kind == "belady" for each in passes]
    all_compiled = all(can_compile(each.policy, has_scores=batching.source.meta.scores_recorded) for each in passes)
    # Blocks that take well under a second, so that stopping does too.
    block_steps = MAX_BLOCK_STEPS if all_compiled else SLOW_BLOCK_STEPS
    future = _future(batching, block_steps) if any(looking_ahead) else None
    for block in batching.blocks(block_steps):
        prepared = prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, batching.source.meta.num_experts)
        next_use = None if future is None else next(future)
        uncounted = min(block.steps, max(0, warmup_steps - done))
        for each, ahead in zip(running, looking_ahead, strict=True):
            each.run(block, prepared, next_use if ahead else None, uncounted)
        done += block.steps
        if progress is not None:
            progress(done, batching.steps)
        if stop is not None and stop():
            break
    return done


def _future(batching: Batching, block_steps: int) -> Iterator[NextUse]:
    """What ``belady`` knows, from a read of its own."""
    from runtime.simulate.lookahead import next_uses
    from runtime.simulate.prepare import prepare

    experts = batching.source.meta.num_experts

    return next_uses(
        (
            prepare(block.offsets_S1, block.rows.ids_RLK, block.rows.gates_RLK, experts)
            for block in batching.blocks(block_steps)
        ),
        experts,
    )


def _notes(source: TraceSource, index: TraceIndex, batch_size: int | None, passes: Sequence[PassSpec]) -> Iterator[str]:
    meta = source.meta
    if index.left_out:
        left_out = plural(index.left_out, "padding or dummy token")
        yield f"{left_out} {verb(index.left_out, 'counts', 'count')} for nothing"
    if index.unknown_phase and batch_size is not None:
        does = f"{plural(index.unknown_phase, 'token')} {verb(index.unknown_phase, 'does', 'do')}"
        yield f"{does} not say whether prefill or decode, which counts as decode"
    if index.without_step and batch_size is None:
        without = plural(index.without_step, "token")
        yield f"{without} without a step id {verb(index.without_step, 'was', 'were')} left out"
    if meta.draft_layers:
        yield f"layers of the draft head were left out: {', '.join(map(str, meta.draft_layers))}"
    if not meta.gates_recorded:
        yield "the trace has no gate weights: every chosen expert counts as equally important"
    if not meta.scores_recorded and any(not can_keep_all(each) for each in passes):
        yield "the trace has only the chosen experts' weights: lost slots stay empty (compensation acts as none)"
    slow = sorted(
        {each.policy.name for each in passes if not can_compile(each.policy, has_scores=meta.scores_recorded)}
    )
    if slow:
        yield f"replayed policy by policy, not compiled: {', '.join(slow)}"


def can_keep_all(each: PassSpec) -> bool:
    """Whether the policy loses no slot, whatever comes."""
    return each.policy.name == "router"
