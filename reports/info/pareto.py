"""Which of several trade-offs are worth considering."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[bool, ...]:
    """Which points no other dominates, both coordinates the smaller the better; equal points do not dominate."""
    return tuple(
        not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
        for point in points
    )
