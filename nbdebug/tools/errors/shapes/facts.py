"""What a size that does not fit shows: the op, what it was given, what it wanted, where the size came from, and the
cures that were tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Link
from nbdebug.tools.errors.facts import Raised

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ShapeOperand:
    """A tensor or array that the op was given. name: the user's text for it, "" where it has none; role: torch's name
    for it ("input", "target", "attn_mask"), "" in an expression of the user's; shape: None where it can't be told."""

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
    """One step on the way of a size: after this layer or op the shape was this."""

    what: str
    shape: Shape


@dataclasses.dataclass(frozen=True)
class ShapeFix:
    """A change that was thought of. slug: which kind of change; name: of the tensor or module that it changes; code:
    what the user would write; verified: it was tried and the op ran (None: not tried); result: the shape it gave."""

    slug: str
    name: str
    code: str
    verified: bool | None = None
    result: Shape | None = None


@dataclasses.dataclass(frozen=True)
class ShiftedSize:
    """A sequence of which the one side of a loss was cut and the other was not. rows: of the batch; scores, target: the
    places of each sequence on either side; name: the tensor that the longer side was made of; shape: its shape."""

    rows: int
    scores: int
    target: int
    name: str = ""
    shape: Shape = ()


@dataclasses.dataclass(frozen=True)
class ViewDownstream:
    """The layer that takes the result of the op that failed. path: its name; wants: the features it takes; gets: those
    that it is given when the op gives what there is."""

    path: str
    wants: int
    gets: int


@dataclasses.dataclass(frozen=True)
class ShapeFacts:
    """kind: what does not fit (see looks.shapes.said). op: as the user wrote it ("@", "cat", "view"). axis, wanted,
    got: where, and the two sizes. target: the shape that was wanted. numbers: plain arguments of the op with their text
    (`(("dim", 2),)`, a shape). entered: the user's tensor that went into the failing module from the user's line.
    lines: the user's lines that led there. passed: how the shape came about, in order. folded: the op after which the
    predictions no longer had the rows of the batch. uneven: (text of a divisor, what is divided, by what), where a size
    like `12 // heads` leaves a rest."""

    raised: Raised
    kind: str
    op: str
    operands: tuple[ShapeOperand, ...] = ()
    layer: FailedLayer | None = None
    axis: int | None = None
    wanted: int | None = None
    got: int | None = None
    which: int | None = None
    numbers: tuple[tuple[str, Any], ...] = ()
    target: Shape | None = None
    entered: ShapeOperand | None = None
    lines: tuple[Link, ...] = ()
    passed: tuple[ShapeStep, ...] = ()
    folded: ShapeStep | None = None
    shifted: ShiftedSize | None = None
    behind: ViewDownstream | None = None
    uneven: tuple[str, int, int] | None = None
    cures: tuple[ShapeFix, ...] = ()
