"""What goes into the store comes out of it, whatever it holds."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.errors import StoreError
from probes.records import Calibration, Probe
from store.codec import decode, digest, encode, from_text
from store.records import PolicyRecord, RunRecord
from store.session import open_store

IDS = itertools.count()
ROUND_TRIP = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a record's type: every enum member, empty tuples, absent options, the largest and smallest numbers."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name: anything(hints[field.name]) for field in dataclasses.fields(kind)}
        return st.builds(kind, **fields)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(anything(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(anything, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), anything(arguments[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(anything, arguments))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return {
        str: st.text(max_size=20),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
    }[kind]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_store(str(tmp_path_factory.mktemp("round-trip") / "caee.db")) as store:
        yield store


def _identified(record: Any, field: str) -> Any:
    # A date and an id of its own: the store insists on both.
    return dataclasses.replace(record, **{field: f"r{next(IDS)}-é", "created_at": "2026-03-01T12:00:00+01:00"})


@ROUND_TRIP
@given(probe=anything(Probe))
def test_any_probe(shared_store: Any, probe: Probe) -> None:
    probe = _identified(probe, "probe_id")
    shared_store.save_probe(probe)
    assert shared_store.probe(probe.probe_id) == probe


@ROUND_TRIP
@given(calibration=anything(Calibration))
def test_any_calibration(shared_store: Any, calibration: Calibration) -> None:
    calibration = _identified(calibration, "calibration_id")
    shared_store.save_calibration(calibration)
    assert shared_store.calibration(calibration.calibration_id) == calibration


@ROUND_TRIP
@given(run=anything(RunRecord))
def test_any_run(shared_store: Any, run: RunRecord) -> None:
    run = _identified(run, "run_id")
    shared_store.save_run(run)
    assert shared_store.run(run.run_id) == run


@ROUND_TRIP
@given(policy=anything(PolicyRecord))
def test_any_policy(shared_store: Any, policy: PolicyRecord) -> None:
    policy = _identified(policy, "policy_id")
    shared_store.save_policy(policy)
    assert shared_store.policy(policy.policy_id) == policy


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@ROUND_TRIP
@given(document=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_any_simulation(shared_store: Any, document: dict[str, Any]) -> None:
    simulation_id = f"s{next(IDS)}"
    shared_store.save_simulation(simulation_id, "2026-03-01T12:00:00Z", document)
    assert shared_store.simulation(simulation_id) == document


def test_everything_stored_above_passes_the_check(shared_store: Any) -> None:
    found = [problem for problem in shared_store.check() if problem.damage]
    assert found == []


def test_extreme_floats_survive_exactly(records: Any) -> None:
    model = dataclasses.replace(
        records.calibration().models[0], alpha=5e-324, bandwidth_bytes_per_s=1.7976931348623157e308, beta_seconds=-0.0
    )
    calibration = dataclasses.replace(records.calibration(), models=(model,))
    with open_store("sqlite://") as store:
        store.save_calibration(calibration)
        found = store.calibration().models[0]
    assert found == model
    assert (found.alpha, found.bandwidth_bytes_per_s) == (5e-324, 1.7976931348623157e308)


def test_a_path_that_is_no_utf8_survives(records: Any) -> None:
    run = dataclasses.replace(records.run(), model="/models/\udce9")
    with open_store("sqlite://") as store:
        store.save_run(run)
        assert store.run() == run
        assert [problem for problem in store.check() if problem.damage] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_by_name_and_nothing_is_written(records: Any, value: float) -> None:
    run = records.run()
    run = dataclasses.replace(run, quality=dataclasses.replace(run.quality, mean_kl=value))
    with open_store("sqlite://") as store:
        with pytest.raises(StoreError, match=r"RunRecord\.quality\.mean_kl is not a finite number"):
            store.save_run(run)
        assert store.entries() == ()


def test_a_value_that_json_has_not_is_refused_by_name(records: Any) -> None:
    run = dataclasses.replace(records.run(), warnings=(b"bytes",))
    with pytest.raises(StoreError, match=r"RunRecord\.warnings\[0\] is a bytes"):
        encode(run)


def _without(document: dict[str, Any], *path: str | int) -> dict[str, Any]:
    return _with(document, None, *path, delete=True)


def _with(document: dict[str, Any], value: Any, *path: Any, delete: bool = False) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(document))
    at: Any = changed
    for step in path[:-1]:
        at = at[step]
    if delete:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("links", 0, "kind"), "wire", r"Probe\.links\[0\]\.kind: 'wire' is not a valid LinkKind"),
        (
            ("links", 0, "samples", 1, "seconds", 0),
            "1.0",
            r"Probe\.links\[0\]\.samples\[1\]\.seconds\[0\]: expected fl",
        ),
        (("links", 0, "warnings"), "slow", r"Probe\.links\[0\]\.warnings: expected a list, not str"),
        (("links", 0, "extra"), 1, r"Probe\.links\[0\]: unknown field extra"),
        (("links", 0), None, r"Probe\.links\[0\]: expected an object"),
        (("devices", 0, "index"), True, r"Probe\.devices\[0\]\.index: expected int, not bool"),
        (("devices", 0, "index"), 0.0, r"Probe\.devices\[0\]\.index: expected int, not float"),
        (("fingerprint", "identity"), [], r"Probe\.fingerprint\.identity: expected an object"),
        (("fingerprint", "identity", "cpu", "value"), [], r"identity\['cpu'\]\.value: expected str or int or"),
        (("link_groups", 0, "factor"), 10**400, r"Probe\.link_groups\[0\]\.factor: expected float"),
    ],
)
def test_a_document_that_does_not_fit_is_refused_by_field(
    records: Any, path: tuple[Any, ...], value: Any, expected: str
) -> None:
    document = _with(encode(records.probe()), value, *path)
    with pytest.raises(StoreError, match=expected):
        decode(document, Probe)


@pytest.mark.parametrize("document", [None, [], "probe", 3])
def test_what_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(StoreError, match="Probe: expected an object"):
        decode(document, Probe)


def test_a_missing_field_is_refused_unless_it_has_a_default(records: Any) -> None:
    document = encode(records.probe())
    with pytest.raises(StoreError, match=r"Probe\.devices: this field is missing"):
        decode(_without(document, "devices"), Probe)
    assert decode(_without(document, "warnings"), Probe).warnings == ()


def test_a_pair_needs_two_values(records: Any) -> None:
    document = _with(encode(records.run()), [0.9], "gain_tpot", "ci95")
    with pytest.raises(StoreError, match=r"RunRecord\.gain_tpot\.ci95: expected 2 values, not 1"):
        decode(document, RunRecord)


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "[" * 100_000, "", "{", b"\xff\xfe\xfa"])
def test_text_that_is_not_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_text(text)


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"b": [1, "é"], "a": None}) == digest({"a": None, "b": [1, "é"]})
    assert digest({"a": 1}) != digest({"a": 1.0})


def test_the_order_of_a_policys_parameters_is_kept(records: Any) -> None:
    policy = dataclasses.replace(records.run().policy, parameters={"theta": 0.8, "rule": "cir"})
    with open_store("sqlite://") as store:
        store.save_run(dataclasses.replace(records.run(), policy=policy))
        assert str(store.run().policy) == "caee:theta=0.8,rule=cir"
