"""The decision on tensors of one device: scores in, experts and weights out, three launches a layer.

Decides as ``runtime.policy.reference`` does, integer by integer; weights agree to 1e-6. Every buffer is allocated once
and nothing waits for the device, so a layer can be captured in a CUDA graph (call it once before: the first call
compiles). Results stay in the buffers until the next call on the same object overwrites them, in stream order.

Tensor names carry their shapes, as in ``runtime.policy.types``.
"""

from __future__ import annotations

import torch

from probes.errors import CaseError, UsageError
from runtime.kernels.budget import decide_budget
from runtime.kernels.buffers import FIGURES, allocate, layer_on, padded
from runtime.kernels.decide import EXPAND, KEEP_ALL, KEEP_MANDATORY, decide
from runtime.kernels.launch import Argument, Launch
from runtime.kernels.reroute import AFFECTED, DROP, EVERY, ORIGINAL, SURVIVORS, UNSCALED, reroute
from runtime.kernels.summarise import summarise
from runtime.policy.shares import threshold
from runtime.policy.spec import resolve
from runtime.policy.types import Machine, PolicySpec

MAX_EXPERTS = 512
MAX_TOP_K = 16
MAX_DEVICES = 64
MAX_LINKS = 128
MAX_TOKENS = 1 << 14  # of one rank; all ranks together: fewer than 2¹⁷, so that importance fits its 47 bits
POLICIES = ("router", "importance", "caee", "budget")

_MODES = {"router": KEEP_ALL, "importance": KEEP_MANDATORY, "caee": EXPAND}
_RENORMALIZE = {"survivors": SURVIVORS, "original": ORIGINAL, "none": UNSCALED}
_LARGEST = 2**63 - 1
# Elements of a matrix that one program holds at a time: beyond it, registers spill.
_MATRIX = 4096


class DeviceDecision:
    """One policy on one machine, for batches of up to ``max_tokens`` rows. Not for concurrent streams.

    ``layer`` and ``buffers`` may be read, and ``layer.resident_NR`` and ``buffers.price`` written in place between
    steps. Several layers may share an object if each passes its own residency.

    Raises ``UsageError`` for a policy without a kernel, ``CaseError`` for sizes beyond the limits above.
    """

    def __init__(
        self, spec: PolicySpec, machine: Machine, *, top_k: int, max_tokens: int, device: torch.device | str
    ) -> None:
        _check_policy(spec)
        self.experts, self.replicas = machine.placement_NR.shape
        self.spec = resolve(spec, offloading=machine.resident_NR is not None)
        self.offloading = machine.resident_NR is not None
        self.devices = machine.devices
        self.top_k = top_k
        self.max_tokens = max_tokens
        self.layer = layer_on(machine, torch.device(device))
        self.links = len(self.layer.factors_L)
        for name, value, most in (
            ("number of experts", self.experts, MAX_EXPERTS),
            ("top_k", top_k, min(MAX_TOP_K, self.experts)),
            ("number of devices", self.devices, MAX_DEVICES),
            ("number of devices and link groups", self.links, MAX_LINKS),
            ("max_tokens", max_tokens, MAX_TOKENS),
        ):
            if not 1 <= value <= most:
                raise CaseError(f"{name}: {value} is not between 1 and {most}, what the GPU kernels are made for")
        self.buffers = allocate(
            experts=self.experts,
            top_k=top_k,
            max_tokens=max_tokens,
            devices=self.devices,
            device=torch.device(device),
        )
        self.buffers.price.fill_(float(self.spec.parameters.get("price", 0.0)))

    def __call__(
        self,
        scores_TN: torch.Tensor,
        *,
        selection_scores_TN: torch.Tensor | None = None,
        topk_ids_TK: torch.Tensor | None = None,
        token_mask_T: torch.Tensor | None = None,
        resident_NR: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, K] (int32, −1: nothing) and weights [T, K] (float32), views of the buffers.

        ``scores_TN``: G(t)_e, any floating type. ``topk_ids_TK``: the router's own choice; without it, the K of highest
        selection score. ``token_mask_T``: bool, False for padding. ``resident_NR``: bool, instead of the machine's.
        """
        for launch in self.launches(
            scores_TN,
            selection_scores_TN=selection_scores_TN,
            topk_ids_TK=topk_ids_TK,
            token_mask_T=token_mask_T,
            resident_NR=resident_NR,
        ):
            launch()
        rows = len(scores_TN)
        return self.buffers.ids_TK[:rows], self.buffers.weights_TK[:rows]

    def launches(
        self,
        scores_TN: torch.Tensor,
        *,
        selection_scores_TN: torch.Tensor | None = None,
        topk_ids_TK: torch.Tensor | None = None,
        token_mask_T: torch.Tensor | None = None,
        resident_NR: torch.Tensor | None = None,
    ) -> tuple[Launch, Launch, Launch]:
        """Summarise, decide and reroute, to be launched in this order.

        Data-parallel ranks add up ``buffers.summary`` between the first and the second (one all-reduce).
        """
        mask_T = self.buffers.mask_T[: len(scores_TN)] if token_mask_T is None else token_mask_T
        ranks_TN = scores_TN if selection_scores_TN is None else selection_scores_TN
        resident = self.layer.resident_NR if resident_NR is None else resident_NR
        self._check(scores_TN, ranks_TN, topk_ids_TK, mask_T, resident)
        return (
            self._summarise(scores_TN, ranks_TN, topk_ids_TK, mask_T),
            self._decide(resident),
            self._reroute(scores_TN, ranks_TN, mask_T),
        )

    def figures(self) -> dict[str, int]:
        """The last decision's figures; loads and F in picoseconds, ``removed`` in 2⁻³⁰. Waits for the device."""
        return dict(zip(FIGURES, self.buffers.figures.tolist(), strict=True))

    def _summarise(
        self,
        scores_TN: torch.Tensor,
        ranks_TN: torch.Tensor,
        choice_TK: torch.Tensor | None,
        mask_T: torch.Tensor,
    ) -> Launch:
        least = self._least_prefix()
        choice = self.buffers.own_TK if choice_TK is None else choice_TK
        return Launch(
            kernel=summarise,
            programs=len(scores_TN),
            warps=1,
            arguments={
                "scores": scores_TN,
                "ranks": ranks_TN,
                "choice": choice,
                "mask": mask_T,
                "own": self.buffers.own_TK,
                "shares": self.buffers.shares_TK,
                "summary": self.buffers.summary,
                "scores_stride": scores_TN.stride(0),
                "ranks_stride": ranks_TN.stride(0),
                "choice_stride": choice.stride(0),
                "least": least or 0,
            },
            constants={**self._token_sizes(), "CHOOSE": choice_TK is None, "MARK": least is not None},
        )

    def _decide(self, resident_NR: torch.Tensor) -> Launch:
        name, buffers = self.spec.name, self.buffers
        arguments: dict[str, Argument] = {
            "summary": buffers.summary,
            "placement": self.layer.placement_NR,
            "cost": self.layer.cost_NR,
            "resident": resident_NR,
            "crosses": self.layer.crosses_DL,
            "factors": self.layer.factors_L,
        }
        written: dict[str, Argument] = {
            "importance": buffers.importance_N,
            "device": buffers.device_N,
            "paid": buffers.paid_N,
            "held": buffers.held_N,
            "active": buffers.active_N,
            "mandatory": buffers.mandatory_N,
            "kept": buffers.kept_N,
        }
        results: dict[str, Argument] = {"figures": buffers.figures, "loads": buffers.loads_2D}
        experts, links = padded(self.experts), padded(self.links, least=2)
        constants: dict[str, int | float | bool] = {
            "N": self.experts,
            "R": self.replicas,
            "D": self.devices,
            "L": self.links,
            "N_PAD": experts,
            "L_PAD": links,
            "CHUNK": min(experts, _MATRIX // 2 // links),
            "ROWS": min(experts, _MATRIX // experts),
            "OFFLOADING": self.offloading,
        }
        if name == "budget":
            return Launch(
                kernel=decide_budget,
                programs=1,
                warps=4,
                arguments=arguments
                | {"price": buffers.price}
                | written
                | {"keys": buffers.keys_N, "sums": buffers.sums_N}
                | results,
                constants=constants,
            )
        theta = float(self.spec.parameters.get("theta", 0.0))
        return Launch(
            kernel=decide,
            programs=1,
            warps=4,
            arguments=arguments
            | written
            | {"keys": buffers.keys_N, "order": buffers.order_N}
            | results
            | {"least": min(threshold(theta), _LARGEST)},
            constants=constants | {"SCORE": self.spec.parameters.get("rule") == "score", "MODE": _MODES[name].value},
        )

    def _reroute(self, scores_TN: torch.Tensor, ranks_TN: torch.Tensor, mask_T: torch.Tensor) -> Launch:
        spec, buffers = self.spec, self.buffers
        fill = EVERY if spec.reselect == "all" else AFFECTED
        if spec.compensation == "none" or spec.name == "router":
            fill = DROP
        return Launch(
            kernel=reroute,
            programs=len(scores_TN),
            warps=1,
            arguments={
                "scores": scores_TN,
                "ranks": ranks_TN,
                "mask": mask_T,
                "own": buffers.own_TK,
                "shares": buffers.shares_TK,
                "kept": buffers.kept_N,
                "held": buffers.held_N,
                "figures": buffers.figures,
                "ids": buffers.ids_TK,
                "weights": buffers.weights_TK,
                "scores_stride": scores_TN.stride(0),
                "ranks_stride": ranks_TN.stride(0),
            },
            constants={
                **self._token_sizes(),
                "FILL": fill.value,
                "WITH_RESIDENT": spec.compensation == "resident",
                "RENORMALIZE": _RENORMALIZE[spec.renormalize or "survivors"].value,
                "FACTOR": 1.0 if spec.routed_scaling_factor is None else spec.routed_scaling_factor,
            },
        )

    def _least_prefix(self) -> int | None:
        """Σq at which a token's marked prefix ends; None where no token marks anything.

        Of two prefixes of one order, θ's and the ceiling's, the union is the longer. ``budget`` marks one slot at
        least: the shortest prefix there is.
        """
        parameters = self.spec.parameters
        shares = [0.0] if self.spec.name == "budget" else []
        if parameters.get("rule") == "cir":
            shares.append(float(parameters["theta"]))
        if "ceiling" in parameters:
            shares.append(1 - float(parameters["ceiling"]))
        return threshold(max(shares)) - self.top_k if shares else None

    def _token_sizes(self) -> dict[str, int | float | bool]:
        return {
            "N": self.experts,
            "K": self.top_k,
            "N_PAD": padded(self.experts),
            "K_PAD": padded(self.top_k, least=2),
        }

    def _check(
        self,
        scores_TN: torch.Tensor,
        ranks_TN: torch.Tensor,
        choice_TK: torch.Tensor | None,
        mask_T: torch.Tensor,
        resident_NR: torch.Tensor,
    ) -> None:
        """Shapes, types and places; of values nothing is read."""
        if not resident_NR.is_contiguous():
            raise CaseError("resident is not contiguous")
        rows = len(scores_TN)
        if rows > self.max_tokens:
            raise CaseError(f"scores: {rows} tokens, and max_tokens is {self.max_tokens}")
        integers = (torch.int32, torch.int64)
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for name, tensor, shape, types in (
            ("scores", scores_TN, (rows, self.experts), floats),
            ("selection_scores", ranks_TN, (rows, self.experts), floats),
            ("topk_ids", choice_TK, (rows, self.top_k), integers),
            ("token_mask", mask_T, (rows,), (torch.bool,)),
            ("resident", resident_NR.view(-1), (self.experts * self.replicas,), (torch.bool,)),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape or (tensor.numel() > 1 and shape[-1] > 1 and tensor.stride(-1) != 1):
                raise CaseError(
                    f"{name} has shape {list(tensor.shape)}, and contiguous rows {list(shape)} were expected"
                )
            if tensor.dtype not in types:
                raise CaseError(f"{name} has type {tensor.dtype}, and {' or '.join(map(str, types))} was expected")
            if tensor.device != self.buffers.summary.device:
                raise CaseError(f"{name} is on {tensor.device}, and the decision on {self.buffers.summary.device}")


def _check_policy(spec: PolicySpec) -> None:
    if spec.name not in POLICIES:
        raise UsageError(f"policy {spec.name} has no GPU kernel", hint=f"there are kernels for {', '.join(POLICIES)}")
    if spec.name == "budget" and "price" not in spec.parameters:
        raise UsageError("policy budget needs a price on the GPU", hint="write for example budget:price=4")
    if spec.parameters.get("reuse"):
        raise UsageError("policy budget has no reuse on the GPU", hint="leave reuse away")
