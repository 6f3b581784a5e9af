"""A graph that an earlier backward has freed: which of the user's variables holds it.

After a first `backward()` the values that the derivatives need are freed. A second one through the same nodes fails.
The graph of the failing loss is still there, and so are the variables: one whose history is part of that graph, and
which by the source keeps its value from one iteration to the next, holds it. Such a variable is looked for in the
functions of the traceback, among the attributes of objects, and in closures; then where backward was called before. The
last part reads how the statements of a loop write and read a variable."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.observe.variables import MODULES_OWN, attributes, named_modules, user_variables
from nbdebug.report import Where
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    backward_roots,
    callee,
    enclosing_scopes,
    failing_node,
    insertions,
    is_freed,
    is_module,
    is_skipped,
    last_name,
    loops_around,
    loss_text,
    node_distances,
    op_of,
    own_expressions,
    package,
    reachable_functions,
    share_history,
    statements_of,
    static_value,
    targets,
    traceback_functions,
)
from nbdebug.tools.errors.autograd.in_place import changes_in_statement
from nbdebug.tools.errors.autograd.rules import BackwardTwiceFacts, GraphHolder
from nbdebug.tools.errors.context import UNKNOWN, ErrorContext, is_tensor, word_set
from nbdebug.tools.errors.rules import NOWHERE

SECOND = re.compile(r"backward through the graph a second time|already unpacked once")
ORDER = ("each", "sum", "iteration", "sometimes", "again", "attribute", "list", "once", "shared")
"""The ways to hold a graph (see `GraphHolder`), the likeliest first."""
MAX_QUERIED = 2000
"""Nodes of which is read whether they are freed, 20 microseconds each."""
NO_GRAPH = word_set(
    "print item detach float append add_scalar log info debug write format rand_like randn_like zeros_like ones_like "
    "empty_like full_like set_postfix update len isinstance str"
)
"""Calls that take a value and put none of its graph into a loss."""
INSERTS = ("append", "extend", "insert", "add", "appendleft", "update", "put")
CONTAINERS = (list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
NO_TENSORS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
"""What holds no tensor."""
Graph = dict[Any, int]


def detect(context: ErrorContext) -> BackwardTwiceFacts | None:
    """The facts of a second backward through one graph, or None where the exception is about something else."""
    if context.type not in ("RuntimeError", "CheckpointError") or not SECOND.search(context.message):
        return None
    codes, graph = traceback_functions(context), node_distances(backward_roots(context))
    loss = loss_text(context, codes)
    holders = _holders(context, codes, graph, loss)
    first_backward, first_loss = NOWHERE, ""
    shared: list[GraphHolder] = []
    for code in codes:
        where, first_loss, shared = earlier_backward(code, graph, loss)
        if where is not None:
            first_backward = where
            break
    if all(holder.how == "once" for holder in holders):
        each = _of_all_losses(codes, loss, holders)
        known = {holder.name for holder in shared}
        holders = [each] if each is not None else [*shared, *(h for h in holders if h.name not in known)]
    holders.sort(key=lambda holder: ORDER.index(holder.how))
    nodes_freed, optimizers = sum(is_freed(node) for node in list(graph)[:MAX_QUERIED]), len(context.owners.optimizers)
    return BackwardTwiceFacts(
        context.raised(), loss, tuple(holders[:6]), first_backward, first_loss, len(graph), nodes_freed, optimizers
    )


def _holders(context: ErrorContext, codes: list[FunctionSource], graph: Graph, loss: str) -> list[GraphHolder]:
    """Each variable that holds a part of the graph, once, innermost function first."""
    holders: dict[str, GraphHolder] = {}
    for code in codes:
        for holder in _in_function(code, graph, loss):
            cell = isinstance(code.node, ast.Module) and not loops_around(code, failing_node(code) or code.node)
            holders.setdefault(holder.name, dataclasses.replace(holder, cell=cell))
    for holder in _in_attributes(context, graph):
        holders.setdefault(holder.name, holder)
    for holder in _in_closures(context, graph) if not holders else ():
        holders.setdefault(holder.name, holder)
    return list(holders.values())


def _in_function(code: FunctionSource, graph: Graph, loss: str) -> Iterator[GraphHolder]:
    """Among the variables of one function of the traceback."""
    body = _repeated_body(code)
    outside = {name for s in code.statements() if isinstance(s, (ast.Global, ast.Nonlocal)) for name in s.names}
    values = dict(code.frame.names) or {
        name: value for name, value in user_variables(code.frame.globals).items() if not callable(value)
    }
    for name in outside:
        values.setdefault(name, code.frame.globals.get(name))
    used = _names_used(code)
    values |= {n: code.frame.globals[n] for n in used if n not in values and n in code.frame.globals}
    for name in [name for name in values if name in used]:
        value = values[name]
        if not _shares_graph(value, graph):
            continue
        around = code.node if name in outside and body is None else body
        if around is not None:
            holder = _in_body(code, around, name, value, graph, loss)
            if holder is not None:
                yield holder
        elif name not in code.arguments and _is_from_outside(code, name):
            yield _from_outside(code, name, value, loss)


def _from_outside(code: FunctionSource, name: str, value: Any, loss: str, read: Where = NOWHERE) -> GraphHolder:
    """The holder of a graph that was made before what runs again."""
    holder = _holder(name, "again" if name == loss else "once", value, _last_write(code, name), read)
    return dataclasses.replace(holder, made="\n".join(map(ast.unparse, _history(code, name))))


def _repeated_body(code: FunctionSource) -> Any | None:
    """What runs again and again around the failing line: the innermost loop; a cell as a whole; None for a function
    without."""
    line = failing_node(code)
    loops = loops_around(code, line) if line is not None else []
    return loops[0] if loops else code.node if isinstance(code.node, ast.Module) else None


def _is_from_outside(code: FunctionSource, name: str) -> bool:
    """Whether a function neither takes a variable nor writes it."""
    args = getattr(code.node, "args", None)
    is_parameter = name in code.positional or args is not None and any(a.arg == name for a in args.kwonlyargs)
    return not is_parameter and not writes_of(code.statements(), name)


def _in_body(code: FunctionSource, body: Any, name: str, value: Any, graph: Graph, loss: str) -> GraphHolder | None:
    """How a variable gets into the next iteration of a loop (or the next run of a cell)."""
    statements = list(statements_of(body))
    reads = reads_of(statements, name)
    carried = carry_over(code, body, name)
    if carried is not None:
        how, write, read = carried
        return _holder(name, how, value, code.where(write), code.where(read))
    if not is_tensor(value):
        insert = insert_into(statements, name)
        if insert is not None and reads:
            return _holder(name, "list", value, code.where(insert), code.where(reads[0]))
    is_loop_variable = isinstance(body, ast.For) and name in [ast.unparse(target) for target in targets(body)]
    if is_loop_variable or any(not is_skipped(s, code) for s in writes_of(statements, name)):
        return None
    for statement in statements:
        if any(ast.unparse(site.node) == name for site in changes_in_statement(statement, code)):
            return _holder(name, "iteration", value, code.where(statement), code.where(statement))
    if graph and graph.keys().isdisjoint(tensor.grad_fn for tensor in graph_tensors(value)):
        return None
    if isinstance(body, ast.Module) and not reads and name != loss:
        return None
    return _from_outside(code, name, value, loss, code.where(reads[0]) if reads else NOWHERE)


def _in_attributes(context: ErrorContext, graph: Graph) -> Iterator[GraphHolder]:
    """Attributes that keep a graph from one step to the next."""
    methods = reachable_functions(context)
    for path, thing in _objects(context):
        own = attributes(thing)
        for name, value in own.items():
            if name in MODULES_OWN or not _shares_graph(value, graph):
                continue
            places = _write_and_early_read(name, thing, methods)
            if places is not None:
                yield _holder(f"{path}.{name}", "attribute", value, *places)
        for name, value in (own.get("_buffers") or {}).items() if is_module(thing) else ():
            if _shares_graph(value, graph):
                places = _write_and_early_read(name, thing, methods) or (NOWHERE, NOWHERE)
                yield _holder(f"{path}.{name}", "attribute", value, *places)


def _objects(context: ErrorContext) -> Iterator[tuple[str, Any]]:
    """(path, object) of the modules of all models, then of the variables that are other objects."""
    visited: set[int] = set()
    for model in context.owners.models.values():
        for _, part in named_modules(model):
            if id(part) not in visited:
                visited.add(id(part))
                yield context.owners.paths.get(id(part)) or type(part).__name__, part
    for space in [frame.names for frame in context.users] + [user_variables(context.names)]:
        for name, value in space.items():
            known = id(value) in visited or is_tensor(value) or is_module(value)
            if not known and package(value) not in ("builtins", "types"):
                visited.add(id(value))
                yield name, value


def _write_and_early_read(
    name: str, thing: Any, methods: list[tuple[FunctionSource, Any]]
) -> tuple[Where, Where] | None:
    """(where an attribute gets its value, where it is read before that), None where each step computes it again."""
    text = f"self.{name}"
    all_writes: list[tuple[FunctionSource, Any]] = []
    early: list[tuple[FunctionSource, Any]] = []
    for code, _ in methods:
        if code.frame.names.get("self") is not thing:
            continue
        statements = list(code.statements())
        insert = insert_into(statements, text)
        writes = writes_of(statements, text) if insert is None else [insert]
        all_writes += [(code, statement) for statement in writes]
        first = next((s for s in writes if _is_unconditional(code, s, code.node, writes)), None)
        early += [
            (code, s)
            for s in reads_of(statements, text)
            if first is None or insert is not None or s.lineno <= first.lineno
        ]
    if not early:
        return None
    written = all_writes[-1][0].where(all_writes[-1][1]) if all_writes else NOWHERE
    return written, early[0][0].where(early[0][1])


def _in_closures(context: ErrorContext, graph: Graph) -> Iterator[GraphHolder]:
    """Variables of a closure or a file that a function which took part reads, and that were computed outside of it."""
    for code, _ in reachable_functions(context):
        for name in _names_used(code) if not isinstance(code.node, ast.Module) else ():
            value = code.frame.names.get(name, code.frame.globals.get(name))
            if is_tensor(value) and value.grad_fn in graph and _is_from_outside(code, name):
                yield _holder(name, "once", value, _last_write(code, name))


def _names_used(code: FunctionSource) -> set[str]:
    return {n.id for n in ast.walk(code.node) if isinstance(n, ast.Name)}


def _of_all_losses(codes: list[FunctionSource], loss: str, holders: list[GraphHolder]) -> GraphHolder | None:
    """`for loss in losses: loss.backward()`: what all the losses were computed from."""
    line = failing_node(codes[0]) if codes else None
    for loop in loops_around(codes[0], line) if line is not None else ():
        if isinstance(loop, ast.For) and loss in [ast.unparse(target) for target in targets(loop)]:
            losses = ast.unparse(loop.iter)
            shared = next((h for h in holders if h.how == "once" and h.name not in (losses, loss)), None)
            if shared is not None:
                return dataclasses.replace(shared, how="each", read=codes[0].where(loop))
    return None


def _holder(name: str, how: str, value: Any, write: Where, read: Where = NOWHERE) -> GraphHolder:
    tensors = graph_tensors(value)
    if not tensors:
        return GraphHolder(name, how, write=write, read=read)
    first, container = tensors[0], not is_tensor(value)
    is_object = container and type(value) not in CONTAINERS
    return GraphHolder(name, how, tuple(first.shape), op_of(first.grad_fn), write, read, container, is_object)


def graph_tensors(value: Any) -> list[Any]:
    """The tensors with a history that a variable holds: itself, those of an exact container, an object's attributes."""
    if is_tensor(value):
        return [value] if value.grad_fn is not None else []
    if type(value) in CONTAINERS:
        items: Iterable[Any] = list(value.values() if issubclass(type(value), dict) else value)[:200]
    elif is_module(value) or issubclass(type(value), NO_TENSORS):
        items = ()
    else:
        items = attributes(value).values()
    nested = (list, tuple) if type(value) in CONTAINERS else ()
    return [t for item in items if is_tensor(item) or type(item) in nested for t in graph_tensors(item)]


def _shares_graph(value: Any, graph: Graph) -> bool:
    """Whether the history of a variable and that of the loss meet."""
    tensors = graph_tensors(value)
    return bool(tensors) and (not graph or share_history(tensors, graph))


def _last_write(code: FunctionSource, name: str) -> Where:
    """Where a variable from outside got its value."""
    scope, statement = _last_statement(code, name)
    return scope.where(statement) if statement is not None else NOWHERE


def _history(code: FunctionSource, name: str, depth: int = 8) -> list[Any]:
    """The statements that gave a variable its value, and those before them whose graph is in it, the oldest first."""
    scope, statement = _last_statement(code, name)
    value = getattr(statement, "value", None)
    if value is None or not depth:
        return []
    values = {**code.frame.globals, **code.frame.names}
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - {name}
    before = [s for n in sorted(names) if graph_tensors(values.get(n)) for s in _history(scope, n, depth - 1)]
    return [*dict.fromkeys(sorted(before, key=lambda s: s.lineno)), statement]


def _last_statement(code: FunctionSource, name: str) -> tuple[FunctionSource, Any]:
    for scope in enclosing_scopes(code):
        writes = [
            s
            for s in writes_of(scope.statements(), name)
            if (scope is not code or s.lineno < code.line)
            and not is_skipped(s, scope)
            and last_name(getattr(getattr(s, "value", None), "func", None)) != "detach"
        ]
        if writes:
            return scope, writes[-1]
    return code, None


def earlier_backward(code: FunctionSource, graph: Graph, loss: str) -> tuple[Where | None, str, list[GraphHolder]]:
    """(where backward was called before in the same iteration, on what, what both losses were computed from)."""
    line = failing_node(code)
    loops = loops_around(code, line) if line is not None else []
    statements = list(statements_of(loops[0]) if loops else code.statements())
    for statement, call, inner in reversed(list(backward_calls(code, [s for s in statements if s.lineno < code.line]))):
        retains = [k.value for k in call.keywords if k.arg in ("retain_graph", "create_graph")]
        if any(isinstance(v, ast.Constant) and v.value for v in retains) or is_skipped(statement, code):
            continue
        argument = _backward_argument(call)
        text = ast.unparse(argument) if argument is not None else ""
        since = [s for s in statements if statement.lineno < s.lineno < code.line]
        value = static_value(argument, inner) if inner is code else UNKNOWN
        if inner is code and text == loss and not writes_of(since, text):
            return code.where(call), text, [_holder(text, "again", None if value is UNKNOWN else value, NOWHERE)]
        shared = _computed_from(code, graph, statement, value)
        if shared:
            return inner.where(call), text if inner is code else "", shared
    for scope in (
        list(enclosing_scopes(code))[1:] if isinstance(code.node, ast.Module) else ()
    ):  # a cell that ran before
        for _, call, inner in reversed(list(backward_calls(scope, scope.statements(), depth=0))):
            argument = _backward_argument(call)
            return inner.where(call), ast.unparse(argument) if argument is not None else "", []
    return None, "", []


def backward_calls(
    code: FunctionSource, statements: Iterable[Any], depth: int = 2
) -> Iterator[tuple[Any, ast.Call, FunctionSource]]:
    """(statement, the call of backward, the function in which it stands) among statements and what they call."""
    for statement in statements:
        for node in own_expressions(statement):
            if not isinstance(node, ast.Call):
                continue
            name = last_name(node.func)
            if name == "backward" or name == "grad" and "autograd" in ast.unparse(node.func):
                yield statement, node, code
            elif depth and (inner := callee(node, code)) is not None:
                for _, call, where in backward_calls(inner, inner.statements(), depth - 1):
                    yield statement, call, where


def _backward_argument(call: ast.Call) -> Any:
    """What a backward is called on."""
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return call.args[0] if call.args else None


def _computed_from(code: FunctionSource, graph: Graph, statement: Any, first_loss: Any) -> list[GraphHolder]:
    """The variable from which both losses were computed, nearest to the second loss."""
    first_graph = node_distances([first_loss]) if is_tensor(first_loss) else None
    in_statement = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    shared: list[tuple[int, str, Any]] = []
    for name, value in (dict(code.frame.names) or dict(user_variables(code.frame.globals))).items():
        for node in [tensor.grad_fn for tensor in graph_tensors(value)]:
            in_first = node in first_graph if first_graph is not None else name in in_statement
            if value is not first_loss and node in graph and in_first:
                shared.append((graph[node], name, value))
                break
    if not shared:
        return []
    _, name, value = min(shared, key=lambda entry: entry[0])
    reads = reads_of(code.statements(), name)
    return [_holder(name, "shared", value, _last_write(code, name), code.where(reads[0]) if reads else NOWHERE)]


def writes_of(statements: Iterable[Any], text: str) -> list[Any]:
    """The statements that give a variable (or `self.x`) its value."""
    return [
        s
        for s in statements
        if any(isinstance(t, (ast.Name, ast.Attribute)) and ast.unparse(t) == text for t in targets(s))
    ]


def reads_of(statements: Iterable[Any], text: str) -> list[Any]:
    """The statements that compute with it: not those that only print it, compare it, or take its number."""
    reads = []
    for statement in statements:
        if isinstance(statement, (ast.If, ast.While)):
            continue
        adds = isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == text
        if adds or any(
            _reads(node, text)
            for field, node in ast.iter_fields(statement)
            if field not in ("targets", "target", "body", "orelse", "handlers", "finalbody")
        ):
            reads.append(statement)
    return reads


def _reads(node: Any, text: str) -> bool:
    if isinstance(node, list):
        return any(_reads(one, text) for one in node)
    if not isinstance(node, ast.AST):
        return False
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == text:
        return True
    no_graph = ("data", "shape", "dtype", "device", "grad")
    if isinstance(node, ast.Compare) or isinstance(node, ast.Attribute) and node.attr in no_graph:
        return False
    if isinstance(node, ast.Call) and last_name(node.func) in NO_GRAPH:
        return False
    return any(_reads(child, text) for child in ast.iter_child_nodes(node))


def carry_over(code: FunctionSource, body: Any, text: str) -> tuple[str, Any, Any] | None:
    """(how, the statement that writes a variable, the one that reads it in the next iteration); None where no value of
    it gets there."""
    statements = list(statements_of(body))
    writes = [s for s in writes_of(statements, text) if not is_skipped(s, code)]
    reads = [s for s in reads_of(statements, text) if not is_skipped(s, code)]
    if not writes or not reads:
        return None
    unconditional = [s for s in writes if _is_unconditional(code, s, body, writes)]
    first = unconditional[0] if unconditional else writes[0]
    added = {id(s): s.value for s in writes if isinstance(s, ast.Assign) and isinstance(s.value, ast.BinOp)}
    added = {
        k: v for k, v in added.items() if isinstance(v.op, ast.Add) and text in map(ast.unparse, (v.left, v.right))
    }
    sums = [s for s in writes if isinstance(s, ast.AugAssign) or id(s) in added]
    if sums and not [s for s in writes if s.lineno < sums[0].lineno and s not in sums]:
        return "sum", sums[0], sums[0]
    early = [s for s in reads if s.lineno < first.lineno or s is first]
    if early:
        return "iteration", writes[-1], early[0]
    if not unconditional:
        return "sometimes", first, next((s for s in reads if s.lineno > first.lineno), reads[0])
    return None


def _is_unconditional(code: FunctionSource, statement: Any, body: Any, writes: list[Any]) -> bool:
    """Whether a statement runs in each iteration: under no condition, or with a like one in the other branch."""
    inner = statement
    for around in code.source.around(statement):
        if around is body:
            break
        if isinstance(around, ast.If):
            other = around.orelse if inner in around.body else around.body
            if not any(s is write for part in other for s in ast.walk(part) for write in writes):
                return False
        elif isinstance(around, (ast.Try, ast.ExceptHandler)):
            return False
        inner = around
    return True


def insert_into(statements: list[Any], text: str) -> Any | None:
    """The statement that puts something into a container of this name, where none of them binds a new one."""
    if writes_of(statements, text):
        return None
    return next((statement for statement, _ in insertions(statements, text, INSERTS)), None)
