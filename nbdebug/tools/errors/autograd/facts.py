"""Facts of an error in `backward()`: where the gradient's path ends, what was freed before, what was changed since."""

from __future__ import annotations

import dataclasses

from nbdebug.report import Edit, Where
from nbdebug.tools.errors.facts import NOWHERE, Raised, TensorFact


@dataclasses.dataclass(frozen=True)
class GraphCut:
    """A place at which the gradient's path ends. kind: "detached", "number", "whole numbers", "comparison", "rebuilt",
    "sampled", "gradient" (one without a graph of its own), "checkpoint" (no input of it requires a gradient), "block"
    (no_grad around it), "global" (gradients are off everywhere), "frozen" (no parameter requires one).

    op: as the user calls it ("argmax", ".item()"). text: the expression. source: what the path came from. target: the
    variable that gets the result, and has no gradient. function: around it, "" for a cell. sure: whether the source is
    known to have a gradient. names: of what is frozen. statement: the one in which it happens.
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
    statement: str = ""


@dataclasses.dataclass(frozen=True)
class NoGradFacts:
    """A gradient was requested of something that has none.

    what: "loss" (backward on it), "not scalar", "not a tensor", "input" (autograd.grad's), "unused" (likewise, and not
    reached), "no parameters", "not a leaf" (given to an optimizer), "grad is None", "hook" (on a tensor without one),
    "inference". expression: that of which it was requested, as the user wrote it. tensor: its facts. type_name: of what
    is no tensor. no_path: nothing that it was computed from ever had a gradient. eval_models: in eval mode, which turns
    no gradient off. counts: parameters that require a gradient and all, of each model. untracked: what no optimizer or
    parent knows ("self.blocks"). mean: the loss reduced to one number, where that was tried. producer: the function
    that returned what is no tensor. parameter: its name. edit: the line that makes the first
    untracked list, with one that registers its modules."""

    raised: Raised
    what: str
    expression: str = ""
    tensor: TensorFact | None = None
    type_name: str | None = None
    cut: GraphCut | None = None
    no_path: bool = False
    eval_models: tuple[str, ...] = ()
    counts: tuple[tuple[str, int, int], ...] = ()
    untracked: tuple[tuple[str, str], ...] = ()
    mean: float | None = None
    producer: str | None = None
    parameter: str | None = None
    edit: Edit | None = None


@dataclasses.dataclass(frozen=True)
class GraphHolder:
    """A variable that holds a graph which an earlier backward has freed.

    how: "iteration" (gets its value in one iteration of a loop, read in the next), "sum" (added to in each iteration),
    "sometimes" (computed in some iterations), "attribute" (of an object), "list" (in a container), "once" (computed
    before the loop), "shared" (two losses were computed from it), "each" (all those of a list), "again" (the same
    loss). op: of its last node. write, read: the lines. container, object: it is a container, or another object that
    holds the tensors. cell: what runs again is a cell, no loop.
    """

    name: str
    how: str
    shape: tuple[int, ...] = ()
    op: str | None = None
    write: Where = NOWHERE
    read: Where = NOWHERE
    container: bool = False
    object: bool = False
    cell: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardTwiceFacts:
    """A graph was walked a second time. loss: as the user wrote it. holders: of the freed graph, the likeliest first.
    first_backward: where backward was called before on the same graph, as far as the source shows it; first_loss: what
    it was called on. nodes: of the loss's graph, with those freed among them. optimizers: how many there are: two train
    two things."""

    raised: Raised
    loss: str = ""
    holders: tuple[GraphHolder, ...] = ()
    first_backward: Where = NOWHERE
    first_loss: str = ""
    nodes: int = 0
    nodes_freed: int = 0
    optimizers: int = 0


@dataclasses.dataclass(frozen=True)
class InPlaceChange:
    """An in-place change. text: the statement. target: what it changes ("out"). how: "statement", "method", "item",
    "out", "module" (an activation with inplace=True), "step" (an optimizer), "block" (in no_grad). op: its node in the
    graph. operand: what it puts in ("residual"). replacement: the statement without the change, as code. module: the
    dotted name of the module in whose forward it stands. function: around it."""

    text: str
    target: str
    how: str
    op: str
    operand: str | None = None
    replacement: str = ""
    module: str | None = None
    function: str = ""
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class InPlaceFacts:
    """Something that backward needs was changed in place.

    what: "saved" (detected in backward), "leaf", "leaf view", "view", "expanded", "out", "inference" (refused at once).
    saved_by: the op whose derivative needs the old value ("Relu"); own_result: it is that op's own result. shape,
    version, saved_version: what torch says of the tensor. parameter: its name where it is one; module: of that op.
    change: the likeliest statement; others: further ones that would fit. fix_passes: whether backward passes without
    the change, on random numbers of that shape. loss: what backward was called on. edit: the change's statement without
    the change, or of a leaf within no_grad; weight: what it changes is a parameter, which is never computed anew."""

    raised: Raised
    what: str
    saved_by: str = ""
    own_result: bool = False
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    version: int | None = None
    saved_version: int | None = None
    parameter: str | None = None
    tensor: str | None = None
    module: str | None = None
    change: InPlaceChange | None = None
    others: tuple[InPlaceChange, ...] = ()
    fix_passes: bool | None = None
    loss: str = ""
    edit: Edit | None = None
    weight: bool = False
