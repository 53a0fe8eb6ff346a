"""The probe's figures beside those of tools that people trust: STREAM for host memory, fio for the disk.

    python benchmarks/probe_peers.py [--disk-path FOLDER] [--rounds 3]

The peer and the probe take turns, and medians are compared. STREAM's copy and triad are compiled from ``stream_copy.c``
beside this file; fio must be installed (``apt-get install fio``), else the disk is left out. How far
the middle half of the peer's runs lies apart says whether the machine was quiet enough for a comparison: it is printed
either way, and only a quiet machine can fail one.
Exit code 1 where a figure is off by more than the tolerance although the peer agrees with itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from probes.devices import find_devices
from probes.limits import last_level_cache_bytes
from probes.links import measure_link
from probes.memory import HUGE_PAGE_BYTES
from probes.plan import LinkPlan, plan_links
from probes.records import Concurrency, LinkKind, LinkMode
from probes.sampling import Limits
from probes.scratch import ScratchFile, make_scratch
from probes.transfers import DiskTransfer
from probes.units import format_rate, format_size

MEMORY_TOLERANCE = 0.10
DISK_TOLERANCE = 0.15
COPY_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
FILE_BYTES = 512 << 20
SECONDS = 3.0
# A disk's speed drifts within seconds: short turns, so that all see the same disk.
TURN_SECONDS = 1.0
DISK_TURNS = 4
PASSES = 15
# With less of a processor than this, others also push what is measured out of the caches.
QUIET_SHARE = 0.9


def middle_half(rates: Sequence[float]) -> float:
    """How far the middle half of the runs lies apart: one burst of a disk's cache says nothing of the others."""
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rates[0],) * 3
    return high - low


@dataclass(slots=True)
class Comparison:
    """Bytes per second of each run, of the peer and of the probe, in the order taken."""

    name: str
    tolerance: float | None
    """None: nothing to judge, for the reason that the name gives."""
    peer: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    busy: str | None = None

    def fails(self) -> bool:
        """Print the figures; True where the probe is off although the peer agrees with itself."""
        peer, ours = statistics.median(self.peer), statistics.median(self.ours)
        spread = middle_half(self.peer) / peer
        off = ours / peer - 1.0
        print(self.name)
        print(f"  peer   {format_rate(peer)}   runs: {', '.join(map(format_rate, self.peer))}")
        print(f"         the middle half of them is {spread:.1%} wide")
        print(f"  probe  {format_rate(ours)}   runs: {', '.join(map(format_rate, self.ours))}")
        if self.tolerance is None:
            print(f"  {off:+.1%}\n")
            return False
        if abs(off) <= self.tolerance:
            print(f"  {off:+.1%}: within ± {self.tolerance:.0%}\n")
            return False
        noisy = self.busy or ("the peer disagrees with itself as much" if spread > self.tolerance else None)
        print(f"  {off:+.1%}: {f'no verdict, {noisy}' if noisy else 'off'}\n")
        return noisy is None


def stream_program(folder: Path) -> Path | None:
    """The compiled peer, or None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        print("host memory: left out, there is no C compiler (apt-get install gcc)\n")
        return None
    program = folder / "stream_copy"
    source = Path(__file__).with_name("stream_copy.c")
    subprocess.run([compiler, "-O3", "-march=native", "-o", program, source], check=True)
    return program


def stream(program: Path) -> tuple[float, float, float]:
    """Median bytes per second of copy and triad over arrays of four times the last-level cache, as STREAM asks for.

    The third value is the share of its time for which it had a processor.
    """
    words = max(4 * (last_level_cache_bytes() or 0), COPY_BYTES) // 8
    lines = subprocess.run(
        [program, str(words), str(PASSES)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    columns = zip(*(map(float, line.split()) for line in lines), strict=True)
    copied, triad, share = map(statistics.median, columns)
    return copied, triad, share


def probed(plan: LinkPlan, size_bytes: int, seconds: float = SECONDS) -> float:
    """What the probe says of ``plan`` at one size, by the median of its samples."""
    found = measure_link(plan, [size_bytes], Limits(seconds=seconds, min_samples=40))
    if not found.samples:
        sys.exit(f"{plan.kind}: {found.reason}")
    return size_bytes / statistics.median(found.samples[0].seconds)


def host_memory(folder: Path, scratch: ScratchFile, rounds: int) -> bool:
    """Compare with STREAM; True where it fails."""
    program = stream_program(folder)
    if program is None:
        return False
    plan = link(scratch, LinkKind.HOST_MEMORY, None)
    compared = Comparison("Host memory, one core, copy (read + written): STREAM's copy", MEMORY_TOLERANCE)
    triads = []
    for _ in range(rounds):
        copied, triad, share = stream(program)
        if share < QUIET_SHARE:
            compared.busy = f"other programs left the peer {share:.0%} of a processor"
        compared.peer.append(copied)
        triads.append(triad)
        compared.ours.append(probed(plan, COPY_BYTES))
    print(f"(STREAM's triad: {', '.join(map(format_rate, triads))}; its stores fetch what they overwrite, uncounted)")
    return compared.fails()


def fio(scratch: ScratchFile) -> float:
    """Bytes per second of fio's direct random reads, one at a time, of the file that the probe reads too.

    A virtual disk serves what was written lately, and some places more than others, at another speed: two files of the
    same size are not the same disk.
    """
    assert scratch.direct is not None
    assert scratch.content is not None
    options = {
        "name": "read",
        "filename": f"/proc/{os.getpid()}/fd/{scratch.direct.fileno()}",
        "rw": "randread",
        "bs": BLOCK_BYTES,
        "size": scratch.content.size_bytes // BLOCK_BYTES * BLOCK_BYTES,
        "direct": 1,
        "ioengine": "psync",
        "iodepth": 1,
        "iomem_align": HUGE_PAGE_BYTES,
        "time_based": 1,
        "ramp_time": TURN_SECONDS,
        "runtime": TURN_SECONDS,
        "output-format": "json",
    }
    command = ["fio", "--readonly", *(f"--{name}={value}" for name, value in options.items())]
    # On huge pages, as the probe reads: a virtual disk fills small ones up to five times slower.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(json.loads(printed[printed.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def without_pause(scratch: ScratchFile, buffer_bytes: int | None) -> float:
    """Bytes per second of the probe's own reads, one after the other as fio's are, after the same time to settle."""
    assert scratch.direct is not None
    assert scratch.content is not None
    transfer = DiskTransfer(scratch.direct, scratch.content, part=0, parts=1, seed=0, buffer_bytes=buffer_bytes)
    rate = 0.0
    for _ in range(2):
        moved, start = 0, time.monotonic()
        while time.monotonic() < start + TURN_SECONDS:
            transfer.load(BLOCK_BYTES)
            moved += BLOCK_BYTES
        rate = moved / (time.monotonic() - start)
    return rate


def disk(scratch: ScratchFile, rounds: int) -> bool:
    """Compare with fio; True where it fails."""
    if shutil.which("fio") is None:
        print("disk: left out, fio is not installed (apt-get install fio)\n")
        return False
    if scratch.direct is None:
        print(f"disk: left out, no direct reads: {scratch.waived or scratch.not_direct}\n")
        return False
    what = f"Disk, direct random reads of {format_size(BLOCK_BYTES)}, one at a time: fio"
    plan = link(scratch, LinkKind.DISK_TO_HOST, LinkMode.DIRECT)
    same = Comparison(f"{what}; both into one block of memory", DISK_TOLERANCE)
    fresh = Comparison(f"{what}; the probe into memory that is in no cache, as slots are", None)
    sampled = Comparison(f"{what}; the probe's samples, into such memory and compared afterwards", None)
    for turn in range(rounds * DISK_TURNS):
        takers: list[Callable[[], None]] = [
            lambda: same.peer.append(fio(scratch)),
            lambda: same.ours.append(without_pause(scratch, BLOCK_BYTES)),
            lambda: fresh.ours.append(without_pause(scratch, None)),
            lambda: sampled.ours.append(probed(plan, BLOCK_BYTES, 2 * TURN_SECONDS)),
        ]
        for taker in takers[turn % 4 :] + takers[: turn % 4]:
            taker()
    fresh.peer.extend(same.peer)
    sampled.peer.extend(same.peer)
    return any([same.fails(), fresh.fails(), sampled.fails()])


def link(scratch: ScratchFile, kind: LinkKind, mode: LinkMode | None) -> LinkPlan:
    """The probe's own plan of that link, alone."""
    plans = plan_links(find_devices("cpu:1"), scratch, max_bytes=COPY_BYTES, seed=0)
    return next(p for p in plans if (p.kind, p.mode, p.concurrency) == (kind, mode, Concurrency.SOLO))


def main() -> int:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk-path", type=Path, default=Path.cwd(), help="folder on the disk to compare on")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
    scratch = make_scratch(arguments.disk_path, size_bytes=FILE_BYTES, seconds=60.0, seed=0)
    checks: tuple[Callable[[], bool], ...]
    try:
        with tempfile.TemporaryDirectory() as folder:
            checks = (
                lambda: host_memory(Path(folder), scratch, arguments.rounds),
                lambda: disk(scratch, arguments.rounds),
            )
            failed = [check() for check in checks]
    finally:
        scratch.close()
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
