"""Cases from files and standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from probes.errors import CaseError


def is_lines(source: str) -> bool:
    """Whether ``source`` holds a case a line: standard input (``-``) and ``.jsonl`` files do."""
    return source == "-" or source.endswith(".jsonl")


def read_case(source: str) -> bytes:
    """The content of a JSON file. Raises ``CaseError``."""
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise CaseError(f"cannot read {source}: {error.strerror}", hint="give a JSON file, or - for lines") from error


def lines_of(source: str) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank. Raises ``CaseError`` where ``source`` cannot be read."""
    try:
        with nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise CaseError(f"cannot read {source}: {error.strerror}", hint="give a .jsonl file, or - for lines") from error


def parse_case(content: bytes) -> object:
    """The document in ``content``. Raises ``CaseError``."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"not JSON: {error}", hint="a case is one JSON object") from error
