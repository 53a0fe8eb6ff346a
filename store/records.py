"""What the store keeps beside probes and calibrations: runs and simulations, as the floors above hand them in.

Times are in seconds. A quantity that is unknown is None, never NaN. Per-device lists are ordered by device index.
"""

from __future__ import annotations

from dataclasses import dataclass

from probes.records import Device, Fingerprint

FEWEST_PAIRS = 3
"""Of fewer than these no interval is given: a bootstrap of two gives little else than the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Median of ``samples`` (raw, in the order taken) with a 95 % bootstrap interval of the median; the interval is
    None where there are fewer than ``FEWEST_PAIRS``."""

    median: float
    ci95: tuple[float, float] | None
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """with policy ÷ baseline, paired: below 1 is faster. ``ci95``: 95 %; None of fewer than ``FEWEST_PAIRS``."""

    ratio: float
    ci95: tuple[float, float] | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """``ci95`` where it shows anything: one of no width is of samples that cannot differ."""
        return self.ci95 if self.ci95 is not None and self.ci95[0] < self.ci95[1] else None

    @property
    def outside_noise(self) -> bool:
        """Whether there is an interval, and it does not contain 1."""
        return self.interval is not None and not self.interval[0] <= 1.0 <= self.interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean seconds of one decode step by where they went, on the slowest rank; ``other``: dense compute, overhead.

    The mean over all passes, where TPOT is the median of theirs on rank 0: one disturbed pass moves this alone.
    """

    total: float
    fetch_wait: float
    experts: float
    exchange: float
    decide: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStatistics:
    """One kind of pass (baseline, or with the policy) over all interleaved pairs.

    ``max_device_misses_per_step``: mean over decode steps of Σ_layers max_d fetches. ``removed_importance``: per real
    token and layer. ``tokens``: how many tokens one pass generated. ``output_digest``: of all generated token ids.
    ``dispatches``: experts run, over layers, decode steps and devices. ``ttft_seconds``: None where a trace is
    replayed, which generates nothing.
    """

    ttft_seconds: Estimate | None
    tpot_seconds: Estimate
    tokens: int
    steps: int
    misses_per_device: tuple[int, ...]
    max_device_misses_per_step: float
    hit_rate: float | None
    removed_importance: float
    rerouted_slots: int
    step_times: StepTimes
    predicted_tpot_seconds: float | None
    output_digest: str = ""
    dispatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Decode-shaped quality on held-out text, teacher-forced in lockstep on the policy's own evolving caches.

    ``nll_*`` in nats per token; ``mean_kl`` = mean KL(baseline ‖ policy) per token, nats; ``nll_difference_ci95`` is
    a paired bootstrap over sequences of nll_policy − nll_baseline.
    """

    nll_baseline: float
    nll_policy: float
    nll_difference_ci95: tuple[float, float]
    perplexity_ratio: float
    mean_kl: float
    top1_agreement: float
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """One metric of an evaluation task, over the same ``documents`` with the router's own choice and with the policy.

    Values are as the harness makes them (``filter``: of answers, before they are scored), None where they are no finite
    numbers. ``difference_ci95``: paired bootstrap over documents of with_policy − baseline. ``documents_better`` and
    ``_worse``: whose own value the policy changed, None where the metric is no mean of such. ``chance``: what guessing
    scores, where that is known.
    """

    metric: str
    filter: str
    baseline: float | None
    with_policy: float | None
    difference: float | None
    difference_ci95: tuple[float, float] | None
    higher_is_better: bool | None
    documents: int
    documents_better: int | None
    documents_worse: int | None
    chance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """One task of lm-evaluation-harness. ``shape``: ``decode`` where every token was decoded in lockstep, ``prefill``
    where contexts were computed in one forward pass, which makes nearly every expert mandatory.

    ``requests``: what the harness asked, ``requests_cut`` of them longer than the model's context.
    ``removed_importance``: by the policy, per real token and layer, over all steps.
    """

    task: str
    shape: str
    requests: int
    requests_cut: int
    removed_importance: float
    metrics: tuple[TaskMetric, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One MoE layer over the policy's passes: per device, mean per decode step.

    ``before`` is what the router's own choice would have cost on the very caches and tokens of ``after``. Costs are
    in seconds (fetches × calibrated cost), misses in experts. ``gap_histogram_*``: number of decode steps by max_d −
    min_d misses. ``importance_highest`` and ``_lowest``: mean over steps of the highest and lowest importance share
    among the activated experts (paper, Fig. 4).
    """

    layer: int
    device_cost_before: tuple[float, ...]
    device_cost_after: tuple[float, ...]
    device_misses_before: tuple[float, ...]
    device_misses_after: tuple[float, ...]
    gap_histogram_before: tuple[int, ...]
    gap_histogram_after: tuple[int, ...]
    importance_highest: float | None
    importance_lowest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """Per decode step of the last pair: max over devices of the step's fetches, and share of dispatches that hit."""

    baseline_max_misses: tuple[int, ...]
    policy_max_misses: tuple[int, ...]
    baseline_hit_rate: tuple[float, ...]
    policy_hit_rate: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A policy as it was run: its name and every parameter, defaults included."""

    name: str
    parameters: dict[str, str | float | int | bool]

    def __str__(self) -> str:
        pairs = ",".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}:{pairs}" if pairs else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was run. ``cache_experts``: cached experts per device, over all layers. ``batch_size`` sequences decode in
    lockstep: the concurrency. ``input_len``: tokens of every prompt where they were cut to one length, else None.
    """

    batch_size: int
    max_new_tokens: int
    prompts: int
    pairs: int
    seed: int
    dtype: str
    cache: str
    cache_experts: int
    experts_per_device: int
    top_k: int
    num_experts: int
    moe_layers: int
    expert_bytes: int
    phases: str
    read_mode: str | None
    input_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Calibrated model against measurement, for the policy's passes: relative_error = predicted ÷ measured − 1."""

    tpot_seconds: float
    relative_error: float
    baseline_tpot_seconds: float
    baseline_relative_error: float
    calibration_id: str
    seconds_per_expert: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One prompt and what followed it, for the eye."""

    prompt: str
    baseline: str
    with_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One resident expert on ``tokens`` tokens: floating-point operations and measured seconds."""

    tokens: int
    flops: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Expert matmuls on one device against its limits (paper, Fig. 1).

    ``expert_bytes``: one expert as computed with, read once. ``peak_flops_per_s``: a large square matmul of the same
    dtype. ``memory_bytes_per_s``: reading, as calibrated. ``fetch_seconds``: bringing one expert to the device.
    """

    device: str
    dtype: str
    peak_flops_per_s: float
    memory_bytes_per_s: float | None
    expert_bytes: int
    fetch_seconds: float | None
    points: tuple[RooflinePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeStatistics:
    """The automatic brake, which brings the router's own choice back where a layer's output is too far from it.

    ``budget``: mean relative error ‖policy − router‖ ÷ ‖router‖ of a layer's output that is allowed. Over the policy's
    measured passes: ``layer_steps`` that it watched, in ``braked_layer_steps`` of which the router's own choice was in
    force; ``samples``: decode layer-steps computed both ways, with ``mean_error`` and ``highest_error`` over those
    whose error is a number (None without any); ``trips``: how often it began to brake. ``shadow_seconds`` (of rank 0)
    and ``shadow_fetches`` (of all devices): what the samples took, which no other figure includes. ``quality_*``:
    while quality was measured, None where it was not.
    """

    budget: float
    sample_every: int
    layer_steps: int
    braked_layer_steps: int
    samples: int
    mean_error: float | None
    highest_error: float | None
    trips: int
    shadow_seconds: float
    shadow_fetches: int
    quality_layer_steps: int | None
    quality_braked_layer_steps: int | None
    quality_trips: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a trace-driven run replayed, and with which bytes: MoE layers alone, and no model's weights.

    ``model_layers``: MoE layers of the model, of which the workload's ``moe_layers`` were replayed. ``recorded``: the
    trace's own steps, not batches of equal size; the workload's ``batch_size`` is then their mean number of tokens,
    rounded. ``storage``: how the checkpoint would store an expert; ``multiplies``: what was multiplied, in words.
    ``distinct_experts`` of ``experts_per_device`` had bytes of their own. ``checked_experts``: on every device, whose
    bytes were compared after the last pass. Of the baseline's passes: ``expert_compute_seconds`` for one dispatched
    expert, ``rest_seconds`` of a step for neither fetching nor computing.
    """

    trace: str
    model_layers: int
    warmup_steps: int
    steps: int
    recorded: bool
    storage: str
    multiplies: str
    distinct_experts: int
    checked_experts: int
    expert_compute_seconds: float
    rest_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPoint:
    """One setting of a policy's knob, tried on held-out text.

    ``loss_rise``: (nll − baseline's) ÷ baseline's, with the 95 % interval of a paired bootstrap over sequences.
    ``within_limit``: whether that interval's upper end is. The rest as in ``PassStatistics``, while it was tried.
    """

    value: float
    nll: float
    loss_rise: float
    loss_rise_ci95: tuple[float, float]
    removed_importance: float
    max_device_misses_per_step: float
    within_limit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySearch:
    """How far a policy's ``knob`` may be turned. ``max_quality_drop``: the rise of held-out loss that is allowed, as a
    share; ``points`` in the order tried, over ``sequences`` passages with ``tokens`` predictions in all; ``chosen``:
    None where none of them is within the limit. ``nll_baseline`` in nats per token.
    """

    knob: str
    max_quality_drop: float
    nll_baseline: float
    sequences: int
    tokens: int
    points: tuple[PolicyPoint, ...]
    chosen: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOrigin:
    """The stored policy that a run used; ``searched_here``: that run itself searched for it."""

    policy_id: str
    created_at: str
    searched_here: bool
    search: PolicySearch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """A policy found for one model on one kind of machine, with the evidence; ``policy`` None: none is within limits.

    ``model_identity``: digest of its config and weights. ``measured`` and ``gain_tpot``: by the run ``run_id`` that
    followed, its quality on other passages than those searched on; None where that run was not completed or not begun.
    The rest as in ``Workload`` and ``RunRecord``.
    """

    policy_id: str
    created_at: str
    model: str
    model_identity: str
    model_family: str
    devices: tuple[Device, ...]
    tier: str
    cache: str
    cache_experts: int
    experts_per_device: int
    batch_size: int
    dtype: str
    phases: str
    seed: int
    fingerprint: Fingerprint
    calibration_id: str | None
    policy: PolicyChoice | None
    search: PolicySearch
    run_id: str | None = None
    measured: Quality | None = None
    gain_tpot: Ratio | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything one ``caee run`` measured. ``gain_ttft`` is None, and ``replay`` given, where a trace was replayed.

    ``max_quality_drop``: the rise of held-out loss that was allowed, as a share of the baseline's, where one was asked
    for; ``policy_origin``: where the policy came from, unless it was given. ``tasks``: as they were asked for.
    """

    run_id: str
    created_at: str
    model: str
    model_family: str
    devices: tuple[Device, ...]
    tier: str
    policy: PolicyChoice
    workload: Workload
    fingerprint: Fingerprint
    calibration_id: str | None
    baseline: PassStatistics
    with_policy: PassStatistics
    gain_ttft: Ratio | None
    gain_tpot: Ratio
    quality: Quality | None
    layers: tuple[LayerCost, ...]
    series: StepSeries
    predicted: Prediction | None
    samples: tuple[SampleText, ...]
    warnings: tuple[str, ...]
    roofline: Roofline | None = None
    brake: BrakeStatistics | None = None
    replay: Replay | None = None
    max_quality_drop: float | None = None
    policy_origin: PolicyOrigin | None = None
    tasks: tuple[TaskResult, ...] = ()
