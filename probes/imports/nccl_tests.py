"""NVIDIA's nccl-tests (github.com/NVIDIA/nccl-tests): all_reduce_perf and alltoall_perf, time by size.

A log does not say which collective it timed, except in recent versions: a reduction and the ratio of bus to algorithm
bandwidth tell an all-reduce, a column for a reduction that stays empty tells an all-to-all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from probes.errors import ImportFormatError
from probes.imports.figures import Figures
from probes.imports.sweeps import fitted, for_all_ranks, swept
from probes.records import Concurrency, LinkKind

_MICROSECOND = 1e-6
_RANK = re.compile(r"^#\s+Rank\s+(\d+) .*?device\s+\d+ \[\S+\] (.+?)\s*$", re.MULTILINE)
_HEADER = re.compile(r"^#\s+size\s+count\s+type\b.*$", re.MULTILINE)
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s+.*\d")
_HOW = "run all_reduce_perf or alltoall_perf -b 1K -e 1G -f 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    size_bytes: int
    reduction: str
    seconds: float
    bus_ratio: float


def looks_like(text: str) -> bool:
    return "# nThread" in text and _HEADER.search(text) is not None


def read(text: str) -> Figures:
    """A model of the collective on each rank. Raises ``ImportFormatError`` where another collective was timed."""
    header = _HEADER.search(text)
    columns = header[0].split() if header else []
    rows = [_row(line, columns) for line in text.splitlines() if _ROW.match(line)]
    names = [name for _, name in sorted(dict(_RANK.findall(text)).items(), key=lambda rank: int(rank[0]))]
    if not rows or not names:
        raise ImportFormatError("this nccl-tests log lists no ranks or no sizes", hint=_HOW)
    times = {row.size_bytes: row.seconds for row in rows if row.size_bytes > 0}
    kinds = _kinds(text, columns, rows, len(names))
    links = [swept(kind, "cuda:0", "ranks", times, concurrency=Concurrency.ALL) for kind in kinds]
    return for_all_ranks(fitted(links, names, how=_HOW))


def _row(line: str, columns: list[str]) -> _Row:
    size, _, _, *rest = line.split()
    reduction = rest.pop(0) if rest and not rest[0][0].isdigit() and rest[0][0] != "-" else ""
    if "root" in columns and rest:
        rest.pop(0)
    try:
        microseconds, algorithm, bus = (float(cell) for cell in rest[:3])
    except ValueError as error:
        raise ImportFormatError(f"nccl-tests: {line.strip()!r} is no row of times", hint=_HOW) from error
    if not all(map(math.isfinite, (microseconds, algorithm, bus))):
        raise ImportFormatError(f"nccl-tests: {line.strip()!r} is no row of times", hint=_HOW)
    ratio = bus / algorithm if algorithm > 0 else 0.0
    return _Row(size_bytes=int(size), reduction=reduction, seconds=microseconds * _MICROSECOND, bus_ratio=ratio)


def _kinds(text: str, columns: list[str], rows: list[_Row], ranks: int) -> tuple[LinkKind, ...]:
    # The way back moves the same bytes.
    to_all = (LinkKind.ALL_TO_ALL_DISPATCH, LinkKind.ALL_TO_ALL_COMBINE)
    reductions = {row.reduction for row in rows} - {"", "none"}
    # doc/PERFORMANCE.md there: an all-reduce's bus bandwidth is 2(n − 1)/n of its algorithm bandwidth.
    factor = 2 * (ranks - 1) / ranks
    if reductions and (ranks == 1 or math.isclose(rows[-1].bus_ratio, factor, rel_tol=0.05)):
        return (LinkKind.ALL_REDUCE,)
    if not reductions and ("alltoall" in text or ("redop" in columns and "root" not in columns)):
        return to_all
    raise ImportFormatError(
        "this nccl-tests log is neither of an all-reduce nor, for sure, of an all-to-all (it looks like an all_gather)",
        hint=f"expert parallelism needs the other two: {_HOW}",
    )
