"""``caee run --max-quality-drop`` and ``--policy stored``: what is searched, what is kept of it, and what fits here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probes.errors import CheckFailed, InputError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from caee_cli.running import RunRequest
    from probes.records import Fingerprint
    from runtime.options import RunOptions
    from runtime.policy.types import PolicySpec
    from runtime.worker import RankReport
    from store.records import PolicyOrigin, PolicyRecord, PolicySearch, RunRecord
    from store.session import Store

STORED = "stored"
MAKE_ONE = "caee run MODEL --max-quality-drop 1%, with the same --devices, --tier and cache, finds and stores one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the options say of the policy. ``spec``: None for the stored one; ``limit``: of the loss, as a share."""

    spec: PolicySpec | None
    limit: float | None
    search: bool


def wished(policy: str, theta: float | None, max_quality_drop: str | None, *, quality: bool) -> Wish:
    """Read ``--policy``, ``--theta`` and ``--max-quality-drop`` together. Raises ``UsageError``.

    A policy that says how much it prunes is run as it is and only checked; otherwise that is searched.
    """
    from runtime.policy.knob import is_given
    from runtime.policy.spec import parse_policy

    limit = None if max_quality_drop is None else parse_share(max_quality_drop)
    if limit is not None and not quality:
        raise UsageError("--max-quality-drop needs quality to be measured", hint="leave out --no-quality")
    if policy == STORED:
        if theta is not None:
            raise UsageError("--theta and --policy stored exclude each other: a stored policy has its own")
        return Wish(spec=None, limit=limit, search=False)
    separator = "," if ":" in policy else ":"
    written = policy if theta is None else f"{policy}{separator}theta={theta}"
    return Wish(spec=parse_policy(written), limit=limit, search=limit is not None and not is_given(written))


def parse_share(text: str) -> float:
    """``1%`` or ``0.01``. Raises ``UsageError``."""
    hint = "write a share of the loss, for example 1% or 0.01"
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"--max-quality-drop {text!r} is not a share", hint=hint) from error
    if not 0 <= value < 1:
        raise UsageError(f"--max-quality-drop {text} is out of range", hint=f"at least 0 and below 100%; {hint}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a stored policy must have been found under to be used."""

    identity: str
    tier: str
    devices: int
    cache: str
    cache_experts: int | None

    def differences(self, record: PolicyRecord) -> list[str]:
        """In words what ``record``, of the same model, was found under instead."""
        half = max(1, record.experts_per_device // 2)
        cached = min(self.cache_experts or half, record.experts_per_device)
        if self.tier == "device":
            cached = record.experts_per_device
        pairs = (
            ("tier", record.tier, self.tier),
            ("device count", len(record.devices), self.devices),
            ("cache", record.cache, self.cache),
            ("cached experts per device", record.cache_experts, cached),
        )
        return [f"{name} {found} where this run has {asked}" for name, found, asked in pairs if found != asked]


def stored_policy(store: Store, conditions: Conditions) -> PolicyRecord:
    """The newest stored policy of this model, tier, cache and number of devices. Raises ``InputError``."""
    records = [record for record in store.policies() if record.model_identity == conditions.identity]
    if not records:
        others = sorted({record.model for record in store.policies()})
        other = f"; those kept are of {', '.join(others)}" if others else ""
        raise InputError(f"no policy is stored for this model{other}", hint=MAKE_ONE)
    fitting = [record for record in records if not conditions.differences(record)]
    if not fitting:
        differences = ", ".join(conditions.differences(records[0]))
        raise InputError(f"the newest policy stored for this model was found with {differences}", hint=MAKE_ONE)
    if fitting[0].policy is None:
        raise InputError(
            f"the newest search for this model here, {fitting[0].policy_id}, found nothing to gain: no setting of "
            f"{fitting[0].search.knob} kept the loss within {_percent(fitting[0].search.max_quality_drop)}",
            hint="allow more with --max-quality-drop, or name a policy",
        )
    return fitting[0]


def use_stored(
    store: Store, request: RunRequest, folder: Path, devices: int, tier: str
) -> tuple[PolicySpec, PolicyOrigin, list[str]]:
    """The stored policy for this model and machine, where it came from, and what else was different then."""
    from runtime.cache import parse_cache
    from runtime.models.identity import model_identity
    from runtime.policy.spec import policy_from_mapping
    from store.records import PolicyOrigin

    conditions = Conditions(
        identity=model_identity(folder),
        tier=tier,
        devices=devices,
        cache=str(parse_cache(request.cache)),
        cache_experts=request.cache_experts,
    )
    record = stored_policy(store, conditions)
    assert record.policy is not None
    spec = policy_from_mapping({"name": record.policy.name, **record.policy.parameters})
    origin = PolicyOrigin(
        policy_id=record.policy_id, created_at=record.created_at, searched_here=False, search=record.search
    )
    phases = request.phases or ("decode" if tier == "device" else "all")
    pairs = (("batch size", record.batch_size, request.batch_size), ("phases", record.phases, phases))
    notes = [
        f"the stored policy {record.policy_id} was found with {name} {found}, not {asked}: its loss may differ here"
        for name, found, asked in pairs
        if found != asked
    ]
    return spec, origin, notes


def policy_record(
    options: RunOptions, report: RankReport, search: PolicySearch, fingerprint: Fingerprint, model: str
) -> PolicyRecord:
    """What is kept of a search, before it is known what came of it."""
    import datetime
    import uuid

    from runtime.cache import parse_cache
    from runtime.models.identity import model_identity
    from runtime.summary import policy_choice
    from store.records import PolicyRecord

    return PolicyRecord(
        policy_id=uuid.uuid4().hex[:12],
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=model,
        model_identity=model_identity(options.model),
        model_family=report.family,
        devices=report.devices,
        tier=options.tier,
        cache=str(parse_cache(options.cache)),
        cache_experts=report.cache_experts,
        experts_per_device=report.experts_per_device,
        batch_size=report.batch_size,
        dtype=report.dtype,
        phases=options.phases or ("all" if options.offloading else "decode"),
        seed=options.seed,
        fingerprint=fingerprint,
        calibration_id=options.calibration.calibration_id if options.calibration else None,
        policy=None if search.chosen is None else policy_choice(report.policy),
        search=search,
    )


def keep(
    store: Store, options: RunOptions, report: RankReport, fingerprint: Fingerprint, model: str
) -> RunRecord | PolicyRecord:
    """Store the run, and the policy that it searched for; only the search, where that found nothing to run."""
    from runtime.summary import run_record
    from store.records import PolicyOrigin

    if report.search is None:
        run = run_record(options, report, fingerprint, model)
        store.save_run(run)
        return run
    found = policy_record(options, report, report.search, fingerprint, model)
    if found.policy is None:
        store.save_policy(found)
        return found
    origin = PolicyOrigin(
        policy_id=found.policy_id, created_at=found.created_at, searched_here=True, search=found.search
    )
    run = run_record(dataclasses.replace(options, policy_origin=origin), report, fingerprint, model)
    found = dataclasses.replace(found, run_id=run.run_id, measured=run.quality, gain_tpot=run.gain_tpot)
    store.save_policy(found)
    store.save_run(run)
    return run


def check_quality(run: RunRecord) -> None:
    """Raise ``CheckFailed`` where the loss rose by more than was allowed."""
    if run.max_quality_drop is None or run.quality is None:
        return
    rise = run.quality.nll_policy / run.quality.nll_baseline - 1
    if rise > run.max_quality_drop:
        raise CheckFailed(
            f"held-out loss rose by {_percent(rise)}, more than the {_percent(run.max_quality_drop)} that "
            "--max-quality-drop allows",
            hint=f"run {run.run_id} is stored all the same; give a milder policy, or none: then one is searched",
        )


def nothing_found(found: PolicyRecord) -> CheckFailed:
    """No setting was within the limit."""
    mildest = found.search.points[-1]  # a bisection that finds nothing ends there
    return CheckFailed(
        f"nothing to gain at this limit: no setting of {found.search.knob} kept the rise of the held-out loss within "
        f"{_percent(found.search.max_quality_drop)}; the mildest tried, {found.search.knob}={mildest.value:g}, reached "
        f"{_percent(mildest.loss_rise_ci95[1])} at the upper end of its interval",
        hint=f"search {found.policy_id} is stored with all it tried; allow more, or give a longer --held-out text",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
