"""What a shadow sample measures: how far a layer's output under a policy is from the router's own.

Shape legend: T tokens (rows of the step, padding included), H hidden size.
"""

from __future__ import annotations

import math

import torch

from runtime.policy.types import Bools


def relative_error(policy_TH: torch.Tensor, router_TH: torch.Tensor, real_T: Bools) -> float:
    """‖policy − router‖ ÷ ‖router‖ over the real tokens, in float64; waits for the device.

    Where the router's output is zero: 0 if the policy's is, too, else infinite.
    """
    real = torch.from_numpy(real_T).to(router_TH.device)
    router = router_TH[real].double()
    difference = float(torch.linalg.vector_norm(policy_TH[real].double() - router))
    size = float(torch.linalg.vector_norm(router))
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size
