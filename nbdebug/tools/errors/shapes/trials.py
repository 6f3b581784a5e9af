"""The op that failed, tried again with one of its operands seen in another way: transposed, with an axis more or less.

What counts as a cure must fail as it was and run as it would be, on copies, within a fraction of a second.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.sandbox import CannotRun, Sandbox, quiet
from nbdebug.tools.errors.shapes.call import CallPart, FailedCall, is_shaped
from nbdebug.tools.errors.shapes.facts import ShapeFix
from nbdebug.tools.errors.shapes.history import through

Shape = tuple[int, ...]
Accept = Callable[[Shape], bool]
SECONDS = 0.25
"""For all trials of one error together; it is asked between them."""
ROWS, SIDE = 2, 64
"""Of a batch too large to try, as many rows, and of its pictures as large a corner, as show whether the rest fits."""


@dataclasses.dataclass(frozen=True)
class FixIdea:
    """Another view of one operand. which: its number; code: what the user would write for it."""

    slug: str
    which: int
    code: str
    change: Callable[[Any], Any]


class CallTrials:
    """Runs of one call."""

    def __init__(self, call: FailedCall):
        self.call, self.until = call, time.monotonic() + SECONDS
        self.fails = self._fails()

    def _fails(self) -> bool:
        """Whether it fails on copies as well: else they prove nothing."""
        with quiet():
            try:
                self._run({})
            except CannotRun:
                return False
            except Exception:
                return True
        return False

    def result(self, ideas: Iterable[FixIdea]) -> Shape | None:
        """The shape of what the call gives with these changes; None where it fails, or was not run."""
        if not self.fails or time.monotonic() > self.until:
            return None
        with quiet():
            try:
                return shape_of(self._run({idea.which: idea.change for idea in ideas}))
            except Exception:  # CannotRun, and whatever torch or NumPy say of a cure that is none
                return None

    def _run(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        call = self.call
        if call.op in ("cat", "stack", "concatenate") and call.inner is None:
            return self._joined(changes)
        if call.direct and call.node is not None and call.frame is not None and not self._fewer():
            try:
                return self._expression(changes)
            except CannotRun:  # torch's own frame has all that the user's expression has computed
                if call.inner is None:
                    raise
        if call.inner is None or call.function is None:
            raise CannotRun
        sandbox = Sandbox()
        names = dict(call.inner.names) | self._fewer()
        new = {call.parts[i].role: change(sandbox.copy(names[call.parts[i].role])) for i, change in changes.items()}
        return sandbox.call_function(call.function, names, new, call.layer)

    def _expression(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        call, sandbox = self.call, Sandbox()
        assert call.frame is not None
        new: dict[int | str, Any] = {
            call.parts[i].text: change(sandbox.copy(call.parts[i].value)) for i, change in changes.items()
        }
        return Sandbox(new).evaluate(call.node, call.frame)

    def instead(self, node: ast.AST) -> Shape | None:
        """The shape that another expression gives in the place of the one that failed; None where it fails."""
        if not self.fails or self.call.frame is None:
            return None
        with quiet():
            try:
                return shape_of(Sandbox().evaluate(node, self.call.frame))
            except Exception:
                return None

    def _fewer(self) -> dict[str, Any]:
        """A large input of a convolution, cut to a corner of its first rows: it shows what fits. An axis of as many
        entries as the layer has channels stays whole."""
        layer: Any = self.call.layer
        part = self.call.parts[0] if self.call.parts else None
        if part is None or type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or not torch.is_tensor(part.value):
            return {}
        if part.value.ndim < 3 or part.value.numel() < 100_000:
            return {}
        channels = attributes(layer)["in_channels"]
        cut = [slice(0, ROWS), *(slice(None if size == channels else SIDE) for size in part.value.shape[1:])]
        return {part.role: part.value.detach()[tuple(cut)]}

    def _joined(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        sandbox = Sandbox()
        values = [sandbox.copy(part.value) for part in self.call.parts]
        for i, change in changes.items():
            values[i] = change(values[i])
        home = np if type(values[0]) is np.ndarray else torch
        sandbox.allow("cat")
        return getattr(home, self.call.op)(values, *[axis_of(self.call)])

    def cure(self, idea: FixIdea, accept: Accept | None = None) -> ShapeFix | None:
        """The cure that an idea is, if the call runs with it."""
        shape = self.result([idea])
        if shape is None or accept is not None and not accept(shape):
            return None
        if self._fewer() and self.call.layer is not None:  # what the whole input would give
            view = idea.change(torch.zeros(()).expand(self.call.parts[0].shape or ()))
            shape = through(self.call.layer, tuple(view.shape))
        return ShapeFix(idea.slug, self.call.parts[idea.which].text, idea.code, True, shape)

    def without(self, role: str) -> Shape | None:
        """The shape that the layer gives without one of its arguments."""
        if self.call.inner is None or self.call.function is None:
            return None
        with quiet():
            try:
                names = dict(self.call.inner.names) | {role: None, self.call.parts[0].role: self.call.parts[0].value}
                return shape_of(Sandbox().call_function(self.call.function, names, {}, self.call.layer))
            except Exception:
                return None

    def with_layer(self, module: nn.Module, code: str, path: str, slug: str = "layer") -> Iterator[ShapeFix]:
        """Another layer in the place of the one that failed: by its formula, else by running it."""
        part = self.call.parts[0]
        shape, sandbox = through(module, part.shape) if part.shape is not None else None, Sandbox()
        with quiet():
            try:
                given = sandbox.copy(next(iter(self._fewer().values()), part.value))
                if not sandbox.large and part.value.device.type == "cpu":
                    shape = shape_of(module.to(part.value.dtype)(given))
            except Exception:  # it does not fit either
                return
        if shape is not None:
            yield ShapeFix(slug, path, code, True, shape)


def shape_of(result: Any) -> Shape:
    """The shape of a result, of the first of several."""
    while issubclass(type(result), (tuple, list)) and result:
        result = result[0]
    return tuple(result.shape) if is_shaped(result) else ()


def axis_of(call: FailedCall) -> int:
    """The axis along which tensors are joined: the first by default, as in torch.cat."""
    node = call.node
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg in ("dim", "axis"):
            found = dict(call.numbers).get(ast.unparse(keyword.value))
            return found if type(found) is int else 0
    return next((n for _, n in call.numbers if type(n) is int), 0)


def named(part: CallPart) -> str:
    """The user's text for an operand, fit to have a method called on it."""
    simple = part.node is None or isinstance(part.node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return part.text if simple and part.text else f"({part.text or 'x'})"


def swapped(which: int, part: CallPart) -> Iterator[FixIdea]:
    """Two axes exchanged, the last two first."""
    name, axes = named(part), len(part.shape or ())
    if axes == 2:
        yield FixIdea("transpose", which, f"{name}.T", lambda x: x.T)
    pairs = [(-2, -1), (1, 2), (0, 1), (1, 3), (0, 2)] if axes > 2 else []
    seen = set()
    for i, j in pairs:
        key = (i % axes, j % axes)
        if max(i, j) < axes and key not in seen:
            seen.add(key)
            method = "swapaxes" if type(part.value) is np.ndarray else "transpose"
            yield FixIdea("transpose", which, f"{name}.{method}({i}, {j})", operator.methodcaller("swapaxes", i, j))


def _permuted(x: Any, order: tuple[int, ...]) -> Any:
    return x.permute(*order)


def moved(which: int, part: CallPart) -> Iterator[FixIdea]:
    """The last axis brought to where torch has its channels, and the reverse."""
    name, axes = named(part), len(part.shape or ())
    orders: dict[int, list[tuple[int, ...]]] = {
        3: [(2, 0, 1), (1, 2, 0)],
        4: [(0, 3, 1, 2), (0, 2, 3, 1)],
        5: [(0, 4, 1, 2, 3), (0, 2, 3, 4, 1)],
    }
    for order in orders.get(axes, ()):
        if is_shaped(part.value) and type(part.value) is not np.ndarray:
            yield FixIdea("permute", which, f"{name}.permute{order}", functools.partial(_permuted, order=order))


def widened(which: int, part: CallPart) -> Iterator[FixIdea]:
    """An axis of one added."""
    name, axes = named(part), len(part.shape or ())
    for k in [1, 0, *range(2, axes + 1)] if axes else [0]:
        if type(part.value) is np.ndarray:
            code = f"np.expand_dims({part.text}, {k})"
            yield FixIdea("unsqueeze", which, code, functools.partial(np.expand_dims, axis=k))
        else:
            yield FixIdea("unsqueeze", which, f"{name}.unsqueeze({k})", operator.methodcaller("unsqueeze", k))
    if axes == 2:
        yield FixIdea("unsqueeze", which, f"{name}[None, None]", lambda x: x[None, None])
        yield FixIdea("unsqueeze", which, f"{name}[:, :, None, None]", lambda x: x[:, :, None, None])


def aligned(which: int, part: CallPart, to: CallPart) -> Iterator[FixIdea]:
    """Each axis of the shorter beside an axis of the longer that has its size, with axes of one between: a batch of
    numbers beside a batch of pictures, a mask [N, S] beside scores [N, H, L, S]."""
    own, long = part.shape or (), to.shape or ()
    if not 0 < len(own) < len(long):
        return
    # the batch first, then what keeps the last axis the last: as masks of attention are meant
    ends = sorted(itertools.combinations(range(len(long)), len(own)), key=lambda at: (at[0], -at[-1]))
    for places in ends:
        if all(long[place] == size for place, size in zip(places, own)):
            index = tuple(slice(None) if i in places else None for i in range(len(long)))
            text = ", ".join(":" if i is not None else "None" for i in index)
            yield FixIdea("unsqueeze", which, f"{named(part)}[{text}]", operator.itemgetter(index))


def narrowed(which: int, part: CallPart) -> Iterator[FixIdea]:
    """An axis of one taken away."""
    for k, size in reversed(list(enumerate(part.shape or ()))):
        if size == 1:
            yield FixIdea("squeeze", which, f"{named(part)}.squeeze({k})", operator.methodcaller("squeeze", k))


def flattened(which: int, part: CallPart) -> Iterator[FixIdea]:
    """Several axes made one."""
    if len(part.shape or ()) > 2 and type(part.value) is not np.ndarray:
        yield FixIdea("flatten", which, f"{named(part)}.flatten(1)", lambda x: x.flatten(1))


def resized(which: int, part: CallPart, to: CallPart) -> Iterator[FixIdea]:
    """A picture brought to the size of another, where only their sizes differ."""
    a, b = part.shape or (), to.shape or ()
    if len(a) == len(b) == 4 and a[0] == b[0] and a[2:] != b[2:] and to.text and "float" in str(part.value.dtype):
        code = f"F.interpolate({part.text}, size={named(to)}.shape[2:])"
        yield FixIdea("resize", which, code, lambda x: nn.functional.interpolate(x, size=b[2:]))


def no_larger(call: FailedCall) -> Callable[[Shape], bool]:
    """Accepts a result of no more elements than the largest operand: two axes that cross are never what was meant."""
    most = max((math.prod(part.shape) for part in call.parts if part.shape is not None), default=0)
    return lambda shape: math.prod(shape) <= most


def anything(shape: Shape) -> bool:
    return True


def known(call: FailedCall) -> list[tuple[int, CallPart]]:
    return [(i, part) for i, part in enumerate(call.parts) if part.shape is not None and not part.weight]


def tried(trials: CallTrials, ideas: Iterable[FixIdea], accept: Accept = anything) -> Iterator[ShapeFix | None]:
    return (trials.cure(idea, accept) for idea in ideas)


def first(trials: CallTrials, *stages: Iterable[FixIdea], accept: Accept = anything) -> Iterator[ShapeFix | None]:
    """The cures of the first stage that has any: what is less likely is not offered beside them."""
    for ideas in stages:
        found = [cure for idea in ideas if (cure := trials.cure(idea, accept)) is not None]
        yield from found
        if found:
            return
