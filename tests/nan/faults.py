"""The faults that a random program may hold, as text.

Each fault is a few lines of code that take `h` (rows, time, width), which needs a gradient, and `s` (rows,), one
column of what the batch brings along, and leave `y` in the shape of `h`. The line that starts with "!" is the one at
fault. With `s` between 0.5 and 1.5 all is well; where `s` has the value `bad`, that line makes a non-finite value
(forward), or its derivative is non-finite (backward) while the loss stays finite. A fault that is `learnt` has a
parameter instead, which starts with a bad value.

`operand` and `result` name what goes into the line and what comes out, so that the claim can be proven without nbdebug:
finite in, non-finite out, in the rows that were spoiled. `rows` says where the batch is: in dimension "0" or "1",
"folded" with time, a Python "loop" over samples. "all" and "one": so many must be bad, and no row is to blame.
"""

from __future__ import annotations

import dataclasses
import importlib


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to go wrong. `bad` may hold several values, of which a program takes one; in double precision `bad64`."""

    name: str
    phase: str
    codes: tuple[str, ...]
    ops: tuple[str, ...]
    bad: tuple[float, ...]
    text: str
    operand: str
    result: str
    top: str = ""
    init: str = ""
    rows: str = "0"
    bad64: tuple[float, ...] = ()
    child: str = ""
    learnt: str = ""
    wide: bool = False
    rare: bool = False
    """rare: comes with a small share of the programs, chosen apart, so that the seeds of all others keep their program.
    wide: works only with two rows or more in the batch that are not bad, or none is left to stay finite."""

    @property
    def mark(self) -> str:
        lines = (self.top + "\n" + self.text).splitlines()
        return next(line.strip()[1:].strip() for line in lines if line.strip().startswith("!"))


FAULTS: list[Fault] = []


def forward(name: str, codes: str, ops: str, bad: object, text: str, operand: str, result: str, **more: object) -> None:
    """Add a fault that makes a non-finite value. codes and ops are words, the chapter is left out."""
    _add("forward", name, codes, ops, bad, text, operand, result, **more)


def backward(
    name: str, codes: str, ops: str, bad: object, text: str, operand: str, result: str, **more: object
) -> None:
    """Add a fault whose derivative is not finite."""
    _add("backward", name, codes, ops, bad, text, operand, result, **more)


def _add(phase: str, name: str, codes: str, ops: str, bad: object, *rest: str, **more: object) -> None:
    values = bad if isinstance(bad, tuple) else (bad,)
    told = tuple(f"nan/{code}" for code in codes.split())
    FAULTS.append(Fault(name, phase, told, tuple(ops.split()), values, *rest, **more))  # type: ignore[arg-type]


LEVEL = "level = (h.abs().mean(-1) + 0.2) * s[:, None]\n"
ADD = "\ny = h + 0.1 * worth[..., None]"
SHIFTED = "high = h.tanh() + s[:, None, None]\n"


def all_faults() -> list[Fault]:
    """Every fault, in a fixed order."""
    for name in ("forward", "masked", "backward"):
        importlib.import_module(f"tests.nan.faults_{name}")
    return FAULTS


NOT_CAST = frozenset(
    {"log of a spectrum", "cumprod", "einsum", "acos", "asin", "atanh", "eigh", "svd", "slope too large"}
)
"""The faults that need more than half precision."""
