"""The frames of a traceback, their variables, and the models among these: read without running the user's code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import USER, Site, at_site, kind_of, span_of
from nbdebug.observe.variables import attributes, closure_variables, frame_variables, named_modules, user_variables
from nbdebug.report import Where

HANDLERS = ("__torch_dispatch__", "__torch_function__")
_OPTIM = os.path.join(os.path.dirname(torch.__file__), "optim") + os.sep


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a traceback. names: its variables; users: it is the user's own code; module: the nn.Module whose
    method it is, if one; globals: of the file or notebook; span: (line, end line, column, end column) of the expression
    that ran, columns in bytes, where Python knows it (3.11 and newer)."""

    names: Mapping[str, Any]
    site: Site
    users: bool
    module: nn.Module | None
    globals: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    span: tuple[int, int, int, int] | None = None

    @property
    def where(self) -> Where:
        return at_site(Where(), self.site)


def frames(error: BaseException, before: FrameType | None = None) -> list[Frame]:
    """The frames of a traceback, outermost first, without those of nbdebug and the shell. They end at a dispatch mode
    that refused an op, whose own frames are no part of the computation, and at the frame `before`."""
    trail: list[Frame] = []
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_name not in HANDLERS and at.tb_frame is not before:
        package = str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("nbdebug", "IPython", "ipykernel"):
            trail.append(_frame(at.tb_frame, at.tb_lineno, at.tb_lasti))
        at = at.tb_next
    return trail


def _frame(frame: FrameType, line: int, instruction: int) -> Frame:
    names, code = frame_variables(frame), frame.f_code
    owner = names.get("self")
    return Frame(
        names,
        Site(code.co_filename, line, code.co_name),
        kind_of(code) == USER,
        owner if issubclass(type(owner), nn.Module) else None,
        frame.f_globals,
        span_of(code, instruction),
    )


@dataclasses.dataclass
class Owners:
    """The models and optimizers by name. modules: the name of every module within its model, by its id; paths: the
    same with the model's own name before it."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    modules: dict[int, str]
    paths: dict[int, str]

    @classmethod
    def among(cls, names: Mapping[str, Any], trail: list[Frame]) -> Owners:
        """Those among the user's variables and those of the frames, each once, without parts of other models."""
        models: dict[int, tuple[str, nn.Module]] = {}
        optimizers: dict[int, tuple[str, torch.optim.Optimizer]] = {}
        trainers = [
            {f"self.{name}": value for name, value in attributes(frame.names["self"]).items()}
            for frame in trail
            if frame.users and "self" in frame.names and frame.module is None
        ]
        closures = [closed for frame in trail if frame.users for closed in _closures(frame.names)]
        # last: `self` has no name of the user's, so the name of its class is taken
        selves = [{"self": frame.names["self"]} for frame in trail if "self" in frame.names]
        spaces = [{n: v for n, v in frame.names.items() if n != "self"} for frame in trail if frame.users]
        torchs = [frame.names for frame in trail if not frame.users and "self" not in frame.names]
        for space in [user_variables(names), *spaces, *trainers, *closures, *torchs, *selves]:
            for name, value in space.items():
                if issubclass(type(value), nn.Module):
                    title = type(value).__name__ if name == "self" else name
                    models.setdefault(id(value), (title, value))
                elif issubclass(type(value), torch.optim.Optimizer):
                    optimizers.setdefault(id(value), (name, value))
        parts = {id(part) for _, model in models.values() for _, part in named_modules(model) if part is not model}
        roots = {name: model for key, (name, model) in models.items() if key not in parts}
        modules: dict[int, str] = {}
        paths: dict[int, str] = {}
        for title, model in roots.items():
            for name, part in named_modules(model):
                modules.setdefault(id(part), name)
                paths.setdefault(id(part), f"{title}.{name}".rstrip("."))
        return cls(roots, dict(optimizers.values()), modules, paths)


def _closures(names: Mapping[str, Any], depth: int = 2) -> Iterator[dict[str, Any]]:
    """The closure variables of the functions among these variables."""
    for function in names.values():
        if type(function) is FunctionType and function.__closure__:
            closed = closure_variables(function)
            yield closed
            if depth > 1:
                yield from _closures(closed, depth - 1)


def phase(trail: list[Frame]) -> str:
    """ "forward", "backward" or "optimizer", by the functions that were running."""
    if any(frame.site.function == "_engine_run_backward" for frame in trail):
        return "backward"
    for frame in reversed(trail):  # a closure that an optimizer calls, as Lightning's, is none of it
        steps = frame.site.file.startswith(_OPTIM) and frame.site.function != "zero_grad"
        if steps or issubclass(type(frame.names.get("self")), torch.optim.Optimizer) and frame.module is None:
            return "optimizer"
        if frame.module is not None or frame.users:
            break
    return "forward"


def running_module(trail: list[Frame], owners: Owners) -> tuple[str | None, str | None]:
    """The innermost module whose method ran, by name, and its class."""
    for frame in reversed(trail):
        if frame.module is not None and id(frame.module) in owners.modules:
            return owners.modules[id(frame.module)], type(frame.module).__name__
    return None, None


def exception_chain(error: BaseException) -> list[BaseException]:
    """An exception and those that led to it, each once."""
    errors: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        cause = todo.pop()
        if cause is not None and not any(cause is known for known in errors):
            errors.append(cause)
            todo += [cause.__cause__, cause.__context__]
    return errors
