"""Facts of an error in `backward()`: where the gradient's path ends, what was freed before, what was changed since."""

from __future__ import annotations

import dataclasses

from nbdebug.report import Where
from nbdebug.tools.errors.facts import NOWHERE, Raised, TensorFact


@dataclasses.dataclass(frozen=True)
class GraphCut:
    """A place at which the gradient's path ends. kind: "detached", "number", "whole numbers", "comparison", "rebuilt",
    "sampled", "gradient" (one without a graph of its own), "block" (no_grad around it), "global" (gradients are off
    everywhere), "frozen" (no parameter wants one).

    op: as the user calls it ("argmax", ".item()"). text: the expression. source: what the path came from. target: the
    variable that gets the result, and has no gradient. function: around it, "" for a cell. sure: whether the source is
    known to have a gradient. names: of what is frozen. written: the statement in which it happens.
    """

    kind: str
    op: str
    text: str = ""
    source: str | None = None
    target: str | None = None
    function: str = ""
    where: Where = NOWHERE
    sure: bool = True
    names: tuple[str, ...] = ()
    written: str = ""


@dataclasses.dataclass(frozen=True)
class NoGradFacts:
    """Something without a gradient was asked for one.

    what: "loss" (backward on it), "not scalar", "not a tensor", "input" (autograd.grad's), "unused" (likewise, and not
    reached), "no parameters", "not a leaf" (given to an optimizer), "grad is None", "hook" (on a tensor without one),
    "inference", asked: the expression, as the user wrote it. tensor:
    its facts. kind: the type, where it is no tensor. evaluating: models in eval mode, which is innocent. counts:
    parameters that want a gradient and all, of each model. untracked: what no optimizer or parent knows
    ("self.blocks"). reduced: the loss's mean, where that was tried. giver: the function that gave what is no tensor.
    parameter: its name."""

    raised: Raised
    what: str
    asked: str = ""
    tensor: TensorFact | None = None
    kind: str | None = None
    cut: GraphCut | None = None
    plain: bool = False
    evaluating: tuple[str, ...] = ()
    counts: tuple[tuple[str, int, int], ...] = ()
    untracked: tuple[tuple[str, str], ...] = ()
    reduced: float | None = None
    giver: str | None = None
    parameter: str | None = None


@dataclasses.dataclass(frozen=True)
class GraphHolder:
    """A variable that brings a graph along which an earlier backward has freed.

    how: "turn" (given its value in one turn of a loop, read in the next), "sum" (added to in each turn), "sometimes"
    (computed in some turns), "held" (an attribute of an object), "list" (in a container), "once" (computed before the
    loop), "shared" (two losses were computed from it), "each" (all those of a list), "again" (the same loss).
    assigned, read: the lines. freed: whether its own node has been freed. several, object: it is a container, or
    another object that holds the tensors. cell: what runs again is a cell, no loop.
    """

    name: str
    how: str
    shape: tuple[int, ...] = ()
    made_by: str | None = None
    assigned: Where = NOWHERE
    read: Where = NOWHERE
    freed: bool | None = None
    several: bool = False
    object: bool = False
    cell: bool = False


@dataclasses.dataclass(frozen=True)
class TwiceFacts:
    """A graph was walked a second time. loss: as written. carriers: the likeliest first. earlier: where backward was
    called before on the same graph, as far as the source shows it; first: what it was called on. nodes: of the loss's
    graph, with those freed among them. optimizers: how many there are: two train two things."""

    raised: Raised
    loss: str = ""
    carriers: tuple[GraphHolder, ...] = ()
    earlier: Where = NOWHERE
    first: str = ""
    nodes: int = 0
    nodes_freed: int = 0
    optimizers: int = 0


@dataclasses.dataclass(frozen=True)
class InPlaceChange:
    """An in-place change. text: the statement. target: what it changes ("out"). added: what it puts in ("residual").
    instead: the statement without the change, as code. module: the dotted name of the module in whose forward it
    stands. function: around it. how: "statement", "method", "item", "out", "module" (an activation with inplace=True),
    "step" (an optimizer), "block" (in no_grad)."""

    text: str
    target: str
    how: str
    op: str
    added: str | None = None
    instead: str = ""
    module: str | None = None
    function: str = ""
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class InPlaceFacts:
    """Something that backward needs was changed in place.

    what: "saved" (seen in backward), "leaf", "leaf view", "view", "expanded", "out", "inference" (refused at once).
    saved_by: the op whose derivative needs the old value ("Relu"); own: it is that op's own result. shape, version,
    expected: what torch said of the tensor. parameter: its name where it is one; module: of that op. change: the
    likeliest statement; others: further ones that would fit. optimizer: the name of the one that holds the parameter.
    tried: whether backward passes without the change, on random numbers of that shape. loss: what backward was called
    on."""

    raised: Raised
    what: str
    saved_by: str = ""
    own: bool = False
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    version: int | None = None
    expected: int | None = None
    parameter: str | None = None
    tensor: str | None = None
    module: str | None = None
    change: InPlaceChange | None = None
    others: tuple[InPlaceChange, ...] = ()
    optimizer: str | None = None
    steps: tuple[str, ...] = ()
    tried: bool | None = None
    loss: str = ""
