"""Sizes as a person reads and writes them."""

from __future__ import annotations

import re

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """A number of bytes in binary units, to three figures: "512 bytes", "1.21 MiB", "78.0 GiB"."""
    value, unit = float(abs(count)), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.{digits}f} {'byte' if (value, unit) == (1.0, 0) else UNITS[unit]}"


def bytes_of(given: int | float | str) -> int:
    """The bytes of "24GiB", "24 GB", "512MB" or a number. KB, MB … are decimal; KiB, MiB … and a bare K, M, … binary.

    Raises ValueError for what is no size, or not above zero."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        count = float(given)
    else:
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)(b?)(?:ytes)?\s*", str(given).lower())
        if found is None:
            raise ValueError(f'a size is a number of bytes or a string like "24GiB"; got {given!r}')
        number, prefix, binary, byte = found.groups()
        step = 1000 if prefix and byte and not binary else 1024
        count = float(number) * step ** " kmgt".index(prefix or " ")
    if not 0 < count < float("inf"):
        raise ValueError(f"a size is above zero; got {given!r}")
    return int(count)
