"""The CUDA samples' bandwidthTest over a range of sizes (github.com/NVIDIA/cuda-samples)."""

from __future__ import annotations

import re
from collections import defaultdict

from probes.imports.figures import Figures
from probes.imports.sweeps import fitted, swept
from probes.records import LinkKind, LinkMode

_GB = 1e9
_ROW = re.compile(
    r"^bandwidthTest-(?P<way>\w+?)(?:-(?P<mode>\w+))?, Bandwidth = (?P<rate>\d+(?:\.\d+)?) GB/s, "
    r"Time = [\d.]+ s, Size = (?P<size>\d{1,18}) bytes",
    re.MULTILINE,
)
_DEVICE = re.compile(r"^\s*Device (\d+): (.+?)\s*$", re.MULTILINE)
# Printed to 0.1 GB/s: slower rows are off by more than 5 % from rounding alone.
_LEAST_RATE = 1.0
_WAYS = {
    "H2D": (LinkKind.HOST_TO_DEVICE, "host", "cuda:0"),
    "D2H": (LinkKind.DEVICE_TO_HOST, "cuda:0", "host"),
    "D2D": (LinkKind.DEVICE_MEMORY, "cuda:0", "cuda:0"),
}
_MODES = {"Pinned": LinkMode.PINNED, "Paged": LinkMode.PAGEABLE}


def looks_like(text: str) -> bool:
    return _ROW.search(text) is not None or "[CUDA Bandwidth Test]" in text


def read(text: str) -> Figures:
    """A fitted model of each way. Raises ``ImportFormatError`` where there are too few sizes."""
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in _ROW.finditer(text):
        rate, size = float(row["rate"]), int(row["size"])
        if rate >= _LEAST_RATE and row["way"] in _WAYS:
            # A copy within the device counts twice, read and written: the printed rate does so, the size does not.
            moved = 2 * size if row["way"] == "D2D" else size
            times[row["way"], row["mode"] or ""][moved] = moved / (rate * _GB)
    links = [
        swept(
            *_WAYS[way],
            found,
            mode=_MODES.get(mode),
            convention="read+write" if way == "D2D" else "copy",
        )
        for (way, mode), found in times.items()
    ]
    names = [name for index, name in _DEVICE.findall(text) if index == "0"] or ["NVIDIA GPU"]
    return fitted(links, names[:1], how="run bandwidthTest --mode=shmoo --csv")
