"""Where the path of a gradient ends: a result is followed back through the user's source to what it was computed from.

Each expression has a gradient, has none because what it comes from never had one (data), or lost it at a place: the
innermost op behind which there still is one. A live tensor is asked; an expression whose frame is gone is read. Calls
of the user's functions and modules are followed into, torch's own modules give a gradient when a parameter of theirs
wants one."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.tools.errors.autograd import calls as parts
from nbdebug.tools.errors.autograd.calls import (
    FRESH,
    INDICES,
    callee,
    cut_kind,
    disables_grad,
    enclosing_scopes,
    entries,
    forward_of,
    forward_of_new_module,
    loop_modules,
    no_grad_decorator,
    truth,
)
from nbdebug.tools.errors.autograd.facts import GraphCut
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    assignments,
    children,
    is_module,
    last_name,
    own_expressions,
    parameters,
    static_value,
    targets,
)
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.values import UNKNOWN

GRAD, PLAIN, OPEN = "has a gradient", "never had one", "not known"
Verdict = GraphCut | str


def joined(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what is computed together: one gradient is enough; else the surest place at which one was lost."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, GraphCut)), key=lambda c: not c.sure)
    if GRAD in found:
        return GRAD
    return cuts[0] if cuts else OPEN if OPEN in found else PLAIN


def either(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what may have run, one or the other: a lost gradient explains best why there is none."""
    found = list(verdicts)
    cuts = sorted((v for v in found if isinstance(v, GraphCut)), key=lambda c: not c.sure)
    return cuts[0] if cuts else next((v for v in (GRAD, OPEN) if v in found), PLAIN)


def has_gradient(lies: Any) -> bool:
    """Whether a value is a tensor that wants a gradient, or an exact container that holds one."""
    if is_tensor(lies):
        return bool(lies.requires_grad)
    if type(lies) in (list, tuple, dict):
        inside = list(lies.values() if type(lies) is dict else lies)[:100]
        return any(is_tensor(one) and one.requires_grad for one in inside)
    return False


DEEP = 40
STEPS = 2000


class Path:
    """One walk back. frozen: modules met none of whose parameters wants a gradient, by path."""

    def __init__(self, scene: ErrorContext) -> None:
        self.scene = scene
        self.frozen: dict[str, Any] = {}
        self.walked: list[tuple[int, int]] = []
        self.steps = 0
        self.known: dict[
            tuple[int, int], tuple[Verdict, FunctionSource]
        ] = {}  # the code with it, so that its id stays its own

    def of(self, node: Any, code: Any) -> Verdict:
        """What became of the gradient of an expression."""
        if not isinstance(node, ast.AST):
            return node if node in (GRAD, PLAIN, OPEN) or isinstance(node, GraphCut) else OPEN
        if (id(node), id(code)) in self.known:
            return self.known[id(node), id(code)][0]
        self.steps += 1
        key = (id(node), id(code.node))
        if self.steps > STEPS or len(self.walked) > DEEP or key in self.walked:
            return PLAIN if key in self.walked else OPEN
        self.walked.append(key)
        try:
            verdict = self._of(node, code)
            self.known[id(node), id(code)] = verdict, code
            return verdict
        finally:
            self.walked.pop()

    def _of(self, node: Any, code: FunctionSource) -> Verdict:
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
            branches = [node.body, node.orelse] if holds is None else [node.body if holds else node.orelse]
            return either(self.of(part, code) for part in branches)
        if isinstance(node, ast.Compare):
            return self.cut("comparison", parts.comparison_sign(node), node, [node.left, *node.comparators], code)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.cut("comparison", "not", node, [node.operand], code)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self.of(node.elt, code)
        if isinstance(node, ast.JoinedStr | ast.Lambda | ast.Constant):
            return PLAIN
        return joined(
            self.of(part, code) for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.Starred))
        )

    def name(self, node: ast.Name, code: FunctionSource) -> Verdict:
        """A variable: as it lies, else by what gave it its value."""
        lies = static_value(node, code)
        if has_gradient(lies):
            return GRAD
        if issubclass(type(lies), (types.ModuleType, type)) or is_module(lies):
            return PLAIN
        for around in parts.comprehensions(node, code):
            return self.of(around.iter, code)
        for scope in enclosing_scopes(code):
            before: int | tuple[int, int] = code.line if scope is code else 10**9
            if scope is code and id(node) in code.source.parents:
                before = node.lineno, node.col_offset
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

    def assigned(self, name: str, code: FunctionSource, before: int | tuple[int, int]) -> Verdict | None:
        """By the statements that give a variable its value, from the last back to the first that always runs."""
        found: list[Verdict] = []
        filled = [self.of(given, code) for given in parts.values_put_in(code, name)]
        for statement in reversed(assignments(code, name, before)):
            if parts.is_skipped(statement, code):
                continue
            verdict = self.statement(statement, name, code)
            found.append(verdict)
            if not any(isinstance(n, (ast.If, ast.Try, ast.ExceptHandler)) for n in code.source.around(statement)):
                break
        if not found:
            return None
        return joined([either(found), *filled])

    def statement(self, statement: Any, name: str, code: FunctionSource) -> Verdict:
        """What an assignment gives to one of its targets."""
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            return self.of(statement.iter, code)
        if isinstance(statement, ast.AugAssign):
            earlier = (
                self.assigned(name, code, (statement.lineno, statement.col_offset))
                if not parts.first_value(statement, name, code)
                else PLAIN
            )
            return self.within(statement, joined([self.of(statement.value, code), earlier or PLAIN]), code, name)
        given = getattr(statement, "value", None)
        if given is None or isinstance(statement, (ast.With, ast.AsyncWith)):
            return next(
                (self.of(n.value, code) for n in own_expressions(statement) if isinstance(n, ast.NamedExpr)), PLAIN
            )
        place = parts.target_index(statement, name)
        if place == 1 and isinstance(given, ast.Call) and last_name(given.func) in INDICES:
            verdict = self.cut(
                "whole numbers", last_name(given.func), given, parts.call_operands(given, code), code, name
            )
        else:
            verdict = self.of(given, code) if place is None else self.entry(given, place, code)
            if place is not None and isinstance(verdict, GraphCut) and verdict.where.line == given.lineno:
                verdict = dataclasses.replace(verdict, target=name)
        return self.within(statement, verdict, code, name)

    def within(self, statement: Any, verdict: Verdict, code: FunctionSource, name: str | None = None) -> Verdict:
        """The same with the blocks around a statement looked at: under no_grad nothing gets a gradient."""
        if isinstance(verdict, GraphCut) or verdict == PLAIN:
            return verdict
        return parts.no_grad_block(statement, code, name) or verdict

    def attribute(self, node: ast.Attribute, code: FunctionSource) -> Verdict:
        lies = static_value(node, code)
        if has_gradient(lies) and node.attr != "data":
            return GRAD
        if node.attr == "data":
            return self.cut("detached", ".data", node, [node.value], code)
        if node.attr == "grad":
            return self.cut("gradient", ".grad", node, [node.value], code)
        if node.attr in ("shape", "dtype", "device", "ndim"):
            return PLAIN
        if node.attr == "indices":
            return self.cut("whole numbers", ".indices", node, [node.value], code)
        if lies is not UNKNOWN and not (is_tensor(lies) and lies.grad_fn is None and not lies.requires_grad):
            return PLAIN
        for statement in code.statements():  # an attribute that this function has set
            if (
                statement.lineno < code.line
                and any(ast.unparse(t) == ast.unparse(node) for t in targets(statement) if isinstance(t, ast.Attribute))
                and getattr(statement, "value", None) is not None
            ):
                return self.within(statement, self.of(statement.value, code), code, ast.unparse(node))
        return self.own(lies, node) if lies is not UNKNOWN else self.of(node.value, code)

    def item(self, node: ast.Subscript, code: FunctionSource) -> Verdict:
        lies = static_value(node, code)
        if has_gradient(lies):
            return GRAD
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if index == 1 and isinstance(node.value, ast.Call) and last_name(node.value.func) in INDICES:
            return self.cut(
                "whole numbers", last_name(node.value.func), node, parts.call_operands(node.value, code), code
            )
        return self.of(node.value, code) if index is None else self.entry(node.value, index, code)

    def entry(self, node: Any, key: Any, code: FunctionSource) -> Verdict:
        """One entry of a tuple, a list or a dict, where the source shows it; else the whole."""
        found = list(entries(node, key, code))
        verdict = either(self.of(part, inner) for part, inner in found)
        whole = OPEN if found and isinstance(verdict, GraphCut) else self.of(node, code)
        return whole if not found or isinstance(whole, GraphCut) and whole.kind == "block" else verdict

    def call(self, node: ast.Call, code: FunctionSource) -> Verdict:
        """A call: into the user's function or module; of a cutting op; else as its arguments have it."""
        name, called = last_name(node.func), static_value(node.func, code)
        if isinstance(node.func, ast.Name) and called is UNKNOWN:
            modules = loop_modules(node.func.id, code)
            if modules:
                return self.through(modules, joined(self.of(a, code) for a in parts.call_arguments(node)), code)
        if is_module(called):
            return self.module(called, node, code)
        inner = callee(node, code, called) or forward_of_new_module(node, code)
        if inner is not None:
            return self.function(inner)
        off = no_grad_decorator(called)
        if off is not None:
            text = ast.unparse(node.func)
            return GraphCut(
                "block",
                off,
                f"{text} (decorated with {off})",
                None,
                None,
                code.name,
                code.where(node),
                written=parts.short(parts.statement_of(node, code) or node),
            )
        if name in FRESH:
            return PLAIN
        if name in ("checkpoint", "checkpoint_sequential"):
            return self.checkpointed(node, code)
        operands = parts.call_operands(node, code)
        kind = cut_kind(node, parts.is_function(node, code))
        if kind is not None:
            return self.cut(kind, name, node, operands, code)
        if called is not UNKNOWN and parts.top_package(called) == "numpy":
            return self.cut("number", ast.unparse(node.func), node, operands, code)
        unknown = [OPEN] if isinstance(node.func, ast.Call) else []  # `nn.Linear(4, 3)(x)`: what is called is new
        return joined([*unknown, *(self.of(part, code) for part in operands)])

    def checkpointed(self, node: ast.Call, code: FunctionSource) -> Verdict:
        """torch's checkpoint in its old form passes a gradient only where one of its inputs wants one."""
        inputs = [a for a in node.args[1:] if not isinstance(a, ast.Starred)]
        verdict = joined(self.of(a, code) for a in inputs)
        again = next((k.value for k in node.keywords if k.arg == "use_reentrant"), None)
        if verdict != PLAIN or isinstance(again, ast.Constant) and again.value is False:
            return GRAD if verdict == PLAIN else verdict
        inside = static_value(node.args[0], code) if node.args else UNKNOWN
        if is_module(inside) and not _wants(inside):
            return PLAIN
        statement = parts.statement_of(node, code)
        to = [ast.unparse(t) for t in targets(statement)] if isinstance(statement, ast.Assign) else []
        return GraphCut(
            "checkpoint",
            "checkpoint",
            parts.short(node),
            ", ".join(map(ast.unparse, inputs)) or None,
            ", ".join(to) or None,
            code.name,
            code.where(node),
            written=parts.short(statement or node),
        )

    def function(self, inner: FunctionSource) -> Verdict:
        """A function of the user's: what it gives back, under its decorators."""
        for decorator in getattr(inner.node, "decorator_list", ()):
            if disables_grad(decorator, inner):
                verdict = either(self.of(given, inner) for given, _ in inner.returned())
                return (
                    verdict
                    if verdict == PLAIN
                    else GraphCut(
                        "block",
                        last_name(decorator.func if isinstance(decorator, ast.Call) else decorator),
                        "@" + ast.unparse(decorator),
                        None,
                        None,
                        inner.name,
                        inner.where(decorator),
                        written=f"def {inner.name}(...):",
                    )
                )
        return (
            either(
                self.within(statement, self.of(given, inner), inner)
                for given, statement in inner.returned()
                if not parts.is_skipped(statement, inner)
            )
            if inner.returned()
            else PLAIN
        )

    def module(self, module: Any, node: ast.Call, code: FunctionSource) -> Verdict:
        inner = callee(node, code, module)
        if inner is not None:
            verdict = self.function(inner)
            return (
                verdict
                if isinstance(verdict, GraphCut) or verdict == GRAD
                else joined([verdict, OPEN if _wants(module) else PLAIN])
            )
        return self.through([module], joined(self.of(a, code) for a in parts.call_arguments(node)), code)

    def through(self, modules: Iterable[Any], verdict: Verdict, code: FunctionSource) -> Verdict:
        """What a value becomes that goes through modules of torch's or a library's, one after the other."""
        for module in modules:
            inner = forward_of(module)
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

    def cut(
        self, kind: str, op: str, node: Any, operands: list[Any], code: FunctionSource, name: str | None = None
    ) -> Verdict:
        """An op that ends the path, unless nothing that it is given had a gradient, or lost it before."""
        given = [(self.of(part, code), part) for part in operands]
        verdict = joined(v for v, _ in given)
        if isinstance(verdict, GraphCut) or verdict == PLAIN:
            return verdict
        source = next((ast.unparse(part) for v, part in given if v == verdict), None)
        statement = parts.statement_of(node, code)
        to = [ast.unparse(t) for t in targets(statement)] if isinstance(statement, ast.Assign | ast.AugAssign) else []
        return GraphCut(
            kind,
            op,
            parts.short(node),
            source,
            name or ", ".join(to) or None,
            code.name,
            code.where(node),
            verdict == GRAD,
            written=parts.short(statement if statement is not None else node),
        )


def _wants(module: Any) -> bool:
    return any(p.requires_grad for _, p in parameters(module))
