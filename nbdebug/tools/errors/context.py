"""An exception with the frames of its traceback: where the detectors find the user's variables.

The context keeps the user's own objects alive, so it lasts as long as one `explain`. Nothing in it runs code of the
user's: attributes are read statically (observe/variables.py), never through a property, `__getattr__`, `__repr__`,
`__len__` or `__eq__`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.frames import Frame, Owners, frames, phase, running_module
from nbdebug.observe.sources import tree_of
from nbdebug.observe.tensors import base_name
from nbdebug.observe.variables import members, user_variables
from nbdebug.report import Link, Where
from nbdebug.tools.errors.exceptions import RemoteException, remote_exception
from nbdebug.tools.errors.exceptions import with_remote_frames as whole
from nbdebug.tools.errors.facts import Raised, TensorFact
from nbdebug.tools.errors.syntax import comprehensions
from nbdebug.tools.errors.values import UNKNOWN, expression, message_of, shape_of, tensor_attribute

READ_AT_MOST = 10_000_000
"""Elements of a tensor whose least and largest value are read: some milliseconds. Larger ones keep to their shape."""
LOADER = re.compile(r"[\\/]torch[\\/]utils[\\/]data[\\/]")
ENDS = (50, 150)
"""Outermost and innermost frames of a traceback that are read."""
MOST = 40
"""Tensors listed for one error."""


@dataclasses.dataclass
class ErrorContext:
    """error: the exception; trail: its frames, outermost first; names: the variables of the notebook or of
    the caller; owners: models and optimizers in either; led_to: the exceptions that followed, nearest first.

    carried: the exception that it reports from elsewhere, a loader's worker or the compiler: `message` and `type` are
    then of that one, and only file and line are known of the last frames of the trail.
    """

    error: BaseException
    trail: list[Frame]
    names: Mapping[str, Any]
    owners: Owners
    led_to: tuple[BaseException, ...] = ()
    carried: RemoteException | None = None

    @classmethod
    def of(cls, error: BaseException, names: Mapping[str, Any], led_to: tuple[BaseException, ...] = ()) -> ErrorContext:
        trail = _shortened([*_outer_frames(error, led_to), *frames(error)])
        if sys.version_info >= (3, 12):
            trail = [_with_comprehension(frame, callee) for frame, callee in zip(trail, [*trail[1:], None])]
        elsewhere = remote_exception(type(error).__name__, message_of(error))
        if elsewhere is not None:
            trail = whole(elsewhere, trail)
        return cls(error, trail, names, Owners.among(names, trail), led_to, elsewhere)

    @property
    def message(self) -> str:
        return self.carried.message if self.carried else message_of(self.error)

    @property
    def type(self) -> str:
        """The name of the exception's class."""
        return self.carried.type if self.carried else type(self.error).__name__

    @property
    def users(self) -> list[Frame]:
        """The frames of the user's own code, innermost first."""
        return [frame for frame in reversed(self.trail) if frame.users]

    def path(self, module: Any) -> str | None:
        """The dotted name of a module within its model ("encoder.layers.3"), "" for the model itself."""
        return self.owners.modules.get(id(module))

    def variables(self) -> Iterator[tuple[str, Any, Frame | None]]:
        """(name, value, frame) of the user's variables, innermost frame first, then the notebook's own; an object's
        attributes follow as `self.x`."""
        for frame in self.users:
            for name, value in frame.names.items():
                yield name, value, frame
            if "self" in frame.names:
                for name, value in members(frame.names["self"]).items():
                    yield f"self.{name}", value, frame
        for name, value in user_variables(self.names).items():
            yield name, value, None

    def raised(self) -> Raised:
        """The facts that all kinds of errors share."""
        at = self.users[0].where if self.users else Where()
        module, kind = running_module(self.trail, self.owners)
        where = dataclasses.replace(at, phase=_phase(self.trail), module=module, module_type=kind)
        reached = tuple(Link(f"in {_function_phrase(frame)}", frame.where) for frame in self.trail if frame.users)
        return Raised(
            self.type,
            self.message,
            where,
            reached,
            tuple(f"{type(e).__name__}: {message_of(e)}" for e in self.led_to),
            self.tensors(),
        )

    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors among the user's variables, each once, innermost first."""
        tensors: dict[int, TensorFact] = {}
        for name, value, _ in self.variables():
            if is_tensor(value) and id(value) not in tensors and len(tensors) < MOST:
                tensors[id(value)] = fact(name, value)
        return tuple(tensors.values())


def _with_comprehension(frame: Frame, callee: Frame | None) -> Frame:
    """With the variables of the comprehension that failed in it. Python 3.12 and newer run it in the function's own
    frame, where they no longer exist after the error: what was passed to a module is known, the others are UNKNOWN
    (and not the values of the same names outside the comprehension)."""
    tree = tree_of(frame.site.file) if frame.users and frame.span is not None else None
    node = expression(frame) if tree is not None else None
    if tree is None or node is None or frame.site.function.startswith("<") and frame.site.function != "<module>":
        return frame
    targets = [part for clause in comprehensions(tree, node) for part in ast.walk(clause.target)]
    names = {part.id: UNKNOWN for part in targets if isinstance(part, ast.Name)}
    if not names:
        return frame
    passed = callee.names if callee is not None and callee.site.function == "_wrapped_call_impl" else {}
    args, kwargs = passed.get("args", ()), passed.get("kwargs", {})
    if isinstance(node, ast.Call) and not any(isinstance(arg, ast.Starred) for arg in node.args):
        values = [*zip(node.args, args), *((k.value, kwargs[k.arg]) for k in node.keywords if k.arg in kwargs)]
        names |= {arg.id: value for arg, value in values if isinstance(arg, ast.Name) and arg.id in names}
    return dataclasses.replace(frame, names={**names, **{n: v for n, v in frame.names.items() if n not in names}})


def _phase(trail: list[Frame]) -> str:
    """The phase of the trail; "input" where a loader was fetching samples and no model ran in it."""
    fetching = [i for i, frame in enumerate(trail) if LOADER.search(frame.site.file)]
    inside = fetching and not any(frame.module is not None for frame in trail[fetching[-1] :])
    return "input" if inside else phase(trail)


def _function_phrase(frame: Frame) -> str:
    """A function as a person would call it."""
    name = frame.site.function
    if name == "<module>":
        return "the cell" if frame.where.cell else "the program"
    return {"<lambda>": "a lambda", "<genexpr>": "a generator expression"}.get(name, f"`{name}`")


def _shortened(trail: list[Frame]) -> list[Frame]:
    """Without the middle of an endless recursion."""
    return trail if len(trail) <= sum(ENDS) else [*trail[: ENDS[0]], *trail[-ENDS[1] :]]


def _outer_frames(error: BaseException, led_to: tuple[BaseException, ...]) -> list[Frame]:
    """The frames around the one that caught an exception: its own traceback begins there, that of the exception which
    followed leads to it."""
    trail: list[Frame] = []
    inner = error
    for after in led_to:
        start = inner.__traceback__.tb_frame if inner.__traceback__ is not None else None
        at = after.__traceback__
        while at is not None and at.tb_frame is not start:
            at = at.tb_next
        if at is None or start is None:  # caught in another thread, or in a task
            break
        trail = [*frames(after, start), *trail]
        inner = after
    return trail


def is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def fact(name: str, value: torch.Tensor, *, read: bool = False) -> TensorFact:
    """The facts of one tensor. read: its least and largest value as well (waits for a device, which may refuse)."""
    grad_fn = tensor_attribute(value, "grad_fn")
    op = base_name(grad_fn.name().removesuffix("0").removesuffix("Backward").lower()) if grad_fn is not None else None
    kind = "parameter" if issubclass(type(value), torch.nn.Parameter) else "tensor"
    low, high, bad = _range(value) if read else (None, None, None)
    return TensorFact(
        name,
        shape_of(value) or (),
        str(tensor_attribute(value, "dtype")).removeprefix("torch."),
        str(tensor_attribute(value, "device")),
        kind,
        tensor_attribute(value, "requires_grad"),
        op,
        low,
        high,
        bad,
    )


def _range(value: torch.Tensor) -> tuple[float | None, float | None, int | None]:
    try:
        if not _readable(value):
            return None, None, None
        with torch.no_grad():
            flat = value.detach()
            if not flat.dtype.is_floating_point:
                return float(flat.min()), float(flat.max()), 0
            good = flat[flat.isfinite()]
            bad = flat.numel() - good.numel()
            return (float(good.min()), float(good.max()), bad) if good.numel() else (None, None, bad)
    except Exception:  # a device that has failed, a layout without min: then the range is unknown
        return None, None, None


def _readable(value: torch.Tensor) -> bool:
    """Whether its values are there to be read: not a user's own kind of tensor, not freed (FSDP, `resize_(0)`), and not
    on a GPU that is still busy, which may hang."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if value.layout is not torch.strided or not 0 < value.numel() <= READ_AT_MOST or value.device.type == "meta":
        return False
    if value.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    reach = value.storage_offset() + sum((side - 1) * step for side, step in zip(value.shape, value.stride())) + 1
    if reach * value.element_size() > value.untyped_storage().nbytes():
        return False
    return not value.is_cuda or torch.cuda.current_stream(value.device).query()
