"""Objects of an earlier definition of their class: a cell that ran again, or a reload, has defined it again.

The name then refers to the new class. The old objects keep the old methods; `isinstance`, `super(Net, self)`, pickle
and comparisons of enum members no longer accept them.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping
from typing import Any

from nbdebug.observe.locations import code_fingerprint
from nbdebug.observe.variables import is_user_module
from nbdebug.tools.notebook.cells import (
    At,
    CellBinding,
    CellHistory,
    dotted,
    error_message,
    first_read,
    names_in,
    nodes,
    root_of,
    traceback_links,
)
from nbdebug.tools.notebook.facts import NOWHERE, Redefined
from nbdebug.tools.notebook.stale_modules import functions_of

_PLAIN = (str, int, float, bool, type(None))


def redefined_classes(
    names: Mapping[str, Any], things: list[tuple[str, Any]], history: CellHistory, error: BaseException | None
) -> list[Redefined]:
    """One entry for each class that has objects or subclasses and whose name now refers to another class. things: what
    the variables lead to, by name."""
    objects: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    children: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    current: dict[tuple[str, str], type] = {}
    alive: set[int] = set()
    for name, thing in things:
        kind = thing if issubclass(type(thing), type) else type(thing)
        own = issubclass(type(thing), type)
        alive.add(0 if own else id(kind))
        for parent in type.__getattribute__(kind, "__mro__"):
            now = _current_class(parent, names)
            if now is None or now is parent or own and parent is kind and name.isidentifier():
                continue  # a second name for a class, given on purpose
            key = (str(type.__getattribute__(parent, "__module__")), parent.__name__)
            current[key] = now
            into = objects if parent is kind and not own else children
            into.setdefault(key, []).append((name, parent))
    return [
        _redefined(key, now, objects.get(key) or children[key], key not in objects, id(now) in alive, history, error)
        for key, now in current.items()
    ]


def _current_class(kind: type, names: Mapping[str, Any]) -> type | None:
    """The class that the name of this class refers to now; None where that is not known."""
    module = str(type.__getattribute__(kind, "__module__"))
    name = type.__getattribute__(kind, "__dict__").get("__qualname__", kind.__qualname__)
    if "." in str(name) or not is_user_module(module):
        return None
    loaded = sys.modules.get(module)
    space = names if module == "__main__" else vars(loaded) if type(loaded) is types.ModuleType else {}
    now = space.get(str(name))
    if not issubclass(type(now), type) or type.__getattribute__(now, "__module__") != module:
        return None
    return now if type.__getattribute__(now, "__qualname__") == name else None


def _redefined(
    key: tuple[str, str],
    now: type,
    mine: list[tuple[str, Any]],
    subclasses: bool,
    renewed: bool,
    history: CellHistory,
    error: BaseException | None,
) -> Redefined:
    module, name = key
    instances = tuple(dict.fromkeys(instance for instance, _ in mine))
    created = [b for b in history.bindings(root_of(instances[0])) if b.how in ("assign", "class", "for")]
    creation = created[-1] if created else None
    defined = _definitions(name, history) if module == "__main__" else _reloads(module, history)
    old = _old_definition(mine[0][1], defined, creation, history)
    after = [b for b in defined if old is not None and b.at > old.at] or defined[-1:]
    new = after[0] if after else None
    at = new.at if new is not None else (0, 0)
    changed = _differences(mine[0][1], now)
    roots = {root_of(instance) for instance in instances[:8]}
    evidence = "exception" if (message := _exception_evidence(name, error)) else ""
    direct = False
    if not evidence and new is not None:
        evidence, direct = _class_use(name, at, roots, history)
    used = evidence == "exception" or any(first_read(history, root, at) is not None for root in roots)
    return Redefined(
        name,
        instances,
        tuple(changed),
        subclasses,
        renewed and not direct,
        evidence,
        message,
        used,
        history.text(creation) if creation is not None else "",
        module,
        history.place(new) if new is not None else NOWHERE,
        history.place(old) if old is not None else NOWHERE,
        history.place(creation) if creation is not None else NOWHERE,
    )


MAKES = frozenset({"namedtuple", "NamedTuple", "make_dataclass", "Enum", "IntEnum", "TypedDict", "type"})
"""Functions that make a class."""


def _definitions(name: str, history: CellHistory) -> list[CellBinding]:
    """The class statements of this name, and what makes a class without one: `Batch = namedtuple("Batch", "x y")`."""
    return [
        b
        for b in history.bindings(name, "class", "assign")
        if b.how == "class" or isinstance(b.value, ast.Call) and dotted(b.value.func).rpartition(".")[2] in MAKES
    ]


def _old_definition(
    kind: Any, defined: list[CellBinding], creation: CellBinding | None, history: CellHistory
) -> CellBinding | None:
    """The definition of the old class: the cell in which its methods are, or else the last one before the object was
    created."""
    for thing in type.__getattribute__(kind, "__dict__").values():
        if type(thing) is types.FunctionType and (number := history.cell_of(thing.__code__.co_filename)) is not None:
            exact = thing.__code__.co_filename.startswith("<ipython-input-")
            runs = {number} if exact else set(history.same(number))
            mine = [b for b in defined if b.number in runs]
            earlier = [b for b in mine if creation is None or b.at <= creation.at]
            if mine:
                return mine[-1] if exact else earlier[-1] if earlier else mine[0]
    earlier = [b for b in defined if creation is not None and b.at <= creation.at]
    return earlier[-1] if earlier else None


def _reloads(module: str, history: CellHistory) -> list[CellBinding]:
    """The statements that import the module or reload it."""
    last = module.rpartition(".")[2]
    return [
        CellBinding(cell.number, last, "import", s, None)
        for cell in history.mentioning(last)
        for s in cell.statements
        if last in ast.unparse(s) and ("reload" in ast.unparse(s) or isinstance(s, (ast.Import, ast.ImportFrom)))
    ]


def _differences(old: Any, new: Any) -> list[str]:
    """The methods and plain attributes in which two classes of one name differ."""
    texts: list[dict[str, list[Any]]] = []
    for kind in (old, new):
        files = {
            f.__code__.co_filename
            for f in type.__getattribute__(kind, "__dict__").values()
            if type(f) is types.FunctionType
        }
        fingerprints: dict[str, list[Any]] = {}
        for label, code in functions_of(kind, ""):
            if code.co_filename in files:
                fingerprints.setdefault(label.strip("."), []).append(code_fingerprint(code))
        texts.append(fingerprints)
    before, after = texts
    plain = [
        {
            key: repr(value)
            for key, value in type.__getattribute__(kind, "__dict__").items()
            if type(value) in _PLAIN and not key.startswith("__")
        }
        for kind in (old, new)
    ]
    return [
        name
        for name in {**before, **after, **plain[0], **plain[1]}
        if before.get(name) != after.get(name) or plain[0].get(name) != plain[1].get(name)
    ]


def _exception_evidence(name: str, error: BaseException | None) -> str:
    """The message of the last exception, if an object of an earlier definition causes such a one; else ""."""
    message = error_message(error)
    if "not the same object as" in message and f".{name}" in message:
        return message
    if "obj must be an instance or subtype of type" in message or "is not an instance or subtype of type" in message:
        return message if name in _names_read(error) else ""
    return ""


def _names_read(error: BaseException | None) -> set[str]:
    """The names that the code of the innermost frame reads."""
    links = list(traceback_links(error))
    if not links:
        return set()
    code = links[-1].tb_frame.f_code
    return {*code.co_names, *code.co_freevars, str(getattr(code, "co_qualname", "")).partition(".")[0]}


def _class_use(name: str, at: At, roots: set[str], history: CellHistory) -> tuple[str, bool]:
    """How a cell that ran after the new definition uses the class: "isinstance", "super" or "pickle"; and whether the
    same statement is about one of the old objects."""
    first = ""
    for _, root, own in history.after(at, name, "pickle"):
        about = own and any(isinstance(n, ast.Name) and n.id in roots for n in nodes([root]))
        for how in filter(None, (_class_check(node, name) for node in nodes([root]))):
            if about:
                return how, True
            first = first or how
    return first, False


def _class_check(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.Call):
        function = dotted(node.func)
        names = set().union(*(names_in(arg) for arg in node.args)) if node.args else set()
        if function in ("isinstance", "issubclass") and name in names:
            return "isinstance"
        if function == "super" and name in names:
            return "super"
        if function.rpartition(".")[2] in ("dump", "dumps") and "pickle" in function:
            return "pickle"
    if (
        isinstance(node, ast.Compare)
        and name in names_in(node)
        and any(isinstance(op, (ast.Is, ast.Eq, ast.IsNot, ast.NotEq, ast.In)) for op in node.ops)
    ):
        return "isinstance"
    kind = node.type if isinstance(node, ast.ExceptHandler) else node.cls if isinstance(node, ast.MatchClass) else None
    return "isinstance" if kind is not None and name in names_in(kind) else ""
