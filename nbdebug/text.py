"""Words for numbers, names and sizes: how every report writes them, so that one thing is written one way."""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import Any

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

WIDEST = 100
"""Columns: longer lines are hard to read."""


NARROWEST = 40
ANSI = {"bold": "1", "code": "36", "good": "32", "bad": "31", "pale": "2"}
"""Styles of a terminal: bold, cyan, green, red, faint."""


def module_name(kind: type) -> str:
    """The module of a class; "" where no text stands there: Cython's classes of functions have a descriptor."""
    name = kind.__module__
    return name if type(name) is str else ""


def terminal_width(default: int = 80) -> int:
    """The columns to write in: COLUMNS, else those of the terminal that stdout is, else `default`; at most WIDEST.

    A kernel's stdout is no terminal, whatever the kernel was started from."""
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or not int(columns):
        columns = str(shutil.get_terminal_size((default, 24)).columns if is_terminal(sys.stdout) else default)
    return max(NARROWEST, min(WIDEST, int(columns)))


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # a stream of the user's that can't say
        return False


def in_colour(stream: Any) -> bool:
    """Whether what is written there may be coloured: to a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(stream)


def styled(text: str, style: str = "") -> str:
    """The text with ANSI codes. style: a key of ANSI, or "". `Code` loses its backticks and gets a colour instead."""
    begin = f"\033[{ANSI[style]}m" if style else ""
    text = re.sub(r"`([^`]+)`", rf"\033[{ANSI['code']}m\1\033[0m{begin}", text)
    return f"{begin}{text}\033[0m" if style else text


def clip(text: str, limit: int) -> str:
    """The text, or its beginning with "…" where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def in_a_line(error: BaseException) -> str:
    """An exception's type and the first line of its message: "RuntimeError: no size". Torch's may have hundreds."""
    first = next(iter(str(error).splitlines()), "") or "no message"
    return f"{type(error).__name__}: {clip(first, 160)}"


def sentence(error: BaseException) -> str:
    """What an error says, as it is told to a person: that of the file system without its number."""
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
    return text if text.endswith((".", "?", "!")) else f"{text}."


def clip_start(name: str, limit: int) -> str:
    """A dotted name, or its end in whole parts behind "…": the end tells modules apart."""
    while len(name) > limit and "." in name:
        name = name.removeprefix("…").partition(".")[2]
        name = "…" + name if len(name) < limit else name
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]


def listed(names: Iterable[object], most: int = 3, quote: str = "`") -> str:
    """Names in a sentence: "`a`", "`a` and `b`", "`a`, `b`, `c` and 4 more". quote: put around each of them."""
    words = [f"{quote}{name}{quote}" for name in names]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most:,} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def nearest(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean off?", or "" where no choice is near."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def refused(message: str) -> str:
    """argparse's refusal of a choice, by what was typed, with the nearest choice; any other message as it is."""
    match = re.fullmatch(r"(?:argument ([^:]*): )?invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if match is None:
        return message
    choices = re.findall(r"[\w.-]+", match[3])
    option = f"{match[1]}: " if (match[1] or "").startswith("-") else ""  # other names are on no screen
    known = listed(choices, most=len(choices), quote="").replace(" and ", " or ")
    return f"{option}{match[2]!r} is not {known}.{nearest(match[2], choices)}"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 step", "2 steps", "1,200 batches" (where the plural is given)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def figures(value: float, digits: int = 3) -> str:
    """A number for a sentence, to so many digits; in full up to a million: "0.0123", "65,504", "1.2e-8", "nan"."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e6:
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    head, mark, power = f"{value:.{digits}g}".partition("e")
    return head + (f"e{int(power)}" if mark else "")


def duration(seconds: float) -> str:
    """A time, as people write it: "12.3 ms", "4.5 s"."""
    return f"{figures(1000 * seconds)} ms" if seconds < 1 else f"{figures(seconds)} s"


def percent(share: float) -> str:
    """A share of one, as people write it: 0.006 is "0.6%", 0.4321 "43%", 0.99997 "99.997%", 1e-7 "under 0.001%"."""
    value = share * 100
    if not math.isfinite(value) or value in (0, 100):
        return f"{value:g}%"
    if 0 < abs(value) < 0.001:
        return "under 0.001%"
    near = round(min(abs(value), abs(100 - value)) if 0 < value < 100 else abs(value), 9)
    digits = 0 if near >= 9.95 else 1 if near >= 0.1 else 2 if near >= 0.01 else 3
    return f"{value:.{digits}f}%"


def size(count: float) -> str:
    """A number of bytes in binary units, to three figures: "512 bytes", "1.21 MiB", "78.0 GiB"."""
    value, unit = float(abs(count)), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.{digits}f} {'byte' if (value, unit) == (1.0, 0) else UNITS[unit]}"


def bytes_of(amount: int | float | str) -> int:
    """The bytes of "24GiB", "24 GB", "512MB" or a number. KB, MB … are decimal; KiB, MiB … and a bare K, M, … binary.

    Raises ValueError for what is no size, or not above zero."""
    if isinstance(amount, (int, float)) and not isinstance(amount, bool):
        result = float(amount)
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)(b?)(?:ytes)?\s*", str(amount).lower())
        if match is None:
            raise ValueError(f'a size is a number of bytes or a string like "24GiB"; got {amount!r}')
        number, prefix, binary, byte = match.groups()
        step = 1000 if prefix and byte and not binary else 1024
        result = float(number) * step ** " kmgt".index(prefix or " ")
    if not 0 < result < float("inf"):
        raise ValueError(f"a size is above zero; got {amount!r}")
    return int(result)
