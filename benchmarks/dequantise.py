"""What dequantising an expert costs, against transformers' own functions and against fetching it.

    python benchmarks/dequantise.py [--device cpu|cuda:0]

One expert's gate_up_proj of the size of Qwen3-30B-A3B (FP8, blocks of 128 × 128) and of gpt-oss-20b (MXFP4), to
float32 and bfloat16, by one thread. Prints nanoseconds per thousand weights, the median of interleaved pairs, and the
bytes per second at which stored experts are consumed: a tier faster than that waits for dequantising, not for bytes.
Exit code 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from runtime.experts.dequantise import dequantise_fp8, dequantise_mxfp4
from runtime.statistics import paired_ratio

PAIRS = 15
FP8 = (1536, 2048)
"""Rows and columns."""
MXFP4 = (5760, 2880)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    same = True
    for name, case in (("FP8", fp8_case), ("MXFP4", mxfp4_case)):
        for dtype in (torch.float32, torch.bfloat16):
            same &= compare(f"{name} to {str(dtype)[6:]}", *case(dtype, device), device)
    return 0 if same else 1


Case = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], int]
"""Ours, theirs, and how many bytes are stored."""


def fp8_case(dtype: torch.dtype, device: torch.device) -> Case:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = FP8
    values = torch.randn(1, rows, columns).clamp(-448, 448).to(torch.float8_e4m3fn).to(device)
    scales = torch.rand(1, rows // 128, columns // 128, device=device)
    out = torch.empty(values.shape, dtype=dtype, device=device)

    def ours() -> torch.Tensor:
        dequantise_fp8(values, scales, (128, 128), out)
        return out

    theirs = Fp8Dequantize(None)
    return ours, lambda: theirs._dequantize_one(values, scales, dtype), values.numel() + 4 * scales.numel()


def mxfp4_case(dtype: torch.dtype, device: torch.device) -> Case:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows, columns = MXFP4
    values = torch.randint(0, 256, (1, rows, columns // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(110, 130, (1, rows, columns // 32), dtype=torch.uint8, device=device)
    out = torch.empty((1, columns, rows), dtype=dtype, device=device)

    def ours() -> torch.Tensor:
        dequantise_mxfp4(values, scales, out)
        return out

    return ours, lambda: convert_moe_packed_tensors(values, scales, dtype=dtype), values.numel() + scales.numel()


def compare(
    name: str,
    ours: Callable[[], torch.Tensor],
    theirs: Callable[[], torch.Tensor],
    stored_bytes: int,
    device: torch.device,
) -> bool:
    same = torch.equal(ours(), theirs())
    times = np.array([[seconds(each, device) for each in (ours, theirs)] for _ in range(PAIRS)])
    weights = ours().numel()
    median, ratio = float(np.median(times[:, 0])), paired_ratio(times[:, 1].tolist(), times[:, 0].tolist(), seed=0)
    low, high = ratio.ci95
    print(
        f"{name}: {median / weights * 1e12:.0f} ns per 1,000 weights, {stored_bytes / median / 1e9:.2f} GB/s stored, "
        f"{ratio.ratio:.2f} × transformers' time (95 % {low:.2f} to {high:.2f}), bits {'equal' if same else 'DIFFER'}"
    )
    return same


def seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    start = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
