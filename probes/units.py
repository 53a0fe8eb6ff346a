"""Sizes, times and rates as people write and read them. A gigabyte is 10⁹ bytes, a gibibyte 2³⁰."""

from __future__ import annotations

import re

from probes.errors import UsageError

# At most 20 digits: more is no size, and would become infinite.
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_SECONDS = re.compile(
    r"\s*([+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:e[+-]?\d{1,2})?)\s*(s|ms|us|µs|μs|ns)?\s*", re.IGNORECASE
)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def parse_size(text: str) -> int:
    """Bytes of ``43MB``, ``1GiB``, ``4096`` or ``4k`` (decimal unless the ``i`` says binary)."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is not a size", hint="write a number of bytes, or for example 43MB or 1GiB")
    base: int = 1024 if match[3] else 1000
    scale: int = base ** _POWERS[match[2].lower()]
    return round(float(match[1]) * scale)


def parse_seconds(text: str) -> float:
    """Seconds of ``412us``, ``0.4ms``, ``2 s`` or, without a unit, of a number as Python writes it.

    The value's sign and size are the caller's to check; infinities and NaN are no times.
    """
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a time", hint="write seconds, or for example 412us or 0.4ms")
    # Divided, not multiplied: 412us is then the very number that 0.000412 is.
    return float(match[1]) / _PER_SECOND[(match[2] or "s").lower().replace("μ", "u").replace("µ", "u")]


def format_size(size_bytes: float) -> str:
    """``43.0 MB``: decimal units, three significant digits."""
    return _scaled(size_bytes, "B")


def format_rate(bytes_per_s: float) -> str:
    """``1.21 GB/s``."""
    return _scaled(bytes_per_s, "B/s")


def format_flops(flops_per_s: float) -> str:
    """``1.21 GFLOP/s``: floating-point operations per second."""
    return _scaled(flops_per_s, "FLOP/s")


def format_seconds(seconds: float) -> str:
    """``1.21 s``, ``843 µs``: three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= scale or unit == "ns":
            return f"{_three_digits(seconds / scale)} {unit}"
    raise AssertionError("unreachable")


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
