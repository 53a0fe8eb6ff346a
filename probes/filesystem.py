"""Which file system holds a path, as the kernel sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted file system: ``kind`` is its type (``ext4``), ``source`` the device or share behind it."""

    mount_point: Path
    kind: str
    source: str


def mount_of(path: Path, *, mountinfo: Path = _MOUNTINFO) -> Mount | None:
    """The mount that holds ``path`` (which need not exist yet), or None where the kernel does not say."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    found: Mount | None = None
    for line in lines:
        mount = _parse(line)
        # Later lines lie on top of earlier ones with the same mount point.
        if (
            mount is not None
            and resolved.is_relative_to(mount.mount_point)
            and (found is None or len(mount.mount_point.parts) >= len(found.mount_point.parts))
        ):
            found = mount
    return found


def _parse(line: str) -> Mount | None:
    # Format: proc(5), /proc/pid/mountinfo. Optional fields end with a lone "-".
    left, _, right = line.partition(" - ")
    before, after = left.split(), right.split()
    if len(before) < 5 or len(after) < 2:
        return None
    return Mount(mount_point=Path(_unescape(before[4])), kind=after[0], source=_unescape(after[1]))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
