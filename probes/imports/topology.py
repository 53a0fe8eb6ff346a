"""``nvidia-smi topo -m``: how GPUs are joined, to each other and to the NUMA nodes. It knows no speeds.

Columns are separated by tabs, and by spaces where the output was pasted; network cards may stand among the GPUs, and
their rows may be cut.
"""

from __future__ import annotations

import re

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, named_gpus
from probes.records import Field

_HEADER = re.compile(r"^\s*GPU0\s.*(?:Affinity|GPU1|NIC0|mlx)", re.MULTILINE)
_PATH = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV\d+|SOC|PSB|QPI")
_SWITCHES = ("PIX", "PXB", "PSB")
_AGAIN = "write it again: nvidia-smi topo -m > FILE"
_NO_SPEED = "a topology tells how GPUs are joined, not how fast: it holds no cost model"
_UNKNOWN = "nvidia-smi says N/A"


def looks_like(text: str) -> bool:
    return _HEADER.search(text) is not None and re.search(r"^\s*GPU0\s+X(?:\s|$)", text, re.MULTILINE) is not None


def read(text: str) -> Figures:
    """Paths between GPUs and their affinities as facts. Raises ``ImportFormatError`` where the table is cut."""
    header = next(line for line in text.splitlines() if _HEADER.match(line))
    names = re.findall(r"\b(?:GPU|NIC|mlx\d_)\d+\b", header)
    gpus = [name for name in names if name.startswith("GPU")]
    paths: dict[tuple[int, int], str] = {}
    facts: dict[str, Field] = {}
    for index, name in enumerate(gpus):
        row = next((line for line in text.splitlines() if re.match(rf"^\s*{name}\s+\S", line) and line != header), None)
        if row is None:
            raise ImportFormatError(f"the row of {name} is missing", hint=_AGAIN)
        cells = row.split()[1:]
        found = cells[: len(names)]
        if len(found) < len(names) or not all(_PATH.fullmatch(cell) for cell in found):
            raise ImportFormatError(f"the row of {name} does not fit the {len(names)} columns before it", hint=_AGAIN)
        for other, cell in zip(names, found, strict=True):
            if other in gpus:
                paths[index, gpus.index(other)] = cell
        facts |= _affinities(index, cells[len(names) :])
    for (one, other), path in paths.items():
        if (path == "X") != (one == other) or path != paths[other, one]:
            raise ImportFormatError(
                f"GPU{one} to GPU{other} is {path}, GPU{other} to GPU{one} is {paths[other, one]}",
                hint="the matrix was edited: " + _AGAIN,
            )
        if one < other:
            facts[f"gpu{one}-gpu{other}.path"] = Field(value=path)
    return Figures(
        devices=named_gpus(["NVIDIA GPU"] * len(gpus)),
        models=(),
        link_groups=(),
        warnings=(_NO_SPEED, *_shared(len(gpus), paths)),
        facts=facts,
    )


def _affinities(index: int, cells: list[str]) -> dict[str, Field]:
    facts = {}
    for name, cell in zip(("cpus", "numa_node"), cells, strict=False):
        known = cell != "N/A"
        value = int(cell) if known and cell.isdigit() and name == "numa_node" else cell
        facts[f"gpu{index}.{name}"] = Field(value=value if known else None, reason=None if known else _UNKNOWN)
    return facts


def _shared(count: int, paths: dict[tuple[int, int], str]) -> list[str]:
    """GPUs behind one PCIe switch, whose link to the host they share."""
    left = set(range(count))
    found = []
    while left:
        first = min(left)
        group = {first}
        while more := {b for a in group for b in left - group if paths[a, b] in _SWITCHES}:
            group |= more
        left -= group
        if len(group) > 1:
            members = ", ".join(map(str, sorted(group)))
            found.append(
                f"GPUs {members} hang on one PCIe switch and share its link to the host: measure them together"
            )
    return found
