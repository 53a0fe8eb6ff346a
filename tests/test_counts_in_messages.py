"""Where a message counts things, the noun and the verb after the number fit one of them as well as many."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from caee_cli.guard import PACKAGES, installed_in
from probes.text import plural, verb

# After a number: a noun and a verb in the plural, right for every count but one.
FIXED_PLURAL = re.compile(r"^(?: [a-z-]+){0,2} [a-z-]+[^s\W]s (?:are|were|have|do|stand|remain|copy)\b")
PLURAL_VERB = re.compile(r"^ (?:are|were|have|do|stand|remain|copy)\b")
# Counts that are never one where the message is given (the shortest run of dummies, more than fit or than there are),
# and those that are only a part of what the verb is about.
OTHERS = {"marker.marked", "devices", "redundant", "options.prompt_count", "max_new_tokens", "len(values)"}


def numbers_in(file: Path) -> Iterator[tuple[str, str]]:
    """What stands for each number in a text, and the text after it; assertions speak to no user."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    asserted = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Assert) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in asserted:
            for number, text in itertools.pairwise(node.values):
                if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant):
                    yield ast.unparse(number.value), str(text.value)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_verb_is_plural_whatever_the_count(package: str) -> None:
    files = sorted((installed_in() / package).rglob("*.py"))
    texts = [(file.name, number, text) for file in files for number, text in numbers_in(file)]
    wrong = [
        (name, number, text)
        for name, number, text in texts
        if number not in OTHERS and (PLURAL_VERB if number.startswith("plural(") else FIXED_PLURAL).match(text)
    ]
    assert texts
    assert not wrong


@pytest.mark.parametrize(("count", "said"), [(0, "0 tokens have"), (1, "1 token has"), (2, "2 tokens have")])
def test_noun_and_verb(count: int, said: str) -> None:
    assert f"{plural(count, 'token')} {verb(count, 'has', 'have')}" == said
