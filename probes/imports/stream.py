"""STREAM (www.cs.virginia.edu/stream): host memory bandwidth, by its copy kernel, which counts reading and writing."""

from __future__ import annotations

import re

from probes.errors import ImportFormatError
from probes.imports.figures import Figures, model_of_rate
from probes.records import Concurrency, Device, Field, LinkKind

_MB = 1e6
_COPY = re.compile(r"^(?:(?P<label>\w+)[^\n:]*:\s*)?Copy:?\s+(?P<rate>\d+(?:\.\d+)?)", re.MULTILINE)
_WHOLE = "full_system"


def looks_like(text: str) -> bool:
    return _COPY.search(text) is not None and "Triad" in text


def read(text: str) -> Figures:
    """Of several runs, the one labelled ``full_system`` becomes the model, the others are facts."""
    rates = {found["label"] or "": float(found["rate"]) * _MB for found in _COPY.finditer(text)}
    label = _WHOLE if _WHOLE in rates else next(iter(rates))
    if len(rates) > 1 and label != _WHOLE:
        raise ImportFormatError(
            f"{len(rates)} STREAM results, and none says that it is of the whole machine",
            hint=f"import one run, or label one of them {_WHOLE}",
        )
    if rates[label] <= 0:
        raise ImportFormatError("a STREAM copy rate of 0", hint="run STREAM again")
    model = model_of_rate(
        LinkKind.HOST_MEMORY, "host", "host", mode=None, concurrency=Concurrency.ALL, bytes_per_s=rates[label]
    )
    return Figures(
        devices=(Device(index=0, kind="cpu", name="all CPU cores", uuid=None, memory_bytes=None),),
        models=(model,),
        link_groups=(),
        warnings=("STREAM runs on all cores at once: the figure is that of all devices together",),
        facts={f"stream.{name or 'copy'}": Field(value=rate) for name, rate in rates.items()},
    )
