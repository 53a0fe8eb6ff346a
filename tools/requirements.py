"""Print the requirements of a ``pyproject.toml``: what building it needs, its dependencies, the extras asked for.

They are installed apart from the wheel, so that a change of the code reinstalls the wheel alone.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    arguments = parser.parse_args()
    document = tomllib.loads(arguments.pyproject.read_text())
    requirements = ["build", *document["build-system"]["requires"], *document["project"]["dependencies"]]
    for extra in arguments.extra:
        requirements += document["project"]["optional-dependencies"][extra]
    print("\n".join(requirements))


if __name__ == "__main__":
    main()
