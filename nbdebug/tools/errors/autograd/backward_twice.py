"""A graph that an earlier backward has freed: which of the user's variables brought it along.

After a first `backward()` the values that the derivatives need are freed. A second one through the same nodes fails.
The graph of the failing loss is still there, and so are the variables: one whose history is part of that graph, and
which by the source keeps its value from one turn to the next, is the carrier."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Any

from nbdebug.observe.variables import MODULES_OWN, attributes, user_variables
from nbdebug.report import Where
from nbdebug.tools.errors.autograd.calls import (
    callee,
    enclosing_scopes,
    is_skipped,
    reachable_functions,
    traceback_functions,
)
from nbdebug.tools.errors.autograd.changes import changes_in_statement
from nbdebug.tools.errors.autograd.facts import GraphHolder, TwiceFacts
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    calls_in,
    failing_node,
    is_module,
    last_name,
    loops_around,
    modules,
    own_expressions,
    package,
    static_value,
    targets,
)
from nbdebug.tools.errors.autograd.graph import asked, backward_roots, is_freed, node_distances, op_of, share_history
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.facts import NOWHERE
from nbdebug.tools.errors.values import UNKNOWN

QUIET = frozenset(
    {
        "print",
        "item",
        "detach",
        "float",
        "append",
        "add_scalar",
        "log",
        "info",
        "debug",
        "write",
        "format",
        "rand_like",
        "randn_like",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "set_postfix",
        "update",
        "len",
        "isinstance",
        "str",
    }
)
"""Calls that take a value and put none of its graph into a loss."""


def body_of(code: FunctionSource, node: Any) -> Any | None:
    """What runs again and again around a line: the innermost loop; a cell as a whole; None for a function without."""
    around = loops_around(code, node) if node is not None else []
    if around:
        return around[0]
    return code.node if isinstance(code.node, ast.Module) else None


def within(body: Any) -> list[Any]:
    """The statements of a loop's body, or of a cell."""
    found: list[Any] = []
    todo = list(reversed(body.body))
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("finalbody", "orelse", "handlers", "cases", "body"):
                todo += [n for n in reversed(getattr(node, part, None) or []) if isinstance(n, ast.AST)]
    return found


def outside_names(code: FunctionSource) -> set[str]:
    """The variables that a function shares with what is around it: global and nonlocal ones."""
    return {name for s in code.statements() if isinstance(s, (ast.Global, ast.Nonlocal)) for name in s.names}


def writes(statements: list[Any], text: str) -> list[Any]:
    """The statements that give a variable (or `self.x`) its value."""
    return [
        s
        for s in statements
        if any(isinstance(t, (ast.Name, ast.Attribute)) and ast.unparse(t) == text for t in targets(s))
    ]


def reads(statements: list[Any], text: str) -> list[Any]:
    """The statements that compute with it: not those that only print it, compare it, or take its number."""
    found = []
    for statement in statements:
        if isinstance(statement, (ast.If, ast.While)):
            continue
        counts = isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == text
        if counts or any(
            _reads(node, text)
            for field, node in ast.iter_fields(statement)
            if field not in ("targets", "target", "body", "orelse", "handlers", "finalbody")
        ):
            found.append(statement)
    return found


def _reads(node: Any, text: str) -> bool:
    if isinstance(node, list):
        return any(_reads(one, text) for one in node)
    if not isinstance(node, ast.AST):
        return False
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == text:
        return True
    if (
        isinstance(node, ast.Compare)
        or isinstance(node, ast.Attribute)
        and node.attr in ("data", "shape", "dtype", "device", "grad")
    ):
        return False
    if isinstance(node, ast.Call) and last_name(node.func) in QUIET:
        return False
    return any(_reads(child, text) for child in ast.iter_child_nodes(node))


def carried(code: FunctionSource, body: Any, text: str) -> tuple[str, Any, Any] | None:
    """(how, where it gets its value, where that is read in the next turn) of a variable; None where it is not
    carried."""
    statements = within(body)
    written = [s for s in writes(statements, text) if not is_skipped(s, code)]
    read = [s for s in reads(statements, text) if not is_skipped(s, code)]
    if not written or not read:
        return None
    steady = [s for s in written if _always(code, s, body, written)]
    first = steady[0] if steady else written[0]
    sums = [s for s in written if isinstance(s, ast.AugAssign) or isinstance(s, ast.Assign) and _adds_to(s.value, text)]
    if sums and not [s for s in written if s.lineno < sums[0].lineno and s not in sums]:
        return "sum", sums[0], sums[0]
    early = [s for s in read if s.lineno < first.lineno or s is first]
    if early:
        return "turn", written[-1], early[0]
    if not steady:
        return "sometimes", first, next((s for s in read if s.lineno > first.lineno), read[0])
    return None


def _adds_to(node: Any, text: str) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and text in (ast.unparse(node.left), ast.unparse(node.right))
    )


def _always(code: FunctionSource, statement: Any, body: Any, written: list[Any]) -> bool:
    """Whether a statement runs in each turn: under no condition, or with a like one in the other branch."""
    inner = statement
    for around in code.source.around(statement):
        if around is body:
            break
        if isinstance(around, ast.If):
            other = around.orelse if inner in around.body else around.body
            if not any(s is w for part in other for s in ast.walk(part) for w in written):
                return False
        elif isinstance(around, (ast.Try, ast.ExceptHandler)):
            return False
        inner = around
    return True


def steady(code: FunctionSource, written: list[Any]) -> list[Any]:
    """Of the statements that give something its value those that run at each call."""
    return [s for s in written if _always(code, s, code.node, written)]


def filled(statements: list[Any], text: str) -> Any | None:
    """The statement that puts something into a container of this name, where it isn't made anew among them."""
    if writes(statements, text):
        return None
    for statement in statements:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Subscript) and ast.unparse(t.value) == text for t in statement.targets
        ):
            return statement
        if isinstance(statement, ast.Expr) and any(
            last_name(call.func) in ("append", "extend", "insert", "add", "appendleft", "update", "put")
            and isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value) == text
            for call in calls_in(statement)
        ):
            return statement
    return None


def backwards(
    code: FunctionSource, statements: list[Any], depth: int = 2
) -> Iterator[tuple[Any, ast.Call, FunctionSource]]:
    """(statement, the call of backward, the function in which it stands) among statements and what they call."""
    for statement in statements:
        for node in own_expressions(statement):
            if not isinstance(node, ast.Call):
                continue
            if (
                last_name(node.func) == "backward"
                or last_name(node.func) == "grad"
                and "autograd" in ast.unparse(node.func)
            ):
                yield statement, node, code
            elif depth and (inner := callee(node, code)) is not None:
                for _, call, where in backwards(inner, list(inner.statements()), depth - 1):
                    yield statement, call, where


def keeps(call: ast.Call) -> bool:
    """Whether a backward keeps its graph."""
    return any(
        k.arg in ("retain_graph", "create_graph") and isinstance(k.value, ast.Constant) and k.value.value
        for k in call.keywords
    )


CONTAINERS = (list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
PLAIN = (
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


def tensors_of(thing: Any) -> list[Any]:
    """The tensors with a history that a variable holds: itself, those of an exact container, an object's attributes."""
    if is_tensor(thing):
        return [thing] if thing.grad_fn is not None else []
    if type(thing) in CONTAINERS:
        inside = list(thing.values() if issubclass(type(thing), dict) else thing)[:200]
        return [t for one in inside for t in (tensors_of(one) if type(one) in (list, tuple) else _one(one))]
    if is_module(thing) or issubclass(type(thing), PLAIN):
        return []
    return [t for one in attributes(thing).values() for t in _one(one)]


def _one(thing: Any) -> list[Any]:
    return [thing] if is_tensor(thing) and thing.grad_fn is not None else []


def part_of(thing: Any, found: dict[Any, int]) -> bool:
    """Whether the history of a variable and that of the loss meet."""
    mine = tensors_of(thing)
    return bool(mine) and (not found or share_history(mine, found))


def carrier(name: str, how: str, thing: Any, assigned: Where, read: Where = NOWHERE) -> GraphHolder:
    mine = tensors_of(thing)
    one = mine[0] if mine else None
    if one is None:
        return GraphHolder(name, how, assigned=assigned, read=read)
    return GraphHolder(
        name,
        how,
        tuple(one.shape),
        op_of(one.grad_fn),
        assigned,
        read,
        is_freed(one.grad_fn),
        not is_tensor(thing),
        not is_tensor(thing) and type(thing) not in CONTAINERS,
    )


def written(code: FunctionSource, name: str) -> Where:
    for scope in enclosing_scopes(code):
        made = [
            s
            for s in writes(list(scope.statements()), name)
            if (scope is not code or s.lineno < code.line)
            and not is_skipped(s, scope)
            and last_name(getattr(getattr(s, "value", None), "func", None)) != "detach"
        ]
        if made:
            return scope.where(made[-1])
    return NOWHERE


def earlier_backward(
    code: FunctionSource, found: dict[Any, int], loss: str
) -> tuple[Where | None, str, list[GraphHolder]]:
    """(where backward was called before in the same turn, on what, what both losses were computed from)."""
    node = failing_node(code)
    around = loops_around(code, node) if node is not None else []
    statements = within(around[0]) if around else list(code.statements())
    for statement, call, where in reversed(list(backwards(code, [s for s in statements if s.lineno < code.line]))):
        if keeps(call) or is_skipped(statement, code):
            continue
        base, text = _called_on(call), _root_of(call)
        if (
            where is code
            and text == loss
            and not writes([s for s in statements if statement.lineno < s.lineno < code.line], text)
        ):
            lies = static_value(base, code)
            return where.where(call), text, [carrier(text, "again", None if lies is UNKNOWN else lies, NOWHERE)]
        first = static_value(base, where) if where is code else UNKNOWN
        shared = _shared(code, found, statement, first)
        if shared:
            return where.where(call), text if where is code else "", shared
    for scope in (
        list(enclosing_scopes(code))[1:] if isinstance(code.node, ast.Module) else ()
    ):  # another cell, that ran before
        for _, call, where in reversed(list(backwards(scope, list(scope.statements()), depth=0))):
            return where.where(call), _root_of(call), []
    return None, "", []


def _called_on(call: ast.Call) -> Any:
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return call.args[0] if call.args else None


def _root_of(call: ast.Call) -> str:
    """What a backward is called on, as it is written."""
    base = _called_on(call)
    return ast.unparse(base) if base is not None else ""


def _shared(code: FunctionSource, found: dict[Any, int], statement: Any, first: Any) -> list[GraphHolder]:
    """The variables from which both losses were computed, nearest to the second loss."""
    mine = node_distances([first]) if is_tensor(first) else None
    names = dict(code.frame.names) or dict(user_variables(code.frame.globals))
    both: list[tuple[int, str, Any]] = []
    for name, thing in names.items():
        for tensor in tensors_of(thing):
            node = tensor.grad_fn
            if (
                thing is not first
                and node in found
                and (
                    node in mine
                    if mine is not None
                    else any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement))
                )
            ):
                both.append((found[node], name, thing))
                break
    both.sort(key=lambda entry: entry[0])
    around = list(code.statements())
    return [
        carrier(
            name,
            "shared",
            thing,
            written(code, name),
            code.where(read[0]) if (read := reads(around, name)) else NOWHERE,
        )
        for _, name, thing in both[:1]
    ]


SECOND = re.compile(r"backward through the graph a second time|already unpacked once")
ORDER = ("each", "sum", "turn", "sometimes", "again", "held", "list", "once", "shared")
ASKED_AT_MOST = 2000


def look(scene: ErrorContext) -> TwiceFacts | None:
    if scene.type not in ("RuntimeError", "CheckpointError") or not SECOND.search(scene.message):
        return None
    codes, found = traceback_functions(scene), node_distances(backward_roots(scene))
    of = asked(scene, codes[0], "loss") if codes else None
    text = ast.unparse(of) if of is not None else ""
    carriers = _carriers(scene, codes, found, text)
    earlier, first = NOWHERE, ""
    shared: list[GraphHolder] = []
    for code in codes:
        where, first, shared = earlier_backward(code, found, text)
        if where is not None:
            earlier = where
            break
    if all(c.how == "once" for c in carriers):
        each = _each(codes, text, carriers)
        known = {c.name for c in shared}
        carriers = [each] if each is not None else [*shared, *(c for c in carriers if c.name not in known)]
    ordered = sorted(carriers, key=lambda c: ORDER.index(c.how))
    return TwiceFacts(
        scene.raised(),
        text,
        tuple(ordered[:6]),
        earlier,
        first,
        len(found),
        sum(is_freed(node) for node in list(found)[:ASKED_AT_MOST]),
        len(scene.owners.optimizers),
    )


def _carriers(scene: ErrorContext, codes: list[FunctionSource], found: dict[Any, int], loss: str) -> list[GraphHolder]:
    """Each variable that brings a graph along, once, innermost function first."""
    carriers: dict[str, GraphHolder] = {}
    for code in codes:
        for one in _in_function(code, found, loss):
            cell = isinstance(code.node, ast.Module) and not loops_around(code, failing_node(code) or code.node)
            carriers.setdefault(one.name, dataclasses.replace(one, cell=cell))
    for one in _held(scene, found):
        carriers.setdefault(one.name, one)
    for one in _around(scene, found) if not carriers else ():
        carriers.setdefault(one.name, one)
    return list(carriers.values())


def _in_function(code: FunctionSource, found: dict[Any, int], loss: str) -> Iterator[GraphHolder]:
    """Of the variables of one function of the traceback."""
    node = failing_node(code)
    body = body_of(code, node)
    shared = outside_names(code)
    names = dict(code.frame.names) or {k: v for k, v in user_variables(code.frame.globals).items() if not callable(v)}
    for name in shared:
        names.setdefault(name, code.frame.globals.get(name))
    used = _used(code)
    names |= {n: code.frame.globals[n] for n in used if n not in names and n in code.frame.globals}
    for name in [n for n in names if n in used]:
        thing = names[name]
        if not part_of(thing, found):
            continue
        around = code.node if name in shared and body is None else body
        here = _in_body(code, around, name, thing, found, loss) if around is not None else None
        if here is not None:
            yield here
        elif (
            around is None
            and name not in code.given
            and not _argument(code, name)
            and not writes(list(code.statements()), name)
        ):  # of a function that is called again: a variable from outside of it
            yield carrier(name, "again" if name == loss else "once", thing, written(code, name))


def _each(codes: list[FunctionSource], loss: str, carriers: list[GraphHolder]) -> GraphHolder | None:
    """`for loss in losses: loss.backward()`: what several losses were computed from, in one carrier."""
    for code in codes[:1]:
        for loop in loops_around(code, failing_node(code)) if failing_node(code) is not None else []:
            if isinstance(loop, ast.For) and loss in [ast.unparse(t) for t in targets(loop)]:
                over = ast.unparse(loop.iter)
                shared = next((c for c in carriers if c.how == "once" and c.name not in (over, loss)), None)
                if shared is not None:
                    return dataclasses.replace(shared, how="each", read=code.where(loop))
    return None


def _around(scene: ErrorContext, found: dict[Any, int]) -> Iterator[GraphHolder]:
    """Variables of a closure or a file that a function which took part reads, and that were computed outside of it."""
    for code, _ in reachable_functions(scene):
        for name in _used(code) if not isinstance(code.node, ast.Module) else ():
            thing = code.frame.names.get(name, code.frame.globals.get(name))
            if (
                is_tensor(thing)
                and thing.grad_fn in found
                and not _argument(code, name)
                and not writes(list(code.statements()), name)
            ):
                yield carrier(name, "once", thing, written(code, name))


def _used(code: FunctionSource) -> set[str]:
    return {n.id for n in ast.walk(code.node) if isinstance(n, ast.Name)}


def _argument(code: FunctionSource, name: str) -> bool:
    args = getattr(code.node, "args", None)
    return args is not None and any(a.arg == name for a in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def _in_body(
    code: FunctionSource, body: Any, name: str, thing: Any, found: dict[Any, int], loss: str
) -> GraphHolder | None:
    """How a variable gets into the next turn of a loop (or the next run of a cell)."""
    statements = within(body)
    how = carried(code, body, name)
    if how is not None:
        return carrier(name, how[0], thing, code.where(how[1]), code.where(how[2]))
    if not is_tensor(thing):
        put = filled(statements, name)
        if put is not None and reads(statements, name):
            return carrier(name, "list", thing, code.where(put), code.where(reads(statements, name)[0]))
    drawn = name in [ast.unparse(t) for t in targets(body)] if isinstance(body, ast.For) else False
    if drawn or any(not is_skipped(s, code) for s in writes(statements, name)):
        return None
    changed = next(
        (one for s in statements for one in changes_in_statement(s, code) if ast.unparse(one.node) == name), None
    )
    if changed is not None:
        return carrier(name, "turn", thing, code.where(changed.statement), code.where(changed.statement))
    own_nodes = {t.grad_fn for t in tensors_of(thing)}
    if own_nodes.isdisjoint(found) and found:
        return None
    if isinstance(body, ast.Module) and not reads(statements, name) and name != loss:
        return None
    read = reads(statements, name)
    return carrier(
        name, "again" if name == loss else "once", thing, written(code, name), code.where(read[0]) if read else NOWHERE
    )


def _held(scene: ErrorContext, found: dict[Any, int]) -> Iterator[GraphHolder]:
    """Attributes that keep a graph from one step to the next."""
    methods = reachable_functions(scene)
    for path, thing in _objects(scene):
        for name, kept in attributes(thing).items():
            if name in MODULES_OWN or not part_of(kept, found):
                continue
            here = _kept(name, thing, kept, methods)
            if here is not None:
                yield carrier(f"{path}.{name}", "held", kept, *here)
        for name, kept in (attributes(thing).get("_buffers") or {}).items() if is_module(thing) else ():
            if part_of(kept, found):
                places = _kept(name, thing, kept, methods) or (NOWHERE, NOWHERE)
                yield carrier(f"{path}.{name}", "held", kept, *places)


def _objects(scene: ErrorContext) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for model in scene.owners.models.values():
        for part in modules(model):
            if id(part) not in seen:
                seen.add(id(part))
                yield scene.owners.paths.get(id(part)) or type(part).__name__, part
    spaces = [frame.names for frame in scene.users] + [user_variables(scene.names)]
    for space in spaces:
        for name, thing in space.items():
            known = id(thing) in seen or is_tensor(thing) or is_module(thing)
            if not known and package(thing) not in ("builtins", "types"):
                seen.add(id(thing))
                yield name, thing


def _kept(name: str, thing: Any, kept: Any, methods: list[tuple[FunctionSource, Any]]) -> tuple[Where, Where] | None:
    """(where an attribute gets its value, where it is read before that), None where each step makes it anew."""
    text = f"self.{name}"
    written: list[tuple[FunctionSource, Any]] = []
    early: list[tuple[FunctionSource, Any]] = []
    for code, _ in methods:
        mine = code.frame.names.get("self")
        if mine is not thing:
            continue
        statements = list(code.statements())
        made, used = writes(statements, text), reads(statements, text)
        put = filled(statements, text)
        if put is not None:
            made = [put]
        written += [(code, s) for s in made]
        first = next(iter(steady(code, made)), None)
        early += [(code, s) for s in used if first is None or put is not None or s.lineno <= first.lineno]
    if not early:
        return None
    made_at = written[-1][0].where(written[-1][1]) if written else NOWHERE
    return made_at, early[0][0].where(early[0][1])
