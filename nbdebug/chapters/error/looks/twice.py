"""A graph that an earlier backward has freed: which of the user's variables brought it along.

After a first `backward()` the values that the derivatives need are freed. A second one through the same nodes fails. The
graph of the failing loss is still there, and so are the variables: one whose history is part of that graph, and which by
the source keeps its value from one turn to the next, is the carrier.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.facts_autograd import Carrier, TwiceFacts
from nbdebug.chapters.error.looks.calls import reached, trail
from nbdebug.chapters.error.looks.carried import (backwards, body_of, carried, filled, keeps, outside_names, reads,
                                                  within, writes)
from nbdebug.chapters.error.looks.graph import freed, nodes, op_of, roots
from nbdebug.chapters.error.looks.source import Code, calls, failing, is_module, last, loops, targets, value
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.finding import Where
from nbdebug.observe.named import MODULES_OWN, attributes, own

SECOND = re.compile(r"backward through the graph a second time|already unpacked once")
ORDER = ("sum", "turn", "sometimes", "again", "held", "list", "once", "shared")
ASKED_AT_MOST = 2000


def look(scene: Scene) -> TwiceFacts | None:
    if scene.type not in ("RuntimeError", "CheckpointError") or not SECOND.search(scene.message):
        return None
    codes, found = trail(scene), nodes(roots(scene))
    asked, text = _asked(codes[0]) if codes else (None, "")
    carriers: dict[str, Carrier] = {}
    for code in codes:
        for carrier in _in_function(code, found, text):
            carriers.setdefault(carrier.name, carrier)
    for carrier in _held(scene, found):
        carriers.setdefault(carrier.name, carrier)
    earlier, first, shared = Where(), "", []
    for code in codes:
        where, first, shared = _earlier(code, found, text)
        if where is not None:
            earlier = where
            break
    if not any(c.how != "once" for c in carriers.values()):
        for carrier in shared:
            carriers[carrier.name] = carrier
    ordered = sorted(carriers.values(), key=lambda c: ORDER.index(c.how))
    some = list(found)[:ASKED_AT_MOST]
    return TwiceFacts(scene.raised(), text, tuple(ordered[:6]), earlier, first, len(found),
                      sum(freed(node) for node in some))


def _asked(code: Code) -> tuple[Any, str]:
    """What backward was called on."""
    node = failing(code)
    for call in calls(node) if node is not None else ():
        if last(call.func) in ("backward", "grad"):
            base = call.func.value if isinstance(call.func, ast.Attribute) else None
            if call.args and (base is None or not is_tensor(value(base, code))):
                base = call.args[0]
            if base is not None:
                return base, ast.unparse(base)
    return None, ""


def tensors_of(thing: Any) -> list[Any]:
    """The tensors with a history that a variable holds: itself, or those of an exact container, one level deeper too."""
    if is_tensor(thing):
        return [thing] if thing.grad_fn is not None else []
    if type(thing) in (list, tuple, dict) or type(thing).__module__ == "collections":
        inside = list(thing.values() if isinstance(thing, dict) else thing)[:200]
        return [t for one in inside for t in (tensors_of(one) if type(one) in (list, tuple) else [one] if is_tensor(
            one) and one.grad_fn is not None else [])]
    return []


def part_of(thing: Any, found: dict[Any, int]) -> bool:
    """Whether the history of a variable and that of the loss meet."""
    mine = tensors_of(thing)
    return bool(mine) and (not found or not found.keys().isdisjoint(nodes(mine)))


def carrier(name: str, how: str, thing: Any, assigned: Where, read: Where = Where()) -> Carrier:
    mine = tensors_of(thing)
    one = mine[0] if mine else None
    return Carrier(name, how, tuple(one.shape) if one is not None else (), op_of(one.grad_fn) if one is not None else None,
                   assigned, read, freed(one.grad_fn) if one is not None else None, not is_tensor(thing))


def _in_function(code: Code, found: dict[Any, int], asked: str) -> Iterator[Carrier]:
    """Of the variables of one function of the traceback."""
    node = failing(code)
    body = body_of(code, node)
    shared = outside_names(code)
    names = dict(code.frame.names) or {k: v for k, v in own(code.frame.globals).items() if not callable(v)}
    for name in shared:
        names.setdefault(name, code.frame.globals.get(name))
    used = {n.id for s in code.statements() for n in ast.walk(s) if isinstance(n, ast.Name)}
    for name in [n for n in names if n in used]:
        thing = names[name]
        if not part_of(thing, found):
            continue
        around = code.node if name in shared and body is None else body
        here = _in_body(code, around, name, thing, found, asked) if around is not None else None
        if here is not None:
            yield here
        elif around is None and name not in code.given and not _argument(code, name) and not writes(
                list(code.statements()), name):  # of a function that is called again: a variable from outside of it
            yield carrier(name, "again" if name == asked else "once", thing, _written(code, name))


def _argument(code: Code, name: str) -> bool:
    args = getattr(code.node, "args", None)
    return args is not None and any(a.arg == name for a in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def _in_body(code: Code, body: Any, name: str, thing: Any, found: dict[Any, int], asked: str) -> Carrier | None:
    """How a variable gets into the next turn of a loop (or the next run of a cell)."""
    statements = within(body)
    how = carried(code, body, name)
    if how is not None:
        return carrier(name, how[0], thing, code.where(how[1]), code.where(how[2]))
    if not is_tensor(thing):
        put = filled(statements, name)
        if put is not None and reads(statements, name):
            return carrier(name, "list", thing, code.where(put), code.where(reads(statements, name)[0]))
    if writes(statements, name) or any(isinstance(t, ast.Name) and t.id == name for t in targets(body)):
        return None
    own_nodes = {t.grad_fn for t in tensors_of(thing)}
    if own_nodes.isdisjoint(found) and found:
        return None
    if isinstance(body, ast.Module) and not reads(statements, name) and name != asked:
        return None
    read = reads(statements, name)
    return carrier(name, "again" if name == asked else "once", thing, _written(code, name),
                   code.where(read[0]) if read else Where())


def _written(code: Code, name: str) -> Where:
    from nbdebug.chapters.error.looks.calls import outward

    for scope in outward(code):
        made = [s for s in writes(list(scope.statements()), name) if scope is not code or s.lineno < code.line]
        if made:
            return scope.where(made[-1])
    return Where()


def _held(scene: Scene, found: dict[Any, int]) -> Iterator[Carrier]:
    """Attributes that keep a graph from one step to the next."""
    methods = reached(scene)
    for path, thing in _objects(scene):
        for name, kept in attributes(thing).items():
            if name in MODULES_OWN or not part_of(kept, found):
                continue
            here = _kept(name, thing, kept, methods)
            if here is not None:
                yield carrier(f"{path}.{name}", "held", kept, *here)
        for name, kept in (attributes(thing).get("_buffers") or {}).items() if is_module(thing) else ():
            if part_of(kept, found):
                yield carrier(f"{path}.{name}", "held", kept, *(_kept(name, thing, kept, methods) or (Where(), Where())))


def _objects(scene: Scene) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for model in scene.owners.models.values():
        for part in model.modules():
            if id(part) not in seen:
                seen.add(id(part))
                yield scene.owners.paths.get(id(part)) or type(part).__name__, part
    spaces = [frame.names for frame in scene.users] + [own(scene.names)]
    for space in spaces:
        for name, thing in space.items():
            if id(thing) not in seen and not is_tensor(thing) and hasattr(type(thing), "__dict__") and type(
                    thing).__module__ not in ("builtins", "types") and not is_module(thing):
                seen.add(id(thing))
                yield name, thing


def _kept(name: str, thing: Any, kept: Any, methods: list[tuple[Code, Any]]) -> tuple[Where, Where] | None:
    """(where an attribute gets its value, where it is read before that), None where each step makes it anew."""
    text = f"self.{name}"
    written: list[tuple[Code, Any]] = []
    early: list[tuple[Code, Any]] = []
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
        sometimes = bool(made) and all(any(isinstance(n, ast.If) for n in code.source.around(s)) for s in made)
        early += [(code, s) for s in used if not made or sometimes or put is not None or s.lineno < made[0].lineno
                  or s is made[0]]
    if not early:
        return None
    made_at = written[-1][0].where(written[-1][1]) if written else Where()
    return made_at, early[0][0].where(early[0][1])


def _earlier(code: Code, found: dict[Any, int], asked: str) -> tuple[Where | None, str, list[Carrier]]:
    """(where backward was called before in the same turn, on what, what both losses were computed from)."""
    node = failing(code)
    around = loops(code, node) if node is not None else []
    statements = within(around[0]) if around else list(code.statements())
    for statement, call, where in reversed(list(backwards(code, [s for s in statements if s.lineno < code.line]))):
        if keeps(call):
            continue
        base = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else (call.args or [None])[0]
        text = ast.unparse(base) if base is not None else ""
        if where is code and text == asked and not writes(
                [s for s in statements if statement.lineno < s.lineno < code.line], text):
            lies = value(base, code)
            return where.where(call), text, [carrier(text, "again", None if lies is UNKNOWN else lies, Where())]
        first = value(base, where) if where is code else UNKNOWN
        shared = _shared(code, found, statement, first)
        if shared:
            return where.where(call), text, shared
    return None, "", []


def _shared(code: Code, found: dict[Any, int], statement: Any, first: Any) -> list[Carrier]:
    """The variables from which both losses were computed, nearest to the second loss."""
    mine = nodes([first]) if is_tensor(first) else None
    names = dict(code.frame.names) or dict(own(code.frame.globals))
    both: list[tuple[int, str, Any]] = []
    for name, thing in names.items():
        for tensor in tensors_of(thing):
            node = tensor.grad_fn
            if thing is not first and node in found and (node in mine if mine is not None else any(
                    isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement))):
                both.append((found[node], name, thing))
                break
    both.sort(key=lambda entry: entry[0])
    return [carrier(name, "shared", thing, _written(code, name)) for _, name, thing in both[:1]]
