"""A value that the backward needs was changed in place: by which statement of the user's.

First the changes in the user's source: `+=`, `x[i] = v`, `x.mul_(…)`, `inplace=True`, `out=`. Then the one that
backward met: the node that misses its value is still in the graph, and so is what was computed with the changed one.
Every in-place statement of the functions that took part gets a score: whether it changes a variable that was made by
the very op, whether the graph has a node of its kind next to it, and whether it stands in the forward of the module to
which the nearest parameters belong. The steps of optimizers change parameters, and are looked for by these. At last the
change, and the same without it, are tried on random numbers.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.sources import edit_of, nodes_of, parents, tree_of
from nbdebug.observe.variables import attributes, named_children, named_modules, named_parameters
from nbdebug.report import Edit, Where
from nbdebug.text import clip
from nbdebug.tools.errors.autograd.functions import (
    PART_VIEWS,
    VIEWS,
    FunctionSource,
    ModifiedValue,
    assignments,
    backward_roots,
    callee,
    enclosing_scopes,
    end_position,
    failing_node,
    forward_of_class,
    function_source,
    is_module,
    is_skipped,
    last_name,
    loops_around,
    loss_text,
    modified_values,
    nearest_leaves,
    node_distances,
    op_of,
    op_of_name,
    own_expressions,
    package,
    reachable_functions,
    statement_of,
    statements_of,
    static_value,
    traceback_functions,
)
from nbdebug.tools.errors.autograd.no_grad import no_grad_block
from nbdebug.tools.errors.autograd.rules import InPlaceChange, InPlaceFacts
from nbdebug.tools.errors.context import UNKNOWN, ErrorContext, calls_in, is_tensor, kind_of_message, operands
from nbdebug.tools.errors.rules import NOWHERE, word_pairs
from nbdebug.tools.errors.sandbox import continued

# -- changes in the source ---------------------------------------------------------------------------------------------


ACTIVATION_NODES = word_pairs("ReLU6:Hardtanh LeakyReLU:LeakyRelu SELU:Elu CELU:Elu RReLU:RreluWithNoise Dropout:Mul")
"""Activations whose node in the graph has a name of its own."""
SIGNS = {
    getattr(ast, kind): sign
    for kind, sign in word_pairs("Add:+ Sub:- Mult:* Div:/ Pow:** FloorDiv:// Mod:% MatMult:@ BitAnd:& BitOr:|").items()
}
OPERATORS = {
    getattr(ast, kind): op
    for kind, op in word_pairs(
        "Add:Add Sub:Sub Mult:Mul Div:Div Pow:Pow FloorDiv:FloorDivide Mod:Remainder MatMult:Mm BitAnd:BitwiseAnd "
        "BitOr:BitwiseOr"
    ).items()
}
"""The node of an operator in the graph."""
HARMLESS = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "rename_", "detach_"})
"""Methods with the underscore of a change that leave a tensor's values as they are."""


class ChangeSite(NamedTuple):
    """A change with its syntax. node: what is changed."""

    change: InPlaceChange
    code: FunctionSource
    statement: Any
    node: Any


class _Target(NamedTuple):
    """node: what is changed; the rest as in `InPlaceChange`."""

    node: Any
    how: str
    op: str
    operand: str | None
    replacement: str


def in_place_changes(code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """All that one function changes in place, in the order of its lines."""
    for statement in code.statements():
        yield from changes_in_statement(statement, code, module)


def changes_in_statement(statement: Any, code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """What one statement changes."""
    inside = "block" if no_grad_block(statement, code) is not None else None
    for node, how, op, operand, replacement in _change_targets(statement, code):
        if not _may_be_tensor(node, code):
            continue
        smallest = next((n for n in code.source.around(node) if isinstance(n, ast.Lambda)), statement)
        text, target = clip(ast.unparse(smallest).partition("\n")[0], 90), ast.unparse(node)
        where = code.where(statement)
        change = InPlaceChange(text, target, inside or how, op, operand, replacement, module, code.name, where)
        yield ChangeSite(change, code, statement, node)


def _change_targets(statement: Any, code: FunctionSource) -> Iterator[_Target]:
    if isinstance(statement, ast.AugAssign):
        yield from _augmented_target(statement)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and not _is_dict_item(target):
                yield _item(target, "", ast.unparse(statement.value))
    for node in own_expressions(statement):
        if isinstance(node, ast.Call):
            yield from _call_targets(node, code)


def _augmented_target(statement: ast.AugAssign) -> Iterator[_Target]:
    sign, op = SIGNS.get(type(statement.op), "?"), OPERATORS.get(type(statement.op), "")
    target, operand = statement.target, ast.unparse(statement.value)
    text = ast.unparse(target)
    if isinstance(target, ast.Subscript):
        if not _is_dict_item(target):
            yield _item(target, sign, operand)
    elif not text.endswith((".data", ".grad")):
        right = f"({operand})" if isinstance(statement.value, (ast.BinOp, ast.IfExp)) else operand
        yield _Target(target, "statement", op, operand, f"{text} = {text} {sign} {right}")


def _item(target: ast.Subscript, sign: str, operand: str) -> _Target:
    base = ast.unparse(target.value)
    replacement = f"{base} = {base}.clone()\n{ast.unparse(target)} {sign}= {operand}"
    return _Target(target.value, "item", "CopySlices", operand, replacement)


def _is_dict_item(target: ast.Subscript) -> bool:
    return isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)


def _call_targets(node: ast.Call, code: FunctionSource) -> Iterator[_Target]:
    name, function = last_name(node.func), ast.unparse(node.func)
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    rest = ", ".join(map(ast.unparse, [*node.args, *(k for k in node.keywords if k.arg not in ("out", "inplace"))]))
    out = next((k.value for k in node.keywords if k.arg == "out"), None)
    inplace = next((k.value for k in node.keywords if k.arg == "inplace"), None)
    if out is not None:
        arguments = ", ".join(map(ast.unparse, [*node.args, *(k for k in node.keywords if k.arg != "out")]))
        yield _Target(out, "out", _camel(name), rest or None, f"{ast.unparse(out)} = {function}({arguments})")
    elif isinstance(inplace, ast.Constant) and inplace.value is True and node.args:
        replacement = f"{function}({rest})   # without inplace=True: {ast.unparse(node.args[0])} stays"
        yield _Target(node.args[0], "method", _camel(name), None, replacement)
    elif name.endswith("_") and not name.endswith("__") and name not in HARMLESS:
        plain = name[:-1]
        if base is not None and hasattr(torch.Tensor, name) and type(static_value(base, code)) is not types.ModuleType:
            text = ast.unparse(base)
            if not text.endswith((".data", ".grad")):
                yield _Target(base, "method", _camel(plain), rest or None, _out_of_place(text, plain, rest))
        elif node.args and (hasattr(torch, name) or hasattr(torch.nn.functional, name) or hasattr(torch.nn.init, name)):
            replacement = f"{ast.unparse(node.args[0])} = {function[:-1]}({rest})"
            yield _Target(node.args[0], "method", _camel(plain), None, replacement)


def _out_of_place(text: str, method: str, arguments: str) -> str:
    """What to write instead of `text.method_(arguments)`."""
    if method in ("zero", "fill"):
        if method == "zero":
            return f"{text} = torch.zeros_like({text})"
        return f"{text} = torch.full_like({text}, {arguments})"
    if hasattr(torch.Tensor, method):
        return f"{text} = {text}.{method}({arguments})"
    return f"{text} = {text}.clone()\n{text}.{method}_({arguments})"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _may_be_tensor(node: Any, code: FunctionSource) -> bool:
    """Whether what is changed may be a tensor: not what is known to be something else."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return False
    value = static_value(node, code)
    if value is not UNKNOWN:
        return is_tensor(value)
    return not any(
        isinstance(s, ast.Assign)
        and any(isinstance(t, ast.Name) and isinstance(node, ast.Name) and t.id == node.id for t in s.targets)
        and isinstance(s.value, (ast.Constant, ast.List, ast.Dict, ast.ListComp, ast.DictComp, ast.JoinedStr))
        for s in code.statements()
    )


def in_place_modules(context: ErrorContext) -> Iterator[tuple[InPlaceChange, Any]]:
    """(change, module) of torch's activations that were made with `inplace=True`."""
    for model in context.owners.models.values():
        for _, parent in named_modules(model):
            for name, part in named_children(parent).items():
                if attributes(part).get("inplace") is True and package(part).startswith("torch.nn"):
                    path, kind = context.path(part) or name, type(part).__name__
                    title = (context.owners.paths.get(id(part)) or path) if path.isdigit() else path
                    op = ACTIVATION_NODES.get(kind, kind.capitalize())
                    where = _constructor(parent, name, kind, context)
                    text = f"{kind}(inplace=True)"
                    yield InPlaceChange(text, title, "module", op, None, f"nn.{kind}()", path, where=where), part


def inplace_flag(call: ast.Call) -> ast.expr | None:
    """The `True` in `nn.ReLU(inplace=True)`, or in `nn.ReLU(True)`."""
    flags = [*(k.value for k in call.keywords if k.arg == "inplace"), *call.args[-1:]]
    return next((flag for flag in flags if isinstance(flag, ast.Constant) and flag.value is True), None)


def _constructor(parent: Any, name: str, kind: str, context: ErrorContext) -> Where:
    """The call in the user's sources that made an activation: the only one of its kind in the `__init__` of the parent
    or of a module around it, else in the user's files; of several the one that gets its name, or that stands at its
    place in a Sequential of as many layers."""
    models = context.owners.models.values()
    outer = [
        m for model in models for _, m in named_modules(model) if any(c is parent for c in named_children(m).values())
    ]
    sources = [function_source(vars(type(one)).get("__init__")) for one in (parent, *outer)]
    roots = [(code.source.file, code.node) for code in sources if code is not None]
    roots += [(f, tree) for f in dict.fromkeys(frame.site.file for frame in context.users) if (tree := tree_of(f))]
    for file, root in roots:
        calls = calls_in(root)
        made = [n for n in calls if last_name(n.func) == kind and inplace_flag(n) is not None]
        if len(made) > 1:
            lines = [
                n for n in ast.walk(root) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == f"self.{name}"
            ]
            alike = [
                n for n in calls if last_name(n.func) == "Sequential" and len(n.args) == len(named_children(parent))
            ]
            places = [line.value for line in lines] + [n.args[int(name)] for n in alike if name.isdigit()]
            made = [n for n in made if any(n is place for place in places)]
        if made:
            return at_site(Where(), Site(file, made[0].lineno, "")) if len(made) == 1 else NOWHERE
    return NOWHERE


# -- the change that backward met --------------------------------------------------------------------------------------


SAVED = re.compile(
    r"modified by an inplace operation: \[\S*?(\w+)Tensor \[([\d, ]*)\]\](?:, which is output \d+ of "
    r"(\w+),)? is at version (\d+); expected version (\d+)"
)
DTYPES = word_pairs("Float:float32 Double:float64 Half:float16 ComplexFloat:complex64")
AT_ONCE = {
    "leaf": "a leaf Variable that requires grad is being used in an in-place",
    "leaf view": "a view of a leaf Variable that requires grad is being used in an in-place",
    "view": "is a view (and|of a view).*modified inplace|A view was created in .* modified inplace",
    "expanded": "refers? to a single memory location|some elements of the input tensor and the written-to tensor",
    "out": r"functions with out=\.\.\. arguments don't support automatic differentiation",
    "inference": "Inplace update to inference tensor",
}
"""Changes that torch refuses on the spot, by its message."""
ENOUGH = 3
"""The score from which a statement is named: one sign that it is this value, not only that it is in place."""
NODE_NAMES = word_pairs(
    "linear:addmm conv1d:convolution conv2d:convolution conv3d:convolution batchnorm1d:nativebatchnorm "
    "batchnorm2d:nativebatchnorm layernorm:nativelayernorm matmul:mm maxpool2d:maxpool2dwithindices"
)
"""Modules and functions whose node has another name, in small letters without underscores."""
LARGEST = 100_000
"""Elements of a trial; a larger tensor is represented by one of this many."""
OWN_RESULT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in "Relu Sigmoid Tanh Exp Sqrt Reciprocal Rsqrt Expm1".split()},
    "Softmax": lambda x: torch.softmax(x, -1),
    "LogSoftmax": lambda x: torch.log_softmax(x, -1),
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

Candidate = tuple[ChangeSite | None, InPlaceChange]
"""A change, with its syntax where the source shows it."""


def detect(context: ErrorContext) -> InPlaceFacts | None:
    """The facts of an in-place change, or None where the exception is about something else."""
    if context.type not in ("RuntimeError", "NotImplementedError"):
        return None
    message = SAVED.search(context.message)
    if message or "modified by an inplace operation" in context.message:
        changed = _changed_before_backward(context, message)
        if changed.change is None:
            return changed
        copied = _copied_where_read(context, changed.change)
        return dataclasses.replace(changed, edit=_without_change(changed.change), copied=copied)
    what = kind_of_message(AT_ONCE, context.message)
    facts = _refused_at_once(context, what) if what else None
    return _under_no_grad(context, facts) if facts is not None and what in ("leaf", "leaf view") else facts


def _statement_of(change: InPlaceChange) -> tuple[str, Any] | None:
    """(file, statement) of a change; None for one of a module or a step."""
    file, line = change.where.file, change.where.line
    if file is None or line is None or change.how not in ("statement", "item", "method", "out", "block"):
        return None
    alike = [n for n in nodes_of(file) if isinstance(n, SIMPLE) and n.lineno <= line <= (n.end_lineno or 0)]
    return (file, alike[0]) if len(alike) == 1 else None


SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)


def _without_change(change: InPlaceChange | None) -> Edit | None:
    """The statement rewritten so that it makes a new tensor."""
    if change is not None and change.how == "module" and change.where.file:
        calls = [n for n in nodes_of(change.where.file) if isinstance(n, ast.Call) and n.lineno == change.where.line]
        calls = [n for n in calls if last_name(n.func) == change.text.partition("(")[0]]
        new: dict[ast.AST, str] = {}
        for made in calls:
            if (flag := inplace_flag(made)) is not None:
                new[flag] = "inplace=False" if flag in made.args else "False"
        return edit_of(change.where.file, new)
    place = _statement_of(change) if change is not None and change.replacement else None
    if place is None or change is None or change.how == "block":
        return None
    file, statement = place
    pad = " " * statement.col_offset
    if isinstance(statement, ast.AugAssign) or change.how == "item" or isinstance(statement, ast.Expr):
        code = change.replacement.partition("   #")[0]
        return edit_of(file, {statement: code.replace("\n", f"\n{pad}")})
    for call in ast.walk(statement):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and change.how == "method":
            flags = [k for k in call.keywords if k.arg == "inplace"]
            if flags:
                return edit_of(file, {flags[0].value: "False"})
            if call.func.attr.endswith("_") and ast.unparse(call.func.value) == change.target:
                return edit_of(file, {call.func: f"{change.target}.{call.func.attr[:-1]}"})
    return None


MOST_READS = 3
"""Places in which a forward may read what is changed, for them all to read a copy."""


def _copied_where_read(context: ErrorContext, change: InPlaceChange) -> Edit | None:
    """The forward on a copy of what is changed later: each place, with gradients, that reads that very tensor."""
    if change.how not in ("item", "statement", "method", "block"):
        return None
    functions = [code for code, _ in reachable_functions(context) if code.source.file == change.where.file]
    sites = [site for code in functions for site in in_place_changes(code)]
    written = {id(site.node) for site in sites}
    own = [site for site in sites if site.change.where == change.where]
    changed = {id(value) for site in own if is_tensor(value := static_value(site.node, site.code))}
    around = parents(tree_of(change.where.file or "") or ast.Module([], []))
    reads: dict[ast.AST, str] = {}
    for code in functions:
        here = [site.statement for site in own if site.code is code]
        local, last = bool(here), max((n.lineno for n in here), default=math.inf)
        repeated = [loop for n in here for loop in loops_around(code, n)]
        for statement in code.statements():
            if statement.lineno > last and not any(loop in repeated for loop in loops_around(code, statement)):
                continue  # it reads the last value
            for node in own_expressions(statement) if no_grad_block(statement, code) is None else ():
                read = isinstance(getattr(node, "ctx", None), ast.Load) and id(node) not in written
                if read and ast.unparse(node) == change.target and (local or id(static_value(node, code)) in changed):
                    while isinstance(outer := around.get(id(node)), ast.Subscript) and outer.value is node:
                        node = outer
                    reads[node] = "{}.clone()"
    return edit_of(change.where.file or "", reads) if 0 < len(reads) <= MOST_READS else None


def _block_of(file: str, statement: ast.stmt, pad: str) -> dict[ast.AST, str]:
    """The statement and those behind it that write into something in place, indented below no_grad."""
    around = parents(tree_of(file) or ast.Module([], [])).get(id(statement))
    block = None
    if around:
        block = next((b for b in ast.iter_fields(around) if isinstance(b[1], list) and statement in b[1]), None)
    behind = block[1][block[1].index(statement) + 1 :] if block is not None else []
    writes = itertools.takewhile(lambda n: isinstance(n, ast.AugAssign) and not isinstance(n.target, ast.Name), behind)
    changes: dict[ast.AST, str] = {statement: "with torch.no_grad():\n" + pad + "    {raw}"}
    return changes | dict.fromkeys(writes, "    {raw}")


def _under_no_grad(context: ErrorContext, facts: InPlaceFacts) -> InPlaceFacts:
    """The write into a leaf within no_grad, tried on a copy of it."""
    place = _statement_of(facts.change) if facts.change is not None else None
    frame = context.frame
    if place is None or frame is None or isinstance(place[1], ast.Return):
        return facts
    file, statement = place
    pad = " " * statement.col_offset
    edit = edit_of(file, _block_of(file, statement, pad))
    parameters = [v for _, v in operands(frame, whole=True) if type(v) is torch.nn.Parameter]
    trial = continued(context, edit) if edit is not None and "torch" in {**frame.globals, **frame.names} else None
    passes = True if trial is not None and trial.worked and parameters else None
    return dataclasses.replace(facts, edit=edit, fix_passes=passes, weight=bool(parameters))


def _changed_before_backward(context: ErrorContext, message: re.Match[str] | None) -> InPlaceFacts:
    """Detected in backward: the node that misses its value, and the statement that changed it."""
    graph = node_distances(backward_roots(context))
    # the node that torch's message is about: of the named op, nearest to the loss
    named, values = op_of_name(message[3] or "") if message else "", modified_values(graph)
    of_op = [v for v in values if named and v.producer is not None and op_of(v.producer) == named]
    missing = next(iter(of_op or values), None)
    shape = tuple(int(n) for n in message[2].split(",") if n.strip()) if message else None
    version = int(message[4]) if message else None
    leaf = missing.leaf if missing is not None else None
    names = _parameter_names(context)
    module = _nearest_module(context, missing)
    step = optimizer_step(context, leaf, earlier=True) if id(leaf) in names else None
    signs = Signs(missing, graph, shape, version, module, leaf)
    ranked = [] if step is not None else rank_changes(_candidates(context), signs)
    if step is None and not ranked and leaf is not None:
        step = optimizer_step(context, leaf, earlier=False)
    if step is None and not ranked:
        alone = rank_changes(_candidates_in_classes(context), signs)
        ranked = alone if len(alone) == 1 else []
    saved_by = op_of(missing.node) if missing is not None else ""
    best = step or (ranked[0] if ranked else None)
    variables = (name for name, value, _ in context.variables() if value is leaf)
    return InPlaceFacts(
        context.raised(),
        "saved",
        saved_by,
        missing is not None and missing.producer is missing.node,
        shape,
        DTYPES.get(message[1], message[1].lower()) if message else None,
        version,
        int(message[5]) if message else None,
        names.get(id(leaf)) if leaf is not None else None,
        next(variables, None) if leaf is not None else None,
        module,
        best,
        tuple(ranked[1:4]),
        fix_passes(best, saved_by, shape),
        loss_text(context, traceback_functions(context)),
    )


def _parameter_names(context: ErrorContext) -> dict[int, str]:
    """The dotted name, with the model's, of each parameter by its id; of one that several models share the last."""
    return {
        id(parameter): f"{model_name}.{name}"
        for model_name, model in context.owners.models.items()
        for name, parameter in named_parameters(model)
    }


def _nearest_module(context: ErrorContext, missing: ModifiedValue | None) -> str | None:
    """The module nearest to the node that misses its value, by the parameters that it was computed from."""
    if missing is None:
        return None
    owners = {
        id(p): context.path(part)
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        for p in (attributes(part).get("_parameters") or {}).values()
        if p is not None
    }
    return next((owners[id(leaf)] for leaf in nearest_leaves(missing.node) if id(leaf) in owners), None)


def _candidates(context: ErrorContext) -> Iterator[Candidate]:
    """All in-place changes of the functions that took part, of the notebook's cells, and of modules."""
    functions = reachable_functions(context)
    functions += [
        (cell, None)
        for code in traceback_functions(context)
        for cell in enclosing_scopes(code)
        if isinstance(cell.node, ast.Module) and cell is not code
    ]
    for code, module in functions:
        for site in in_place_changes(code, context.path(module) if module is not None else None):
            yield site, site.change
    yield from ((None, change) for change, _ in in_place_modules(context))


def _candidates_in_classes(context: ErrorContext) -> Iterator[Candidate]:
    """The changes in the forwards of all module classes that the user has, where the module itself is gone."""
    spaces = [context.names, *(frame.globals for frame in context.users), *(frame.names for frame in context.users)]
    kinds = {id(kind): kind for space in spaces for kind in space.values() if issubclass(type(kind), type)}
    for kind in kinds.values():
        forward = forward_of_class(kind)
        yield from ((site, site.change) for site in in_place_changes(forward)) if forward is not None else ()


def _refused_at_once(context: ErrorContext, what: str) -> InPlaceFacts:
    """The failing statement itself changes it."""
    raised, names = context.raised(), _parameter_names(context)
    for code in traceback_functions(context):
        statement = statement_of(failing_node(code), code)
        for site in changes_in_statement(statement, code, raised.where.module) if statement is not None else ():
            value = static_value(site.node, code)
            shape = tuple(value.shape) if is_tensor(value) else None
            name, target = names.get(id(value)), site.change.target
            return InPlaceFacts(raised, what, shape=shape, parameter=name, tensor=target, change=site.change)
    tensors = ((text, value) for frame in context.users for text, value in operands(frame) if is_tensor(value))
    leaf = what.startswith("leaf")  # the user's tensor that went in where torch's own code was refused
    text, tensor = next(((t, v) for t, v in tensors if not leaf or v.is_leaf and v.requires_grad), (None, None))
    running = [frame.module for frame in context.trail]
    inside = (change for change, part in in_place_modules(context) if any(module is part for module in running))
    shape = tuple(tensor.shape) if tensor is not None else None
    return InPlaceFacts(raised, what, shape=shape, tensor=text, change=next(inside, None))


def optimizer_step(context: ErrorContext, parameter: Any, earlier: bool) -> InPlaceChange | None:
    """The `step()` that changed the parameter. earlier: only one above the failing line."""
    for code in traceback_functions(context):
        line = failing_node(code)
        loops = loops_around(code, line) if line is not None else []
        steps = [
            (statement, call, inner)
            for statement in (statements_of(loops[-1]) if loops else code.statements())
            for call, inner in _step_calls(statement, code)
            if _optimizes(static_value(call.func.value, inner), parameter)
        ]
        if earlier:
            steps = [step for step in steps if step[0].lineno < code.line]
        for _, call, inner in steps[-1:]:
            text, target = ast.unparse(call), ast.unparse(call.func.value)
            return InPlaceChange(text, target, "step", "step", function=inner.name, where=inner.where(call))
    return None


def _step_calls(statement: Any, code: FunctionSource, depth: int = 2) -> list[tuple[Any, FunctionSource]]:
    """The calls of `.step()` in a statement and in the functions that it calls."""
    steps: list[tuple[Any, FunctionSource]] = []
    for node in own_expressions(statement):
        if isinstance(node, ast.Call) and last_name(node.func) == "step" and isinstance(node.func, ast.Attribute):
            steps.append((node, code))
        elif isinstance(node, ast.Call) and depth and (inner := callee(node, code)) is not None:
            steps += [step for s in inner.statements() for step in _step_calls(s, inner, depth - 1)]
    return steps


def _optimizes(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer has changed a parameter."""
    if not issubclass(type(optimizer), torch.optim.Optimizer):
        return False
    known = attributes(optimizer)
    stateless = type(optimizer) is torch.optim.SGD  # it keeps no state without momentum
    if not known.get("state") and not stateless:  # it has not made a step yet
        return False
    return any(p is parameter for group in known.get("param_groups") or [] for p in group.get("params", ()))


@dataclasses.dataclass(frozen=True)
class Signs:
    """By what a statement is recognised. missing: the node without its value; graph: all nodes; shape, version: of the
    tensor; module: nearest to the node; leaf: the parameter or input that was changed, if it is one."""

    missing: ModifiedValue | None
    graph: dict[Any, int]
    shape: tuple[int, ...] | None
    version: int | None
    module: str | None
    leaf: Any

    @property
    def producer(self) -> Any:
        return self.missing.producer if self.missing is not None else None

    def users(self) -> set[str]:
        """The ops of the nodes that took the value, or that of which it is a view, in small letters."""
        anchors, node = [], self.producer
        while node is not None:
            anchors.append(node)
            is_view = op_of(node) in VIEWS | PART_VIEWS and node.next_functions
            node = node.next_functions[0][0] if is_view else None
        return {
            op_of(node).lower()
            for node in self.graph
            if any(before is anchor for before in input_nodes(node) for anchor in anchors)
        }


def rank_changes(candidates: Iterator[Candidate], signs: Signs) -> list[InPlaceChange]:
    """The changes that would explain it, the likeliest first; one of a class that several modules share is named by the
    module nearest to the node."""
    users = signs.users()
    scores: dict[tuple[Any, ...], tuple[float, InPlaceChange]] = {}
    for site, change in candidates:
        score = _score(site, change, signs, users)
        if score is None or score < ENOUGH:
            continue
        late = site.statement.lineno / 1e6 if site is not None and site.code.live else 0
        near = score + _nearness(change.module, signs.module) + late
        near += _order(change.module, signs.module) if site is None else 0
        key = (change.where.file, change.where.line, change.target if site else change.module)
        if key not in scores or near > scores[key][0]:
            scores[key] = (near, change)
    return [change for _, change in sorted(scores.values(), key=lambda entry: -entry[0])]


def _score(site: ChangeSite | None, change: InPlaceChange, signs: Signs, users: set[str]) -> float | None:
    op = change.op.lower()
    score = 3.0 if users & {op, op + "_"} or change.how == "item" and "copyslices" in users else 0.0
    if site is None:
        return score
    code, statement = site.code, site.statement
    after = code.live and statement.lineno > code.line and not loops_around(code, statement)
    if after or is_skipped(statement, code):
        return None
    value = static_value(site.node, code)
    if signs.leaf is not None:
        in_block = change.how == "block" and issubclass(type(value), torch.nn.Parameter)  # a loop over the parameters
        return score + 6 if value is signs.leaf else 4 if in_block else 0
    if is_tensor(value):
        # where it has got another value since, that is not what was changed
        later = assignments(code, site.node.id, code.line) if isinstance(site.node, ast.Name) else []
        rebound = any(s.lineno > statement.lineno and not isinstance(s, ast.AugAssign) for s in later)
        part = signs.producer is not None and op_of(signs.producer) in PART_VIEWS | {"Select"}
        same_size = part or signs.shape is None or value.numel() == math.prod(signs.shape) or value._is_view()
        if code.live and not rebound and not (value._version > 0 and same_size):
            return None
        if signs.producer is None or signs.version == value._version:
            score += 3 if signs.producer is None else 2
    elif signs.producer is None and not users:
        score += 1
    if signs.producer is not None and _last_op(site.node, code, _start(statement)) == op_of(signs.producer).lower():
        score += 4
    return score


def _order(module: str | None, other: str | None) -> float:
    """In a Sequential: what comes next behind a layer before what comes later, and before what came earlier."""
    parent, _, place = (module or "").rpartition(".")
    theirs, _, at = (other or "").rpartition(".")
    if parent != theirs or not (place.isdigit() and at.isdigit()):
        return 0
    behind = int(place) - int(at)
    return -0.01 * behind if behind > 0 else -1


def _nearness(module: str | None, other: str | None) -> float:
    """How near a module is to another: the share of the dotted name that both have, a whole ancestor most."""
    if module is None or other is None:
        return 0
    mine, theirs = [p for p in module.split(".") if p], other.split(".")
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    return (1 if common == len(mine) else 0) + common / 10 - (len(mine) - common) / 100


def _last_op(node: Any, code: FunctionSource, before: tuple[int, int], depth: int = 6) -> str:
    """The op that an expression's value comes from last, in small letters, as its node is named."""
    if depth == 0:
        return ""
    if isinstance(node, ast.Name):
        bindings = [
            s
            for s in assignments(code, node.id, before)
            if isinstance(s, ast.Assign) and end_position(s) <= before and not is_skipped(s, code)
        ]
        if bindings:
            return _last_op(bindings[-1].value, code, _start(bindings[-1]), depth - 1)
        argument, caller = code.arguments.get(node.id, (None, None))
        return _last_op(argument, caller, (caller.line, 0), depth - 1) if isinstance(argument, ast.AST) else ""
    if isinstance(node, ast.BinOp):
        return OPERATORS.get(type(node.op), "").lower()
    if isinstance(node, ast.Call):
        function = static_value(node.func, code)
        if is_module(function) and (op := _module_op(function)):
            return op
        inner = callee(node, code, function) if function is not UNKNOWN else None
        if inner is not None and inner.returned():
            value, statement = inner.returned()[-1]
            return _last_op(value, inner, _start(statement), depth - 1)
        return _node_name(last_name(node.func))
    return ""


def _start(statement: Any) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _module_op(module: Any) -> str:
    """The last op of a module of torch's own; of a Sequential that of its last part."""
    parts = list(named_children(module).values())
    if type(module).__name__ == "Sequential" and parts:
        return _module_op(parts[-1])
    return _node_name(type(module).__name__) if package(module).startswith("torch.nn") else ""


def _node_name(name: str) -> str:
    plain = name.lower().replace("_", "")
    return NODE_NAMES.get(plain, plain)


def fix_passes(change: InPlaceChange | None, saved_by: str, shape: tuple[int, ...] | None) -> bool | None:
    """Whether backward fails with the change and passes without; None where that can't be tried with torch alone."""
    if change is None or saved_by not in OWN_RESULT or change.op not in CHANGES or not shape or change.how == "step":
        return None
    source = torch.Generator().manual_seed(0)  # the user's own generator stays as it is
    start = torch.rand(shape if math.prod(shape) <= LARGEST else (LARGEST,), generator=source, device="cpu") + 0.5
    operand = torch.rand(start.shape, generator=source, device="cpu") + 0.5
    op, (in_place, out_of_place) = OWN_RESULT[saved_by], CHANGES[change.op]
    return not _passes(start, operand, op, in_place) and _passes(start, operand, op, out_of_place)


def _passes(
    start: torch.Tensor,
    operand: torch.Tensor,
    op: Callable[[torch.Tensor], torch.Tensor],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> bool:
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = start.clone().requires_grad_()
        result = change(op(x), operand)
        try:
            result.sum().backward()
        except RuntimeError:
            return False
    return x.grad is not None
