"""Cost tables: seconds per expert on each device, from calibrated link models.

C(e, d) = α·S_e/B_d + β_d (arXiv:2606.29982, eq. 3), looked up once per device: the runtime only adds and compares.
Experts that lie on the device cost what a layer of their shape was measured to take for one more of them, where such
layers were measured: a layer's β is then paid once, not by every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probes.errors import InputError
from probes.records import Calibration, Concurrency, LayerModel, LinkKind, LinkMode, LinkModel
from runtime.policy.types import GROUP_UNIT, NO_GROUPS, PICOSECONDS, Ints, LinkGroups

# What an expert crosses on its way to a device of the kind; the modes in order of preference.
_PATHS: dict[tuple[str, str], tuple[LinkKind, ...]] = {
    ("disk", "cpu"): (LinkKind.DISK_TO_HOST,),
    ("disk", "gpu"): (LinkKind.DISK_TO_HOST, LinkKind.HOST_TO_DEVICE),
    ("host", "cpu"): (LinkKind.HOST_MEMORY,),
    ("host", "gpu"): (LinkKind.HOST_TO_DEVICE,),
    ("device", "cpu"): (LinkKind.HOST_MEMORY,),
    ("device", "gpu"): (LinkKind.DEVICE_MEMORY,),
}
_MODES = (LinkMode.DIRECT, LinkMode.PINNED, None, LinkMode.BUFFERED, LinkMode.PAGEABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What one paid movement costs on each device, and which devices share a link.

    ``layer``: how long a layer takes by the experts that a device runs in it, where that was measured as a whole; a
    movement then costs what one more expert adds.
    """

    seconds_per_expert: tuple[float, ...]
    groups: LinkGroups
    layer: LayerModel | None = None

    @property
    def picoseconds(self) -> Ints:
        """[D] as the decision adds and compares them: round-half-even(C · 10¹²)."""
        exact: Ints = np.rint(np.asarray(self.seconds_per_expert) * PICOSECONDS).astype(np.int64)
        return exact

    def layer_picoseconds(self, experts: int) -> Ints:
        """[experts + 1] a layer's time by how many experts the device runs, 0 for none; empty without ``layer``."""
        if self.layer is None:
            return np.zeros(0, np.int64)
        fit = self.layer.fit
        seconds = [0.0, *(fit.seconds(count) for count in range(1, experts + 1))]
        exact: Ints = np.rint(np.asarray(seconds) * PICOSECONDS).astype(np.int64)
        return exact


def uniform_costs(seconds_per_expert: float, devices: int) -> CostTable:
    """The same cost everywhere, and no shared link."""
    return CostTable(seconds_per_expert=(seconds_per_expert,) * devices, groups=NO_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A model's routed experts, as measured layers are found by. ``dtypes``: what tables may call their weights'."""

    hidden_size: int
    intermediate_size: int
    top_k: int
    num_experts: int
    dtypes: tuple[str, ...]


def layer_of(calibration: Calibration, shape: ExpertShape, devices: int) -> LayerModel | None:
    """The measured layer of ``shape`` spread over ``devices``: of several kernels the one that is fastest when all of
    the device's experts run. None where there is none of exactly this shape.
    """
    found = [
        layer
        for layer in calibration.layers
        if layer.shape.dtype in shape.dtypes
        and (layer.shape.hidden_size, layer.shape.intermediate_size) == (shape.hidden_size, shape.intermediate_size)
        and (layer.shape.top_k, layer.shape.num_experts) == (shape.top_k, shape.num_experts)
        and layer.shape.expert_parallel_size == devices
    ]
    return min(found, key=lambda layer: layer.fit.seconds(shape.num_experts / devices), default=None)


def cost_table(
    calibration: Calibration,
    tier: str,
    devices: Sequence[str],
    expert_bytes: int,
    shape: ExpertShape | None = None,
) -> CostTable:
    """Costs on ``devices`` (names as on links, ``cpu:0``) of experts that wait in ``tier`` (device, host, disk).

    In the tier ``device``, with a ``shape`` whose layer was measured, that layer decides and ``expert_bytes`` does not.
    Raises ``InputError`` where the calibration lacks a link that the tier needs.
    """
    layer = layer_of(calibration, shape, len(devices)) if tier == "device" and shape is not None else None
    if layer is not None:
        return CostTable(
            seconds_per_expert=(layer.fit.seconds_per_expert,) * len(devices), groups=NO_GROUPS, layer=layer
        )
    seconds = []
    kinds: set[LinkKind] = set()
    for device in devices:
        on_cpu = device.startswith("cpu")
        path = _PATHS[tier, "cpu" if on_cpu else "gpu"]
        kinds.update(path)
        # Within host memory a fetch is a copy, and the link's bytes count reading and writing; running an expert reads.
        moved = 2 * expert_bytes if on_cpu and tier == "host" else expert_bytes
        seconds.append(sum(_model(calibration, kind, device).seconds(moved) for kind in path))
    return CostTable(seconds_per_expert=tuple(seconds), groups=_groups(calibration, kinds, devices))


def _model(calibration: Calibration, kind: LinkKind, device: str) -> LinkModel:
    """The model of ``device``'s own link of ``kind``, or of the one that all devices use."""
    solo = [m for m in calibration.models if m.kind is kind and m.concurrency is Concurrency.SOLO]
    own = [m for m in solo if device in (m.source, m.destination)]
    shared = [m for m in solo if not any(":" in end for end in (m.source, m.destination))]
    candidates = own or shared or solo
    if not candidates:
        raise InputError(
            f"calibration {calibration.calibration_id} has no cost model for {kind.value} to {device}",
            hint="run `caee probe` and `caee calibrate` on this machine, or choose another --tier",
        )
    return min(candidates, key=lambda model: _MODES.index(model.mode))


def _groups(calibration: Calibration, kinds: set[LinkKind], devices: Sequence[str]) -> LinkGroups:
    """The calibrated groups on the path, as places in ``devices``; a device that stands there twice is twice in it."""
    index = [int(device.rpartition(":")[2]) for device in devices]
    found = [group for group in calibration.link_groups if group.kind in kinds]
    members = [np.array([d for d, at in enumerate(index) if at in group.devices], np.int64) for group in found]
    if not found:
        return NO_GROUPS
    return LinkGroups(
        starts_G1=np.concatenate([[0], np.cumsum([len(m) for m in members])]).astype(np.int64),
        members=np.concatenate(members),
        factors_G=np.array([round(group.factor * GROUP_UNIT) for group in found], np.int64),
    )
