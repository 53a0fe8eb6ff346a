"""Guard against a stranger's ``store`` or ``runtime`` in the place of ours.

The five packages have plain names: a folder of the same name in another program's working directory, or another
distribution, can stand in front of one of them. They lie side by side where they were installed, which is easy to see.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("caee_cli", "reports", "runtime", "store", "probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A package of one of our names that is not ours; ``path`` is None where nothing of that name is found."""

    name: str
    path: Path | None


def installed_in() -> Path:
    """The folder that holds this file's package, and should hold all five."""
    return Path(__file__).resolve().parent.parent


def strangers() -> tuple[Stranger, ...]:
    """Packages that Python would import from elsewhere, without importing them."""
    home = installed_in()
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is None or origin.parent.parent != home:
            found.append(Stranger(name=name, path=origin))
    return tuple(found)


def check_packages() -> None:
    """Raise ``UsageError`` naming the file that stands in the way of one of our packages."""
    found = strangers()
    if not found:
        return
    # Imported late: probes itself may be the stranger.
    first = found[0]
    where = first.path or "nowhere"
    message = f"the package {first.name!r} is imported from {where}, not from {installed_in()} where caee is installed"
    hint = "install caee in an environment of its own, or start the program from another folder"
    try:
        from probes.errors import UsageError
    except ImportError:
        raise ImportError(f"{message}; {hint}") from None
    raise UsageError(message, hint=hint)
