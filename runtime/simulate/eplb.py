"""Placement balanced by load, with or without redundant experts, as DeepSeek's EPLB describes it.

Source: https://github.com/deepseek-ai/EPLB, README: groups of experts are packed onto nodes, the most loaded experts
are replicated within their node, and the replicas are packed onto the node's devices. Loads are compared as exact
fractions and ties go to the lower id, so that a placement depends on the loads alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from probes.errors import UsageError


def balance(
    loads: Sequence[int | Fraction], *, devices: int, redundant: int = 0, groups: int = 1, nodes: int = 1
) -> list[list[int]]:
    """Expert ids on each device, one layer. ``loads``: of each expert, at least 0.

    Each device holds ⌈(N + ``redundant``) / ``devices``⌉ at most; a replica of an expert may share a device with
    another. ``groups``: of experts that a group-limited router chooses together; they matter when ``nodes`` divides
    them. Raises ``UsageError`` where the numbers do not divide as they must.
    """
    if groups % nodes:
        groups = nodes = 1
    if len(loads) % groups or devices % nodes or redundant % nodes or redundant < 0:
        raise UsageError(
            f"a balanced placement of {len(loads)} experts in {groups} groups with {redundant} redundant ones on "
            f"{devices} devices in {nodes} nodes does not come out even",
            hint="groups must divide the experts, and nodes the devices and the redundant experts",
        )
    size = len(loads) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    placed = []
    for node in pack([sum(loads[expert] for expert in group) for group in members], nodes):
        local = [expert for group in node for expert in members[group]]
        replicas = replicate([loads[expert] for expert in local], redundant // nodes)
        count = [replicas.count(place) for place in range(len(local))]
        shares = [Fraction(loads[local[place]]) / count[place] for place in replicas]
        for device in pack(shares, devices // nodes):
            placed.append([local[replicas[replica]] for replica in device])
    return placed


def replicate(loads: Sequence[int | Fraction], redundant: int) -> list[int]:
    """Every place of ``loads`` once, then ``redundant`` more: each time the one with the highest load per replica."""
    replicas = list(range(len(loads)))
    count = [1] * len(loads)
    for _ in range(redundant):
        hottest = max(range(len(loads)), key=lambda place: (Fraction(loads[place]) / count[place], -place))
        replicas.append(hottest)
        count[hottest] += 1
    return replicas


def pack(loads: Sequence[int | Fraction], packs: int) -> list[list[int]]:
    """Places of ``loads`` in ``packs`` of equal size (within one): the heaviest first, each to the lightest pack with
    room; ties to the lower place and pack. One item a pack: in order."""
    capacity = -(-len(loads) // packs)
    if capacity == 1:
        return [[place] if place < len(loads) else [] for place in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    weight: list[int | Fraction] = [0] * packs
    for place in sorted(range(len(loads)), key=lambda place: (-loads[place], place)):
        lightest = min(
            (pack for pack in range(packs) if len(held[pack]) < capacity), key=lambda pack: (weight[pack], pack)
        )
        held[lightest].append(place)
        weight[lightest] += loads[place]
    return held
