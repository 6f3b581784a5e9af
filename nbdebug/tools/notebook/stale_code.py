"""Code that is not what its file, or its name, says by now.

A module whose file was edited after Python loaded it, with the cell that imported the old version. And objects of an
earlier definition of their class: a cell that ran again, or a reload, has defined it again. The name then refers to the
new class. The old objects keep the old methods; `isinstance`, `super(Net, self)`, pickle, comparisons of enum members
and tables with classes as keys no longer accept them. And results of earlier code: of a file, a memo, a guard.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple

from nbdebug.observe.locations import code_fingerprint, edited_since_import, same_code
from nbdebug.observe.variables import closure_variables, is_user_module, user_variables
from nbdebug.report import Where
from nbdebug.text import module_name
from nbdebug.tools.notebook.cells import (
    DEFINED,
    FUNCTIONS,
    At,
    Cell,
    CellBinding,
    CellHistory,
    arguments_of,
    dotted,
    error_message,
    first_read,
    names_in,
    nodes,
    read_by,
    root_of,
    running,
    traceback_links,
)
from nbdebug.tools.notebook.rules import NOWHERE, Redefined, StaleModule, Told, named, told

SLACK = 2.0
"""Seconds: clocks of file systems are coarse."""
_SIMPLE = (int, float, str, bool, bytes, type(None))


@functools.lru_cache(maxsize=1024)
def _compiled(file: str, modified: int, size: int) -> tuple[ast.Module, dict[str, list[types.CodeType]]]:
    """The syntax tree of a file, and its functions by name, as of the time when it was last written."""
    with open(file, "rb") as opened:
        source = opened.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source, file)
        todo, codes = [compile(tree, file, "exec", dont_inherit=True)], dict[str, list[types.CodeType]]()
    while todo:
        for inner in todo.pop().co_consts:
            if isinstance(inner, types.CodeType):
                codes.setdefault(inner.co_name, []).append(inner)
                todo.append(inner)
    return tree, codes


class EditedModule:
    """A module of the user's whose file was written after the process started. codes: the functions in the file, by
    name."""

    def __init__(self, module: types.ModuleType, file: str) -> None:
        """Raises SyntaxError, ValueError or OSError where the file can't be compiled."""
        self.module, self.file, self.name = module, file, str(vars(module).get("__name__", ""))
        status = os.stat(file)
        self.tree, self.codes = _compiled(file, status.st_mtime_ns, status.st_size)

    def holds(self, code: types.CodeType) -> bool:
        """Whether a function with this code is in the file now."""
        return any(same_code(code, other) for other in self.codes.get(code.co_name, ()))

    def old(self, thing: Any, name: str) -> list[str]:
        """The functions of a function or class that were loaded from the file and are not in it now."""
        functions = functions_of(thing, name)
        return [label for label, code in functions if code.co_filename == self.file and not self.holds(code)]

    @functools.cached_property
    def changed(self) -> list[str]:
        """What differs between the loaded module and its file: functions and constants, changed or added."""
        own = vars(self.module)
        names = [
            label for name, thing in list(own.items()) if self._from_here(thing) for label in self.old(thing, name)
        ]
        names += self._added(self.tree.body, own, "")
        constants = self._constants()
        if constants and (names or edited_since_import(self.file)):
            names += constants
        return list(dict.fromkeys(names))

    def _from_here(self, thing: Any) -> bool:
        kind, own = type(thing), vars(self.module)
        if kind is types.FunctionType and thing.__code__.co_filename == self.file and thing.__globals__ is not own:
            return False  # made from text by a decorator (of hypothesis), which gives it the file's name
        return (
            kind is types.FunctionType
            or hasattr_own(thing, "__wrapped__")
            or (issubclass(kind, type) and type.__getattribute__(thing, "__module__") == self.name)
        )

    def _added(self, body: list[ast.stmt], loaded: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Functions and classes of the file that the loaded module lacks."""
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.decorator_list:
                continue
            if node.name not in loaded and not node.name.startswith("__"):
                if node.name not in self._deleted:
                    yield prefix + node.name
            elif isinstance(node, ast.ClassDef) and not prefix and issubclass(type(loaded.get(node.name)), type):
                kind = loaded[node.name]
                if type.__getattribute__(kind, "__module__") == self.name:
                    yield from self._added(node.body, type.__getattribute__(kind, "__dict__"), f"{node.name}.")

    @functools.cached_property
    def _deleted(self) -> set[str]:
        return {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)}

    def _constants(self) -> list[str]:
        """Plain constants that the file sets once, and that have another value in the loaded module."""
        assigned: dict[str, list[ast.expr]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        assigned.setdefault(target.id, []).append(node.value)
        own, names = vars(self.module), []
        for name, values in assigned.items():
            try:
                value = ast.literal_eval(values[0])
            except (ValueError, SyntaxError, TypeError):
                continue
            loaded = own.get(name)
            if (
                len(values) == 1
                and name in own
                and type(value) in _SIMPLE
                and type(loaded) in _SIMPLE
                and repr(value) != repr(loaded)
            ):
                names.append(name)
        if not names:
            return []
        shared = {name for n in ast.walk(self.tree) if isinstance(n, ast.Global) for name in n.names}
        return [name for name in names if name not in shared]


def edited_modules(since: float) -> tuple[list[EditedModule], list[str]]:
    """The user's loaded modules whose files were written since then (seconds since the epoch), and the files among them
    that can't be compiled now."""
    edited, broken = [], []
    for name, module in list(sys.modules.items()):
        if type(module) is not types.ModuleType or name == "__main__" or not is_user_module(name):
            continue
        file = vars(module).get("__file__")
        if type(file) is not str or not file.endswith(".py") or vars(module).get("__name__") != name:
            continue
        if type(getattr(vars(module).get("__spec__"), "loader", None)) is not SourceFileLoader:
            continue  # another loader (of pytest, of a type checker) compiles something else than the file
        try:
            status = os.stat(file)
            if max(status.st_mtime, status.st_ctime) < since - SLACK:
                continue
            edited.append(EditedModule(module, file))
        except OSError:  # it is gone: nothing to compare with
            continue
        except (SyntaxError, ValueError):
            broken.append(os.path.basename(file))
    return edited, broken


def functions_of(thing: Any, name: str) -> Iterator[tuple[str, types.CodeType]]:
    """(name to show, code) of the functions inside a function or a class."""
    todo, visited = [(name, thing)], set[int]()
    while todo and len(visited) < 2000:
        label, now = todo.pop(0)
        if id(now) in visited:
            continue
        visited.add(id(now))
        if type(now) is types.FunctionType:
            yield label, now.__code__
            inside = closure_variables(now).values()
            todo += [(label, value) for value in inside if type(value) is types.FunctionType]
        elif type(now) in (staticmethod, classmethod):
            todo.append((label, now.__func__))
        elif type(now) is property:
            todo += [(label, part) for part in (now.fget, now.fset, now.fdel) if part is not None]
        elif type(now) is functools.cached_property:
            todo.append((label, now.func))
        elif issubclass(type(now), type) and now is thing:
            todo += [(f"{label}.{key}", part) for key, part in type.__getattribute__(now, "__dict__").items()]
        if hasattr_own(now, "__wrapped__"):
            todo.append((label, now.__dict__["__wrapped__"]))


def hasattr_own(thing: Any, name: str) -> bool:
    """Whether a function, or the result of `functools.lru_cache`, has this attribute of its own."""
    kind = type(thing)
    return (kind is types.FunctionType or kind is functools._lru_cache_wrapper) and name in thing.__dict__


WRITES = re.compile(
    r"%%writefile|write_text|write_bytes|\.write\(|writelines|open\(|sed -i|copyfile|copy2?\("
    r"|>\s*\S+\.py"
)
"""Text in a cell that writes a file."""


class Import(NamedTuple):
    """A statement that imports a module, or reloads it."""

    number: int
    node: ast.AST
    text: str
    reload: bool


def stale_modules(names: Mapping[str, Any], history: CellHistory, since: float) -> tuple[list[StaleModule], list[str]]:
    """The modules whose file has changed since they were loaded, and what could not be compared, in words. since: the
    start of the process."""
    stale: list[StaleModule] = []
    modules, broken = edited_modules(since)
    unchecked = [f"{file}: it can't be compiled now, so it was not compared" for file in broken]
    references = _references(names) if modules else {}
    for one in modules:
        try:
            if one.changed:
                stale.append(_stale_module(one, history))
            elif old := list(dict.fromkeys(_old_references(one, references))):
                stale.append(_stale_names(one, old, history))
        except Exception as fault:  # a strange module: the others still hold
            unchecked.append(
                f"{os.path.basename(one.file)}: it could not be compared ({type(fault).__name__}: {fault})"
            )
    return stale, unchecked


def _stale_module(one: EditedModule, history: CellHistory) -> StaleModule:
    """The module is older than its file."""
    imports = list(_imports(one.name, history))
    wrote = _writing_cell(os.path.basename(one.file), history, imports[0].number if imports else 0)
    since = [i for i in imports if wrote is None or i.number > wrote.number]
    chosen = (since[0] if wrote is not None else since[-1]) if since else None
    again = chosen is not None and chosen is not imports[0]
    stale = dataclasses.replace(_stale(one, imports, chosen, history), again=again)
    if wrote is not None and chosen is None:
        lines = enumerate(wrote.raw.splitlines(), 1)
        written = next((n for n, line in lines if os.path.basename(one.file) in line), 1)
        stale = dataclasses.replace(stale, where=wrote.place(written))
    return stale if wrote is None else dataclasses.replace(stale, edited=wrote.place())


def _stale_names(one: EditedModule, references: list[tuple[str, str]], history: CellHistory) -> StaleModule:
    """The module was reloaded, and the notebook still holds old functions."""
    imports = list(_imports(one.name, history))
    reloads = [i for i in imports if i.reload]
    stale = _stale(one, imports, (reloads or imports)[-1] if imports else None, history)
    names, changed = (tuple(dict.fromkeys(pair[place] for pair in references)) for place in (0, 1))
    return dataclasses.replace(stale, names=names, changed=changed, again=bool(reloads))


def _stale(one: EditedModule, imports: list[Import], chosen: Import | None, history: CellHistory) -> StaleModule:
    first, reload = _place(imports[0] if imports else None, history), _reload_code(one.name, imports)
    file, changed = os.path.basename(one.file), tuple(one.changed)
    return StaleModule(one.name, file, changed, (), reload, _place(chosen, history), first)


class FunctionReference(NamedTuple):
    """A function, or a class, under the name by which the notebook or a module holds it. code: of one function in it,
    called `function` there."""

    module: str
    name: str
    thing: Any
    function: str
    code: types.CodeType


def _references(names: Mapping[str, Any]) -> dict[str, list[FunctionReference]]:
    """All functions and classes that the notebook and the user's modules hold, by the file of their code."""
    spaces = [("", user_variables(names))] + [
        (name, vars(module))
        for name, module in list(sys.modules.items())
        if type(module) is types.ModuleType and name != "__main__" and is_user_module(name)
    ]
    references: dict[str, list[FunctionReference]] = {}
    for module, space in spaces:
        for name, thing in list(space.items()):
            if type(thing) is types.FunctionType or issubclass(type(thing), type):
                for function, code in functions_of(thing, name):
                    references.setdefault(code.co_filename, []).append(
                        FunctionReference(module, name, thing, function, code)
                    )
    return references


def _old_references(one: EditedModule, references: Mapping[str, list[FunctionReference]]) -> Iterator[tuple[str, str]]:
    """(name, function) of the old functions and classes that the notebook, or another module, still holds."""
    for reference in references.get(one.file, ()):
        if reference.module == one.name:
            continue
        if type(reference.thing) is not types.FunctionType:
            current = reference.thing is vars(one.module).get(reference.name)
            if current or type.__getattribute__(reference.thing, "__module__") != one.name:
                continue
        if not one.holds(reference.code):
            yield (f"{reference.module}.{reference.name}" if reference.module else reference.name), reference.function


def _imports(module: str, history: CellHistory) -> Iterator[Import]:
    """The statements that import the module or reload it, in the order in which they ran."""
    last = module.rpartition(".")[2]
    for cell in history.reaching(last):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Import):
                if any(alias.name == module or alias.name.startswith(f"{module}.") for alias in node.names):
                    yield Import(cell.number, node, ast.unparse(node), False)
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == module or module in whole or (node.module or "").startswith(f"{module}."):
                    yield Import(cell.number, node, ast.unparse(node), False)
            elif (
                isinstance(node, ast.Call)
                and dotted(node.func).rpartition(".")[2] == "reload"
                and node.args
                and (dotted(node.args[0]).rpartition(".")[2] in (last, *_aliases(module, history)))
            ):
                yield Import(cell.number, node, ast.unparse(node), True)


def _aliases(module: str, history: CellHistory) -> set[str]:
    """The aliases of the module in the notebook: `import losses as L`."""
    last = module.rpartition(".")[2]
    return {
        alias.asname
        for cell in history.mentioning(last)
        for s in cell.statements
        if isinstance(s, (ast.Import, ast.ImportFrom))
        for alias in s.names
        if alias.asname and alias.name.rpartition(".")[2] == last
    }


def _reload_code(module: str, imports: list[Import]) -> str:
    """The code that loads the new version: a reload, then the notebook's own `from … import`."""
    froms = [i.text for i in imports if isinstance(i.node, ast.ImportFrom) and i.node.module == module]
    return "\n".join([f"import importlib, {module}", f"importlib.reload({module})", *dict.fromkeys(froms)])


def _writing_cell(file: str, history: CellHistory, after: int) -> Cell | None:
    """The last cell after the first import that writes the file, as far as its text shows."""
    names = {
        b.path
        for cell in history.mentioning(file)
        for b in cell.bindings
        if b.value is not None and file in ast.unparse(b.value)
    }
    words = [re.escape(file), *(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in names)]
    named = re.compile("|".join(words))
    wrote = [
        cell
        for cell in history.mentioning(file, *names)
        if cell.number > after and any(named.search(line) and WRITES.search(line) for line in _whole(cell))
    ]
    return wrote[-1] if wrote else None


def _whole(cell: Cell) -> Iterator[str]:
    """The statements of a cell as text; the whole cell as typed where it is no Python."""
    if cell.raw.lstrip().startswith("%%") or not cell.body:
        yield cell.raw
    yield from (cell.text_of(statement) for statement in cell.statements)


def _place(imported: Import | None, history: CellHistory) -> Where:
    if imported is None:
        return NOWHERE
    line = getattr(imported.node, "lineno", 1)
    return history.cells[imported.number].place(line, imported.text)


def redefined_classes(
    names: Mapping[str, Any], things: list[tuple[str, Any]], history: CellHistory, error: BaseException | None
) -> list[Redefined]:
    """One entry for each class that has objects or subclasses and whose name now refers to another class. things: what
    the variables lead to, by name."""
    objects: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    children: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    current: dict[tuple[str, str], type] = {}
    alive: set[int] = set()
    for name, thing in [*things, *_keys(things, error)]:
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


def _keys(things: list[tuple[str, Any]], error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """The classes, and the members of enumerations, that are keys of tables of the user's, where the last failure was
    that such a key is missing."""
    missing = vars(BaseException)["args"].__get__(error)[:1] if issubclass(type(error), KeyError) else ()
    kinds = {key if issubclass(type(key), type) else type(key) for key in missing}
    names = {kind.__qualname__ for kind in kinds if is_user_module(str(type.__getattribute__(kind, "__module__")))}
    for name, thing in things if names else ():
        for key in thing if type(thing) is dict else ():
            kind = key if issubclass(type(key), type) else type(key)
            if kind.__qualname__ in names:
                yield f"{name}[{kind.__qualname__}]", key


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
    return [CellBinding(one.number, last, "import", one.node, None) for one in _imports(module, history)]  # type: ignore[arg-type]


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
            if type(value) in _SIMPLE and not key.startswith("__")
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
    missing = vars(BaseException)["args"].__get__(error)[:1] if issubclass(type(error), KeyError) else ()
    if any(name in (getattr(key, "__qualname__", ""), type(key).__qualname__) for key in missing):
        return f"KeyError: {name}"
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


EXISTS = re.compile(r"\b(?:exists|is_file|isfile|is_dir|isdir)\(")
SAVES = re.compile(r"(?:^|\.|_)(?:save\w*|dump|to_(?:csv|pickle|parquet|feather|hdf|json)|write\w*)$")
LOADS = re.compile(r"(?:^|\.|_)(?:load\w*|read\w*|open)$")
REMOVES = re.compile(
    r"unlink|rmtree|remove\(|\brm |rmdir|cache_clear|\.clear\(|\bdel |force|overwrite|refresh|getsource"
)
"""Words that ask for a file, write it, read it; that take it away, or have it made anew."""


MEMOIZED = type(functools.lru_cache(len))
MEMO = re.compile(r"\bif [^\n]*\bin \w|@[^\n]*\bcache\b|@[^\n]*\blru_cache\b")


def _asks(node: ast.AST) -> bool:
    return MEMO.search(ast.unparse(node)) is not None


class Cached(NamedTuple):
    """A result that is computed where it is not kept yet. test: the line that asks; body: what computes it; place: the
    expression of the file, dict or function that keeps it; how: "file", "memo" or "function"."""

    test: ast.AST
    body: list[ast.stmt]
    place: ast.expr
    how: str


def stale_results(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Results that a cell reads again from a file or a memo, where what computes them was changed since then."""
    first: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
    words = {"exists", "is_file", "isfile", "is_dir", "isdir", "FileNotFoundError"}
    memos = [cell for cell in history.mentioning("in", "cache", "lru_cache") if MEMO.search(cell.source)]
    words |= {name for cell in memos for name, made in cell.functions.items() if any(map(_asks, made))}
    checked = {cell.number: cell for cell in [*history.reaching(*words), *memos]}
    failed = history.failed if history.failed is not None else checked  # a run that failed has kept nothing
    for cell in [checked[number] for number in sorted(checked.keys() - failed)]:
        roots = [ast.Module(cell.body, []), *(r for r in history.reach(cell.number) if isinstance(r, FUNCTIONS))]
        for root, one in [(of, one) for of in roots for one in _cached(of, history, cell.number)]:
            key, code = _key_of(root, one, history, cell.number), _code_of(one, history, cell.number)
            ran, before = first.setdefault(key, (cell.number, code))
            if changed := sorted(name for name in code.keys() & before.keys() if code[name] != before[name]):
                found = _stale_result(changed, ran, cell, root, one, key, names, history)
                if found is not None:
                    yield found
                    return
                first[key] = cell.number, code


def _cached(root: ast.AST, history: CellHistory, number: int) -> Iterator[Cached]:
    """What a cell or a function computes only where it is not kept yet."""
    decorators = [n.func if isinstance(n, ast.Call) else n for n in getattr(root, "decorator_list", ())]
    if any(dotted(n).rpartition(".")[2] in ("cache", "lru_cache") for n in decorators):
        yield Cached(root, root.body, ast.Name(root.name), "function")  # type: ignore[attr-defined]
    loads = any(LOADS.search(called) for called in _calls_in(running(root.body)))  # type: ignore[attr-defined]
    blocks = [getattr(n, part) for n in (root, *running(root.body)) for part in ("body", "orelse") if hasattr(n, part)]  # type: ignore
    for block in [b for b in blocks if isinstance(b, list)]:
        for at, s in enumerate(block):
            if isinstance(s, DEFINED) or not isinstance(s, (ast.If, ast.Try)):
                continue
            if isinstance(s, ast.Try):
                missing = [h.body for h in s.handlers if "FileNotFound" in ast.unparse(h)]
                calls = [
                    n for n in ast.walk(s.body[0]) if isinstance(n, ast.Call) and LOADS.search(_called(n)) and n.args
                ]
                asked, body = calls[0].args[0] if calls else None, missing[0] if missing else []
            else:
                asked, absent = _asked(s.test)
                rest = s.orelse or (block[at + 1 :] if isinstance(s.body[-1], ast.Return) else [])
                body = s.body if absent else rest
            if asked is None or not body:
                continue
            if isinstance(s, ast.If) and not EXISTS.search(ast.unparse(s.test)):
                kept = f"{ast.unparse(asked)}["
                puts = (t for n in running(body) if isinstance(n, ast.Assign) for t in n.targets)
                if root_of(kept) != "self" and any(ast.unparse(target).startswith(kept) for target in puts):
                    yield Cached(s.test, body, asked, "memo")
            elif loads and any(map(SAVES.search, _calls_in(history.reach_of(running(body), number)))):
                yield Cached(getattr(s, "test", s.body[0]), body, asked, "file")


def _calls_in(reached: Iterable[ast.AST]) -> Iterator[str]:
    """The functions and methods that are called there: "torch.save", "write_text"."""
    yield from (_called(node) for node in nodes(reached) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    return dotted(call.func) or getattr(call.func, "attr", "")


def _asked(test: ast.expr) -> tuple[ast.expr | None, bool]:
    """The file or the dict for which a condition asks, and whether it holds where there is none."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and EXISTS.search(f"{_called(node)}("):
            own = isinstance(node.func, ast.Attribute) and not node.args
            off = any(isinstance(n, ast.UnaryOp) and node in ast.walk(n) for n in ast.walk(test))
            return (getattr(node.func, "value", None) if own else node.args[0]), off
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.In, ast.NotIn))
            and dotted(node.comparators[0])
        ):
            return node.comparators[0], isinstance(node.ops[0], ast.NotIn)
    return None, False


def _key_of(root: ast.AST, one: Cached, history: CellHistory, number: int) -> tuple[str, ...]:
    """What says which file or item is asked for: the condition, what its names were made from, and the arguments."""
    texts, todo, known = {ast.unparse(one.test) if one.how != "function" else one.place.id}, [one.test], set[str]()  # type: ignore
    parameters = {a.arg for a in ast.walk(getattr(root, "args", ast.Pass())) if isinstance(a, ast.arg)}
    own = [s for s in running(getattr(root, "body", [])) if isinstance(s, ast.Assign)]
    if one.how == "function":
        todo = []
    while todo:
        node = todo.pop()
        for path in (
            {dotted(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))} - known - {"", "self"}
        ):
            known.add(path)
            values = [s.value for s in own if any(dotted(target) == path for target in s.targets)]
            texts |= {ast.unparse(value) for value in values}
            todo += values
            if not values and path not in parameters:
                texts |= _made_from(path, history, number)
    if isinstance(root, FUNCTIONS):
        makers = {
            root.name,
            *(n for c in history.cells.values() for n, made in c.functions.items() if _holds(made, root)),
        }
        for call in [n for n in nodes(history.reach(number)) if isinstance(n, ast.Call)]:
            if dotted(call.func).rpartition(".")[2] in makers:
                texts |= {ast.unparse(value) for value in arguments_of(call)}
                texts |= {t for v in arguments_of(call) for n in names_in(v) for t in _made_from(n, history, number)}
    return tuple(sorted(texts))


def _holds(made: list[ast.AST], root: ast.AST) -> bool:
    return any(isinstance(kind, ast.ClassDef) and root in kind.body for kind in made)


def _made_from(name: str, history: CellHistory, number: int) -> set[str]:
    """The statements from which a variable of the notebook comes by now."""
    origins = history.origins(name, (number + 1, 0))
    return {history.text(b) for of, at in origins for b in history.bindings(of, "assign") if b.at == at}


def _code_of(one: Cached, history: CellHistory, number: int) -> dict[str, str]:
    """What computes a result: its own lines, the functions that they call, and the constants that these read."""
    reached = history.reach_of(running(one.body), number)
    functions = {f.name: f for f in reached if isinstance(f, FUNCTIONS)}
    code = {name: _says(f.body) for name, f in functions.items()}
    if one.how != "function":
        code[""] = _says(one.body)
    for name in read_by(reached):
        made = [b for b in history.bindings(name, "assign") if b.number <= number][-1:]
        if made and isinstance(made[0].value, (ast.Constant, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict)):
            code[name] = history.text(made[0])
    return code


def _says(body: list[ast.stmt]) -> str:
    """Statements as text, without what only prints or describes."""
    idle = {id(s) for s in running(body) if isinstance(s, ast.Expr) and ast.unparse(s).startswith(("print(", "'", '"'))}
    return "\n".join(ast.unparse(s) for s in body if id(s) not in idle)


def _stale_result(
    changed: list[str],
    ran: int,
    cell: Cell,
    root: ast.AST,
    one: Cached,
    key: tuple[str, ...],
    names: Mapping[str, Any],
    history: CellHistory,
) -> Told | None:
    """What to tell, unless a cell since the first run took the file or the memo away, or made it anew."""
    place = ast.unparse(one.place)
    since = [c for n, c in history.cells.items() if ran < n <= cell.number]
    anew = any(ran < b.number <= cell.number for b in history.bindings(root_of(place)) if one.how != "file")
    files = {text for part in key for text in re.findall(r"'([^']+)'", part)}
    writes = (c for c in since if c.number != cell.number and any(map(SAVES.search, _calls_in(c.statements))))
    if anew or any(REMOVES.search(c.source) for c in since) or any(text in c.source for c in writes for text in files):
        return None
    wrapper = names.get(root_of(place))
    if one.how == "memo" and not (isinstance(wrapper, dict) and wrapper):
        return None
    if one.how == "function" and not (type(wrapper) is MEMOIZED and wrapper.cache_info().hits):
        return None
    made = [(c, n) for c in since for what in changed for n in c.functions.get(what, ())]
    made += [(history.cells[b.number], b.node) for what in changed for b in history.bindings(what) if ran < b.number]
    made += [(c, one.test) for c in since if any(n is one.test for s in c.body for n in ast.walk(s))]
    if not made:
        return None
    at, node = made[0]
    own = any(n is one.test for s in at.body for n in ast.walk(s))
    where, used, first = at.place((one.test if own else node).lineno), cell.place(), history.cells[ran].place()  # type: ignore
    what = " and ".join(f"`{name}`" for name in changed if name) or "the lines that compute it"
    holder = next((b.path for b in cell.bindings if isinstance(b.value, ast.Call) and place.startswith("self.")), "")
    keeps = {"file": f"the file at `{place}`", "memo": f"`{place}`", "function": f"the memo of `{place}`"}[one.how]
    title = (
        f"{named(used)} does not run {what} of {named(where)}: it takes from {keeps} what {named(first)} had computed "
        "before the change"
    )
    path = place.replace("self", holder, 1) if holder else place
    clear = {"file": f"Path({path}).unlink()", "memo": f"{path}.clear()", "function": f"{path}.cache_clear()"}[one.how]
    fix = (
        f"Take the old result away after a change, then run {named(used)} again; or put what decides into its name.",
        clear,
    )
    links = ((f"{named(first)} computed it", first), (f"{named(used)} reads it", used))
    kinds = (name for c in history.cells.values() for name, made in c.functions.items() if _holds(made, root))
    blamed = (place, *filter(None, changed), *dict.fromkeys(kinds if place.startswith("self.") else ()))
    return Told("notebook/stale-reference", title, blamed, where, (fix,), links)


GUARD = re.compile(r"'(\w+)' not in (?:globals|locals|vars|dir)\(\)")


def kept_by_guard(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """`if 'model' not in globals(): model = Net(width)`, run again after what the object is made from had changed."""
    for cell in reversed(history.mentioning("globals", "locals", "vars", "dir")):
        for s in [s for s in cell.statements if isinstance(s, ast.If)]:
            match = GUARD.search(ast.unparse(s.test))
            name, at = match[1] if match is not None else "", (cell.number, s.lineno)
            made = [b for b in history.bindings(name, "assign", "del") if b.number < cell.number]
            alone = [b for b in made if not GUARD.search(history.cells[b.number].source)]
            made = made[made.index(alone[-1]) + (alone[-1].how == "del") :] if alone else made
            value = next((b.value for b in cell.bindings if b.path == name and b.node in s.body), None)
            changed = [
                last
                for of in sorted(names_in(value) if made and name in names else ())
                for b in [history.bindings(of, "assign")]
                for last in [one for one in b if made[0].at < one.at < at][-1:]
                if ast.unparse(last.node) not in [ast.unparse(one.node) for one in b if one.at < made[0].at][-1:]
            ]
            used = first_read(history, name, (cell.number, s.end_lineno or 0)) if changed else None
            if used is not None and value is not None:
                text = history.text(changed[0])
                title = (
                    f"`{name}` is still what {named(history.place(made[0]))} made: In [{cell.number}] makes none where "
                    f"there is one, and `{text}` of {named(history.place(changed[0]))} changes nothing in it"
                )
                fix = ("Make it whenever the cell runs.", f"{name} = {ast.unparse(value)}")
                blamed = (name, changed[0].path)
                yield told("notebook/stale-reference", title, blamed, fix, cell.place(s.lineno), used)
                return


IN_PLACE = re.compile(r"[a-z]\w*(?<!_)_")
"""Methods of tensors that change them."""


def memo_changed(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """What a memo has given, changed in place by one caller: the next one gets it so."""
    cells = [cell for cell in history.mentioning("in", "cache", "lru_cache") if MEMO.search(cell.source)]
    memos = {name for cell in cells for name, made in cell.functions.items() if any(map(_asks, made))}
    bindings = [b for c in history.cells.values() for b in c.bindings if b.how == "assign" and b.path in names]
    taken = [b for b in bindings if isinstance(b.value, ast.Call) and dotted(b.value.func) in memos & names.keys()]
    for first in taken:
        call, thing = ast.unparse(first.value), names[first.path]  # type: ignore[arg-type]
        memo = names[call.partition("(")[0]]
        again = [b for b in taken if b.at > first.at and ast.unparse(b.value) == call]  # type: ignore[arg-type]
        hit = type(memo) is MEMOIZED and memo.cache_info().hits > 0
        again = [b for b in again if names[b.path] is thing and (hit or b.path != first.path)]
        if not again or module_name(type(thing)).partition(".")[0] not in ("torch", "numpy", "pandas"):
            continue
        anew = [b.at for b in history.bindings(first.path, "assign") if not isinstance(b.node, ast.AugAssign)]
        end = min([again[-1].at, *(at for at in anew if at > first.at)])
        for cell in [c for c in history.mentioning(first.path) if first.number <= c.number <= end[0]]:
            changes = (s for s in cell.statements if first.at < (cell.number, s.lineno) < end)
            for s in [s for s in changes if _changes_it(s, first.path)]:
                used = history.place(again[-1])
                title = (
                    f"`{call}` gives one object to all who ask, and `{history.text_of(cell.number, s)}` changes it for "
                    f"all of them: {named(used)} gets it as it is by now"
                )
                fix = ("Change a copy.", f"{first.path} = copy.deepcopy({call})")
                blamed = (dotted(first.value.func), first.path, again[-1].path)  # type: ignore[union-attr]
                yield told("notebook/shared-object", title, blamed, fix, cell.place(s.lineno), used)
                return


def _changes_it(statement: ast.stmt, name: str) -> bool:
    """`x -= mean`, `x[mask] = 0`, `x.div_(std)`, `table.drop(…, inplace=True)`"""
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        itself = isinstance(statement, ast.AugAssign) and dotted(target) == name
        return itself or isinstance(target, ast.Subscript) and root_of(ast.unparse(target)) == name
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or dotted(call.func.value) != name:
        return False
    return bool(IN_PLACE.fullmatch(call.func.attr)) or any(k.arg == "inplace" for k in call.keywords)
