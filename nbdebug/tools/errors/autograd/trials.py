"""Fixes of errors of the graph, tried: the user's training is read again, with gradients and with the edited lines.

A missing gradient, a graph that is walked twice, a value changed in place: the error appears in `backward()`, and the
cure stands elsewhere. So the function is read from its beginning, or from the loop around, over some rounds. Without
the edit the error must appear again; with it no error may. Nothing of the user's is run (see `continuation`).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import linecache
import re
import time
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, cell_name, kind_of
from nbdebug.observe.sources import SCOPES, edit_of, function_at, parents, parse, statement_at, tree_of
from nbdebug.observe.variables import attributes, named_children, named_modules, named_parameters
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import count
from nbdebug.tools.errors.autograd.functions import unwrap
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.continuation import DEEPEST, End, ProgramSandbox, Returned, Run, bind, read_block
from nbdebug.tools.errors.sandbox import ATTRIBUTES, IN_PLACE, TENSORS, CannotRun, TrialResult, quiet
from nbdebug.tools.errors.values import UNKNOWN, statement, value_of

ROUNDS = 3
"""Of a loop around the failing line: what is carried over from one to the next shows in the second."""
LONGEST = 200
"""Rounds of a loop within."""
GRAD_MODES = {"no_grad": False, "inference_mode": False, "enable_grad": True}
TRAINING_SECONDS = 1.0
"""For one trial with gradients."""
_READERS = ("item", "tolist", "numpy", "backward")
"""Methods that are allowed where gradients are on: the values are those of copies."""


_PLAIN: tuple[Any, ...] = (sum, zip, enumerate, float, max, min, abs)
_OF_MODULES: dict[str, Any] = {
    "parameters": named_parameters,
    "modules": named_modules,
    "children": lambda module: named_children(module).items(),
}
_OF_WEIGHTS = ("zero_grad", "requires_grad_", "train", "eval")


class _LoopEnd(Exception):
    """A `break` (True) or a `continue` (False)."""


class TrainingSandbox(ProgramSandbox):
    """A sandbox in which a training goes on: weights are copied as leaves, `backward()` runs on what was computed from
    the copies, `step()` changes these. So that an error of the graph appears again, and an edit shows whether it cures.

    Statements that can't be read are passed over where nothing else needs their result; a value that they would give
    stays what it is, or is unknown where it has a graph. edit: of the user's source; covered: whether it was read."""

    def __init__(self, frame: Frame, edit: Edit | None, swap: Mapping[int | str, Any] | None = None):
        super().__init__(swap)
        self.edit, self.covered, self.frame = edit, False, frame
        self.tree = _edited_tree(edit) if edit is not None else None
        self.calls, self.line = 0, frame.site.line
        self._own: dict[int, Any] = {}
        self._fields: dict[tuple[int, str], Any] = {}

    # values: what the sandbox has made is taken as it is, what is the user's is copied once

    def keep(self, value: Any) -> Any:
        self._own[id(value)] = value
        if type(value) in (list, tuple):
            for item in value:
                self.keep(item)
        return value

    def copy(self, value: Any) -> Any:
        if type(value) is torch.Generator and id(value) not in self._own:
            raise CannotRun
        if id(value) in self._own and self._own[id(value)] is value:
            return value
        if type(value) in (list, dict):
            if id(value) not in self._copies:
                self._copies[id(value)] = (value, self.keep(super().copy(value)))
            return self._copies[id(value)][1]
        return self.keep(super().copy(value))

    def _copy(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return super()._copy(value)
        if value.layout is not torch.strided or value.is_quantized or self.large:
            raise CannotRun
        plain = torch.zeros(value.shape, dtype=value.dtype) if value.device.type != "cpu" else value.detach().clone()
        return plain.requires_grad_(value.is_leaf and value.requires_grad)

    def allow(self, name: str) -> None:
        if name not in _READERS:
            super().allow(name)

    def evaluate(self, node: ast.AST | None, frame: Frame) -> Any:
        if isinstance(node, ast.Attribute):
            thing = value_of(node.value, frame)
            if (id(thing), node.attr) in self._fields:
                return self._fields[id(thing), node.attr]
            if is_tensor(thing) and node.attr in (*ATTRIBUTES, "grad", "requires_grad"):
                return self.keep(getattr(self.copy(thing), node.attr))
        return self.keep(super().evaluate(node, frame))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> list[Any]:
        clause = node.generators[0]
        if len(node.generators) > 1 or clause.ifs:
            raise CannotRun
        inner, values = dataclasses.replace(frame, names=dict(frame.names)), []
        for item in self.items(clause.iter, frame):
            bind(clause.target, item, inner.names)  # type: ignore[arg-type]
            values.append(self.evaluate(node.elt, inner))
        return values

    _generatorexp = _listcomp

    def items(self, node: ast.expr, frame: Frame) -> list[Any]:
        """What a loop goes through."""
        value = value_of(node, frame)
        if issubclass(type(value), (nn.Sequential, nn.ModuleList)):
            return list(named_children(value).values())
        value = self.evaluate(node, frame)
        if type(value) not in (list, tuple, range, *TENSORS) or len(value) > LONGEST:
            raise CannotRun
        return [self.keep(item) for item in value]

    def _dict(self, node: ast.Dict, frame: Frame) -> dict[Any, Any]:
        if any(key is None for key in node.keys):
            raise CannotRun
        return {self.evaluate(k, frame): self.evaluate(v, frame) for k, v in zip(node.keys, node.values)}

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> str:
        texts = []
        for part in node.values:
            value = part.value if isinstance(part, ast.Constant) else self.evaluate(getattr(part, "value", None), frame)
            if type(value) not in (str, int, float, bool):
                raise CannotRun
            texts.append(str(value))
        return "".join(texts)

    # calls

    def call(self, method: FunctionType, owner: Any, argument: Any) -> Any:
        """What a method of the user's returns."""
        return self._read(method, (owner, argument), {})

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        name, base = callee_word(node), getattr(node.func, "value", None)
        owner = value_of(base, frame) if base is not None else None
        if name == "backward":
            return self._backward(node, frame)
        if name == "manual_seed" and isinstance(base, ast.Call) and value_of(base.func, frame) is torch.Generator:
            return torch.Generator().manual_seed(self.evaluate(node.args[0], frame))
        if name == "set_grad_enabled":
            torch._C._set_grad_enabled(bool(self.evaluate(node.args[0], frame)))
            return None
        if issubclass(type(owner), torch.optim.Optimizer) or type(owner).__name__ == "GradScaler":
            return self._optimizer_call(name, node, frame)
        if isinstance(owner, nn.Module) and name in (*_OF_MODULES, *_OF_WEIGHTS):
            return self._module_call(owner, name, node, frame)
        function = value_of(node.func, frame)
        plain = next((f for f in _PLAIN if f is function), None)
        if plain is not None and not node.keywords:
            result = plain(*self._items(node.args, frame))
            return list(result) if plain in (zip, enumerate) else result
        if function is torch.autograd.grad:
            return function(*self._items(node.args, frame), **self._keywords(node, frame))
        if base is not None and type(owner) in (list, dict) and name in ("append", "extend", "clear", "values"):
            result = getattr(self.evaluate(base, frame), name)(*self._items(node.args, frame))
            return list(result) if name == "values" else result
        inner = unwrap(function)
        if type(inner) is FunctionType and inner is not function and kind_of(inner.__code__) == USER:
            own = (function.__self__,) if type(function) is MethodType else ()
            return self._read(inner, (*own, *self._items(node.args, frame)), self._keywords(node, frame))
        return super()._call(node, frame)

    def _module_call(self, owner: nn.Module, name: str, node: ast.Call, frame: Frame) -> Any:
        if name in _OF_MODULES:
            return [value for _, value in _OF_MODULES[name](owner)]
        flag = self.evaluate(node.args[0], frame) if node.args else True
        for _, weight in named_parameters(owner):
            if name == "zero_grad":
                self.copy(weight).grad = None
            elif name == "requires_grad_":
                self.copy(weight).requires_grad_(bool(flag))
        return owner

    def _keywords(self, node: ast.Call, frame: Frame) -> dict[str, Any]:
        return {k.arg: self.evaluate(k.value, frame) for k in node.keywords if k.arg}

    def _backward(self, node: ast.Call, frame: Frame) -> None:
        thing = self.evaluate(getattr(node.func, "value", None), frame)
        if type(thing) not in TENSORS:
            raise AttributeError(f"{type(thing).__name__!r} object has no attribute 'backward'")
        self.calls += 1
        torch.Tensor.backward(thing, *self._items(node.args, frame), **self._keywords(node, frame))

    def _optimizer_call(self, name: str, node: ast.Call, frame: Frame) -> Any:
        """`step` moves each copy that has a gradient a little, `zero_grad` clears them; a scaler scales by one."""
        if name == "scale":
            return self.evaluate(node.args[0], frame)
        for _, weight in list(self._copies.values()) if name in ("step", "zero_grad") else ():
            if type(weight) in TENSORS and weight.is_leaf and weight.requires_grad and weight.grad is not None:
                if name == "zero_grad":
                    weight.grad = None
                else:
                    with torch.no_grad():
                        weight.sub_(weight.grad, alpha=1e-3)
        return None

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> Any:
        target = self.evaluate(ast.parse(ast.unparse(node.target), mode="eval").body, frame)
        return self._arithmetic(IN_PLACE, node.op, target, self.evaluate(node.value, frame))

    # statements

    def read_body(self, function: Any, frame: Frame) -> None:
        edit = self.edit
        if edit is not None and self.tree is not None and frame.site.file == edit.file:
            first = _first_line(function)
            if first <= edit.line <= (function.end_lineno or 0):
                alike = [n for n in ast.walk(self.tree) if type(n) is type(function) and _first_line(n) == first]
                function = next((n for n in alike if getattr(n, "name", "") == function.name), function)
                self.covered |= edit.line < function.body[0].lineno
        modes = [GRAD_MODES[name] for d in function.decorator_list if (name := callee_word(d)) in GRAD_MODES]
        with torch.set_grad_enabled(modes[0] if modes else torch.is_grad_enabled()):
            super().read_body(function, frame)

    def reads(self, node: ast.stmt, frame: Frame) -> bool:
        edit = self.edit
        if edit is not None and frame.site.file == edit.file:
            self.covered |= edit.line <= node.lineno <= edit.line + edit.new.count("\n")
        if isinstance(node, (ast.For, ast.While)):
            self._loop(node, frame)
        elif isinstance(node, (ast.With, ast.Try)):
            self._block(node, frame)
        elif isinstance(node, (ast.Break, ast.Continue)):
            raise _LoopEnd(isinstance(node, ast.Break))
        elif isinstance(node, ast.If):
            self._branch(node, frame)
        elif isinstance(node, ast.Return):
            raise Returned(self.evaluate(node.value or ast.Constant(None), frame))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            self._assign(node, frame)
        elif isinstance(node, ast.Expr):
            self._effect(node, frame)
        return True

    def _effect(self, node: ast.Expr, frame: Frame) -> None:
        try:
            self.evaluate(node.value, frame)
        except CannotRun:
            if "backward" in ast.unparse(node):
                raise

    def _block(self, node: ast.With | ast.Try, frame: Frame) -> None:
        assert self.run is not None
        words = [callee_word(item.context_expr) for item in getattr(node, "items", ())]
        modes = [GRAD_MODES[word] for word in words if word in GRAD_MODES]
        body = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
        with torch.set_grad_enabled(modes[0] if modes else torch.is_grad_enabled()):
            read_block(self.run, body, frame, fresh=True)

    def _assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, frame: Frame) -> None:
        names: Any = frame.names if frame.site.function != "<module>" else frame.globals
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        try:
            value = self.evaluate(node if isinstance(node, ast.AugAssign) else node.value or ast.Constant(None), frame)
            for target in targets:
                self._store(target, value, frame, names)
        except CannotRun:
            if "backward" in ast.unparse(node):
                raise
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    known = names.get(part.id, UNKNOWN)
                    if self._own.get(id(known)) is known or _has_graph(known):
                        names[part.id] = UNKNOWN

    def _store(self, target: Any, value: Any, frame: Frame, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Attribute):
            thing = value_of(target.value, frame)
            if is_tensor(thing):
                setattr(self.copy(thing), target.attr, value)
            elif thing is UNKNOWN:
                raise CannotRun
            elif target.attr in (attributes(thing).get("_parameters") or ()) and type(value) is not nn.Parameter:
                raise TypeError(f"cannot assign a tensor as parameter {target.attr!r}")
            else:
                self._fields[id(thing), target.attr] = value
        elif isinstance(target, ast.Subscript):
            thing, key = (self.evaluate(part, frame) for part in (target.value, target.slice))
            if type(thing) not in (list, dict, *TENSORS):
                raise CannotRun
            thing[key] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and type(value) in (tuple, list):
            if len(value) != len(target.elts):
                raise ValueError(f"not {len(target.elts)} values to unpack, but {len(value)}")
            for part, item in zip(target.elts, value):
                self._store(part, item, frame, names)
        else:
            bind(target, value, names)

    def _branch(self, node: ast.If, frame: Frame) -> None:
        assert self.run is not None
        try:
            test = bool(self.evaluate(node.test, frame))
        except CannotRun:
            line, own = self.line, frame.site.file == self.frame.site.file
            inside = [own and b and b[0].lineno <= line <= (b[-1].end_lineno or 0) for b in (node.body, node.orelse)]
            if not any(inside):
                if "backward" in ast.unparse(node):
                    raise
                return
            test = bool(inside[0])
        read_block(self.run, node.body if test else node.orelse, frame, fresh=True)

    def _loop(self, node: ast.For | ast.While, frame: Frame) -> None:
        """All rounds of a loop; of the one around the failing line the first few."""
        assert self.run is not None
        names: Any = frame.names if frame.site.function != "<module>" else frame.globals
        line = self.line
        around = frame.site.file == self.frame.site.file and node.lineno <= line <= (node.end_lineno or 0)
        rounds: list[Any] = [None] * ROUNDS
        known = isinstance(node, ast.While)
        if isinstance(node, ast.For):
            try:
                rounds = self.items(node.iter, frame)
                rounds, known = rounds[:ROUNDS] if around else rounds, False
            except CannotRun:
                targets = [t.id for t in ast.walk(node.target) if isinstance(t, ast.Name)]
                if not around or any(names.get(t, UNKNOWN) is UNKNOWN for t in targets):
                    raise
                known = True
        elif not around:
            raise CannotRun
        for item in rounds:
            if isinstance(node, ast.For) and not known:
                bind(node.target, item, names)
            try:
                read_block(self.run, node.body, frame, fresh=True)
            except _LoopEnd as end:
                if end.args[0]:
                    break


def _has_graph(value: Any) -> bool:
    items = value if type(value) in (list, tuple) else [value]
    return any(is_tensor(item) and item.grad_fn is not None for item in items)


def callee_word(node: ast.expr) -> str:
    """The last word of a decorator or a context: "no_grad" of `torch.no_grad()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def _first_line(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _edited_tree(edit: Edit) -> ast.Module | None:
    lines = [line.rstrip("\n") for line in linecache.getlines(edit.file)]
    return parse("\n".join([*lines[: edit.line - 1], *edit.new.split("\n"), *lines[edit.end_line :], ""]))


def cured(context: ErrorContext, finding: Finding) -> Finding:
    """A finding about the graph with each fix as an edit that cures, where one can be had: its text in the place of the
    cause's statement, of the failing one, or beside it; the program is read before and after it, with gradients, over
    some rounds of its loop. The error must appear without the edit, and not with it."""
    until, fixes = time.monotonic() + 4 * TRAINING_SECONDS, list[Fix]()
    for fix in finding.fixes:
        wanted = not any(done.verified for done in fixes) and (fix.verified is not False or fix.edit is not None)
        fixes.append(_tried(context, finding, fix, until) if wanted else fix)
    return dataclasses.replace(finding, fixes=tuple(sorted(fixes, key=lambda fix: not fix.verified)))


def _tried(context: ErrorContext, finding: Finding, fix: Fix, until: float) -> Fix:
    for edit in [fix.edit] if fix.edit is not None else _placements(context, finding, fix.code):
        trial = retried(context, edit) if edit is not None and time.monotonic() < until else None
        if edit is not None and trial is not None and trial.worked:
            return Fix.of(fix.title, edit, True, {"the training then runs": trial.text})
        if trial is not None and fix.edit is not None:
            return dataclasses.replace(fix, verified=False, after={"it raised": trial.text, "runs": "1"})
    return fix


def _placements(context: ErrorContext, finding: Finding, code: str) -> Iterator[Edit | None]:
    """The places in which a fix may be meant to stand, the likeliest first."""
    where, frame = finding.where, context.users[0]
    failing = statement(frame)
    cause = statement_at(where.file, where.line) if where.file and where.line else None
    if failing is None:
        return
    yield from _with_gradients(where.file, cause, where.line)
    code = "\n".join(line.partition("   #")[0] for line in code.split("\n"))
    if "nn.functional." in code and "nn" not in {**frame.globals, **frame.names}:
        code = code.replace("nn.functional.", "torch.nn.functional.")
    tree = parse(code)
    if tree is None or not tree.body or "..." in code:
        return
    places = [(where.file, cause), (frame.site.file, failing)]
    around = _function_around(tree_of(frame.site.file) or ast.Module([], []), frame.site.line, frame)
    alike = [n for n in ast.walk(around) if isinstance(n, ast.stmt)] if around is not None else []
    yield from _reordered(frame, failing, alike, tree.body, code)
    for file, line in [*places, *((frame.site.file, line) for line in alike)]:
        if line is not None and file and _same_kind(line, tree.body[-1]):
            text = code
            if isinstance(line, ast.Return) and isinstance(tree.body[-1], ast.Expr):
                text = f"return {code}"
            rebuilt = _rebuilt_around(file, line, tree.body[-1])
            yield edit_of(file, {line: _indented(text, line), **rebuilt})
    yield from _as_loss(context, frame, failing, alike, tree.body, code)
    for file, line in places[::-1] if cause is not failing else places[1:]:
        if file and isinstance(line, (ast.Expr, ast.Assign, ast.AugAssign)):
            pad = "\n" + " " * line.col_offset
            yield edit_of(file, {line: "{raw}" + pad + _indented(code, line)})
            yield edit_of(file, {line: _indented(code, line) + pad + "{raw}"})


def _with_gradients(file: str | None, cause: ast.stmt | None, line: int | None) -> Iterator[Edit | None]:
    """The cause's statement out of its `no_grad`, its function without that decorator, `requires_grad = True`."""
    tree = tree_of(file) if file else None
    if tree is None or file is None or line is None:
        return
    lines = [text.rstrip("\n") for text in linecache.getlines(file)]
    inside = [n for n in ast.walk(tree) if isinstance(n, (ast.With, ast.FunctionDef))]
    inside = [n for n in inside if _first_line(n) <= line <= (n.end_lineno or 0)]
    for node in sorted(inside, key=_first_line, reverse=True):
        if isinstance(node, ast.With) and GRAD_MODES.get(callee_word(node.items[0].context_expr)) is False:
            depth, body = node.body[0].col_offset - node.col_offset, lines[node.body[0].lineno - 1 : node.end_lineno]
            new = "\n".join(text[depth:] if text[:depth].isspace() else text for text in body)
            old = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(node.items) == 1:
                yield Edit(file, node.lineno, node.end_lineno or 0, old, new, cell_name(file))
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if GRAD_MODES.get(callee_word(mark)) is False:
                old = "\n".join(lines[mark.lineno - 1 : node.lineno])
                new = "\n".join(lines[(mark.end_lineno or 0) : node.lineno])
                yield Edit(file, mark.lineno, node.lineno, old, new, cell_name(file))
    text = ast.unparse(cause) if cause is not None else ""
    if cause is not None and "requires_grad" in text:
        flags = [n for n in ast.walk(cause) if isinstance(n, ast.Constant) and n.value is False]
        yield edit_of(file, {flags[0]: "True"}) if len(flags) == 1 else None


def _reordered(
    frame: Frame, failing: ast.stmt, alike: list[ast.stmt], body: list[ast.stmt], code: str
) -> Iterator[Edit | None]:
    """The failing statement in a new text, without the earlier statements that are a part of it: a backward of two
    losses together, a step after all of them. And a sum of numbers, with a backward of what is added to it."""
    texts, names = {ast.unparse(n) for n in body}, {n.id for n in ast.walk(body[-1]) if isinstance(n, ast.Name)}
    parts: list[ast.stmt] = []
    for line in alike:
        base = getattr(getattr(getattr(line, "value", None), "func", None), "value", None)
        whole = isinstance(base, ast.Name) and base.id in names and callee_word(line.value) == "backward"  # type: ignore[attr-defined]
        if isinstance(line, ast.Expr) and line is not failing and (whole or ast.unparse(line) in texts):
            parts.append(line)
    if parts and isinstance(failing, ast.Expr) and isinstance(body[-1], ast.Expr):
        yield _tidy(edit_of(frame.site.file, {**dict.fromkeys(parts, ""), failing: _indented(code, failing)}))
    loss = getattr(getattr(getattr(failing, "value", None), "func", None), "value", None)
    for line in alike if isinstance(loss, ast.Name) else ():
        added = _added(line, loss.id)  # type: ignore[union-attr]
        if added is not None:
            if isinstance(added, ast.Name):
                yield edit_of(frame.site.file, {added: "{}.item()", loss: added.id})  # type: ignore[dict-item]
            else:
                name = next(n for n in ("loss", "term", "current") if n != loss.id and n not in frame.names)  # type: ignore[union-attr]
                first = f"{name} = {ast.unparse(added)}\n" + " " * line.col_offset + "{raw}"
                yield edit_of(frame.site.file, {line: first, added: f"{name}.item()", loss: name})  # type: ignore[dict-item]


def _added(line: ast.stmt, name: str) -> ast.expr | None:
    """The `x` of `total += x` and of `total = total + x`."""
    if isinstance(line, ast.AugAssign) and isinstance(line.op, ast.Add) and ast.unparse(line.target) == name:
        return line.value
    value = line.value if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and ast.unparse(value.left) == name:
        return value.right
    return None


def _tidy(edit: Edit | None) -> Edit | None:
    """Without the empty lines that deleted statements leave."""
    if edit is None:
        return None
    old = {line for line in edit.old.split("\n") if not line.strip()}
    new = [line for line in edit.new.split("\n") if line.strip() or line in old and not line]
    return dataclasses.replace(edit, new="\n".join(new))


def _rebuilt_around(file: str, line: ast.stmt, new: ast.stmt) -> dict[ast.AST, str]:
    """`torch.tensor(x)` becomes `x` where the new statement gives `x` its graph."""
    names = {ast.unparse(t) for t in new.targets} if isinstance(new, ast.Assign) else set()
    function = function_at(file, line.lineno)
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)] if function is not None else []
    return {
        call: ast.unparse(call.args[0])
        for call in calls
        if callee_word(call) in ("tensor", "as_tensor", "float") and call.args and ast.unparse(call.args[0]) in names
        if not line.lineno <= call.lineno <= (line.end_lineno or 0)
    }


def _as_loss(
    context: ErrorContext, frame: Frame, failing: ast.stmt, alike: list[ast.stmt], body: list[ast.stmt], code: str
) -> Iterator[Edit | None]:
    """An expression as the value of the loss; a `target` in it is the tensor of whole numbers that the user has."""
    loss = getattr(getattr(getattr(failing, "value", None), "func", None), "value", None)
    if len(body) > 1 or not isinstance(body[0], ast.Expr) or callee_word(body[0].value) == "backward":
        return
    texts = [code]
    if re.search(r"\btarget\b", code) and "target" not in frame.names:
        lines = [
            n for n in alike if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(loss or failing)
        ]
        made = {ast.unparse(t) for n in alike if isinstance(n, ast.Assign) for t in n.targets}
        used = {n.id for line in lines for n in ast.walk(line) if isinstance(n, ast.Name)} - made
        whole = [t.name for t in context.tensors() if t.dtype == "int64" and t.shape and t.name in used]
        texts = [re.sub(r"\btarget\b", name, code) for name in whole[:3]]
    lines = [
        n for n in alike if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(loss or failing)
    ]
    for text in texts:
        for line in lines[-1:]:
            yield edit_of(frame.site.file, {line.value: text})


def _same_kind(line: ast.stmt, new: ast.stmt) -> bool:
    """Whether a statement can be a new text of another: it gives the same names, or calls the same method."""
    if isinstance(line, ast.Return):
        return isinstance(new, (ast.Return, ast.Expr))
    if isinstance(line, ast.Assign) and isinstance(new, ast.Assign):
        return [ast.unparse(t) for t in line.targets] == [ast.unparse(t) for t in new.targets]
    if isinstance(line, ast.Expr) and isinstance(new, ast.Expr):
        calls = [n.value.func if isinstance(n.value, ast.Call) else n.value for n in (line, new)]
        return ast.unparse(calls[0]) == ast.unparse(calls[1]) or [callee_word(c) for c in calls] == ["append", "append"]
    return isinstance(line, ast.AugAssign) and ast.unparse(line.target) in ast.unparse(new)


def _indented(code: str, line: ast.stmt) -> str:
    return code.replace("\n", "\n" + " " * line.col_offset)


def retried(context: ErrorContext, edit: Edit) -> TrialResult | None:
    """The training with an edit: of the innermost function of the user's in which the error appears again without it,
    and which reads the edited lines. None where there is none."""
    swap = _layers_of(context, edit)
    for frame in context.users[:DEEPEST]:
        for start in _starts(frame):
            before = _training(frame, start, None)
            if before is None or before[0] != _start_of(context.message):
                continue
            after = _training(frame, start, edit, swap)
            if after is None or not (after[2] or swap) or not (after[0] or after[1]):
                continue
            if after[0]:
                return TrialResult(False, after[0])
            return TrialResult(True, f"{count(after[1], 'backward pass', 'backward passes')} without an error")
    return None


def _start_of(message: str) -> str:
    return message.partition("\n")[0][:60]


def _starts(frame: Frame) -> list[int]:
    """The lines from which a frame may be read again: the first of its function, then of each loop around its line."""
    tree, now = tree_of(frame.site.file), statement(frame)
    if tree is None or now is None:
        return []
    around, node, lines = parents(tree), now, [now.lineno]
    while not isinstance(node, (*SCOPES, ast.Module)):
        if isinstance(node, (ast.For, ast.While, ast.With, ast.Try, ast.If)):
            lines.append(node.lineno)
        node = around[id(node)]  # type: ignore[assignment]
    body = getattr(node, "body", None)
    return list(dict.fromkeys([*([body[0].lineno] if isinstance(body, list) else []), *reversed(lines)]))


def _layers_of(context: ErrorContext, edit: Edit) -> dict[int | str, nn.Module]:
    """The layers that an edited line makes without `inplace=True`, by the id of the present ones."""
    if "inplace=False" not in edit.new or "inplace=False" in edit.old:
        return {}
    names, layers = re.findall(r"self\.(\w+)", edit.old), dict[int | str, nn.Module]()
    for model in context.owners.models.values():
        for path, part in named_modules(model):
            made = type(part).__name__ in edit.old and (not names or set(names) & set(path.split(".")))
            if made and attributes(part).get("inplace") is True:
                layers[id(part)] = copy.copy(part)
                layers[id(part)].__dict__["inplace"] = False
    return layers


def _training(
    frame: Frame, start: int, edit: Edit | None, swap: Mapping[int | str, nn.Module] | None = None
) -> tuple[str, int, bool] | None:
    """(what it raised, how many backward passes it had, whether the edit was read) from a line of a frame's function
    on, past the failing line."""
    sandbox = TrainingSandbox(frame, edit, swap)
    run = Run(time.monotonic() + TRAINING_SECONDS, sandbox)
    sandbox.run = run
    original = tree_of(frame.site.file)
    old = _function_around(original, frame.site.line, frame) if original is not None else None
    new, moved = old, 0
    if edit is not None and sandbox.tree is not None and edit.file == frame.site.file and _holds(old, edit.line):
        moved = edit.new.count("\n") - edit.old.count("\n") if edit.line < frame.site.line else 0
        new = _function_around(sandbox.tree, frame.site.line + moved, frame)
    sandbox.line += moved
    body = [n for n in getattr(new, "body", []) if (n.end_lineno or 0) >= start]
    behind = [n for n in getattr(old, "body", []) if n.lineno > frame.site.line]
    body = body[: len(body) - len(behind) + (1 if behind else 0)]
    inner = dataclasses.replace(frame, names=dict(frame.names), globals=dict(frame.globals))
    raised = ""
    enabled = torch.is_grad_enabled()
    with quiet():
        try:
            with torch.set_grad_enabled(enabled):
                read_block(run, body, inner, fresh=True)
        except (Returned, _LoopEnd):
            pass
        except (CannotRun, End):
            return None
        except Exception as error:
            message = error.args[0] if error.args and type(error.args[0]) is str else type(error).__name__
            raised = _start_of(message)
        finally:
            torch._C._set_grad_enabled(enabled)
    return raised, sandbox.calls, sandbox.covered


def _holds(function: Any, line: int) -> bool:
    """Whether a line is one of the function's own."""
    inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function] if function else []
    at = _first_line(function) if isinstance(function, ast.FunctionDef) else 0
    end = getattr(function, "end_lineno", None) or 10**9
    return at <= line <= end and not any(_first_line(n) <= line <= (n.end_lineno or 0) for n in inner)


def _function_around(tree: ast.Module, line: int, frame: Frame) -> Any:
    if frame.site.function == "<module>":
        return tree
    if frame.site.function == "<lambda>":
        near = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno <= line <= (n.end_lineno or 0)]
        body: list[ast.stmt] = [ast.copy_location(ast.Expr(n.body), n.body) for n in near]
        return ast.Module(body, []) if len(near) == 1 else None
    around = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and n.lineno <= line and n.name == frame.site.function
    ]
    return max(around, key=lambda n: n.lineno, default=None)
