"""The user's program from the failing line on, with another text of that line: on copies, as far as torch's own ops and
layers go.

A fix that lets one op run may break the next layer. So the statement is read with the new text, then the statements
behind it, then those of the caller behind its call, up to the loss. Nothing of the user's is run: expressions are
evaluated in the `Sandbox`, which knows torch's functions alone; of the user's own functions and modules the statements
are read in the same way. Where that ends (a file is read, `backward()`, a loop goes round), the trial ends, and says
how far it came.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import textwrap
import time
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.sources import SCOPES, edit_of, functions, parents, parse, tree_of
from nbdebug.observe.variables import class_attribute, named_parameters
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import clip
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.facts import TriedFix
from nbdebug.tools.errors.operands import CALLS
from nbdebug.tools.errors.sandbox import SMALL, CannotRun, Sandbox, TrialResult, quiet
from nbdebug.tools.errors.values import expression, statement, value_of

SECONDS = 0.5
"""For one trial; the clock is read between statements."""
DEEPEST = 6
"""Functions of the user's within one another."""


class Returned(Exception):
    """A `return` was reached."""


class End(Exception):
    """The trial can't go on, or has come to a `backward()`; so far all is well."""


@dataclasses.dataclass
class Run:
    """until: when the time is over; last: the value of the last tensor expression; line: the last statement read."""

    until: float
    sandbox: ProgramSandbox
    last: Any = None
    line: int = 0


class ProgramSandbox(Sandbox):
    """A sandbox that also reads the user's own functions and the `forward` of their modules, statement by statement."""

    def __init__(self, swap: Mapping[int | str, Any] | None = None):
        super().__init__(swap)
        self.run: Run | None = None
        self.depth = 0

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.swap.get(id(module), module)
        if type(module).__module__.startswith("torch."):
            if type(module) is nn.Sequential:
                for child in module._modules.values():
                    assert child is not None
                    args = (self.forward(child, *args),)
                return args[0]
            return super().forward(module, *args, **kwargs)
        return self._read(class_attribute(module, "forward"), (module, *args), kwargs)

    def keep(self, value: Any) -> Any:
        """A result of the sandbox itself."""
        return value

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        function = value_of(node.func, frame)
        if isinstance(node.func, ast.Call):
            made = self.evaluate(node.func, frame)
            if not issubclass(type(made), nn.Module):
                raise CannotRun
            return self.forward(made, *self._items(node.args, frame), **self._keywords(node, frame))
        if issubclass(type(function), type) and issubclass(function, nn.Module):
            return self.made(function, self._items(node.args, frame), self._keywords(node, frame))
        if function is nn.Parameter:
            return self.keep(nn.Parameter(self.evaluate(node.args[0], frame).detach().clone()))
        if type(function) in (FunctionType, MethodType) and kind_of(function.__code__) == USER:
            args = self._items(node.args, frame)
            own = (function.__self__,) if type(function) is MethodType else ()
            return self._read(function, (*own, *args), self._keywords(node, frame))
        return super()._call(node, frame)

    def made(self, kind: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A new module of torch's own, where its weights are few."""
        if not kind.__module__.startswith("torch.nn."):
            raise CannotRun
        if not any(issubclass(type(arg), (nn.Module, list)) for arg in args):
            with torch.device("meta"):
                probe = kind(*args, **kwargs)
            if sum(weight.numel() for _, weight in named_parameters(probe)) > SMALL:
                raise CannotRun
        return self.keep(kind(*args, **kwargs))

    def copy(self, value: Any) -> Any:
        """Modules and results of the sandbox itself stay as they are."""
        return value if issubclass(type(value), nn.Module) else super().copy(value)

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a function of the user's returns for these arguments."""
        from nbdebug.tools.errors.autograd.functions import function_source  # only for what the user wrote

        source = function_source(function)
        if source is None or self.run is None or self.depth >= DEEPEST or not isinstance(source.node, ast.FunctionDef):
            raise CannotRun
        given = source.node.args
        names = [a.arg for a in (*given.posonlyargs, *given.args)]
        if len(args) > len(names) or given.vararg or given.kwarg:
            raise CannotRun
        if unknown := [name for name in kwargs if name not in (*names, *(a.arg for a in given.kwonlyargs))]:
            raise TypeError(f"{source.node.name}() got an unexpected keyword argument {unknown[0]!r}")
        bound: dict[str, Any] = {}
        for name, default in zip(reversed(names), reversed(given.defaults)):
            bound[name] = self.evaluate(default, source.frame)
        bound |= {**dict(zip(names, args)), **kwargs}
        if missing := [name for name in names if name not in bound]:
            raise TypeError(f"{source.node.name}() missing {len(missing)} required positional argument")
        return self._body_value(source, bound)

    def _body_value(self, source: Any, names: dict[str, Any]) -> Any:
        assert self.run is not None
        frame = dataclasses.replace(source.frame, names={**source.frame.names, **names})
        self.depth += 1
        try:
            self.read_body(source.node, frame)
        except Returned as done:
            return done.args[0]
        finally:
            self.depth -= 1
        return None

    def read_body(self, function: Any, frame: Frame) -> None:
        """The statements of a function of the user's."""
        assert self.run is not None
        read_block(self.run, function.body, frame)

    def reads(self, node: ast.stmt, frame: Frame) -> bool:
        """Whether this sandbox has read a statement in a way of its own."""
        return False


def continued(
    context: ErrorContext, edit: Edit | None, layers: Mapping[int | str, nn.Module] | None = None
) -> TrialResult | None:
    """The program from the failing statement on, with the text of an edit of it. layers: what replaces a layer, by its
    id, where the edit is of another line, which makes that layer. None where not even the statement can be read."""
    frame = context.users[0] if context.users else None
    mended = _mended(edit, frame) if frame is not None and edit is not None else None
    if frame is None or (mended is None) is (edit is not None):
        return None
    run = Run(time.monotonic() + SECONDS, ProgramSandbox(layers))
    run.sandbox.run = run
    with quiet():
        try:
            value = _rest_of_frame(run, frame, mended)
        except CannotRun:
            return None
        except End:
            return _result(run)
        except Exception as error:  # the next op, or the user's next layer, refuses it
            message = error.args[0] if error.args and type(error.args[0]) is str else type(error).__name__
            return TrialResult(False, clip(message.partition("\n")[0], 200))
        try:
            _outwards(run, context, frame, value)
        except (CannotRun, End):
            pass
        except Exception as error:
            message = error.args[0] if error.args and type(error.args[0]) is str else type(error).__name__
            return TrialResult(False, clip(message.partition("\n")[0], 200))
    return _result(run)


def edited(context: ErrorContext, code: str, methods: Mapping[str, str], trial: TrialResult | None) -> TriedFix:
    """A fix that calls a method on operands of the user's line (`x.float()`, by the operand's text), as an edit of it;
    tried by the program behind it. trial: of the op alone."""
    frame = context.users[0] if context.users else None
    node = expression(frame) if frame is not None else None
    changes: dict[ast.AST, str] = {}
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.expr) and not isinstance(getattr(part, "ctx", None), (ast.Store, ast.Del)):
            method = methods.get(ast.unparse(part))
            if method is not None and not any(part is n for done in changes for n in ast.walk(done)):
                changes[part] = f"{{}}.{method}"
    edit = edit_of(frame.site.file, changes) if changes and frame is not None else None
    further = continued(context, edit) if edit is not None else None
    if further is not None and not further.worked:
        return TriedFix(code)
    after = dict(trial.after) if trial is not None else {}
    if further is not None:
        after["the program then runs"] = further.text
    return TriedFix(code, True if trial or further else None, after, edit)


def proven(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with each fix that is called tried as an edit of the user's own lines: one that assigns a new value
    (`ids = ids - 1`) goes before the failing line, and the program runs on with it. What is no edit is a suggestion."""
    return dataclasses.replace(finding, fixes=tuple(_proven(context, fix) for fix in finding.fixes))


def _proven(context: ErrorContext, fix: Fix) -> Fix:
    if not fix.verified or fix.edit is not None:
        return fix
    edit = _replaced(context, fix.code)
    if edit is not None:
        return Fix.of(fix.title, edit, True, fix.after)
    edit = _inserted(context, fix.code)
    trial = continued(context, edit) if edit is not None else None
    if edit is None or trial is not None and not trial.worked:
        return dataclasses.replace(fix, verified=None, after={})
    after = {**fix.after, **({"the program then runs": trial.text} if trial is not None else {})}
    return Fix.of(fix.title, edit, True, after)


def _replaced(context: ErrorContext, code: str) -> Edit | None:
    """Statements that end in the failing call itself, on other values, in the place of the failing statement."""
    frame = context.users[0] if context.users else None
    line, tree = statement(frame) if frame is not None else None, parse(code)
    last = tree.body[-1] if tree is not None and tree.body else None
    if frame is None or not isinstance(line, ast.Expr) or not isinstance(last, ast.Expr) or "#" in code:
        return None
    names = [getattr(getattr(one.value, "func", None), "attr", "") for one in (line, last)]
    pad = " " * line.col_offset
    return (
        edit_of(frame.site.file, {line: code.replace("\n", f"\n{pad}")}) if names[0] and names[0] == names[1] else None
    )


def _inserted(context: ErrorContext, code: str) -> Edit | None:
    """Assignments before the failing statement, where that uses what they assign; None for other code."""
    frame = context.users[0] if context.users else None
    line = statement(frame) if frame is not None else None
    tree = parse(code)
    if frame is None or line is None or hasattr(line, "body") or tree is None or "#" in code or "…" in code:
        return None
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    used = {n.id for n in ast.walk(line) if isinstance(n, ast.Name)}
    if len(targets) != len(tree.body) or not any(isinstance(t, ast.Name) and t.id in used for t in targets):
        return None
    known = {*frame.names, *frame.globals, *vars(builtins)} | {t.id for t in targets if isinstance(t, ast.Name)}
    inner = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if any(isinstance(n, ast.Name) and n.id not in known | inner for n in ast.walk(tree)):
        return None
    return before_line(frame, line, tree.body)


def before_line(frame: Frame, line: ast.stmt, body: list[ast.stmt]) -> Edit | None:
    """Assignments before a statement. A name of the function around, or of the file, would become local by that: there
    the one new value is written in its place."""
    tree = tree_of(frame.site.file)
    scopes: tuple[Any, ...] = functions(tree) if tree is not None else ()
    around = [n for n in scopes if n.lineno <= line.lineno <= (n.end_lineno or 0)]
    scope = max(around, key=lambda n: n.lineno, default=None)
    names = {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    inside = list(ast.walk(scope)) if scope is not None else []
    own = {n.arg for n in inside if isinstance(n, ast.arg)}
    own |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if scope is None or names <= own:
        pad = " " * line.col_offset
        text = "".join(ast.unparse(node).replace("\n", f"\n{pad}") + f"\n{pad}" for node in body)
        return edit_of(frame.site.file, {line: text + "{raw}"})
    uses = [n for n in ast.walk(line) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    only = body[0] if len(body) == 1 else None
    if not isinstance(only, ast.Assign) or len(uses) != 1:
        return None
    value = ast.unparse(only.value)
    simple = isinstance(only.value, (ast.Call, ast.Name, ast.Attribute, ast.Subscript))
    return edit_of(frame.site.file, {uses[0]: value if simple else f"({value})"})


def _result(run: Run) -> TrialResult:
    text = f"to line {run.line}"
    if is_tensor(run.last):
        dtype = str(run.last.dtype).removeprefix("torch.")
        text += f", which gives {dtype} {list(run.last.shape)}"
    return TrialResult(True, text)


def _mended(edit: Edit, frame: Frame) -> list[ast.stmt] | None:
    """The statements of the new text."""
    tree = parse(textwrap.dedent(edit.new))
    return tree.body if tree is not None and edit.file == frame.site.file else None


def _rest_of_frame(run: Run, frame: Frame, first: list[ast.stmt] | None, swap: tuple[str, Any] | None = None) -> Any:
    """What a frame returns: its present statement (in the text `first`, or with the value of one call in it known),
    then those behind it. Raises End where it goes no further."""
    now = statement(frame)
    tree = tree_of(frame.site.file)
    if now is None or tree is None:
        raise CannotRun
    frame = dataclasses.replace(frame, names=dict(frame.names), globals=dict(frame.globals))
    before = dict(run.sandbox.swap)
    if swap is not None:
        run.sandbox.swap = {**before, swap[0]: swap[1]}
    try:
        read_block(run, first if first is not None else [now], frame, fresh=True)
        run.sandbox.swap = before
        _behind(run, now, parents(tree), frame)
    except Returned as done:
        return done.args[0]
    finally:
        run.sandbox.swap = before
    raise End


def _behind(run: Run, node: ast.AST, around: Mapping[int, ast.AST], frame: Frame) -> None:
    """The statements behind a statement, in its block and in those around it, up to the end of a loop."""
    while True:
        block = around.get(id(node))
        if block is None:
            raise End
        for part in ("body", "orelse", "finalbody"):
            inside = getattr(block, part, None)
            if isinstance(inside, list) and any(one is node for one in inside):
                at = next(i for i, one in enumerate(inside) if one is node)
                read_block(run, inside[at + 1 :], frame)
        if isinstance(block, (*SCOPES, ast.For, ast.While, ast.Module, ast.AsyncFor)):
            raise End if not isinstance(block, SCOPES) else Returned(None)
        node = block


def read_block(run: Run, body: list[ast.stmt], frame: Frame, fresh: bool = False) -> None:
    """Statements in order. fresh: they must be readable, or nothing was tried at all."""
    for node in body:
        if time.monotonic() > run.until:
            raise End
        try:
            _read_statement(run, node, frame)
        except CannotRun:
            if fresh or run.sandbox.depth:
                raise
            raise End from None
        run.line = node.lineno if not fresh and not run.sandbox.depth else run.line or frame.site.line


def _read_statement(run: Run, node: ast.stmt, frame: Frame) -> None:
    if run.sandbox.reads(node, frame):
        return
    names: Any = frame.names if frame.site.function != "<module>" else frame.globals
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.AugAssign)):
        own = isinstance(node, ast.AugAssign)
        value = run.sandbox.evaluate(node if own else node.value or ast.Constant(None), frame)
        run.last = value if is_tensor(value) else run.last
        if isinstance(node, ast.Return):
            raise Returned(value)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Subscript) or own and not isinstance(target, ast.Name):
                _write(run, target, value, frame, own)
            bind(target, value, names)
    elif isinstance(node, ast.If):
        test = run.sandbox.evaluate(node.test, frame)
        if type(test) not in (bool, int, type(None)):
            raise CannotRun
        read_block(run, node.body if test else node.orelse, frame, fresh=True)
    elif isinstance(node, ast.With) and all(i.optional_vars is None for i in node.items):
        read_block(run, node.body, frame, fresh=True)
    elif not isinstance(node, ast.Pass):
        raise CannotRun


def _write(run: Run, target: Any, value: Any, frame: Frame, done: bool) -> None:
    """`x[i] = value`: into a copy, which is read no more, so the trial ends there. done: it is written already."""
    if not done:
        thing, key = (run.sandbox.evaluate(part, frame) for part in (target.value, target.slice))
        if not is_tensor(thing):
            raise CannotRun
        thing[key] = value
    raise End


def bind(target: Any, value: Any, names: dict[str, Any]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        if type(value) not in (tuple, list, dict, torch.Size) and not is_tensor(value):
            raise CannotRun
        for part, item in unpacked(target, list(value)):
            bind(part, item, names)
    elif target is not None:
        raise CannotRun


def unpacked(target: ast.Tuple | ast.List, items: list[Any]) -> list[tuple[ast.expr, Any]]:
    """(part, item) of an assignment to several names. Raises Python's own ValueError where their numbers differ."""
    parts = list(target.elts)
    star = next((i for i, part in enumerate(parts) if isinstance(part, ast.Starred)), None)
    least = len(parts) - (star is not None)
    if len(items) < least:
        raise ValueError(f"not enough values to unpack (expected {least}, got {len(items)})")
    if star is None:
        if len(items) > least:
            raise ValueError(f"too many values to unpack (expected {least})")
        return list(zip(parts, items))
    end = star + len(items) - least
    rest = parts[star].value  # type: ignore[attr-defined]
    return [*zip(parts[:star], items), (rest, items[star:end]), *zip(parts[star + 1 :], items[end:])]


def _outwards(run: Run, context: ErrorContext, frame: Frame, value: Any) -> None:
    """The callers of a frame that has returned, one after the other, as long as they called it directly."""
    places = {id(one): i for i, one in enumerate(context.trail)}
    at = next(i for i, one in enumerate(context.users) if one is frame)
    for caller in context.users[at + 1 :]:
        between = context.trail[places[id(caller)] + 1 : places[id(frame)]]
        value = _through_layers(run, between, value)
        call = expression(caller)
        if not isinstance(call, ast.Call):
            raise End
        run.line = caller.site.line
        value = _rest_of_frame(run, caller, None, (ast.unparse(call), value))
        frame = caller


def _through_layers(run: Run, between: list[Frame], value: Any) -> Any:
    """What torch's containers make of a result on its way to the caller: a Sequential passes it to its next layers."""
    for frame in reversed(between):
        if frame.site.function in CALLS:
            continue
        if type(frame.module) is not nn.Sequential or frame.site.function != "forward":
            raise End
        layers = list(frame.module._modules.values())
        at = next((i for i, layer in enumerate(layers) if layer is frame.names.get("module")), None)
        for layer in layers[at + 1 :] if at is not None else ():
            assert layer is not None
            value = run.sandbox.forward(layer, value)
    return value
