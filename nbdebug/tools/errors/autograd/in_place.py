"""A value that the backward needs was changed in place: by which statement of the user's.

The node that misses its value is still in the graph, and so is what was computed with the changed one. Every in-place
statement of the functions that took part is weighed: whether it changes a variable that was made by the very op,
whether the graph has a node of its kind next to it, and whether it stands in the forward of the module to which the
nearest parameters belong."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.autograd.backward_twice import within
from nbdebug.tools.errors.autograd.calls import (
    callee,
    enclosing_scopes,
    forward_of_class,
    is_skipped,
    reachable_functions,
    traceback_functions,
)
from nbdebug.tools.errors.autograd.changes import ChangeSite, changes_in_statement, in_place_changes, in_place_modules
from nbdebug.tools.errors.autograd.facts import InPlaceChange, InPlaceFacts
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    assignments,
    children,
    end_position,
    failing_node,
    is_module,
    last_name,
    loops_around,
    modules,
    own_expressions,
    package,
    parameters,
    static_value,
)
from nbdebug.tools.errors.autograd.graph import (
    PART_VIEWS,
    VIEWS,
    ModifiedValue,
    asked,
    backward_roots,
    modified_values,
    nearest_leaves,
    node_distances,
    op_of,
)
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.values import UNKNOWN, operands


def holds(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer changes a parameter."""
    if not issubclass(type(optimizer), torch.optim.Optimizer):
        return False
    lies = attributes(optimizer)
    plain = type(optimizer) is torch.optim.SGD  # which keeps no state without momentum
    if not lies.get("state") and not plain:  # it has not made a step yet
        return False
    groups = lies.get("param_groups") or []
    return any(p is parameter for group in groups for p in group.get("params", ()))


def optimizer_of(scene: ErrorContext, parameter: Any) -> str | None:
    """The name of the optimizer that holds a parameter."""
    return next((name for name, one in scene.owners.optimizers.items() if holds(one, parameter)), None)


def stepping(scene: ErrorContext, parameter: Any, earlier: bool) -> tuple[InPlaceChange | None, tuple[str, ...]]:
    """(the `step()` that changed the parameter, all the steps there). earlier: only one above the failing line."""
    for code in traceback_functions(scene):
        node = failing_node(code)
        around = loops_around(code, node) if node is not None else []
        body = within(around[-1]) if around else list(code.statements())
        found = [
            (s, call, where)
            for s in body
            for call, where in _steps(s, code)
            if holds(static_value(call.func.value, where), parameter)
        ]
        before = [entry for entry in found if entry[0].lineno < code.line]
        for _, call, where in (before or [] if earlier else found)[-1:]:
            target = ast.unparse(call.func.value)
            change = InPlaceChange(
                ast.unparse(call), target, "step", "step", None, "", None, where.name, where.where(call)
            )
            return change, tuple(ast.unparse(c) for _, c, _ in found)
    return None, ()


def _steps(statement: Any, code: FunctionSource, depth: int = 2) -> list[tuple[Any, FunctionSource]]:
    """The calls of `.step()` in a statement and in the functions that it calls."""
    found: list[tuple[Any, FunctionSource]] = []
    for node in own_expressions(statement):
        if isinstance(node, ast.Call) and last_name(node.func) == "step" and isinstance(node.func, ast.Attribute):
            found.append((node, code))
        elif isinstance(node, ast.Call) and depth and (inner := callee(node, code)) is not None:
            found += [entry for s in inner.statements() for entry in _steps(s, inner, depth - 1)]
    return found


LARGEST = 100_000
"""Elements of what is tried on; a larger tensor is stood for by one of this many."""
OWN_RESULT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Exp": torch.exp,
    "Sqrt": torch.sqrt,
    "Softmax": lambda x: torch.softmax(x, -1),
    "LogSoftmax": lambda x: torch.log_softmax(x, -1),
    "Reciprocal": torch.reciprocal,
    "Rsqrt": torch.rsqrt,
    "Expm1": torch.expm1,
}
"""Ops whose derivative is computed from their own result, by the names of their nodes."""
CHANGES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "Add": (lambda y, r: y.add_(r), lambda y, r: y + r),
    "Sub": (lambda y, r: y.sub_(r), lambda y, r: y - r),
    "Mul": (lambda y, r: y.mul_(r), lambda y, r: y * r),
    "Div": (lambda y, r: y.div_(r), lambda y, r: y / r),
    "CopySlices": (lambda y, r: y.copy_(r), lambda y, r: y.clone().copy_(r)),
}
"""The change in place, and the same into a new tensor, by the names of their nodes."""


def tried(change: InPlaceChange | None, saved_by: str, shape: tuple[int, ...] | None) -> bool | None:
    """Whether backward fails with the change and passes without; None where that can't be tried with torch alone."""
    if change is None or saved_by not in OWN_RESULT or change.op not in CHANGES or not shape or change.how == "step":
        return None
    size = 1
    for n in shape:
        size *= n
    source = torch.Generator().manual_seed(0)  # the user's own generator stays as it is
    start = torch.rand(shape if size <= LARGEST else (LARGEST,), generator=source) + 0.5
    added = torch.rand(start.shape, generator=source) + 0.5
    op, (in_place, anew) = OWN_RESULT[saved_by], CHANGES[change.op]
    return not _passes(start, added, op, in_place) and _passes(start, added, op, anew)


def _passes(
    start: torch.Tensor,
    added: torch.Tensor,
    op: Callable[[torch.Tensor], torch.Tensor],
    then: Callable[[torch.Tensor, torch.Tensor], object],
) -> bool:
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = start.clone().requires_grad_()
        y = op(x)
        after = then(y, added)
        try:
            (after if isinstance(after, torch.Tensor) else y).sum().backward()
        except RuntimeError:
            return False
    return x.grad is not None


ENOUGH = 3
"""Points from which a statement is named: one sign that it is this value, not only that it is in place."""
SPELT = {
    "linear": "addmm",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "conv3d": "convolution",
    "batchnorm1d": "nativebatchnorm",
    "batchnorm2d": "nativebatchnorm",
    "layernorm": "nativelayernorm",
    "matmul": "mm",
    "softmax": "softmax",
    "logsoftmax": "logsoftmax",
    "embedding": "embedding",
    "silu": "silu",
    "maxpool2d": "maxpool2dwithindices",
}
"""Modules and functions whose node is called otherwise, in small letters without underscores."""
ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "mm"}


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What a statement is weighed against. missing: the node without its value; graph: all nodes; shape, version: of
    the tensor; module: nearest to the node; leaf: the parameter or input that was changed, if it is one."""

    missing: ModifiedValue | None
    graph: dict[Any, int]
    shape: tuple[int, ...] | None
    version: int | None
    module: str | None
    leaf: Any

    @property
    def made_by(self) -> Any:
        return self.missing.made_by if self.missing is not None else None

    def users(self) -> set[str]:
        """The ops of the nodes that took the value, or that of which it is a view."""
        anchors, at = [], self.made_by
        while at is not None:
            anchors.append(at)
            at = at.next_functions[0][0] if op_of(at) in VIEWS | PART_VIEWS and at.next_functions else None
        return {
            op_of(node).lower()
            for node in self.graph
            if any(before is anchor for before in input_nodes(node) for anchor in anchors)
        }


def weigh(
    candidates: list[tuple[ChangeSite | None, InPlaceChange, Any]], against: Weighed, scene: ErrorContext
) -> list[InPlaceChange]:
    """The changes that would explain it, the likeliest first; one of a class that several modules share is named by the
    module nearest to the node."""
    users = against.users()
    scored: dict[tuple[Any, ...], tuple[float, InPlaceChange]] = {}
    for found, change, module in candidates:
        points = _points(found, change, module, against, users)
        if points is None or points < ENOUGH:
            continue
        late = found.statement.lineno / 1e6 if found is not None and found.code.live else 0
        near = points + _nearness(change.module, against.module) + late
        key = (change.where.file, change.where.line, change.target if found else change.module)
        if key not in scored or near > scored[key][0]:
            scored[key] = (near, change)
    return [change for _, change in sorted(scored.values(), key=lambda entry: -entry[0])]


def _points(
    found: ChangeSite | None, change: InPlaceChange, module: Any, against: Weighed, users: set[str]
) -> float | None:
    made = op_of(against.made_by).lower() if against.made_by is not None else ""
    points = 0.0
    if users & {change.op.lower(), change.op.lower() + "_"} or change.how == "item" and "copyslices" in users:
        points += 3
    if found is None:
        return points
    later = (
        found.code.live and found.statement.lineno > found.code.line and not loops_around(found.code, found.statement)
    )
    if later or is_skipped(found.statement, found.code):
        return None
    lies = static_value(found.node, found.code)
    if against.leaf is not None:
        aside = change.how == "block" and issubclass(type(lies), torch.nn.Parameter)  # a loop over the parameters
        return points + 6 if lies is against.leaf else 4 if aside else 0
    if is_tensor(lies):
        if found.code.live and not _bound_again(found) and not _fits(lies, against):
            return None
        if against.made_by is None or against.version == lies._version:
            points += 3 if against.made_by is None else 2
    elif against.made_by is None and not users:
        points += 1
    if made and _ends_in(found.node, found.code, place(found.statement)) == made:
        points += 4
    return points


def _bound_again(found: ChangeSite) -> bool:
    """Whether the variable got another value after the change: what lies in it now is not what was changed."""
    return isinstance(found.node, ast.Name) and any(
        s.lineno > found.statement.lineno and not isinstance(s, ast.AugAssign)
        for s in assignments(found.code, found.node.id, found.code.line)
    )


def _fits(lies: Any, against: Weighed) -> bool:
    """Whether a live tensor may be the one that torch speaks of."""
    return lies._version > 0 and (against.shape is None or lies.numel() == _size(against.shape) or lies._is_view())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _nearness(module: str | None, wanted: str | None) -> float:
    """How near a module is to another: the share of the dotted name that both have, a whole ancestor most."""
    if module is None or wanted is None:
        return 0
    mine, theirs = [p for p in module.split(".") if p], wanted.split(".")
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    return (1 if common == len(mine) else 0) + common / 10 - (len(mine) - common) / 100


def _ends_in(node: Any, code: FunctionSource, line: tuple[int, int], depth: int = 6) -> str:
    """The op that an expression's value comes from last, in small letters."""
    if depth == 0:
        return ""
    if isinstance(node, ast.Name):
        made = [
            s
            for s in assignments(code, node.id, line)
            if isinstance(s, ast.Assign) and end_position(s) <= line and not is_skipped(s, code)
        ]
        if made:
            return _ends_in(made[-1].value, code, place(made[-1]), depth - 1)
        given, caller = code.given.get(node.id, (None, None))
        return _ends_in(given, caller, (caller.line, 0), depth - 1) if isinstance(given, ast.AST) else ""
    if isinstance(node, ast.BinOp):
        return ARITHMETIC.get(type(node.op), "")
    if isinstance(node, ast.Call):
        called = static_value(node.func, code)
        if is_module(called) and _leaf_op(called):
            return _leaf_op(called)
        inner = callee(node, code, called) if called is not UNKNOWN else None
        if inner is not None and inner.returned():
            given, statement = inner.returned()[-1]
            return _ends_in(given, inner, place(statement), depth - 1)
        return _spelt(last_name(node.func))
    return ""


def place(statement: Any) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _leaf_op(module: Any) -> str:
    """The last op of a module of torch's own; of a Sequential that of its last part."""
    parts = list(children(module).values())
    if type(module).__name__ == "Sequential" and parts:
        return _leaf_op(parts[-1])
    return _spelt(type(module).__name__) if package(module).startswith("torch.nn") else ""


def _spelt(name: str) -> str:
    plain = name.lower().replace("_", "")
    return SPELT.get(plain, plain)


SAVED = re.compile(
    r"modified by an inplace operation: \[\S*?(\w+)Tensor \[([\d, ]*)\]\](?:, which is output \d+ of "
    r"(\w+),)? is at version (\d+); expected version (\d+)"
)
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "ComplexFloat": "complex64"}
AT_ONCE = (
    (r"a leaf Variable that requires grad is being used in an in-place", "leaf"),
    (r"a view of a leaf Variable that requires grad is being used in an in-place", "leaf view"),
    (r"is a view (and|of a view).*modified inplace|A view was created in .* modified inplace", "view"),
    (r"refers? to a single memory location|some elements of the input tensor and the written-to tensor", "expanded"),
    (r"functions with out=\.\.\. arguments don't support automatic differentiation", "out"),
    (r"Inplace update to inference tensor", "inference"),
)


def look(scene: ErrorContext) -> InPlaceFacts | None:
    if scene.type not in ("RuntimeError", "NotImplementedError"):
        return None
    said = SAVED.search(scene.message)
    if said:
        return _saved(scene, said)
    if "modified by an inplace operation" in scene.message:
        return _saved(scene, None)
    what = next((what for pattern, what in AT_ONCE if re.search(pattern, scene.message)), None)
    return _at_once(scene, what) if what else None


def _saved(scene: ErrorContext, said: re.Match[str] | None) -> InPlaceFacts:
    """Seen in backward: the node that misses its value, and the statement that took it."""
    found = node_distances(backward_roots(scene))
    missing = _named(modified_values(found), said)
    shape = tuple(int(n) for n in said[2].split(",") if n.strip()) if said else None
    version = int(said[4]) if said else None
    leaf = missing.leaf if missing is not None else None
    names = {id(p): name for name, p in _parameters(scene)}
    holder = _owner(scene, missing)
    optimizer, step_change = None, None
    steps: tuple[str, ...] = ()
    if leaf is not None and id(leaf) in names:
        optimizer = optimizer_of(scene, leaf)
        step_change, steps = stepping(scene, leaf, earlier=True)
    against = Weighed(missing, found, shape, version, holder, leaf)
    weighed = [] if step_change is not None else weigh(_candidates(scene), against, scene)
    if step_change is None and not weighed and leaf is not None:
        step_change, steps = stepping(scene, leaf, earlier=False)
    if step_change is None and not weighed:
        alone = weigh(_elsewhere(scene), against, scene)
        weighed = alone if len(alone) == 1 else []
    saved_by = op_of(missing.node) if missing is not None else ""
    best = step_change or (weighed[0] if weighed else None)
    return InPlaceFacts(
        scene.raised(),
        "saved",
        saved_by,
        missing is not None and missing.made_by is missing.node,
        shape,
        DTYPES.get(said[1], said[1].lower()) if said else None,
        version,
        int(said[5]) if said else None,
        names.get(id(leaf)) if leaf is not None else None,
        _variable(scene, leaf),
        holder,
        best,
        tuple(weighed[1:4]),
        optimizer,
        steps,
        tried(best, saved_by, shape),
        _loss(scene),
    )


def _loss(scene: ErrorContext) -> str:
    codes = traceback_functions(scene)
    of = asked(scene, codes[0], "loss") if codes else None
    return ast.unparse(of) if of is not None else ""


def _named(missing: list[ModifiedValue], said: re.Match[str] | None) -> ModifiedValue | None:
    """Of the nodes that miss a value the one that torch speaks of: of the named op, nearest to the loss."""
    op = (said[3] or "").rstrip("0123456789").removesuffix("Backward") if said else ""
    of_op = [s for s in missing if op and s.made_by is not None and op_of(s.made_by) == op]
    return next(iter(of_op or missing), None)


def _parameters(scene: ErrorContext) -> list[tuple[str, torch.nn.Parameter]]:
    """(dotted name with the model's, parameter) of all models."""
    return [(f"{called}.{name}", p) for called, model in scene.owners.models.items() for name, p in parameters(model)]


def _owner(scene: ErrorContext, missing: ModifiedValue | None) -> str | None:
    """The module nearest to the node that misses its value, by the parameters that it was computed from."""
    if missing is None:
        return None
    owners = {
        id(p): scene.path(part)
        for model in scene.owners.models.values()
        for part in modules(model)
        for p in (attributes(part).get("_parameters") or {}).values()
        if p is not None
    }
    return next((owners[id(leaf)] for leaf in nearest_leaves(missing.node) if id(leaf) in owners), None)


def _candidates(scene: ErrorContext) -> list[tuple[ChangeSite | None, InPlaceChange, Any]]:
    """(with its syntax, change, the module whose method it is) of all in-place changes at hand."""
    found: list[tuple[ChangeSite | None, InPlaceChange, Any]] = []
    cells = [
        (cell, None)
        for code in traceback_functions(scene)
        for cell in enclosing_scopes(code)
        if isinstance(cell.node, ast.Module) and cell is not code
    ]
    for code, module in [*reachable_functions(scene), *cells]:
        for one in in_place_changes(code, scene.path(module) if module is not None else None):
            found.append((one, one.change, module))
    return found + [(None, change, part) for change, part in in_place_modules(scene)]


def _elsewhere(scene: ErrorContext) -> list[tuple[ChangeSite | None, InPlaceChange, Any]]:
    """The changes in the forwards of all module classes that the user has, where the module itself is gone."""
    spaces = [scene.names, *(frame.globals for frame in scene.users), *(frame.names for frame in scene.users)]
    kinds = {id(kind): kind for space in spaces for kind in space.values() if issubclass(type(kind), type)}
    codes = [code for kind in kinds.values() if (code := forward_of_class(kind)) is not None]
    return [(one, one.change, None) for code in codes for one in in_place_changes(code)]


def _variable(scene: ErrorContext, leaf: Any) -> str | None:
    """The name of a tensor among the user's variables."""
    return next((name for name, thing, _ in scene.variables() if thing is leaf), None) if leaf is not None else None


def _at_once(scene: ErrorContext, what: str) -> InPlaceFacts:
    """Refused on the spot: the failing statement itself changes it."""
    codes = traceback_functions(scene)
    for code in codes:
        statement = _statement(code)
        for one in changes_in_statement(statement, code, scene.raised().where.module) if statement is not None else ():
            lies = static_value(one.node, code)
            names = {id(p): name for name, p in _parameters(scene)}
            tensor = lies if is_tensor(lies) else None
            return InPlaceFacts(
                scene.raised(),
                what,
                shape=tuple(tensor.shape) if tensor is not None else None,
                parameter=names.get(id(tensor)),
                tensor=one.change.target,
                change=one.change,
            )
    name, tensor = _given(scene, what)
    inside = next(
        (change for change, part in in_place_modules(scene) if any(frame.module is part for frame in scene.trail)), None
    )
    return InPlaceFacts(
        scene.raised(), what, shape=tuple(tensor.shape) if tensor is not None else None, tensor=name, change=inside
    )


def _given(scene: ErrorContext, what: str) -> tuple[str | None, Any]:
    """The user's tensor that went in where torch's own code was refused."""
    for frame in scene.users:
        for text, thing in operands(frame):
            if is_tensor(thing) and (thing.is_leaf and thing.requires_grad if what.startswith("leaf") else True):
                return text, thing
    return None, None


def _statement(code: FunctionSource) -> Any:
    node = failing_node(code)
    if node is None or isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)
