"""An exception with the frames of its traceback, the user's sources as syntax, and the values of the failing expression
by the user's text for them.

Python (3.11 and newer) knows which expression of a line was running; before that it is the line's statement. Names,
attributes, and items with a constant or a named key are looked up in the frame. A call, a property, a slice
or arithmetic would run code of the user's: its value is unknown, and its own parts are looked up instead. Nothing here
runs code of the user's: attributes are read statically (observe/variables.py), never through a property,
`__getattr__`, `__repr__`, `__len__` or `__eq__`. The context keeps the user's own objects alive, so it lasts as long as
one `explain`.

The exceptions of a chain and of a group, in the order in which they are examined:

raise A from B              B is the root: it goes first
A while B was handled       A goes first where it is a failure of its own (the fallback failed, too); B where the
                            handler only rewords it
ExceptionGroup(B, C)        both, each with the group as what followed it
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import io
import linecache
import pathlib
import re
import sys
import types
from collections import deque, namedtuple
from collections.abc import Iterator, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import torch

from nbdebug.observe.frames import Frame, Owners, frames, phase, running_module
from nbdebug.observe.locations import USER, Site, kind_of
from nbdebug.observe.sources import SCOPES, functions, nodes, parents, parse, statement_over, tree_of
from nbdebug.observe.tensors import base_name
from nbdebug.observe.variables import class_attribute, members, named_children, user_variables
from nbdebug.report import Link, Where
from nbdebug.text import module_name
from nbdebug.tools.errors.rules import Raised, TensorFact

Key = Any
"""An index of a tuple or a list, or a key of a dict."""
FIRST = ("DataLoader", "iter", "next", "list", "tuple", "tqdm", "trange", "reversed", "sorted", "cycle", "Subset")
"""Calls that return the items of their first argument."""


def word_set(text: str) -> frozenset[str]:
    """A list of names as a set: "argmax argmin"."""
    return frozenset(text.split())


def comprehensions(tree: ast.Module, node: ast.AST) -> Iterator[ast.comprehension]:
    """The `for … in …` clauses of the list, set and dict comprehensions in which an expression runs, innermost first:
    from Python 3.12 on these have no frame of their own."""
    around = parents(tree)
    inner, outer = node, around.get(id(node))
    while outer is not None and not isinstance(outer, (*SCOPES, ast.ClassDef, ast.GeneratorExp)):
        if isinstance(outer, (ast.ListComp, ast.SetComp, ast.DictComp)):
            clauses = outer.generators
            last = clauses.index(inner) if isinstance(inner, ast.comprehension) else len(clauses)
            yield from reversed(clauses[:last])
        elif isinstance(outer, ast.comprehension) and inner is not outer.iter:  # in a condition
            yield outer
        inner, outer = outer, around.get(id(outer))


def entries(node: ast.expr, path: tuple[Key, ...]) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
    """An expression; of a tuple, a dict or a call that returns items, the part under the path, and the rest of it."""
    then = _opened(node, path)
    if then is None:
        yield node, path
        return
    for part, rest in then:
        yield from entries(part, rest)


def _opened(node: ast.expr, path: tuple[Key, ...]) -> list[tuple[ast.expr, tuple[Key, ...]]] | None:
    """One step into the expression; None where there is none."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return [(node.value, (node.slice.value, *path))]
    if isinstance(node, ast.Call) and node.args and callee_name(node) in FIRST:
        return [(node.args[0], path)]
    if not path:
        return None
    key, rest = path[0], path[1:]
    if isinstance(node, ast.Call) and node.args and callee_name(node) == "enumerate" and key == 1:
        return [(node.args[0], rest)]
    if isinstance(node, ast.Dict) and type(key) is str:
        return [
            (value, rest)
            for name, value in zip(node.keys, node.values)
            if isinstance(name, ast.Constant) and name.value == key
        ]
    inside: list[ast.expr] | None = None
    if isinstance(node, (ast.Tuple, ast.List)):
        inside = node.elts
    elif callee_name(node) in ("TensorDataset", "zip"):
        inside = getattr(node, "args", [])
    if inside is None or type(key) is not int:
        return None
    return [(inside[key], rest)] if key < len(inside) else []


def value_parts(node: ast.expr) -> Iterator[ast.expr]:
    """An expression and the parts of its value: receivers, operands and arguments, not indices or conditions."""
    yield node
    inner: list[ast.expr] = []
    if isinstance(node, ast.Call):
        inner = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]
    elif isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.Attribute)):
        inner = [node.value] if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)) else []
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        inner = [node.operand]
    elif isinstance(node, ast.IfExp):
        inner = [node.body, node.orelse]
    elif isinstance(node, (ast.Tuple, ast.List)):
        inner = list(node.elts)
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        inner = [node.elt]
    for part in inner:
        yield from value_parts(part)


def callee_name(node: ast.AST) -> str:
    """The last name of what a call calls: "from_numpy" of `torch.from_numpy(a)`, "" for all else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def bindings(scope: ast.AST, text: str) -> list[tuple[ast.expr, tuple[Key, ...]]]:
    """(value, path of the entry) of each statement of this scope that binds a name, in the order of the lines."""
    results: list[tuple[ast.expr, tuple[Key, ...]]] = []
    everywhere = text.startswith("self.")
    for node in _inside(scope, everywhere):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        for target, value in pairs:
            keys = _keys(target, text)
            if keys is not None:
                results.append((value, keys))
    return sorted(results, key=lambda pair: pair[0].lineno)


def _inside(scope: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        yield child
        if everywhere or not isinstance(child, (*SCOPES, ast.ClassDef)):
            yield from _inside(child, everywhere)


def _keys(target: ast.expr, text: str) -> tuple[Key, ...] | None:
    """() when the target is the name, (1,) when it is the second of a tuple, None when it is not there."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for i, part in enumerate(target.elts):
            inner = _keys(part, text)
            if inner is not None:
                return (i, *inner)
        return None
    return () if isinstance(target, (ast.Name, ast.Attribute)) and ast.unparse(target) == text else None


def tensor_attribute(value: Any, name: str) -> Any:
    """An attribute of a tensor as torch itself has it, whatever a subclass defines. Raises what torch raises:
    a nested tensor has no shape, a lazy parameter none yet."""
    return torch._C.TensorBase.__dict__[name].__get__(value)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor; None of other objects, and of a tensor without one (nested, lazy)."""
    if not issubclass(type(value), torch.Tensor):
        return None
    try:
        return tuple(int(side) for side in tensor_attribute(value, "shape"))
    except (RuntimeError, TypeError, ValueError):
        return None


def message_of(error: BaseException) -> str:
    """The message of an exception of torch's or Python's: the text among its arguments."""
    arguments: Any = BaseException.__dict__["args"].__get__(error)
    if type(error) is KeyError and len(arguments) == 1 and type(arguments[0]) in (str, int):
        return repr(arguments[0])
    if issubclass(type(error), OSError) and len(arguments) >= 2 and type(arguments[1]) is str:
        return arguments[1]
    texts = [part for part in arguments if issubclass(type(part), (str, int, float))]
    if texts:
        text = texts[0]
        return str.__str__(text) if isinstance(text, str) else str(text) if type(text) in (int, float, bool) else ""
    if issubclass(type(error), (ImportError, SyntaxError)):
        slot = (ImportError if isinstance(error, ImportError) else SyntaxError).__dict__["msg"]
        text = slot.__get__(error)
        return text if type(text) is str else ""
    return type(arguments[0]).__name__ if type(error) is KeyError and arguments else ""


UNKNOWN = object()
"""Stands for a value that can't be looked up without running code."""


def expression(frame: Frame) -> ast.AST | None:
    """The syntax of what ran in this frame: the smallest expression, else the statement of the line. None where the
    source is not available, or no longer the one that runs."""
    tree = tree_of(frame.site.file)
    if tree is not None and frame.span is None and frame.site.function == "<lambda>":
        alone = _lambda(tree, frame.site.line)
        if alone is not None:
            return alone
    return None if tree is None else _at(tree, frame.span or (frame.site.line, frame.site.line, None, None))


def value_part(node: ast.AST | None) -> ast.AST | None:
    """The expression of a statement that ran."""
    return node.value if isinstance(node, (ast.Expr, ast.Return, ast.Assign, ast.AnnAssign)) else node


def calls_in(node: ast.AST | None) -> list[ast.Call]:
    """The calls in an expression or a statement, the outer before the inner."""
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)] if node is not None else []


def parsed_expression(text: str) -> ast.expr | None:
    """The syntax of an expression; None of a text that is none."""
    tree = parse(text)
    only = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    return only.value if isinstance(only, ast.Expr) else None


def functions_around(tree: ast.Module | None, line: int) -> list[Any]:
    """The functions and lambdas over a line, the innermost first."""
    around: tuple[Any, ...] | list[Any] = functions(tree) if tree is not None else ()
    around = [n for n in around if n.lineno <= line <= (n.end_lineno or 0)]
    return sorted(around, key=lambda n: (n.end_lineno or 0) - n.lineno)


def unpacked(target: ast.Tuple | ast.List, items: list[Any]) -> list[tuple[ast.expr, Any]]:
    """(part, item) of an assignment to several names. Raises Python's own ValueError where their numbers differ."""
    parts = list(target.elts)
    star = next((i for i, part in enumerate(parts) if isinstance(part, ast.Starred)), None)
    least = len(parts) - (star is not None)
    if len(items) < least:
        raise ValueError(f"not enough values to unpack (expected {least}, got {len(items)})")
    if star is None:
        if len(items) > least:
            raise ValueError(f"too many values to unpack (expected {least})")
        return list(zip(parts, items))
    end = star + len(items) - least
    rest = parts[star].value  # type: ignore[attr-defined]
    return [*zip(parts[:star], items), (rest, items[star:end]), *zip(parts[star + 1 :], items[end:])]


def kind_of_message(table: Mapping[str, str], message: str) -> str | None:
    """The first kind of a table (kind → pattern, the narrow before the wide) that a message is of."""
    return next((kind for kind, pattern in table.items() if re.search(pattern, message)), None)


def statement(frame: Frame) -> ast.stmt | None:
    """The statement that ran in this frame, or None as for `expression`."""
    tree = tree_of(frame.site.file)
    if tree is None:
        return None
    span = frame.span
    return statement_over(tree, span[0], span[2]) if span else statement_over(tree, frame.site.line)


@functools.lru_cache(maxsize=256)
def _lambda(tree: ast.Module, line: int) -> ast.expr | None:
    """The body of the only lambda of a line."""
    lambdas = [n for n in nodes(tree) if isinstance(n, ast.Lambda) and n.lineno <= line <= (n.end_lineno or 0)]
    return lambdas[0].body if len(lambdas) == 1 else None


@functools.lru_cache(maxsize=256)
def _at(tree: ast.Module, at: tuple[int, int, int | None, int | None]) -> ast.AST | None:
    exact = [
        n
        for n in nodes(tree)
        if isinstance(n, (ast.expr, ast.stmt)) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == at
    ]
    exact.sort(key=lambda n: isinstance(n, ast.stmt))  # `f(x)` alone on a line is a statement and a call
    return exact[0] if exact else statement_over(tree, at[0])


def operands(frame: Frame, *, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """(text, value) of the names, attributes and items in the failing expression whose value is known: arguments and
    both sides of an operator first, their parts after them. Each text once. whole: of all its statement."""
    line = statement(frame) if whole else None
    node, texts = line if line is not None and not hasattr(line, "body") else expression(frame), set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            text = ast.unparse(part)
            if text not in texts:
                texts.add(text)
                value = value_of(part, frame)
                if value is not UNKNOWN:
                    yield text, value


def value_of(node: ast.AST, frame: Frame) -> Any:
    """The value of an expression in the frame, or UNKNOWN. None of the user's code runs."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for space in (frame.names, frame.globals, vars(builtins)):
            if node.id in space:
                return space[node.id]
        return UNKNOWN
    if isinstance(node, ast.Attribute):
        return _attribute(value_of(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(value_of(node.value, frame), value_of(node.slice, frame))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = value_of(node.operand, frame)
        return -value if type(value) in (int, float) else UNKNOWN
    return UNKNOWN


def _attribute(thing: Any, name: str) -> Any:
    if thing is UNKNOWN:
        return UNKNOWN
    if type(thing) is types.ModuleType:  # torch's own has two thousand names
        return thing.__dict__.get(name, UNKNOWN)
    value = members(thing).get(name, UNKNOWN)
    if value is not UNKNOWN:
        return value
    shared = class_attribute(thing, name, UNKNOWN)
    if type(shared) in _PLAIN:  # `eps = 0.1` of the class
        return shared
    return shared.__get__(thing) if type(shared) in (_FUNCTION, _FIELD) else UNKNOWN


_PLAIN = (int, float, bool, str, type(None))
_FUNCTION = type(expression)
_FIELD: Any = type(vars(namedtuple("_Tuple", "field"))["field"])  # of a named tuple: a descriptor in C


def _item(thing: Any, key: Any) -> Any:
    """An item of an exact list, tuple or dict, or of a container of modules or parameters, under a plain key."""
    if thing is UNKNOWN or type(key) not in (int, str):
        return UNKNOWN
    from torch import nn

    if type(thing) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        children = named_children(thing)
        if type(key) is int and type(thing) is not nn.ModuleDict:
            inside = list(children.values())
            return inside[key] if -len(inside) <= key < len(inside) else UNKNOWN
        return children.get(str(key), UNKNOWN)
    if type(thing) in (list, tuple) and type(key) is int:
        return thing[key] if -len(thing) <= key < len(thing) else UNKNOWN
    return thing.get(key, UNKNOWN) if type(thing) is dict else UNKNOWN


def path_text(value: Any) -> str:
    """The path that a value is, or that an open file was opened with; "" for all else. No code of the user's runs."""
    if issubclass(type(value), pathlib.PurePath) and module_name(type(value)).startswith("pathlib"):
        return str(value)
    if type(value) is str:
        return value if _may_be_path(value) else ""
    if type(value) is io.TextIOWrapper:
        return path_text(value.buffer)
    if type(value) in (io.BufferedReader, io.BufferedRandom, io.BufferedWriter):
        return path_text(value.raw)
    if type(value) is io.FileIO:
        return path_text(value.name) or (value.name if type(value.name) is str else "")
    return ""


def _may_be_path(text: str) -> bool:
    """Whether a text is written as a path: it has a separator or an ending, and is no sentence and no address."""
    if not 0 < len(text) <= 400 or "\n" in text or "://" in text:
        return False
    return re.search(r"[\\/]|\.\w{1,12}$", text) is not None and text.count(" ") < 8


# -- exceptions --------------------------------------------------------------------------------------------------------


DEEPEST = 100
"""Links of one chain, and members of all groups, that are followed."""

EXPECTED = (ImportError, LookupError, AttributeError, StopIteration, NotImplementedError)
"""What a program handles on purpose (an optional package, a missing key): no cause of what fails after it."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exception that may be the cause. led_to: what followed it, the nearest first; the last is what was seen."""

    error: BaseException
    led_to: tuple[BaseException, ...] = ()


def candidate_chains(error: BaseException) -> list[list[Candidate]]:
    """One list for each member of a group (one in all where there is no group): its candidates, in the order in which
    they are checked. Endless chains and cycles end after DEEPEST."""
    chains: list[list[Candidate]] = []
    todo: deque[Candidate] = deque([Candidate(error)])
    visited: set[int] = set()
    while todo and len(chains) < DEEPEST:
        start = todo.popleft()
        if id(start.error) in visited:
            continue
        visited.add(id(start.error))
        line, inside = _candidates(start)
        todo.extend(inside)
        if line:
            chains.append(line)
    return chains


def _candidates(start: Candidate) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates along one chain; and the members of the group that it leads to, which are checked after them, or
    in their place where they only reword it."""
    parts: list[list[Candidate]] = [[]]
    one: Candidate | None = start
    while one is not None and sum(map(len, parts)) < DEEPEST:
        after = (one.error, *one.led_to)
        inside = group_members(one.error)
        if inside:
            return [candidate for part in parts[:-1] for candidate in part], [Candidate(m, after) for m in inside]
        parts[-1].insert(0, one)
        before, again = _before(one.error)
        if before is None or any(before is later for later in after):
            break
        if not again and issubclass(type(before), EXPECTED):
            break
        if not again:
            parts.append([])
        one = Candidate(before, after)
    return [candidate for part in parts for candidate in part], []


def group_members(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions of a group; () for another exception. Python 3.10 has no groups, but there is a backport."""
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "BaseExceptionGroup"]
    slot: Any = kinds[0].__dict__.get("exceptions") if kinds else None
    if slot is None:
        return ()
    members = slot.__get__(error) if hasattr(type(slot), "__get__") and not isinstance(slot, tuple) else slot
    if type(members) not in (tuple, list):
        return ()
    return tuple(one for one in members if issubclass(type(one), BaseException))[:DEEPEST]


def _before(error: BaseException) -> tuple[BaseException | None, bool]:
    """The exception that this one followed, and whether this one only rewords it."""
    cause = _slot("__cause__", error)
    if cause is not None:
        return cause, True
    context = _slot("__context__", error)
    if context is None or _slot("__suppress_context__", error):
        return None, False
    return context, _raised_where_caught(error, context)


def _slot(name: str, error: BaseException) -> Any:
    return BaseException.__dict__[name].__get__(error)


def _raised_where_caught(error: BaseException, handled: BaseException) -> bool:
    """Whether a `raise` in the very function that caught the other exception made this one: another name for it. An op
    that failed there, or in what was called from there, is a failure of its own."""
    caught: TracebackType | None = _slot("__traceback__", handled)
    last: TracebackType | None = _slot("__traceback__", error)
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if caught is None or last is None or caught.tb_frame is not last.tb_frame:
        return False
    text = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    return text.startswith("raise")


CAUGHT = re.compile(r"Caught (\w+) (in .*?)\.\n+Original Traceback \(most recent call last\):\n(.*)", re.DOTALL)
REMOTE = re.compile(r'^\s*"""\s*\nTraceback \(most recent call last\):\n(.*?)"""\s*$', re.DOTALL)
SPAWNED = re.compile(
    r"-- (Process \d+) terminated with the following error:\n\s*Traceback \(most recent call last\):"
    r"\n(.*)",
    re.DOTALL,
)
LAUNCHED = re.compile(
    r"rank\s*: (\d+).*?traceback\s*: Traceback \(most recent call last\):\n(.*?)(?:\n\s*={5,}|\Z)", re.DOTALL
)
DYNAMO = re.compile(r"got (\w+)\((?:'|\")(.*?)(?:'|\")\)\s*(?:\n|$)", re.DOTALL)
FROM_USER = re.compile(r"from user code:\s*\n(.*?)(?:\n\n|$)", re.DOTALL)
LINE = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
COMPILED = frozenset({"TorchRuntimeError", "InternalTorchDynamoError", "BackendCompilerFailed", "Unsupported"})


@dataclasses.dataclass(frozen=True)
class RemoteException:
    """type, message: of the exception as it was raised there; where: "in DataLoader worker process 0"; sites: the lines
    of its traceback, outermost first."""

    type: str
    message: str
    where: str
    sites: tuple[Site, ...]


def remote_exception(kind: str, message: str) -> RemoteException | None:
    """The exception of another process, or of the compiler, that this one reports; None where it reports none."""
    caught = CAUGHT.search(message)
    if caught is not None:
        name, text = _last(caught[3])
        inner = remote_exception(name, text)  # a worker of a worker
        sites = tuple(_sites(caught[3]))
        return RemoteException(name or caught[1], inner.message if inner else text, caught[2], sites)
    if kind == "_RemoteTraceback" or kind == "RemoteTraceback":
        remote = REMOTE.match(message)
        if remote is not None:
            return RemoteException(*_last(remote[1]), "in another process", tuple(_sites(remote[1])))
    if kind == "ProcessRaisedException" and (spawned := SPAWNED.search(message)) is not None:
        return RemoteException(*_last(spawned[2]), f"in {spawned[1].lower()}", tuple(_sites(spawned[2])))
    if kind == "ChildFailedError" and (launched := LAUNCHED.search(message)) is not None:
        return RemoteException(*_last(launched[2]), f"on rank {launched[1]}", tuple(_sites(launched[2])))
    return _compiled(message) if kind in COMPILED else None


SEPARATOR = re.compile(
    r"\n\s*(?:The above exception was the direct cause of|During handling of the above exception)[^\n]*\n"
)
IPYTHON = re.compile(
    r"^(?:File (\S+?):(\d+), in (?:[\w.<>]*\.)?([\w<>]+)|(?:Cell )?In ?\[(\d+)\],? line (\d+))", re.MULTILINE
)
COPIED = "in the text"
"""`RemoteException.where` of what is known as text alone."""
LAST = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Iteration|Interrupt|Exit|Warning))\b(?!\s*Traceback)(?:: ?(.*))?$"
)


def exceptions_of_text(text: str) -> list[RemoteException]:
    """The exceptions of a traceback that was copied as text, the root of a chain first; of a message alone one without
    lines. The formats are Python's and IPython's."""
    exceptions = []
    for part in SEPARATOR.split(text):
        lines = part.rstrip().split("\n")
        at = max((i for i, line in enumerate(lines) if LAST.match(line.strip())), default=None)
        match = LAST.match(lines[at].strip()) if at is not None else None
        kind = match[1].rpartition(".")[2] if match else ""
        message = "\n".join([match[2] or "", *lines[(at or 0) + 1 :]]).strip() if match else part.strip()
        inner = remote_exception(kind, message)
        sites = [*_sites(part)]
        for file, line, function, cell, cell_line in IPYTHON.findall(part):
            site = (f"<ipython-input-{cell}-text>", int(cell_line), "<module>") if cell else (file, int(line), function)
            sites.append(Site(*site))
        exceptions.append(inner or RemoteException(kind or "RuntimeError", message, COPIED, tuple(sites)))
    return exceptions


def _compiled(message: str) -> RemoteException | None:
    match, code = DYNAMO.search(message), FROM_USER.search(message)
    if match is None and code is None:
        return None
    kind, text = (match[1], match[2].replace("\\'", "'").replace("\\n", "\n")) if match else ("RuntimeError", message)
    return RemoteException(kind, text, "while torch.compile traced the code", tuple(_sites(code[1] if code else "")))


def _last(text: str) -> tuple[str, str]:
    """(type, message) at the end of a traceback: what follows its last indented line."""
    lines = text.rstrip().split("\n")
    ends = [i for i, line in enumerate(lines) if line.startswith("  ")]
    tail = "\n".join(lines[ends[-1] + 1 :] if ends else lines)
    while tail.startswith("    "):
        tail = tail.partition("\n")[2]
    match = re.match(r"([A-Za-z_][\w.]*)(?:: (.*))?", tail, re.DOTALL)
    return (match[1].rpartition(".")[2], (match[2] or "").strip()) if match else ("", tail.strip())


def _sites(text: str) -> Iterator[Site]:
    for file, line, function in LINE.findall(text):
        yield Site(file, int(line), function)


def with_remote_frames(carried: RemoteException, live: list[Frame]) -> list[Frame]:
    """The frames: those of this process, which still live, then those that are known from the text."""
    trail = list(live)
    modules = list(sys.modules.values())[::-1] if carried.sites else ()
    files = {getattr(module, "__file__", None): vars(module) for module in modules}  # of one file the first
    for site in carried.sites:
        code = cast(Any, SimpleNamespace(co_filename=site.file, co_name=site.function))
        # the module of that file, which this process may have imported as well
        trail.append(Frame(_self(site, live), site, kind_of(code) == USER, None, files.get(site.file, {})))
    return trail


def _self(site: Site, live: list[Frame]) -> dict[str, Any]:
    """The data set, the sampler or the collate function of a loader that a live frame works with, where this line
    belongs to a method of its class."""
    for frame in reversed(live):
        loader = frame.names.get("self")
        for name in ("dataset", "_dataset", "collate_fn", "_collate_fn", "sampler", "batch_sampler"):
            thing = members(loader).get(name) if loader is not None else None
            for kind in type(thing).__mro__ if thing is not None else ():
                method = vars(kind).get(site.function)
                if getattr(getattr(method, "__code__", None), "co_filename", None) == site.file:
                    return {"self": thing}
    return {}


READ_AT_MOST = 10_000_000
"""Elements of a tensor whose least and largest value are read: some milliseconds. Larger ones keep to their shape."""
LOADER = re.compile(r"[\\/]torch[\\/]utils[\\/]data[\\/]")
ENDS = (50, 150)
"""Outermost and innermost frames of a traceback that are read."""
MOST = 40
"""Tensors listed for one error."""


@dataclasses.dataclass
class ErrorContext:
    """error: the exception; trail: its frames, outermost first; names: the variables of the notebook or of
    the caller; owners: models and optimizers in either; led_to: the exceptions that followed, nearest first.

    carried: the exception that it reports from elsewhere, a loader's worker or the compiler: `message` and `type` are
    then of that one, and only file and line are known of the last frames of the trail.
    """

    error: BaseException
    trail: list[Frame]
    names: Mapping[str, Any]
    owners: Owners
    led_to: tuple[BaseException, ...] = ()
    carried: RemoteException | None = None

    @classmethod
    def of(cls, error: BaseException, names: Mapping[str, Any], led_to: tuple[BaseException, ...] = ()) -> ErrorContext:
        trail = [*_outer_frames(error, led_to), *frames(error)]
        if len(trail) > sum(ENDS):  # an endless recursion
            trail = [*trail[: ENDS[0]], *trail[-ENDS[1] :]]
        if sys.version_info >= (3, 12):
            trail = [_with_comprehension(frame, callee) for frame, callee in zip(trail, [*trail[1:], None])]
        elsewhere = remote_exception(type(error).__name__, message_of(error))
        if elsewhere is not None:
            trail = with_remote_frames(elsewhere, trail)
        return cls(error, trail, names, Owners.among(names, trail), led_to, elsewhere)

    @property
    def message(self) -> str:
        return self.carried.message if self.carried else message_of(self.error)

    @property
    def type(self) -> str:
        """The name of the exception's class."""
        return self.carried.type if self.carried else type(self.error).__name__

    @functools.cached_property
    def users(self) -> list[Frame]:
        """The frames of the user's own code, innermost first."""
        return [frame for frame in reversed(self.trail) if frame.users]

    @property
    def frame(self) -> Frame | None:
        """The innermost of them."""
        return self.users[0] if self.users else None

    @property
    def ran(self) -> ast.AST | None:
        """The expression that ran there, else the statement."""
        return expression(self.users[0]) if self.users else None

    @property
    def line(self) -> ast.stmt | None:
        """The statement that ran there."""
        return statement(self.users[0]) if self.users else None

    def path(self, module: Any) -> str | None:
        """The dotted name of a module within its model ("encoder.layers.3"), "" for the model itself."""
        return self.owners.modules.get(id(module))

    def variables(self) -> Iterator[tuple[str, Any, Frame | None]]:
        """(name, value, frame) of the user's variables, innermost frame first, then the notebook's own; an object's
        attributes follow as `self.x`."""
        for frame in self.users:
            for name, value in frame.names.items():
                yield name, value, frame
            if "self" in frame.names:
                for name, value in members(frame.names["self"]).items():
                    yield f"self.{name}", value, frame
        for name, value in user_variables(self.names).items():
            yield name, value, None

    def raised(self) -> Raised:
        """The facts that all kinds of errors share."""
        at = self.users[0].where if self.users else Where()
        module, kind = running_module(self.trail, self.owners)
        # a loader was fetching samples, and no model ran in it
        fetching = [i for i, frame in enumerate(self.trail) if LOADER.search(frame.site.file)]
        fetches = fetching and not any(frame.module is not None for frame in self.trail[fetching[-1] :])
        where = dataclasses.replace(
            at, phase="input" if fetches else phase(self.trail), module=module, module_type=kind
        )
        reached = tuple(Link(f"in {_function_phrase(frame)}", frame.where) for frame in self.trail if frame.users)
        led_to = tuple(f"{type(e).__name__}: {message_of(e)}" for e in self.led_to)
        return Raised(self.type, self.message, where, reached, led_to, self.tensors())

    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors among the user's variables, each once, innermost first."""
        tensors: dict[int, TensorFact] = {}
        for name, value, _ in self.variables():
            if is_tensor(value) and id(value) not in tensors and len(tensors) < MOST:
                tensors[id(value)] = fact(name, value)
        return tuple(tensors.values())


def _with_comprehension(frame: Frame, callee: Frame | None) -> Frame:
    """With the variables of the comprehension that failed in it. Python 3.12 and newer run it in the function's own
    frame, where they no longer exist after the error: what was passed to a module is known, the others are UNKNOWN
    (and not the values of the same names outside the comprehension)."""
    tree = tree_of(frame.site.file) if frame.users and frame.span is not None else None
    node = expression(frame) if tree is not None else None
    if tree is None or node is None or frame.site.function.startswith("<") and frame.site.function != "<module>":
        return frame
    targets = [part for clause in comprehensions(tree, node) for part in ast.walk(clause.target)]
    names = {part.id: UNKNOWN for part in targets if isinstance(part, ast.Name)}
    if not names:
        return frame
    passed = callee.names if callee is not None and callee.site.function == "_wrapped_call_impl" else {}
    args, kwargs = passed.get("args", ()), passed.get("kwargs", {})
    if isinstance(node, ast.Call) and not any(isinstance(arg, ast.Starred) for arg in node.args):
        values = [*zip(node.args, args), *((k.value, kwargs[k.arg]) for k in node.keywords if k.arg in kwargs)]
        names |= {arg.id: value for arg, value in values if isinstance(arg, ast.Name) and arg.id in names}
    return dataclasses.replace(frame, names={**names, **{n: v for n, v in frame.names.items() if n not in names}})


def _function_phrase(frame: Frame) -> str:
    """A function as a person would call it."""
    name = frame.site.function
    if name == "<module>":
        return "the cell" if frame.where.cell else "the program"
    return {"<lambda>": "a lambda", "<genexpr>": "a generator expression"}.get(name, f"`{name}`")


def _outer_frames(error: BaseException, led_to: tuple[BaseException, ...]) -> list[Frame]:
    """The frames around the one that caught an exception: its own traceback begins there, that of the exception which
    followed leads to it."""
    trail: list[Frame] = []
    inner = error
    for after in led_to:
        start = inner.__traceback__.tb_frame if inner.__traceback__ is not None else None
        at = after.__traceback__
        while at is not None and at.tb_frame is not start:
            at = at.tb_next
        if at is None or start is None:  # caught in another thread, or in a task
            break
        trail = [*frames(after, start), *trail]
        inner = after
    return trail


def is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def fact(name: str, value: torch.Tensor, *, read: bool = False) -> TensorFact:
    """The facts of one tensor. read: its least and largest value as well (waits for a device, which may refuse)."""
    grad_fn = tensor_attribute(value, "grad_fn")
    op = base_name(grad_fn.name().removesuffix("0").removesuffix("Backward").lower()) if grad_fn is not None else None
    kind = "parameter" if issubclass(type(value), torch.nn.Parameter) else "tensor"
    low, high, bad = _range(value) if read else (None, None, None)
    dtype, device = str(tensor_attribute(value, "dtype")).removeprefix("torch."), str(tensor_attribute(value, "device"))
    return TensorFact(
        name, shape_of(value) or (), dtype, device, kind, tensor_attribute(value, "requires_grad"), op, low, high, bad
    )


def _range(value: torch.Tensor) -> tuple[float | None, float | None, int | None]:
    try:
        if not _readable(value):
            return None, None, None
        with torch.no_grad():
            flat = value.detach()
            if not flat.dtype.is_floating_point:
                return float(flat.min()), float(flat.max()), 0
            good = flat[flat.isfinite()]
            bad = flat.numel() - good.numel()
            return (float(good.min()), float(good.max()), bad) if good.numel() else (None, None, bad)
    except Exception:  # a device that has failed, a layout without min: then the range is unknown
        return None, None, None


def _readable(value: torch.Tensor) -> bool:
    """Whether its values are there to be read: not a user's own kind of tensor, not freed (FSDP, `resize_(0)`), and not
    on a GPU that is still busy, which may hang."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if value.layout is not torch.strided or not 0 < value.numel() <= READ_AT_MOST or value.device.type == "meta":
        return False
    if value.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    reach = value.storage_offset() + sum((side - 1) * step for side, step in zip(value.shape, value.stride())) + 1
    if reach * value.element_size() > value.untyped_storage().nbytes():
        return False
    return not value.is_cuda or torch.cuda.current_stream(value.device).query()
