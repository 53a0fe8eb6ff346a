"""Modules with costly set-ups rely on one worker taking all their tests."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="the tests run in one process")
@pytest.mark.xdist_group("whole")
def test_groups_of_tests_stay_whole(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@whole")
