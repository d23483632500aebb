"""Numbers as a person reads them, and the ticks of an axis."""

import math

_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def short_number(value: float, digits: int = 4) -> str:
    """About `digits` significant digits, with k, M, G, T from 10,000 on and an exponent below 0.001."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    if size >= 1e4:
        for factor, letter in _THOUSANDS:
            if size >= factor * 0.99995:
                scaled = value / factor
                return _trim(f"{scaled:.{max(0, digits - 1 - _exponent(scaled))}f}") + letter
    return _trim(f"{value:.{max(0, digits - 1 - _exponent(value))}f}")


def whole_number(value: float) -> str:
    """12345678 -> 12,345,678."""
    return f"{int(value):,}"


def byte_size(value: float) -> str:
    """1610612736 -> 1.50 GiB."""
    factor, unit = byte_unit(value)
    return f"{value / factor:.3g} {unit}" if value / factor < 1000 else f"{value / factor:.0f} {unit}"


def byte_unit(value: float) -> tuple[int, str]:
    """The largest binary unit that is no larger than the value, as (bytes, name)."""
    return next(((factor, unit) for factor, unit in _BINARY_UNITS if value >= factor), (1, "B"))


def duration(seconds: float) -> str:
    """3725 -> 1 h 2 min; 75 -> 1 min 15 s; 4.5 -> 4.5 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def log_ticks(low: float, high: float, base: int, count: int) -> list[float]:
    """At most about `count` powers of the base in [low, high]; 2 and 5 times them where those are too few."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    ticks = [float(base) ** exponent for exponent in range(first, last + 1, stride)]
    if base == 10 and len(ticks) < 3:
        fine = [factor * 10.0**exponent for exponent in range(first - 1, last + 1) for factor in (1, 2, 5)]
        ticks = [tick for tick in fine if low * 0.999 <= tick <= high * 1.001]
    return ticks


def tick_labels(ticks: list[float]) -> list[str]:
    """Labels of ticks with the digits that tell them apart."""
    for digits in range(2, 9):
        labels = [short_number(tick, digits) for tick in ticks]
        if all(_reads_as(label, tick) for label, tick in zip(labels, ticks, strict=True)):
            break
    return labels


def power_labels(ticks: list[float]) -> list[str]:
    """Labels of powers of two: small ones as they are, 65536 -> 2¹⁶ once they are large."""
    if ticks[-1] <= 4096:
        return tick_labels(ticks)
    superscripts = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return ["2" + str(round(math.log2(tick))).translate(superscripts) for tick in ticks]


def _reads_as(label: str, tick: float) -> bool:
    letters = {letter: factor for factor, letter in _THOUSANDS}
    factor = letters.get(label[-1], 1.0)
    number = float(label.rstrip("kMGTP")) * factor
    return math.isclose(number, tick, rel_tol=1e-6, abs_tol=1e-30)


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def _trim(text: str) -> str:
    """Drop the zeros after the decimal point that say nothing."""
    return text.rstrip("0").rstrip(".") if "." in text else text
