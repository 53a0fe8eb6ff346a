"""Ranks that do not find each other say so in time, each in one sentence."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator

import pytest

from probes.errors import RunError
from runtime import parallel
from runtime.parallel import contiguous_placement, join


@pytest.fixture
def port() -> Iterator[int]:
    """One that is in use."""
    with socket.create_server(("localhost", 0)) as server:
        yield server.getsockname()[1]


def describe(monkeypatch: pytest.MonkeyPatch, port: int, *, rank: int) -> None:
    monkeypatch.setattr(parallel, "JOIN_TIMEOUT", datetime.timedelta(seconds=1))
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    with socket.create_server(("localhost", 0)) as server:
        free = server.getsockname()[1]
    describe(monkeypatch, free, rank=rank)
    with pytest.raises(RunError, match="this rank could not join the other 1") as caught:
        join("cpu")
    assert "\n" not in caught.value.message
    assert "25 s" in str(caught.value.hint)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    describe(monkeypatch, port, rank=0)
    with pytest.raises(RunError, match="could not join"):
        join("cpu")


def test_a_port_where_something_else_listens(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """It takes the connection and says nothing, for which torch would wait for ever."""
    describe(monkeypatch, port, rank=1)
    monkeypatch.setattr(parallel, "JOIN_GRACE", datetime.timedelta(seconds=1))
    with pytest.raises(RunError, match=f"no rank answers at localhost:{port}"):
        join("cpu")


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (join("cpu").rank, join("cpu").world) == (0, 1)


@pytest.mark.parametrize(("experts", "devices"), [(8, 2), (10, 4), (7, 3), (3, 4), (1, 1)])
def test_every_expert_has_one_device_in_order(experts: int, devices: int) -> None:
    placement = contiguous_placement(experts, devices)
    assert placement.tolist() == [expert * devices // experts for expert in range(experts)]
    assert sorted(placement) == placement.tolist()
    assert max(placement) < devices
