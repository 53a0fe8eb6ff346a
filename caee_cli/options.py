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
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Same seed, same inputs, same decisions.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output file that exists.")]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")]


def size_option(text: str) -> int:
    """Parser for options that take sizes: ``43MB``, ``1GiB``, ``4096``."""
    from probes.errors import CaeeError
    from probes.units import parse_size

    try:
        return parse_size(text)
    except CaeeError as error:
        raise typer.BadParameter(error.message) from error
