"""Options that several commands share, spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on standard output; notes go to standard error.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PATH|URL",
        envvar="CAEE_STORE",
        help="Where results are kept: an SQLite file or an SQLAlchemy URL. Default: the user's data folder.",
    ),
]
LARGEST_SEED = 2**32 - 1


def _seed(given: int) -> int:
    # Checked here and not by the option's range, which every help would spell out in eleven digits.
    if not 0 <= given <= LARGEST_SEED:
        raise typer.BadParameter(f"{given} is not between 0 and {LARGEST_SEED}")
    return given


SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", callback=_seed, help="Same seed, same inputs, same decisions.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output file that exists.")]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")]

# What commands that execute a live model have in common.
ModelArgument = Annotated[
    str | None, typer.Argument(help="Model folder or Hugging Face id. Default: the model that ships with caee.")
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", metavar="KIND:COUNT", help="For example cpu:2 or cuda:4. Default: what is here."),
]
TierOption = Annotated[
    str | None,
    typer.Option("--tier", help="Where experts wait: device, host or disk. Default: disk on CPUs, host on GPUs."),
]
CacheOption = Annotated[
    str, typer.Option("--cache", help="Expert cache: lfu, lru, lfu:decay=0.97,admit=1, forecast:prefetch=1.")
]
CacheExpertsOption = Annotated[
    int | None,
    typer.Option("--cache-experts", help="Cached experts per device, all layers. Default: half of its experts."),
]
BrakeOption = Annotated[
    str | None,
    typer.Option(
        "--brake",
        metavar="BUDGET[:KEY=VALUE,…]",
        help="Now and then compute a layer as the router would, too; where outputs differ by more than BUDGET (mean "
        "relative error, such as 0.1), the router's own choice is in force again for a while. Default: off.",
    ),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='One prompt per line, or JSON lines with {"prompt": …}. Default: those that ship.',
    ),
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", help="Sequences that decode together, in lockstep. Default: 8.")
]
RunBatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        help="Sequences that decode together, in lockstep. Default: 8; with --trace the recorded steps, where it has "
        "step ids.",
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", help="Another name of --batch-size: that many requests are in flight at all times."),
]
MaxNewTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Tokens written per sequence. Default: 48.")
]
OutputLenOption = Annotated[int | None, typer.Option("--output-len", help="Another name of --max-new-tokens.")]
InputLenOption = Annotated[
    int | None,
    typer.Option(
        "--input-len",
        help="Prompts of exactly that many tokens, cut from --prompts or else the held-out text, by --seed.",
    ),
]

LmEvalOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--lm-eval",
        metavar="FILE|FOLDER",
        help="Evaluate tasks of lm-evaluation-harness with and without the policy: a local task file, or a folder of "
        "them. May be repeated.",
    ),
]
LmEvalShapeOption = Annotated[
    str,
    typer.Option(
        "--lm-eval-shape",
        help="decode: every token of a request in lockstep; prefill: its context in one forward pass, which is faster "
        "and prunes less.",
    ),
]
LmEvalLimitOption = Annotated[
    int | None, typer.Option("--lm-eval-limit", help="Only so many documents of each task. Default: all.")
]

DEFAULT_BATCH_SIZE = 8
DEFAULT_NEW_TOKENS = 48


def either(first: tuple[str, int | None], second: tuple[str, int | None], default: int) -> int:
    """The value of an option that has two names. Raises ``UsageError`` where both are given."""
    from probes.errors import UsageError

    (name, value), (other_name, other) = first, second
    if value is not None and other is not None:
        raise UsageError(f"{name} and {other_name} are two names of the same option", hint="give one of them")
    return next((given for given in (value, other) if given is not None), default)


DataParallelOption = Annotated[
    bool,
    typer.Option("--data-parallel", help="Each device has its own share of the sequences. Default: all have all."),
]
StepsOption = Annotated[
    Path | None,
    typer.Option("--steps-jsonl", metavar="FILE", help="Write a JSON line per step to FILE as the run goes."),
]
LiveOption = Annotated[
    bool, typer.Option("--live", help="Show fetches, hit rate and pruning in a table on standard error meanwhile.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", metavar="N", min=0, max=65535, help="Serve Prometheus metrics at this port meanwhile; 0: any."
    ),
]
MetricsHostOption = Annotated[
    str, typer.Option("--metrics-host", help="Where --metrics-port listens: an address of this machine.")
]


def seconds_option(text: str | float) -> float:
    """Parser for a machine's times: ``412us``, ``0.4ms``, ``0.002`` (seconds), and for their defaults."""
    from probes.errors import CaeeError
    from runtime.simulate.machine import parse_machine_seconds

    try:
        return parse_machine_seconds(str(text))
    except CaeeError as error:
        raise typer.BadParameter(error.message) from error


def size_option(text: str) -> int:
    """Parser for options that take sizes: ``43MB``, ``1GiB``, ``4096``."""
    from probes.errors import CaeeError
    from probes.units import parse_size

    try:
        return parse_size(text)
    except CaeeError as error:
        raise typer.BadParameter(error.message) from error
