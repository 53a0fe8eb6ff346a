"""Numbers as a reader meets them: signed percentages, intervals, counts."""

from __future__ import annotations

from probes.text import plural as plural
from store.records import Ratio

MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 3) -> str:
    """``37.0``, ``1,204``, ``0.0061``: ``digits`` significant digits, whole numbers in full; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return _minus(f"{value:,}")
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return _minus(f"{value:,.0f}")
    if size == 0:
        return "0"
    return _minus(f"{value:.{digits}g}") if size < 1e-4 else _minus(f"{value:.{_decimals(size, digits)}f}")


def percent(share: float | None, *, signed: bool = False) -> str:
    """``14.0 %`` of 0.14; with ``signed`` ``+14.0 %`` or ``−14.0 %``. Below one per cent two decimals are shown."""
    if share is None:
        return "–"
    value = share * 100
    shown = f"{abs(value):,.0f}" if abs(value) >= 100 else f"{abs(value):.{1 if abs(value) >= 0.995 else 2}f}"
    zero = float(shown.replace(",", "")) == 0
    sign = "" if zero else MINUS if value < 0 else "+" if signed else ""
    return f"{sign}{shown} %"


def change(ratio: float) -> str:
    """``−14.0 %`` of the ratio 0.86."""
    return percent(ratio - 1, signed=True)


def change_with_interval(ratio: Ratio) -> str:
    """``−14.0 % (95 % interval −16.0 % to −12.0 %)``."""
    return f"{change(ratio.ratio)} ({interval(ratio)})"


def interval(ratio: Ratio) -> str:
    """``95 % interval −16.0 % to −12.0 %``, where there is one."""
    if ratio.interval is None:
        return "no interval: too few pairs"
    low, high = ratio.interval
    return f"95 % interval {change(low)} to {change(high)}"


def with_bounds(share: float, bounds: tuple[float, float] | None) -> str:
    """``+1.00 % (95 % interval +0.50 % to +1.50 %)`` of shares."""
    said = percent(share, signed=True)
    if bounds is None:
        return f"{said} (no interval)"
    low, high = (percent(bound, signed=True) for bound in bounds)
    return f"{said} (95 % interval {low} to {high})"


def interval_words(bounds: tuple[float, float] | None, unit: str) -> str:
    """``95 % interval 1.234 to 2.345 ms``, where there is one."""
    return "no interval" if bounds is None else f"95 % interval {bounds[0]:.3f} to {bounds[1]:.3f} {unit}"


def minute(moment: str) -> str:
    """``2026-03-14 09:26 UTC`` of an ISO 8601 date and time in UTC; any other text as it is."""
    return f"{moment[:10]} {moment[11:16]} UTC" if moment.endswith(("Z", "+00:00")) else moment


def certainty(ratio: Ratio) -> str:
    """``outside the noise``, ``inside the noise``, or ``not sure`` where there is no interval."""
    if ratio.outside_noise:
        return "outside the noise"
    return "not sure" if ratio.interval is None else "inside the noise"


def _decimals(size: float, digits: int) -> int:
    decimals = digits - 1
    while size < 1 and decimals < 8:
        size *= 10
        decimals += 1
    while size >= 10:
        size /= 10
        decimals -= 1
    return max(decimals, 0)


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
