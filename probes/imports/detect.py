"""Cost models from other tools' outputs. What a file is, is told from its content, never from its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from probes.errors import ImportFormatError, InputError
from probes.ids import new_id, now
from probes.imports import (
    bandwidth_test,
    kernel_tables,
    nccl_tests,
    nvbandwidth,
    p2p,
    smi_xml,
    spec_sheet,
    stream,
    topology,
)
from probes.imports.figures import Figures
from probes.records import Calibration

_MAX_BYTES = 64 << 20
# Name of the format, whether a text looks like it, and its reader.
_READERS: tuple[tuple[str, Callable[[str], bool], Callable[[str], Figures]], ...] = (
    ("nvbandwidth output", nvbandwidth.looks_like, nvbandwidth.read),
    ("p2pBandwidthLatencyTest output", p2p.looks_like, p2p.read),
    ("bandwidthTest output", bandwidth_test.looks_like, bandwidth_test.read),
    ("nccl-tests output", nccl_tests.looks_like, nccl_tests.read),
    ("nvidia-smi -q -x output", smi_xml.looks_like, smi_xml.read),
    ("nvidia-smi topo -m output", topology.looks_like, topology.read),
    ("STREAM output", stream.looks_like, stream.read),
    ("spec sheet", spec_sheet.looks_like, spec_sheet.read),
)


def import_measurement(path: Path) -> Calibration:
    """The cost models that ``path`` implies; ``origin`` says where they come from.

    Raises ``InputError`` where the file cannot be read and ``ImportFormatError`` where it is of no known format or
    contradicts itself.
    """
    content = _read(path)
    name, figures = _figures(path, content)
    return Calibration(
        calibration_id=new_id(),
        created_at=now(),
        probe_id=None,
        origin=f"{name} {path.name}",
        fingerprint=None,
        devices=figures.devices,
        models=figures.models,
        link_groups=figures.link_groups,
        warnings=figures.warnings,
        layers=figures.layers,
        facts=figures.facts,
    )


def _figures(path: Path, content: bytes) -> tuple[str, Figures]:
    if content.startswith(kernel_tables.MAGIC):
        return "kernel table", kernel_tables.figures_of(path)
    text = content.decode(encoding="utf-8", errors="replace")
    for name, looks_like, read in _READERS:
        if looks_like(text):
            return name, read(text)
    known = ", ".join(["kernel table (Parquet)", *(name for name, _, _ in _READERS)])
    raise ImportFormatError(f"{path} is of no format that can be imported", hint=f"known formats: {known}")


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ImportFormatError(f"{path} has {size} bytes: no measuring tool writes so much", hint="check the path")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error
