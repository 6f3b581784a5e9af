"""One step of a guarded run in numbers, and its form as a line of JSON.

JSON has no NaN and no infinity, and Python writes them as words that other readers refuse. So they are written as the
strings "nan", "inf" and "-inf": the file is strict JSON, and a guard's record is about nothing but such numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

OUTCOMES = ("ok", "tripped", "skipped", "above", "scaler")
"""What became of a step: the update was made; the guard tripped; a non-finite step was dropped (on_trip="skip"); the
gradient norm was above `skip_above`, and the step was dropped; GradScaler met inf gradients and skipped it."""

TOO_OFTEN = 0.5
"""Where more than this share of the steps is clipped, clipping sets the size of the steps, and not the learning rate
(Google's tuning playbook)."""
ENOUGH = 10
"""Steps before a share says anything."""

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""The numbers that JSON lacks, by the strings that stand for them."""

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: a line must cost next to nothing


@dataclasses.dataclass(frozen=True)
class StepLine:
    """One step. step: 0-based. loss: the sum of the roots of backward, None where the guard could not see it. norm: of
    all gradients together, before they were clipped. clipped: whether they were. outcome: one of OUTCOMES. lr: of the
    first parameter group. time: in seconds since the epoch."""

    step: int
    loss: float | None = None
    norm: float | None = None
    clipped: bool = False
    outcome: str = "ok"
    lr: float | None = None
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dict that strict JSON can hold."""
        return {
            "step": self.step,
            "loss": _word(self.loss),
            "norm": _word(self.norm),
            "clipped": self.clipped,
            "outcome": self.outcome,
            "lr": _word(self.lr),
            "time": _word(self.time),
        }

    @classmethod
    def from_json(cls, given: Any) -> StepLine:
        """The step of such a dict; keys that are not known are ignored. Raises ValueError for nonsense."""
        if not isinstance(given, Mapping):
            raise ValueError(f"a step is an object of JSON, not {type(given).__name__}")
        step, clipped, outcome, time = map(given.get, ("step", "clipped", "outcome", "time"))
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise ValueError("`step` is a whole number from 0")
        if not isinstance(clipped, bool):
            raise ValueError("`clipped` is true or false")
        if outcome not in OUTCOMES:
            raise ValueError(f"`outcome` is one of {', '.join(OUTCOMES)}")
        if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < 2**53:
            raise ValueError("`time` is in seconds since the epoch")
        loss, norm, lr = (_number(given, key) for key in ("loss", "norm", "lr"))
        return cls(step, loss, norm, clipped, outcome, lr, float(time))


def encoded(values: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Raises ValueError for a bare NaN or infinity, TypeError for what is no plain data."""
    return _encoder.encode(values).encode("ascii") + b"\n"


def decoded(line: bytes) -> Any:
    """What a line of strict JSON holds. Raises ValueError for anything else, endless numbers and nesting included."""
    try:
        return _decoder.decode(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def salvaged(line: bytes) -> Iterator[Any]:
    """The whole objects in a line that is damaged: one before its damage, or one that ran together with it."""
    text = line.decode("utf-8", "replace")
    start = text.find('{"')
    while start >= 0:
        try:
            value, end = _decoder.raw_decode(text, start)
            yield value
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find('{"', end)


def strict(value: Any) -> Any:
    """Plain data with the numbers that JSON lacks written as words; what is no plain data becomes its text."""
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, float):
        return _word(float(value))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _word(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def _number(given: Mapping[str, Any], key: str) -> float | None:
    """A number of any size, or None. Raises ValueError for anything else; a key must be there."""
    value = given.get(key, "")
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    if value is None or type(value) in (int, float):
        try:
            number = None if value is None else float(value)
        except OverflowError:
            raise ValueError(f"`{key}` is larger than a number can be") from None
        if number is None or math.isfinite(number):
            return number
    raise ValueError(f"`{key}` is a number, null, or one of {', '.join(WORDS)}")


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refused)
