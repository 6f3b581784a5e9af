"""Where the path of a gradient ends: a result is followed back through the user's source to what it was computed from.

Each expression has a gradient, has none because what it comes from never had one (data), or lost it at a place: the
innermost op behind which there still is one. A live tensor is asked; an expression whose frame is gone is read. Calls of
the user's functions and modules are followed into, torch's own modules give a gradient when a parameter of theirs wants
one.
"""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.chapters.error.facts_autograd import Cut
from nbdebug.chapters.error.looks.calls import entered, forward, looped, outward
from nbdebug.chapters.error.looks.cutting import FRESH, INDICES, closing, kind_of_call, truth
from nbdebug.chapters.error.looks.source import (SCOPES, Code, assignments, calls, children, heads, is_module, last,
                                                 loops, parameters, targets, value)
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import Scene, is_tensor

GRAD, PLAIN, OPEN = "has a gradient", "never had one", "not known"
Verdict = Cut | str
DEEP = 40
STEPS = 3000


class Path:
    """One walk back. frozen: modules met none of whose parameters wants a gradient, by path."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.frozen: dict[str, Any] = {}
        self.walked: list[tuple[int, int]] = []
        self.steps = 0

    def of(self, node: Any, code: Any) -> Verdict:
        """What became of the gradient of an expression."""
        if not isinstance(node, ast.AST):
            return node if node in (GRAD, PLAIN, OPEN) or isinstance(node, Cut) else OPEN
        self.steps += 1
        key = (id(node), id(code.node))
        if self.steps > STEPS or len(self.walked) > DEEP or key in self.walked:
            return PLAIN if key in self.walked else OPEN
        self.walked.append(key)
        try:
            return self._of(node, code)
        finally:
            self.walked.pop()

    def _of(self, node: Any, code: Code) -> Verdict:
        if isinstance(node, ast.Name):
            return self.name(node, code)
        if isinstance(node, ast.Call):
            return self.call(node, code)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, code)
        if isinstance(node, ast.Subscript):
            return self.item(node, code)
        if isinstance(node, ast.IfExp):
            holds = truth(node.test, code)
            parts = [node.body, node.orelse] if holds is None else [node.body if holds else node.orelse]
            return either(self.of(part, code) for part in parts)
        if isinstance(node, ast.Compare):
            return self.cut("comparison", _sign(node), node, [node.left, *node.comparators], code)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.cut("comparison", "not", node, [node.operand], code)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self.of(node.elt, code)
        if isinstance(node, ast.JoinedStr | ast.Lambda | ast.Constant):
            return PLAIN
        return joined(self.of(part, code) for part in ast.iter_child_nodes(node) if isinstance(
            part, (ast.expr, ast.Starred)))

    def name(self, node: ast.Name, code: Code) -> Verdict:
        """A variable: as it lies, else by what gave it its value."""
        lies = value(node, code)
        if has_gradient(lies):
            return GRAD
        if isinstance(lies, (types.ModuleType, type)) or is_module(lies):
            return PLAIN
        for around in _comprehensions(node, code):
            return self.of(around.iter, code)
        for scope in outward(code):
            before = code.line if scope is code else 10**9
            if scope is code and id(node) in code.source.parents:
                before = node.lineno
            found = self.assigned(node.id, scope, before)
            if found is not None:
                return found
            if node.id in scope.given:
                return self.of(*scope.given[node.id])
        return self.own(lies, node)

    def own(self, lies: Any, node: Any) -> Verdict:
        """A value that no statement has given: a closure's, a global, an attribute."""
        if is_tensor(lies):
            if issubclass(type(lies), torch.nn.Parameter):
                self.frozen.setdefault(ast.unparse(node), lies)
            return PLAIN
        return OPEN if lies is UNKNOWN else PLAIN

    def assigned(self, name: str, code: Code, before: int) -> Verdict | None:
        """By the statements that give a variable its value, from the last back to the first that always runs."""
        found: list[Verdict] = []
        filled = [self.of(given, code) for given in _put_in(code, name)]
        for statement in reversed(assignments(code, name, before)):
            if skipped(statement, code):
                continue
            verdict = self.statement(statement, name, code)
            found.append(verdict)
            if not any(isinstance(n, (ast.If, ast.Try, ast.ExceptHandler)) for n in code.source.around(statement)):
                break
        if not found:
            return None
        return joined([either(found), *filled])

    def statement(self, statement: Any, name: str, code: Code) -> Verdict:
        """What an assignment gives to one of its targets."""
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            return self.of(statement.iter, code)
        if isinstance(statement, ast.AugAssign):
            earlier = self.assigned(name, code, statement.lineno) if not _first(
                statement, name, code) else PLAIN
            return self.within(statement, joined([self.of(statement.value, code), earlier or PLAIN]), code, name)
        given = getattr(statement, "value", None)
        if given is None or isinstance(statement, (ast.With, ast.AsyncWith)):
            return next((self.of(n.value, code) for n in heads(statement) if isinstance(n, ast.NamedExpr)), PLAIN)
        place = _place(statement, name)
        if place == 1 and isinstance(given, ast.Call) and last(given.func) in INDICES:
            verdict = self.cut("whole numbers", last(given.func), given, _operands(given, code), code)
        elif place is not None and isinstance(given, (ast.Tuple, ast.List)) and place < len(given.elts):
            verdict = self.of(given.elts[place], code)
        else:
            verdict = self.of(given, code)
        return self.within(statement, verdict, code, name)

    def within(self, statement: Any, verdict: Verdict, code: Code, name: str | None = None) -> Verdict:
        """The same with the blocks around a statement looked at: under no_grad nothing gets a gradient."""
        if isinstance(verdict, Cut) or verdict == PLAIN:
            return verdict
        return block(statement, code, name) or verdict

    def attribute(self, node: ast.Attribute, code: Code) -> Verdict:
        lies = value(node, code)
        if has_gradient(lies) and node.attr != "data":
            return GRAD
        if node.attr == "data":
            return self.cut("detached", ".data", node, [node.value], code)
        if node.attr in ("shape", "dtype", "device", "grad", "ndim"):
            return PLAIN
        if node.attr == "indices":
            return self.cut("whole numbers", ".indices", node, [node.value], code)
        if lies is not UNKNOWN and not (is_tensor(lies) and lies.grad_fn is None and not lies.requires_grad):
            return PLAIN
        for statement in code.statements():  # an attribute that this function has set
            if statement.lineno < code.line and any(ast.unparse(t) == ast.unparse(node) for t in targets(
                    statement) if isinstance(t, ast.Attribute)) and getattr(statement, "value", None) is not None:
                return self.within(statement, self.of(statement.value, code), code, ast.unparse(node))
        return self.own(lies, node) if lies is not UNKNOWN else self.of(node.value, code)

    def item(self, node: ast.Subscript, code: Code) -> Verdict:
        lies = value(node, code)
        if has_gradient(lies):
            return GRAD
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if index == 1 and isinstance(node.value, ast.Call) and last(node.value.func) in INDICES:
            return self.cut("whole numbers", last(node.value.func), node, _operands(node.value, code), code)
        if isinstance(node.value, (ast.Tuple, ast.List)) and type(index) is int and index < len(node.value.elts):
            return self.of(node.value.elts[index], code)
        return self.of(node.value, code)

    def call(self, node: ast.Call, code: Code) -> Verdict:
        """A call: into the user's function or module; of a cutting op; else as its arguments have it."""
        name, called = last(node.func), value(node.func, code)
        if isinstance(node.func, ast.Name) and called is UNKNOWN:
            modules = looped(node.func.id, code)
            if modules:
                return self.through(modules, joined(self.of(a, code) for a in _given(node)), code)
        if is_module(called):
            return self.module(called, node, code)
        inner = entered(node, code, called)
        if inner is not None:
            return self.function(inner)
        if name in FRESH:
            return PLAIN
        operands = _operands(node, code)
        kind = kind_of_call(node, _is_function(node, code))
        if kind is not None:
            return self.cut(kind, name, node, operands, code)
        if called is not UNKNOWN and _package(called) == "numpy":
            return self.cut("number", ast.unparse(node.func), node, operands, code)
        return joined(self.of(part, code) for part in operands)

    def function(self, inner: Code) -> Verdict:
        """A function of the user's: what it gives back, under its decorators."""
        for decorator in getattr(inner.node, "decorator_list", ()):
            if closing(decorator, inner):
                verdict = either(self.of(given, inner) for given, _ in inner.returned())
                return verdict if verdict == PLAIN else Cut(
                    "block", last(decorator.func if isinstance(decorator, ast.Call) else decorator),
                    "@" + ast.unparse(decorator), None, None, inner.name, inner.where(decorator))
        return either(self.within(statement, self.of(given, inner), inner) for given, statement in inner.returned()
                      if not skipped(statement, inner)) if inner.returned() else PLAIN

    def module(self, module: Any, node: ast.Call, code: Code) -> Verdict:
        inner = entered(node, code, module)
        if inner is not None:
            verdict = self.function(inner)
            return verdict if isinstance(verdict, Cut) or verdict == GRAD else joined(
                [verdict, OPEN if _wants(module) else PLAIN])
        return self.through([module], joined(self.of(a, code) for a in _given(node)), code)

    def through(self, modules: Iterable[Any], verdict: Verdict, code: Code) -> Verdict:
        """What a value becomes that goes through modules of torch's or a library's, one after the other."""
        for module in modules:
            inner = forward(module)
            if inner is not None:
                args = inner.node.args
                wanted = [a.arg for a in (*args.posonlyargs, *args.args)][1:2]
                verdict = self.function(dataclasses.replace(inner, given=dict.fromkeys(wanted, (verdict, None))))
            elif type(module) is torch.nn.Sequential or "_orig_mod" in children(module):
                verdict = self.through(children(module).values(), verdict, code)
            elif _wants(module):
                verdict = GRAD
            elif next(parameters(module), None) is not None:
                self.frozen.setdefault(self.scene.owners.paths.get(id(module)) or type(module).__name__, module)
        return verdict

    def cut(self, kind: str, op: str, node: Any, operands: list[Any], code: Code) -> Verdict:
        """An op that ends the path, unless nothing that it is given had a gradient, or lost it before."""
        given = [(self.of(part, code), part) for part in operands]
        verdict = joined(v for v, _ in given)
        if isinstance(verdict, Cut) or verdict == PLAIN:
            return verdict
        source = next((ast.unparse(part) for v, part in given if v == verdict), None)
        statement = _statement(node, code)
        to = [ast.unparse(t) for t in targets(statement)] if isinstance(statement, ast.Assign | ast.AugAssign) else []
        return Cut(kind, op, _short(node), source, ", ".join(to) or None, code.name, code.where(node), verdict == GRAD)


def block(node: Any, code: Code, name: str | None = None) -> Cut | None:
    """The no_grad around a statement, if one is."""
    for around in code.source.around(node):
        if isinstance(around, (ast.With, ast.AsyncWith)):
            for item in around.items:
                off = closing(item.context_expr, code)
                if off is not None:
                    call = item.context_expr
                    return Cut("block", last(call.func if isinstance(call, ast.Call) else call), f"with {_short(call)}:",
                               None, name, code.name, code.where(around)) if off else None
        if around is code.node:
            break
    return None


def joined(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what is computed together: one gradient is enough; else the surest place at which one was lost."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, Cut)), key=lambda c: not c.sure)
    if GRAD in found:
        return GRAD
    return cuts[0] if cuts else OPEN if OPEN in found else PLAIN


def either(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what may have run, one or the other: a lost gradient explains best why there is none."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, Cut)), key=lambda c: not c.sure)
    return cuts[0] if cuts else next((v for v in (GRAD, OPEN) if v in found), PLAIN)


def has_gradient(lies: Any) -> bool:
    """Whether a value is a tensor that wants a gradient, or an exact container that holds one."""
    if is_tensor(lies):
        return bool(lies.requires_grad)
    if type(lies) in (list, tuple, dict):
        inside = list(lies.values() if type(lies) is dict else lies)[:100]
        return any(is_tensor(one) and one.requires_grad for one in inside)
    return False


def _wants(module: Any) -> bool:
    return any(p.requires_grad for _, p in parameters(module))


def _given(node: ast.Call) -> list[Any]:
    return [*node.args, *(k.value for k in node.keywords)]


def _is_function(node: ast.Call, code: Code) -> bool:
    """`torch.argmax(x)` and `float(x)`, not `x.argmax()`."""
    if isinstance(node.func, ast.Name):
        return True
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(value(base, code), (types.ModuleType, type)) if base is not None else False


def _operands(node: ast.Call, code: Code) -> list[Any]:
    base = [node.func.value] if isinstance(node.func, ast.Attribute) and not _is_function(node, code) else []
    return base + _given(node)


def _package(called: Any) -> str:
    kind = called if isinstance(called, type) else type(called)
    plain = kind in (types.BuiltinFunctionType, types.FunctionType)
    return str(called.__module__ if plain else type.__getattribute__(kind, "__module__")).partition(".")[0]


def _comprehensions(node: ast.Name, code: Code) -> list[Any]:
    """The `for` of a comprehension around a name that gives it its value."""
    return [g for n in code.source.around(node) for g in getattr(n, "generators", ()) if any(
        isinstance(t, ast.Name) and t.id == node.id for t in ast.walk(g.target))]


def _put_in(code: Code, name: str) -> list[Any]:
    """What is put into a container of this name: `name.append(x)`, `name[k] = x`."""
    found: list[Any] = []
    for statement in code.statements():
        if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Subscript) and isinstance(
                t.value, ast.Name) and t.value.id == name for t in statement.targets):
            found.append(statement.value)
        elif isinstance(statement, ast.Expr):
            found += [a for call in calls(statement) if last(call.func) in ("append", "extend", "insert", "add")
                      and isinstance(call.func, ast.Attribute) and last(call.func.value) == name
                      and isinstance(call.func.value, ast.Name) for a in call.args[-1:]]
    return found


def skipped(statement: Any, code: Code) -> bool:
    """Whether a statement stands in a branch that plain values say was not taken."""
    inner = statement
    for around in code.source.around(statement):
        if isinstance(around, ast.If) and not code_live_changed(around.test, code):
            holds = truth(around.test, code)
            if holds is not None and (inner in around.body) is not holds:
                return True
        inner = around
    return False


def code_live_changed(test: Any, code: Code) -> bool:
    """Whether a name in a condition is given its value in a loop: what it is now is not what it was."""
    return any(loops(code, s) for n in ast.walk(test) if isinstance(n, ast.Name)
               for s in assignments(code, n.id, code.line) if not isinstance(s, SCOPES))


def _first(statement: Any, name: str, code: Code) -> bool:
    return not any(s.lineno < statement.lineno for s in assignments(code, name, statement.lineno))


def _place(statement: Any, name: str) -> int | None:
    """Which of several targets a variable is: `_, best = …` → 1 for `best`."""
    for whole in getattr(statement, "targets", ()):
        if isinstance(whole, (ast.Tuple, ast.List)):
            return next((i for i, t in enumerate(whole.elts) if isinstance(t, ast.Name) and t.id == name), None)
    return None


def _statement(node: Any, code: Code) -> Any:
    if isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)


def _sign(node: ast.Compare) -> str:
    signs = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
    return signs.get(type(node.ops[0]), "in")


def _short(node: Any) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else text[:77] + "..."
