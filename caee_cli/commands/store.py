"""``caee store …``."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="(to be written)")


@app.command()
def show() -> None:
    """(to be written)"""
