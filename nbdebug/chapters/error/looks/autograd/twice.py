"""A graph that an earlier backward has freed: which of the user's variables brought it along.

After a first `backward()` the values that the derivatives need are freed. A second one through the same nodes fails.
The graph of the failing loss is still there, and so are the variables: one whose history is part of that graph, and
which by the source keeps its value from one turn to the next, is the carrier."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.facts import NOWHERE
from nbdebug.chapters.error.facts_autograd import Carrier, TwiceFacts
from nbdebug.chapters.error.looks.autograd.calls import reached, trail
from nbdebug.chapters.error.looks.autograd.carried import (
    body_of,
    carried,
    filled,
    outside_names,
    reads,
    steady,
    within,
    writes,
)
from nbdebug.chapters.error.looks.autograd.carriers import carrier, part_of, tensors_of, written
from nbdebug.chapters.error.looks.autograd.changes import of_statement
from nbdebug.chapters.error.looks.autograd.earlier import earlier_backward
from nbdebug.chapters.error.looks.autograd.graph import freed, nodes, roots
from nbdebug.chapters.error.looks.autograd.held import is_module, modules, package
from nbdebug.chapters.error.looks.autograd.parts import skipped
from nbdebug.chapters.error.looks.autograd.source import Code, failing, loops, targets
from nbdebug.chapters.error.looks.autograd.wanting import asked
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.finding import Where
from nbdebug.observe.named import MODULES_OWN, attributes, own

SECOND = re.compile(r"backward through the graph a second time|already unpacked once")
ORDER = ("each", "sum", "turn", "sometimes", "again", "held", "list", "once", "shared")
ASKED_AT_MOST = 2000


def look(scene: Scene) -> TwiceFacts | None:
    if scene.type not in ("RuntimeError", "CheckpointError") or not SECOND.search(scene.message):
        return None
    codes, found = trail(scene), nodes(roots(scene))
    of = asked(scene, codes[0], "loss") if codes else None
    text = ast.unparse(of) if of is not None else ""
    carriers = _carriers(scene, codes, found, text)
    earlier, first = NOWHERE, ""
    shared: list[Carrier] = []
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
        sum(freed(node) for node in list(found)[:ASKED_AT_MOST]),
        len(scene.owners.optimizers),
    )


def _carriers(scene: Scene, codes: list[Code], found: dict[Any, int], loss: str) -> list[Carrier]:
    """Each variable that brings a graph along, once, innermost function first."""
    carriers: dict[str, Carrier] = {}
    for code in codes:
        for one in _in_function(code, found, loss):
            cell = isinstance(code.node, ast.Module) and not loops(code, failing(code) or code.node)
            carriers.setdefault(one.name, dataclasses.replace(one, cell=cell))
    for one in _held(scene, found):
        carriers.setdefault(one.name, one)
    for one in _around(scene, found) if not carriers else ():
        carriers.setdefault(one.name, one)
    return list(carriers.values())


def _in_function(code: Code, found: dict[Any, int], loss: str) -> Iterator[Carrier]:
    """Of the variables of one function of the traceback."""
    node = failing(code)
    body = body_of(code, node)
    shared = outside_names(code)
    names = dict(code.frame.names) or {k: v for k, v in own(code.frame.globals).items() if not callable(v)}
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


def _each(codes: list[Code], loss: str, carriers: list[Carrier]) -> Carrier | None:
    """`for loss in losses: loss.backward()`: what several losses were computed from, in one carrier."""
    for code in codes[:1]:
        for loop in loops(code, failing(code)) if failing(code) is not None else []:
            if isinstance(loop, ast.For) and loss in [ast.unparse(t) for t in targets(loop)]:
                over = ast.unparse(loop.iter)
                shared = next((c for c in carriers if c.how == "once" and c.name not in (over, loss)), None)
                if shared is not None:
                    return dataclasses.replace(shared, how="each", read=code.where(loop))
    return None


def _around(scene: Scene, found: dict[Any, int]) -> Iterator[Carrier]:
    """Variables of a closure or a file that a function which took part reads, and that were computed outside of it."""
    for code, _ in reached(scene):
        for name in _used(code) if not isinstance(code.node, ast.Module) else ():
            thing = code.frame.names.get(name, code.frame.globals.get(name))
            if (
                is_tensor(thing)
                and thing.grad_fn in found
                and not _argument(code, name)
                and not writes(list(code.statements()), name)
            ):
                yield carrier(name, "once", thing, written(code, name))


def _used(code: Code) -> set[str]:
    return {n.id for n in ast.walk(code.node) if isinstance(n, ast.Name)}


def _argument(code: Code, name: str) -> bool:
    args = getattr(code.node, "args", None)
    return args is not None and any(a.arg == name for a in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def _in_body(code: Code, body: Any, name: str, thing: Any, found: dict[Any, int], loss: str) -> Carrier | None:
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
    if drawn or any(not skipped(s, code) for s in writes(statements, name)):
        return None
    changed = next((one for s in statements for one in of_statement(s, code) if ast.unparse(one.node) == name), None)
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
                places = _kept(name, thing, kept, methods) or (NOWHERE, NOWHERE)
                yield carrier(f"{path}.{name}", "held", kept, *places)


def _objects(scene: Scene) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for model in scene.owners.models.values():
        for part in modules(model):
            if id(part) not in seen:
                seen.add(id(part))
                yield scene.owners.paths.get(id(part)) or type(part).__name__, part
    spaces = [frame.names for frame in scene.users] + [own(scene.names)]
    for space in spaces:
        for name, thing in space.items():
            known = id(thing) in seen or is_tensor(thing) or is_module(thing)
            if not known and package(thing) not in ("builtins", "types"):
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
        first = next(iter(steady(code, made)), None)
        early += [(code, s) for s in used if first is None or put is not None or s.lineno <= first.lineno]
    if not early:
        return None
    made_at = written[-1][0].where(written[-1][1]) if written else NOWHERE
    return made_at, early[0][0].where(early[0][1])
