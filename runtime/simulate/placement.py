"""Which device holds which expert.

Shape legend: L MoE layers, N experts, R replicas, D devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from probes.errors import InputError, UsageError
from runtime.simulate.batches import Batching
from runtime.simulate.eplb import balance
from runtime.simulate.records import Placement

Int64s = npt.NDArray[np.int64]

FILE_FORM = "write [layers][experts], of each expert its device or the list of its devices"


def make_placement(text: str, *, layers: int, experts: int, devices: int, loads_LN: Int64s | None = None) -> Placement:
    """The placement written ``contiguous``, ``round-robin``, ``balanced[:redundant=R,groups=G,nodes=M]``, or a file's
    path. ``loads_LN``: what ``balanced`` balances. Raises ``UsageError`` and ``InputError``."""
    check_devices(text, experts=experts, devices=devices)
    ids = np.arange(experts)
    if text == "contiguous":
        return _same_in_every_layer(text, ids * devices // experts, layers)
    if text == "round-robin":
        return _same_in_every_layer(text, ids % devices, layers)
    if text.partition(":")[0] == "balanced":
        options = _balanced_options(text)
        if loads_LN is None:
            raise UsageError(
                "a balanced placement needs loads to balance",
                hint="give --warmup-steps, whose steps it may look at, or --load-profile FILE",
            )
        return Placement(name=text, devices_LNR=_balanced(loads_LN, devices, options))
    return Placement(name=text, devices_LNR=read_placement(Path(text), layers, experts, devices))


def check_devices(text: str, *, experts: int, devices: int) -> None:
    """Raise ``UsageError`` where the placement, written as for ``make_placement``, would leave devices without an
    expert of a layer, or give one device two copies of each. A file says itself which devices hold what."""
    if devices < 1:
        raise UsageError(f"{devices} devices cannot hold experts", hint="use --devices 1 or more")
    name = text.partition(":")[0]
    redundant = _balanced_options(text).get("redundant", 0) if name == "balanced" else 0
    if name in ("contiguous", "round-robin", "balanced") and devices > experts + redundant:
        copies = f" and {redundant} redundant ones" if redundant else ""
        raise UsageError(
            f"{devices} devices are more than the {experts} experts of a layer{copies}",
            hint=f"give at most {experts + redundant} with --devices, or redundant experts: --placement "
            "balanced:redundant=R, or a file",
        )
    if redundant > experts * (devices - 1):
        raise UsageError(
            f"{redundant} redundant experts are more copies than {devices} devices can hold of {experts} experts",
            hint=f"give at most redundant={experts * (devices - 1)}",
        )


def warmup_loads(batching: Batching, layers: int, experts: int, warmup_steps: int) -> Int64s | None:
    """[L, N] how many tokens chose each expert in the warm-up steps; None without any."""
    if warmup_steps < 1:
        return None
    loads_LN = np.zeros((layers, experts), np.int64)
    left = warmup_steps
    for block in batching.blocks():
        rows = block.rows.cut(0, int(block.offsets_S1[min(left, block.steps)]))
        for layer in range(layers):
            ids = rows.ids_RLK[:, layer]
            loads_LN[layer] += np.bincount(ids[ids >= 0], minlength=experts)
        left -= block.steps
        if left <= 0:
            break
    return loads_LN


def read_placement(path: Path, layers: int, experts: int, devices: int) -> npt.NDArray[np.int32]:
    """[L, N, R] from a JSON file of layers of experts of lists of devices. Raises ``InputError``."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"cannot read the placement {path}: {error.strerror}",
            hint=f"use contiguous, round-robin, balanced, or a JSON file: {FILE_FORM}",
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", hint=FILE_FORM) from error
    if not isinstance(document, list) or len(document) != layers:
        raise InputError(f"{path}: a list of {layers} layers was expected", hint=FILE_FORM)
    table = []
    for layer, row in enumerate(document):
        if not isinstance(row, list) or len(row) != experts:
            raise InputError(f"{path}, layer {layer}: a list of {experts} experts was expected", hint=FILE_FORM)
        table.append([_devices(held, f"{path}, layer {layer}, expert {e}", devices) for e, held in enumerate(row)])
    return _as_array(table)


def _devices(held: object, where: str, devices: int) -> list[int]:
    listed = held if isinstance(held, list) else [held]
    for device in listed:
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < devices:
            raise InputError(
                f"{where}: {device!r} is no device", hint=f"devices go from 0 to {devices - 1} (--devices)"
            )
    if not listed:
        raise InputError(f"{where}: the expert is on no device", hint=f"name one from 0 to {devices - 1} (--devices)")
    return sorted(set(listed))


def _same_in_every_layer(name: str, device_N: Int64s, layers: int) -> Placement:
    return Placement(name=name, devices_LNR=np.tile(device_N.astype(np.int32)[None, :, None], (layers, 1, 1)))


def _balanced_options(text: str) -> dict[str, int]:
    options = {}
    for pair in filter(None, text.partition(":")[2].split(",")):
        key, _, value = pair.partition("=")
        if (
            key not in ("redundant", "groups", "nodes")
            or not value.isdecimal()
            or (key != "redundant" and value == "0")
        ):
            raise UsageError(
                f"placement {text!r}: cannot read {pair!r}", hint="write balanced:redundant=16,groups=8,nodes=2"
            )
        options[key] = int(value)
    return options


def _balanced(loads_LN: Int64s, devices: int, options: dict[str, int]) -> npt.NDArray[np.int32]:
    layers, experts = loads_LN.shape
    table: list[list[list[int]]] = [[[] for _ in range(experts)] for _ in range(layers)]
    for layer in range(layers):
        held = balance([int(load) for load in loads_LN[layer]], devices=devices, **options)
        for device, listed in enumerate(held):
            for expert in sorted(set(listed)):
                table[layer][expert].append(device)
    return _as_array(table)


def _as_array(table: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Device lists padded with −1."""
    replicas = max(len(held) for row in table for held in row)
    array = np.full((len(table), len(table[0]), replicas), -1, np.int32)
    for layer, row in enumerate(table):
        for expert, held in enumerate(row):
            array[layer, expert, : len(held)] = held
    return array
