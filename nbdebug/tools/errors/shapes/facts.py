"""What a size that does not fit shows: the op, its operands, the size it expects, where the size came from, and the
fixes that were tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Edit, Link
from nbdebug.tools.errors.facts import Raised

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ShapeOperand:
    """A tensor or array that the op was given. name: the user's text for it, "" where it has none; role: torch's name
    for it ("input", "target", "attn_mask"), "" in an expression of the user's; shape: None where it is not known."""

    name: str
    role: str = ""
    shape: Shape | None = None
    dtype: str = ""
    weight: bool = False


@dataclasses.dataclass(frozen=True)
class FailedLayer:
    """The module of torch's that failed. path: its name in the model; sizes: what it was made for (in_features)."""

    path: str
    kind: str
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ShapeStep:
    """One step in the history of a size: the output shape of this layer or op."""

    what: str
    shape: Shape


@dataclasses.dataclass(frozen=True)
class ShapeFix:
    """A change that may help. slug: which kind of change; name: of the tensor or module that it changes; code: what the
    user would write; verified: it was tried and the op ran (None: not tried); result: the output shape. edit: it as a
    change of the user's own text, and reached: how far the program ran with that text."""

    slug: str
    name: str
    code: str
    verified: bool | None = None
    result: Shape | None = None
    edit: Edit | None = None
    reached: str = ""


@dataclasses.dataclass(frozen=True)
class ShiftedSize:
    """A sequence of which one side of a loss was cut and the other was not. rows: of the batch; scores, target: the
    positions of each sequence on either side; name: the tensor that the longer side was made of; shape: its shape."""

    rows: int
    scores: int
    target: int
    name: str = ""
    shape: Shape = ()


@dataclasses.dataclass(frozen=True)
class ViewDownstream:
    """The layer that takes the output of the view that failed. path: its name; expected: the features it takes; actual:
    those that it would get if the view kept the rows."""

    path: str
    expected: int
    actual: int


@dataclasses.dataclass(frozen=True)
class ShapeFacts:
    """kind: what does not fit (see `messages`). op: as the user wrote it ("@", "cat", "view"). axis, expected, actual:
    where, and the two sizes. which: the number of the operand at fault. arguments: the plain ones of the op, each as
    (text, value) (`(("dim", 2),)`, a shape). target: the shape that was expected. user_input: the user's tensor that
    went into the failing module from the user's line. lines: the user's lines that led there. history: how the shape
    came about, in order. batch_change: the op after which the predictions no longer had the rows of the batch.
    remainder: (text of a divisor, what is divided, by what), where a size like `12 // heads` leaves one."""

    raised: Raised
    kind: str
    op: str
    operands: tuple[ShapeOperand, ...] = ()
    layer: FailedLayer | None = None
    axis: int | None = None
    expected: int | None = None
    actual: int | None = None
    which: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    target: Shape | None = None
    user_input: ShapeOperand | None = None
    lines: tuple[Link, ...] = ()
    history: tuple[ShapeStep, ...] = ()
    batch_change: ShapeStep | None = None
    shift: ShiftedSize | None = None
    downstream: ViewDownstream | None = None
    remainder: tuple[str, int, int] | None = None
    fixes: tuple[ShapeFix, ...] = ()
