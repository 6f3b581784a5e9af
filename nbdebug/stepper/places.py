"""Where a step can wait: before and after each call of a layer, at the loss, and around each layer's backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from nbdebug.observe.sites import Site
from nbdebug.stepper import numbers

BEFORE, AFTER, LOSS, BACKWARD, BACKWARD_DONE = "before", "after", "loss", "backward", "backward done"
PHASES = (BEFORE, AFTER, LOSS, BACKWARD, BACKWARD_DONE)
LEAVING = frozenset({AFTER, LOSS, BACKWARD_DONE})
"""Phases in which a layer's work lies behind."""


@dataclasses.dataclass(frozen=True)
class Place:
    """name: the module's dotted name, "" for the model itself. phase: one of PHASES. depth: how many calls of other
    layers it stands in. call: which call of this module in this step, from 1."""

    name: str
    module_type: str
    phase: str
    depth: int
    call: int = 1

    @property
    def layer(self) -> str:
        """ "`blocks.1.attn` (Attention)", with the call where it is not the first."""
        if self.phase == LOSS:
            return "the loss"
        named = f"`{self.name}` ({self.module_type})" if self.name else f"the model ({self.module_type})"
        return named + (f", call {self.call}" if self.call > 1 else "")

    def __str__(self) -> str:
        return {
            BEFORE: "before {}",
            AFTER: "after {}",
            LOSS: "at {}",
            BACKWARD: "before the backward of {}",
            BACKWARD_DONE: "after the backward of {}",
        }[self.phase].format(self.layer)


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer. nodes: the sequence numbers of autograd's nodes between which its own lie. worst: of what it
    was given (numbers.FINE, INF or NAN). finite_gradient: whether what has come to it in backward is finite. blamed:
    something non-finite was made inside it already. handled: the exception that was being handled when it began.
    received, returned: the names of its tensors by their place in autograd's graph (a node, and which of its outputs);
    leaves: of those that have none, by id."""

    module: nn.Module
    name: str
    number: int
    parent: Call | None
    depth: int
    nodes: tuple[int, int] = (0, 0)
    worst: int = numbers.FINE
    finite_gradient: bool = True
    blamed: bool = False
    given: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    versions: list[int | None] = dataclasses.field(default_factory=list)
    received: dict[tuple[Any, int], str] = dataclasses.field(default_factory=dict)
    leaves: dict[int, str] = dataclasses.field(default_factory=dict)
    returned: dict[tuple[Any, int], str] = dataclasses.field(default_factory=dict)
    site: Site | None = None
    handled: BaseException | None = None

    def place(self, phase: str) -> Place:
        return Place(self.name, type(self.module).__name__, phase, self.depth, self.number)

    def spoils(self, made: int) -> bool:
        """Whether it, and nothing inside it, has made what is worse than what it was given; made: the worst of that. It
        is not blamed for a NaN made of an inf, unless the inf came with the batch, as in a mask: else the one that has
        made the inf is."""
        above, brought = self, self.worst > numbers.FINE
        while brought and above.parent is not None:
            above = above.parent
            brought = above.worst > numbers.FINE
        return made > self.worst and not self.blamed and (self.worst == numbers.FINE or brought)

    def blame(self) -> None:
        """Its callers are not the innermost ones any more."""
        above = self.parent
        while above is not None:
            above.blamed, above = True, above.parent


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a goal may want to stop at. culprit: it made something non-finite of finite values, and nothing
    inside it did."""

    place: Place
    culprit: bool = False

    @property
    def leaving(self) -> bool:
        return self.place.phase in LEAVING

    @property
    def backward(self) -> bool:
        return self.place.phase in (BACKWARD, BACKWARD_DONE)


@dataclasses.dataclass
class Stop:
    """A place where the step waits, and what is known there. given, made: tensors by name; in the forward what a layer
    is given and what it has made of it, in backward the gradients that came and those that it hands on."""

    place: Place
    given: list[tuple[str, torch.Tensor]]
    made: list[tuple[str, torch.Tensor]]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    histograms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    site: Site | None = None
    culprit: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)

    def read(self) -> None:
        """The tensors in numbers."""
        for side, tensors in (("in", self.given), ("out", self.made)):
            for name, tensor in tensors[: numbers.MOST]:
                row, histogram = numbers.row(name, tensor)
                self.rows.append({"": side, "gradient": self.place.phase in (BACKWARD, BACKWARD_DONE), **row})
                self.histograms += [histogram] if histogram else []
            if len(tensors) > numbers.MOST:
                self.notes.append(f"{len(tensors) - numbers.MOST} more tensors {side} are not shown.")
