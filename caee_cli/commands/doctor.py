"""``caee doctor``."""

from __future__ import annotations


def command() -> None:
    """(to be written)"""
