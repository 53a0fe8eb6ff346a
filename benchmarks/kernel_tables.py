"""How well a layer's time is predicted from its activated experts, on measured MoE kernel tables.

    python benchmarks/kernel_tables.py h100_sxm_moe_perf.parquet h200_sxm_moe_perf.parquet

The tables are those of aiconfigurator (github.com/ai-dynamo/aiconfigurator, systems/data/*/vllm/*/moe_perf.parquet).
Every second row of a shape is fitted, form included; the others are predicted. A shape counts as predicted when the
median error of its held-out rows is at most 5 %. Exit code 1 where fewer than 82 % are.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from probes.errors import ImportFormatError
from probes.imports.kernel_tables import GOOD_ERROR, Curve, read_kernel_table
from probes.layer_model import fit_layer, holdout_errors

GOAL = 0.82
Predictor = Callable[[Curve], Sequence[float] | None]


def naive_by_tokens(curve: Curve) -> Sequence[float] | None:
    """A least-squares line over tokens × top-k ÷ devices, which overlooks that picks can coincide."""
    shape = curve.shape
    local = shape.num_experts // shape.expert_parallel_size
    counts = [min(math.ceil(load * shape.top_k / shape.expert_parallel_size), local) for load in curve.tokens]
    return holdout_errors(counts, curve.seconds, naive=True)


def naive(curve: Curve) -> Sequence[float] | None:
    """A least-squares line over the experts that are activated."""
    return holdout_errors(curve.experts, curve.seconds, naive=True)


def chosen(curve: Curve) -> Sequence[float] | None:
    """The form that the training rows call for."""
    return holdout_errors(curve.experts, curve.seconds)


def error_of(predictor: Predictor, curve: Curve) -> float:
    """Median over the held-out rows; infinite where the training rows hold a single count."""
    errors = predictor(curve)
    return statistics.median(errors) if errors else math.inf


def reason(curve: Curve) -> str:
    """Why every second row does not tell the others of this shape."""
    fit = fit_layer(curve.experts[::2], curve.seconds[::2])
    held = list(zip(curve.experts[1::2], curve.seconds[1::2], strict=True))
    worst, seconds = max(held, key=lambda row: abs(fit.seconds(row[0]) / row[1] - 1.0))
    falls = [n for (n, t), (m, u) in zip(rows(curve), rows(curve)[1:], strict=False) if m > n and u < t]
    if falls:
        return f"time falls although more than {falls[0]} experts are activated: another kernel, or a disturbed row"
    if worst > max(curve.experts[::2]):
        return f"{worst} experts lie beyond the last training row ({max(curve.experts[::2])})"
    steps = [(u - t) / (m - n) for (n, t), (m, u) in zip(rows(curve), rows(curve)[1:], strict=False) if m > n]
    bend = max(steps) / max(min(steps), 1e-12)
    side = "over" if fit.seconds(worst) > seconds else "under"
    return f"bends between training rows ({side} at {worst}); cost per expert varies by a factor {bend:.1f}"


def rows(curve: Curve) -> list[tuple[int, float]]:
    """Activated experts and seconds, in order of load."""
    return list(zip(curve.experts, curve.seconds, strict=True))


def report(path: Path) -> bool | None:
    """Print one table's outcome; whether the goal was reached, None where the table cannot be used."""
    try:
        table = read_kernel_table(path)
    except ImportFormatError as refusal:
        print(f"{path.name}: not used: {refusal.message}\n")
        return None
    print(f"{path.name}: {table.device}, {len(table.curves)} shapes")
    share = 0.0
    for predictor in (naive_by_tokens, naive, chosen):
        errors = [error_of(predictor, curve) for curve in table.curves]
        share = sum(error <= GOOD_ERROR for error in errors) / len(errors)
        print(f"  {predictor.__name__:16} within 5 %: {share:6.1%}   median error {statistics.median(errors):.2%}")
    forms = Counter(fit_layer(curve.experts[::2], curve.seconds[::2]).form.value for curve in table.curves)
    print(f"  forms chosen on the training rows: {', '.join(f'{form} {count}' for form, count in forms.items())}")
    print("  not within 5 %:")
    for curve in table.curves:
        error = error_of(chosen, curve)
        if error > GOOD_ERROR:
            s = curve.shape
            name = f"{s.dtype} hidden {s.hidden_size} × {s.intermediate_size}, top {s.top_k} of {s.num_experts}"
            print(f"    {error:6.1%}  {name}, EP {s.expert_parallel_size}, {s.kernel}: {reason(curve)}")
    print()
    return share >= GOAL


def main() -> int:
    """Read the tables named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.parquet")
    reached = [report(path) for path in parser.parse_args().tables]
    used = [outcome for outcome in reached if outcome is not None]
    return 0 if used and all(used) else 1


if __name__ == "__main__":
    sys.exit(main())
