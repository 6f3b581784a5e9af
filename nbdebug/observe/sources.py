"""The source of files and cells as Python's syntax, parsed once as long as the text is the same; and edits of it.

    call = call_at(op.site, op.call, op.name)            the node of `torch.log(1 - p)`
    edit = edit_of(file, {operand(call, 0): "{}.clamp_min(1e-8)"})
    with edited_functions(edit): step()                  the user's own functions, with that text in them

A template says what becomes of an expression: `{}` stands for its source text, in parentheses where it needs them, and
`{raw}` for the text alone. Nothing of the source is run but within `edited_functions`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from nbdebug.observe.locations import Site, cell_name, edited_since_import, span_of
from nbdebug.report import Edit

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Syntax that has local variables of its own; comprehensions are left out."""
Call = tuple[CodeType, int]
"""The user's code and the instruction in it that runs."""
_OPERATORS: dict[type[ast.operator], frozenset[str]] = {
    ast.Div: frozenset({"div", "reciprocal"}),
    ast.Pow: frozenset({"pow"}),
    ast.Mult: frozenset({"mul"}),
    ast.Sub: frozenset({"sub", "rsub"}),
    ast.Add: frozenset({"add"}),
    ast.MatMult: frozenset({"mm", "bmm", "matmul", "mv", "dot"}),
    ast.Mod: frozenset({"remainder"}),
}
_SPELLINGS = {
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "arccosh": "acosh",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "float_power": "pow",
    "square": "pow",
    "norm": "linalg_vector_norm",
    "vector_norm": "linalg_vector_norm",
    "half": "to",
    "masked_fill_": "masked_fill",
}
"""Other names under which torch has an op."""
_NAMES = {0: ("input", "self", "scores"), 1: ("other", "exponent", "target"), 2: ("value",)}
"""Keywords of torch's functions, by the place of the operand."""
_MODULES = frozenset({"torch", "F", "nn", "functional", "linalg", "special", "np", "math", "fft"})
_PURE_METHODS = frozenset(
    "abs view flatten reshape squeeze unsqueeze float double half long bool detach sum size dim numel t transpose "
    "permute expand contiguous to square".split()
)
CONTAINERS = (list, dict, set)
"""What a statement such as `outputs.append(out)` fills."""
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List)


def parse(text: str | bytes) -> ast.Module | None:
    """The syntax of a text; None where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def tree_of(file: str) -> ast.Module | None:
    """The syntax of a file or a cell; None where its source is not available, is no Python (a cell with magics), or was
    edited after its import: its lines are then not those that run."""
    lines = () if edited_since_import(file) else tuple(linecache.getlines(file))
    return parsed(lines) if lines else None


@functools.lru_cache(maxsize=64)
def parsed(lines: tuple[str, ...]) -> ast.Module | None:
    """The same as `parse`, once for each text: the tree is shared, and nobody changes it."""
    return parse("".join(lines))


@functools.lru_cache(maxsize=64)
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` gives them: walked once, since a file of some thousand lines takes 0.2 s."""
    return tuple(ast.walk(tree))


def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """The same by the name of the file; () where its source is not available or is no Python."""
    tree = tree_of(file)
    return () if tree is None else nodes(tree)


@functools.lru_cache(maxsize=64)
def functions(tree: ast.Module) -> tuple[ast.AST, ...]:
    """The functions and lambdas of a file."""
    return tuple(node for node in nodes(tree) if isinstance(node, SCOPES))


@functools.lru_cache(maxsize=64)
def parents(tree: ast.Module) -> Mapping[int, ast.AST]:
    """The node around each node, by the id of the inner one."""
    return {id(child): node for node in nodes(tree) for child in ast.iter_child_nodes(node)}


# -- a call, and its operands -----------------------------------------------------------------------------------------


def call_at(site: Site, call: Call | None, op: str) -> ast.expr | ast.AugAssign | None:
    """The call or operator in the user's line that ran an op: by its place in the line where Python knows it, else the
    only one there of that name. None where it can't be told."""
    span = None if call is None else span_of(*call)
    if span is not None:
        place = span[0], span[2], span[1], span[3]
        for node in nodes_of(site.file):
            if isinstance(node, (ast.Call, ast.BinOp, ast.AugAssign)) and _span(node) == place:
                return node
    statement = statement_at(site.file, site.line)
    calls = [] if statement is None else calls_of(statement, op)
    return calls[0] if len(calls) == 1 else None


def statement_at(file: str, line: int) -> ast.stmt | None:
    """The smallest statement that covers a line, of several on it the first; of one with a body its head."""
    return next(iter(statements_at(file, line)), None)


@functools.lru_cache(maxsize=256)
def statement_over(tree: ast.Module, line: int, column: int | None = None) -> ast.stmt | None:
    """The smallest statement over a line, of functions and classes too; of several on it that at the column, else the
    last, an inner one before the one around it."""
    over = [n for n in nodes(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    if column is not None:
        at = (line, column)
        over = [n for n in over if (n.lineno, n.col_offset) <= at < (n.end_lineno, n.end_col_offset)] or over
    return min(over, key=lambda n: ((n.end_lineno or 0) - n.lineno, -n.col_offset), default=None)


def statements_at(file: str, line: int) -> list[ast.stmt]:
    """The smallest statements that cover a line: several where they share it."""
    covering = [
        node
        for node in nodes_of(file)
        if isinstance(node, ast.stmt)
        and not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= _head_end(node)
    ]
    least = min((_head_end(node) - node.lineno for node in covering), default=0)
    return [node for node in covering if _head_end(node) - node.lineno == least]


def loops_around(file: str, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
    """The loops that a line is in, their heads included, the outermost first."""
    loops = [n for n in nodes_of(file) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]
    return sorted((n for n in loops if n.lineno <= line <= (n.end_lineno or 0)), key=lambda n: n.lineno)


def function_at(file: str, line: int) -> ast.AST | None:
    """The innermost function around a line; the whole file where there is none."""
    around = [
        node
        for node in nodes_of(file)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=next(iter(nodes_of(file)), None))


def calls_of(part: ast.AST, op: str) -> list[ast.expr | ast.AugAssign]:
    """The calls and operators that stand for an op, in the head of a statement or in a whole function, in order."""
    body = [getattr(part, name, []) for name in ("body", "orelse", "finalbody", "handlers")]
    inner = {id(n) for block in body if isinstance(block, list) for child in block for n in ast.walk(child)}
    skip = set() if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)) else inner
    found = [n for n in ast.walk(part) if id(n) not in skip and is_call_of(n, op)]
    return sorted(found, key=_span)  # type: ignore[arg-type]


def is_call_of(node: ast.AST, op: str) -> bool:
    """Whether an expression is a call of this op by one of its names, or the operator for it."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return op in _OPERATORS.get(type(node.op), ())
    if not isinstance(node, ast.Call):
        return False
    return op in _ops_of(name_of(node))


def _ops_of(name: str) -> set[str]:
    """The ops that a function of this name may be."""
    name = name if name in _SPELLINGS else name.rstrip("_") if not name.startswith("_") else name
    base = _SPELLINGS.get(name, name)
    inner = {"svd": "linalg_svd", "logdet": "linalg_slogdet"}.get(base, base)
    return {base, f"linalg_{base}", f"special_{base}", inner}


def name_of(node: ast.expr | ast.AugAssign) -> str:
    """The last part of the name of what is called; "" for an operator."""
    function = getattr(node, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_method(node: ast.expr | ast.AugAssign) -> bool:
    """Whether the first operand of a call stands before the dot: `x.log()`, and not `torch.log(x)`."""
    function = getattr(node, "func", None)
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    return not (
        (isinstance(owner, ast.Name) and owner.id in {*_MODULES, "self"})
        or (isinstance(owner, ast.Attribute) and owner.attr in _MODULES)
    )


def operands(node: ast.expr | ast.AugAssign) -> list[ast.expr]:
    """The operands of a call or operator, in the order of torch's functions."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    assert isinstance(node, ast.Call)
    first = [node.func.value] if is_method(node) and isinstance(node.func, ast.Attribute) else []
    return [*first, *(a for a in node.args if not isinstance(a, ast.Starred))]


def operand(node: ast.expr | ast.AugAssign, place: int) -> ast.expr | None:
    """One operand, positional or by its keyword; None where it is not written there."""
    known = operands(node)
    if place < len(known):
        return known[place]
    return keyword(node, *_NAMES.get(place, ()))


def keyword(node: ast.AST, *names: str) -> ast.expr | None:
    """The value of the first of these keywords that a call has."""
    return next((k.value for k in getattr(node, "keywords", ()) if k.arg in names), None)


def with_keyword(file: str, node: ast.Call, name: str, value: str) -> dict[ast.AST, str]:
    """The changes that give a call this keyword argument, in place of the one that it has."""
    known = keyword(node, name)
    if known is not None:
        return {known: value}
    last = max([*node.args, *(k.value for k in node.keywords)], key=_span, default=None)
    if last is None:
        return {node: f"{source(file, node.func)}({name}={value})"}
    return {last: ("({raw})" if isinstance(last, ast.GeneratorExp) else "{raw}") + f", {name}={value}"}


def is_number(node: ast.expr | None) -> bool:
    """Whether an expression is a number in the code, with or without a sign."""
    return isinstance(getattr(node, "operand", node), ast.Constant)


def may_repeat(node: ast.expr) -> bool:
    """Whether writing an expression twice changes nothing: names, attributes, arithmetic, and methods that only view or
    convert."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and not (
            isinstance(part.func, ast.Attribute) and part.func.attr in _PURE_METHODS
        ):
            return False
        if isinstance(part, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda)):
            return False
    return True


def source(file: str, node: ast.AST) -> str:
    """The text of an expression."""
    text = "".join(linecache.getlines(file)).encode()
    start, end = _offsets(text, node)
    return text[start:end].decode()


def edit_of(file: str, changes: Mapping[ast.AST, str]) -> Edit | None:
    """The edit that rewrites these expressions, each by its template; expressions may lie in one another. None where
    the new text is no Python, is the old one, or gives a function a variable of its own where it reads one from
    outside."""
    text = "".join(linecache.getlines(file)).encode()
    spans = sorted(
        ((*_offsets(text, node), template, isinstance(node, ATOMS)) for node, template in changes.items()),
        key=lambda span: (span[0], -span[1]),
    )
    if not spans:
        return None
    first = min(node.lineno for node in changes)  # type: ignore[attr-defined]
    last = max(node.end_lineno for node in changes)  # type: ignore[attr-defined]
    whole = _rendered(text, 0, len(text), spans).decode()
    tree = parse(whole)
    if tree is None or _hides_a_name(parse(text), tree):
        return None
    old = text.decode().split("\n")
    new = whole.split("\n")
    end = len(new) - (len(old) - last)
    changed = "\n".join(old[first - 1 : last]), "\n".join(new[first - 1 : end])
    return None if changed[0] == changed[1] else Edit(file, first, last, *changed, cell_name(file))


def _hides_a_name(before: ast.Module | None, after: ast.Module) -> bool:
    """Whether a function stores a name now that it only read before, of a variable around it: that would be unbound."""
    scopes = [[n for n in ast.walk(tree) if isinstance(n, SCOPES[:2])] for tree in (before, after) if tree is not None]
    if len(scopes) < 2 or [f.name for f in scopes[0]] != [f.name for f in scopes[1]]:
        return False
    for old, new in zip(*scopes, strict=True):
        arguments = {a.arg for a in ast.walk(old.args) if isinstance(a, ast.arg)}
        stored, kept = (_own_names(f, ast.Store) for f in (new, old))
        if (stored - kept - arguments) & _own_names(old, ast.Load):
            return True
    return False


def _own_names(function: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that a function's own statements read, or store in a variable of its own."""
    names, todo = set[str](), list(ast.iter_child_nodes(function))
    outside = set[str]()
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            names.add(node.id)
        elif isinstance(node, (ast.Nonlocal, ast.Global)):
            outside |= set(node.names)
        if not isinstance(node, (*SCOPES, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)
    return names - outside if context is ast.Store else names


def _rendered(text: bytes, start: int, end: int, spans: list[tuple[int, int, str, bool]]) -> bytes:
    out, at, n = b"", start, 0
    while n < len(spans):
        low, high, template, atom = spans[n]
        inner = [span for span in spans[n + 1 :] if span[1] <= high]
        part = _rendered(text, low, high, inner).decode()
        out += text[at:low] + template.replace("{}", part if atom else f"({part})").replace("{raw}", part).encode()
        at, n = high, n + 1 + len(inner)
    return out + text[at:end]


def _offsets(text: bytes, node: ast.AST) -> tuple[int, int]:
    line, column, end, end_column = _span(node)
    starts = [0]
    for row in text.split(b"\n"):
        starts.append(starts[-1] + len(row) + 1)
    return starts[line - 1] + column, starts[end - 1] + end_column


def _span(node: ast.AST) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _head_end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


# -- statements that a value depends on --------------------------------------------------------------------------------


def slice_of(statements: list[ast.stmt], needed: set[str], space: Mapping[str, Any]) -> tuple[list[ast.stmt], set[str]]:
    """(those of which these names depend, the names that are needed before them). space: the variables' values."""
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            stored = set().union(*map(names_stored, targets))
            if stored & needed and statement.value is not None:
                plain = isinstance(statement, ast.Assign) and all(isinstance(t, (ast.Name, ast.Tuple)) for t in targets)
                needed = (needed - stored if plain else needed) | names_loaded(statement)
                kept.insert(0, statement)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            inner, before = slice_of(statement.body, needed, space)
            if inner:
                needed = before | set().union(*(names_loaded(i) for i in statement.items))
                kept.insert(0, ast.With(statement.items, inner))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if _filled(statement.value, space) & needed:
                needed = needed | names_loaded(statement)
                kept.insert(0, statement)
        elif hasattr(statement, "body") and _changed_inside(statement, space) & needed:
            needed = needed | names_loaded(statement)  # what runs in turns, or not at all, is taken whole
            kept.insert(0, statement)
    return kept, needed


def is_next(node: ast.AST) -> bool:
    """Whether it is a call of `next`."""
    return isinstance(node, ast.Call) and name_of(node) == "next"


def names_loaded(node: ast.AST) -> set[str]:
    """The variables that an expression or a statement reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def names_stored(target: ast.AST) -> set[str]:
    """The variables that an assignment changes: `x`, `x[0]`, `(x, y)`; `x.y` changes an object, which is none."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(names_stored, target.elts))
    return names_stored(target.value) if isinstance(target, (ast.Subscript, ast.Starred)) else set()


def _filled(call: ast.Call, space: Mapping[str, Any]) -> set[str]:
    """The variable that a call such as `outputs.append(out)` or `x.mul_(2)` changes."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    value = space.get(owner.id) if isinstance(owner, ast.Name) else None
    fills = isinstance(value, CONTAINERS) or isinstance(value, torch.Tensor) and name_of(call).endswith("_")
    return {owner.id} if isinstance(owner, ast.Name) and fills else set()


def _changed_inside(statement: ast.stmt, space: Mapping[str, Any]) -> set[str]:
    """The variables that statements inside of this one change; none where they train or leave the loop."""
    inside = list(ast.walk(statement))
    calls = [node for node in inside if isinstance(node, ast.Call)]
    leaves = any(isinstance(node, (ast.Continue, ast.Return, ast.Raise)) for node in inside)
    if leaves or any(name_of(call) in ("backward", "step", "zero_grad") for call in calls):
        return set()
    stores = [node for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)]
    return set().union(*map(names_stored, stores), *(_filled(call, space) for call in calls))


# -- the program as edited ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def edited_functions(edit: Edit) -> Iterator[int]:
    """Within, the functions around the edited lines run the new text: their code is exchanged, and put back at the end;
    so is the code of a cell that a magic runs. Gives how many these are; 0 where none can be exchanged, such as a
    module's own code."""
    exchanges = _exchanges(edit)
    try:
        for thing, attribute, _, new in exchanges:
            setattr(thing, attribute, new)
        yield len(exchanges)
    finally:
        for thing, attribute, old, _ in exchanges:
            setattr(thing, attribute, old)


def _exchanges(edit: Edit) -> list[tuple[Any, str, CodeType, CodeType]]:
    """(object, attribute, its code, its new code) of the functions around the edited lines, and of the closures of
    magics that run the cell; [] where one of them can't get it."""
    lines = [line.rstrip("\n") for line in linecache.getlines(edit.file)]
    tree = parse("\n".join([*lines[: edit.line - 1], *edit.new.split("\n"), *lines[edit.end_line :], ""]))
    functions = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType
        and (code := function.__code__).co_filename == edit.file
        and code.co_firstlineno <= edit.line <= _last_line(code)
    ]
    if tree is None:
        return []
    wanted = {(f.__code__.co_name, f.__code__.co_firstlineno): f.__code__.co_freevars for f in functions}
    for node in ast.walk(tree):  # variables that only the old text uses: the code must know of them, and uses them not
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            names = [ast.Expr(ast.Name(name, ast.Load())) for name in wanted.get((node.name, first), ())]
            node.body += [ast.If(ast.Constant(False), names, [])] if names else []  # type: ignore[arg-type]
    try:
        whole = compile(ast.fix_missing_locations(tree), edit.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return []
    codes: dict[tuple[str, int], list[CodeType]] = {}
    for code in codes_of(whole):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    exchanges: list[tuple[Any, str, CodeType, CodeType]] = []
    for function in functions:
        old = function.__code__
        new = codes.get((old.co_name, old.co_firstlineno), [])
        if len(new) != 1 or new[0].co_freevars != old.co_freevars:
            return []
        exchanges.append((function, "__code__", old, new[0]))
    return exchanges or [(cell, "cell_contents", cell.cell_contents, whole) for cell in _cells_of(edit.file)]


def _cells_of(file: str) -> Iterator[CellType]:
    """What holds the code of a cell in the functions by which a magic runs it."""
    magics = f"{__name__.partition('.')[0]}.magics."  # others, such as pytest's, may hold the code of a module, too
    for function in [f for f in gc.get_objects() if type(f) is FunctionType and str(f.__module__).startswith(magics)]:
        for cell in function.__closure__ or ():
            code = cell.cell_contents if cell != CellType() else None
            if type(code) is CodeType and (code.co_filename, code.co_name) == (file, "<module>"):
                yield cell


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions, classes and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _last_line(code: CodeType) -> int:
    return max(line for inner in codes_of(code) for _, _, line in inner.co_lines() if line is not None)
