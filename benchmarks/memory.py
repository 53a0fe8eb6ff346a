"""How much memory `caee run` takes for a checkpoint whose experts weigh several times as much.

    python benchmarks/memory.py [--gigabytes 6] [--devices cpu:1] [--limit 2e9] [--work FOLDER]

Writes a checkpoint (random weights, or holes in the files with ``--zeros``), runs `caee run` on it from disk with a
small cache, and watches every process that it starts. Prints the dense part, the cache and the staging beside each
process's peak, and how much all of them had at once: memory of their own, and pages that they share counted once.
Exit code 1 where that is more than the limit. The checkpoint is deleted afterwards unless ``--work`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoints import Shape, dense_bytes, write_checkpoint

from runtime.experts.transfer import most_staging_bytes
from runtime.layout import STAGING_SLOTS

CACHE_EXPERTS = 32
LAYERS, EXPERTS = 8, 64
POLL_SECONDS = 0.2


@dataclass(slots=True)
class Watched:
    """Bytes: what each process had at most, by its command, and what all had at once at most."""

    peaks: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    together: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="what all experts weigh")
    parser.add_argument("--devices", default="cpu:1")
    parser.add_argument("--limit", type=float, default=2e9, help="bytes, all processes together")
    parser.add_argument("--zeros", action="store_true", help="experts of zeros, which cost the disk nothing")
    parser.add_argument("--work", type=Path, help="keep the checkpoint here")
    given = parser.parse_args()
    shape = model_of(given.gigabytes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.work or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            write_checkpoint(folder, shape, zeros=given.zeros)
        watched = run(folder, given.devices, Path(temporary))
    return report(shape, watched, devices=int(given.devices.rpartition(":")[2]), limit=given.limit)


def model_of(gigabytes: float) -> Shape:
    """Experts of at least so many gigabytes in all, in as many layers and experts as the figures at the top say."""
    side = -int(-((gigabytes * 1e9 / (LAYERS * EXPERTS * 3 * 4)) ** 0.5) // 32) * 32
    return Shape(layers=LAYERS, experts=EXPERTS, top_k=4, hidden=side, intermediate=side, vocabulary=16_000)


def run(folder: Path, devices: str, temporary: Path) -> Watched:
    """`caee run` on the checkpoint, watched until it ends. Raises ``SystemExit`` where it fails."""
    caee = str(Path(sys.executable).with_name("caee"))
    (temporary / "prompts.txt").write_text("Ten letters\nTo every seat\n")
    sizes = ["--batch-size", "2", "--max-new-tokens", "4", "--pairs", "1", "--no-quality"]
    command = [caee, "run", str(folder), "--tier", "disk", "--devices", devices, *sizes, "--json"]
    command += ["--cache-experts", str(CACHE_EXPERTS), "--prompts", str(temporary / "prompts.txt")]
    environment = os.environ | {"CAEE_STORE": str(temporary / "store.db")}
    with (temporary / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, env=environment)
        watched = Watched()
        while process.poll() is None:
            look(process.pid, watched)
            time.sleep(POLL_SECONDS)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    json.loads((temporary / "output").read_text())
    return watched


def look(root: int, watched: Watched) -> None:
    together = 0
    for process in family(root):
        try:
            status = fields(Path(f"/proc/{process}/status"))
            together += fields(Path(f"/proc/{process}/smaps_rollup"))["Pss"]
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, KeyError):  # it has just ended
            continue
        watched.peaks[process] = max(watched.peaks.get(process, 0), status.get("VmHWM", 0))
        watched.names[process] = command[:60] or watched.names.get(process, "")
    watched.together = max(watched.together, together)


def family(root: int) -> list[int]:
    """``root`` and all that it started, and what these did."""
    found, at = [root], 0
    while at < len(found):
        for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:  # it has just ended
                continue
        at += 1
    return found


def fields(path: Path) -> dict[str, int]:
    """Sizes in bytes of the lines ``Name:   12 kB``."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def report(shape: Shape, watched: Watched, *, devices: int, limit: float) -> int:
    staging = most_staging_bytes(torch.device("cpu"), shape.expert_bytes)
    parts = {
        "dense part": dense_bytes(shape),
        f"cache of {CACHE_EXPERTS} experts": CACHE_EXPERTS * shape.expert_bytes,
        f"staging, {STAGING_SLOTS} slots and buffers": STAGING_SLOTS * shape.expert_bytes + staging,
    }
    print(f"experts: {shape.experts_bytes / 1e9:.2f} GB; per rank, of {devices}:")
    for name, size in parts.items():
        print(f"  {name}: {size / 1e6:.0f} MB")
    print(f"  together: {sum(parts.values()) / 1e6:.0f} MB, beside the libraries")
    for process, peak in sorted(watched.peaks.items(), key=lambda item: -item[1]):
        print(f"  peak of process {process}: {peak / 1e6:.0f} MB  {watched.names[process]}")
    print(f"all processes at once: {watched.together / 1e6:.0f} MB, limit {limit / 1e6:.0f} MB")
    return int(watched.together > limit)


if __name__ == "__main__":
    sys.exit(main())
