"""The cells that ran, in order, read as Python: what each of them binds, deletes, calls and imports.

The shell keeps the text of every cell. It is parsed only if it contains a word that matters, and never run. A cell runs
more than its own lines: a call of a function that another cell has defined also runs the function's lines.
"""

from __future__ import annotations

import ast
import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nbdebug.observe.sources import parse, statement_over
from nbdebug.report import Where

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINED = (*FUNCTIONS, ast.ClassDef)
Bound = tuple[str, str, ast.stmt, "ast.expr | None"]
"""(path, how, statement, value): of `model.fc = new()` "model.fc", "assign", the whole, `new()`."""
At = tuple[int, int]
"""A cell, and a line in it."""
TIMED = frozenset("time timeit capture prun lprun memit mem nan_trace diagnose".split())
"""Magics that run their argument as Python."""


def dotted(node: ast.AST | None) -> str:
    """ "model.layers.fc" of a name or an attribute, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def names_in(node: ast.AST | None) -> set[str]:
    """The variables that an expression reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """What a call is given, by place and by name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def unwrapped(statement: ast.stmt) -> list[ast.stmt]:
    """The statements after `%time` or below `%%time`, as IPython transforms them; else the statement itself."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") not in ("run_cell_magic", "run_line_magic"):
        return [statement]
    arguments = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if len(arguments) != len(call.args) or not arguments or arguments[0] not in TIMED:
        return [statement]
    line, text = statement.lineno, arguments[-1]
    while (tree := parse(text)) is None and arguments[-1].startswith("-") and " " in text:
        text = text.split(None, 1)[1]  # its options
    if tree is None:
        return [statement]
    return [ast.increment_lineno(inner, line if len(arguments) == 3 else line - 1) for inner in tree.body]


def running(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if not isinstance(statement, DEFINED):
            for part in ("body", "orelse", "finalbody"):
                yield from running(getattr(statement, part, ()))
            for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from running(handler.body)


def bound(statement: ast.stmt) -> Iterator[Bound]:
    """What a statement binds or deletes."""
    if isinstance(statement, DEFINED):
        yield statement.name, "class" if isinstance(statement, ast.ClassDef) else "def", statement, None
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], "import", statement, None
    elif isinstance(statement, ast.Delete):
        yield from ((path, "del", statement, None) for target in statement.targets for path in [dotted(target)] if path)
    else:
        loop = isinstance(statement, (ast.For, ast.AsyncFor))
        for target, value in _pairs(statement):
            for path, part in _targets(target, value):
                yield (path, "for", statement, None) if loop else (path, "assign", statement, part)


def _pairs(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, a loop or a with."""
    if isinstance(statement, ast.Assign):
        return [(target, statement.value) for target in statement.targets]
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return [(statement.target, statement.value)] if statement.value is not None else []
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [(statement.target, statement.iter)]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [(item.optional_vars, item.context_expr) for item in statement.items if item.optional_vars is not None]
    return []


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        values = (
            value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        )
        for place, part in enumerate(target.elts):
            yield from _targets(part, values[place] if values else value)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value, value)
    elif dotted(target):
        yield dotted(target), value


def number_of(where: Where) -> int | None:
    """The number of the cell at a place."""
    cell = where.cell or ""
    return int(cell[4:-1]) if cell.startswith("In [") and cell[4:-1].isdigit() else None


def error_message(error: BaseException | None) -> str:
    """The text that an exception was raised with; "" where it has none, or is None."""
    args = vars(BaseException)["args"].__get__(error) if error is not None else ()
    return args[0] if args and type(args[0]) is str else ""


def traceback_links(error: BaseException | None) -> Iterator[types.TracebackType]:
    """The links of an exception's traceback, outermost first."""
    link = vars(BaseException)["__traceback__"].__get__(error) if error is not None else None
    while link is not None:
        yield link
        link = link.tb_next


def cell_lines(error: BaseException | None, history: CellHistory) -> Iterator[tuple[int, int]]:
    """(cell, line) of each line of a cell in an exception's traceback, outermost first."""
    for link in traceback_links(error):
        number = history.cell_of(link.tb_frame.f_code.co_filename)
        if number is not None:
            yield number, link.tb_lineno


_WORD = re.compile(r"[^\W\d]\w*")
LONGEST = 200_000
"""Characters of a cell; a longer one contains data, and is not parsed."""


class CellBinding(NamedTuple):
    """A statement that gives a name a value. path: "model" or "model.fc"; how: "assign", "def", "class", "import",
    "for" or "del"; value: the expression, where there is one."""

    number: int
    path: str
    how: str
    node: ast.stmt
    value: ast.expr | None

    @property
    def at(self) -> tuple[int, int]:
        """The cell and the line: the later of two bindings has the larger."""
        return self.number, self.node.lineno

    @property
    def made_of(self) -> str:
        """The class that is called for the value, "" where none is."""
        name = dotted(getattr(self.value, "func", None)).rpartition(".")[2]
        return name if name[:1].isupper() else ""


class Cell:
    """One cell as it ran: its execution count, its text as Python, and its raw text."""

    def __init__(self, number: int, source: str, raw: str) -> None:
        self.number, self.source, self.raw = number, source, raw

    def mentions(self, word: str) -> bool:
        """Whether its text contains a word: a quick check before it is parsed."""
        return word in self.source

    @functools.cached_property
    def body(self) -> list[ast.stmt]:
        """Its statements; none where it is no Python."""
        tree = parse(self.source) if len(self.source) < LONGEST else None
        return [] if tree is None else [inner for statement in tree.body for inner in unwrapped(statement)]

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Those that run with the cell, also within loops and branches, without the bodies of functions."""
        return list(running(self.body))

    @functools.cached_property
    def bindings(self) -> list[CellBinding]:
        return [CellBinding(self.number, *one) for statement in self.statements for one in bound(statement)]

    @functools.cached_property
    def functions(self) -> dict[str, list[ast.AST]]:
        """The functions, methods and classes that it defines, by their names."""
        definitions: dict[str, list[ast.AST]] = {}
        for statement in self.body:
            for node in ast.walk(statement):
                if isinstance(node, DEFINED):
                    definitions.setdefault(node.name, []).append(node)
        return definitions

    def place(self, line: int | None = None, text: str | None = None) -> Where:
        """A line in it. text: its source, by default that of the line."""
        lines = self.raw.splitlines()
        line = 1 if line is None else line
        source = lines[line - 1].strip() if text is None and 0 < line <= len(lines) else text
        return Where(line=line, text=source or None, cell=f"In [{self.number}]")

    def statement(self, line: int) -> ast.stmt | None:
        """The smallest statement over a line, also of a function."""
        return statement_over(ast.Module(self.body, []), line)

    def place_of(self, node: ast.AST) -> Where:
        """The line of a node; the first line where it is not in this cell, but in a function of another one."""
        own = any(one is node for statement in self.body for one in ast.walk(statement))
        return self.place(getattr(node, "lineno", None) if own else None)

    def text_of(self, node: ast.AST) -> str:
        same = self.source.strip() == self.raw.strip()
        return same and ast.get_source_segment(self.source, node) or ast.unparse(node)


class CellHistory:
    """All cells of a session, and which file name stands for which of them. failed: those that ended in an exception;
    None where the shell keeps no record of it (IPython before 9)."""

    def __init__(
        self, cells: Mapping[int, tuple[str, str]], files: Mapping[str, int], failed: frozenset[int] | None = None
    ) -> None:
        self.failed = failed
        self.cells = {number: Cell(number, *texts) for number, texts in cells.items() if texts[0].strip()}
        self.files = files
        self._reached: dict[int, list[ast.AST]] = {}
        self._bindings: dict[str, list[CellBinding]] = {}

    @classmethod
    def of(cls, shell: Any) -> CellHistory:
        """What the shell keeps of this session; nothing where none runs."""
        manager = getattr(shell, "history_manager", None)
        parsed, raw = (getattr(manager, f"input_hist_{kind}", None) or [] for kind in ("parsed", "raw"))
        files = getattr(getattr(shell, "compile", None), "_filename_map", None) or {}
        ended = getattr(manager, "exceptions", None)
        failed = frozenset(ended) if isinstance(ended, dict) else None
        return cls({n: texts for n, texts in enumerate(zip(parsed, raw)) if n}, files, failed)

    @functools.cached_property
    def _words(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for number, cell in self.cells.items():
            for word in set(_WORD.findall(cell.source)):
                numbers.setdefault(word, []).append(number)
        return numbers

    def mentioning(self, *words: str) -> list[Cell]:
        """The cells whose text holds one of these words, in the order in which they ran."""
        if all(word.isidentifier() for word in words):
            return [self.cells[n] for n in sorted({n for word in words for n in self._words.get(word, ())})]
        return [cell for cell in self.cells.values() if any(cell.mentions(word) for word in words)]

    def reaching(self, *words: str) -> list[Cell]:
        """The cells that say one of these words, or call a function of a cell that does, directly or not."""
        return self.mentioning(*self.words(*words))

    def words(self, *words: str) -> set[str]:
        """These words, and the names of the functions of cells that say one of them, directly or not."""
        reached, todo = set(words), list(words)
        while todo:
            new = [
                name
                for cell in self.mentioning(*todo)
                for name, definitions in cell.functions.items()
                if name not in reached
                and any(word in _WORD.findall(cell.text_of(node)) for word in todo for node in definitions)
            ]
            reached.update(new)
            todo = list(dict.fromkeys(new))
        return reached

    def bindings(self, path: str, *hows: str) -> list[CellBinding]:
        """The statements that bind this name ("model") or attribute ("model.fc"), in order."""
        if path not in self._bindings:
            last = re.escape(path.rpartition(".")[2])
            binds = re.compile(
                rf"\b{last}\b[^\n]*?(?<![=!<>])=(?!=)"
                rf"|\b(?:def|class|import|as|for|del)\b[^\n]*\b{last}\b|\b{last}\b\s*,\s*\n"
            )
            self._bindings[path] = [
                b
                for cell in self.mentioning(path.rpartition(".")[2])
                if binds.search(cell.source)
                for b in cell.bindings
                if b.path == path
            ]
        return [b for b in self._bindings[path] if (b.how in hows if hows else b.how != "del")]

    def loop_of(self, name: str) -> CellBinding | None:
        """The loop that has left a variable its value."""
        last = self.bindings(name)[-1:]
        return last[0] if last and isinstance(last[0].node, ast.For) else None

    def place(self, binding: CellBinding) -> Where:
        """The first line of a binding."""
        return self.cells[binding.number].place(binding.node.lineno)

    def text(self, binding: CellBinding) -> str:
        return self.cells[binding.number].text_of(binding.node)

    def text_of(self, number: int, node: ast.AST) -> str:
        return self.cells[number].text_of(node)

    def cell_of(self, file: str) -> int | None:
        """The number of the cell that this file name stands for: of cells with the same text, the last."""
        match = re.match(r"<ipython-input-(\d+)-", file)
        number = int(match[1]) if match else self.files.get(file)
        return number if number in self.cells else None

    def same(self, number: int) -> list[int]:
        """The runs of all cells with exactly the text of this one, in order."""
        text = self.cells[number].source.strip()
        return [n for n, cell in self.cells.items() if cell.source.strip() == text]

    def reach(self, number: int) -> list[ast.AST]:
        """What the cell runs: its own statements, and the functions of cells that they call, as far as names show."""
        if number not in self._reached:
            self._reached[number] = self.reach_of(self.cells[number].statements, number)
        return self._reached[number]

    def reach_of(self, statements: Iterable[ast.stmt], number: int) -> list[ast.AST]:
        """What these statements run, in this cell."""
        reached: list[ast.AST] = [s for s in statements if not isinstance(s, DEFINED)]
        names: set[str] = set()
        todo = [*reached]
        while todo and len(reached) < 5000:
            for name in _callees(todo.pop()) - names:
                names.add(name)
                more = list(self._defined(name, number))
                reached += more
                todo += more
        return reached

    def methods(self, number: int) -> set[str]:
        """The names of the methods that the cell calls."""
        return methods_of(self.reach(number))

    def training(self, after: int, before: int) -> Iterator[int]:
        """The cells between these two that train: they call `backward` and `step`."""
        found = (cell.number for cell in self.reaching("backward") if after < cell.number < before)
        return (number for number in found if {"backward", "step"} <= self.methods(number))

    def trains(self, statement: ast.stmt, number: int) -> bool:
        """Whether a statement of this cell runs a backward pass."""
        inside = [] if isinstance(statement, DEFINED) else running([statement])
        return "backward" in methods_of(self.reach_of(inside, number))

    def after(self, at: At, *words: str, inner: bool = False) -> Iterator[tuple[Cell, ast.AST, bool]]:
        """(cell, what it runs, whether that is a statement of its own) of what ran after this place, in cells that can
        reach one of these words. inner: functions that this very cell runs count, too."""
        for cell in [cell for cell in self.reaching(*words) if cell.number >= at[0]]:
            for root in self.reach(cell.number):
                own = root in cell.statements
                if cell.number > at[0] or (root.lineno > at[1] if own else inner):  # type: ignore[attr-defined]
                    yield cell, root, own

    def origins(self, name: str, before: At) -> set[tuple[str, At]]:
        """(variable, place of its statement) of all from which a variable was computed, as it was before this place."""
        found, todo = set[tuple[str, At]](), [(name, before)]
        while todo:
            name, before = todo.pop()
            made = max((b for b in self.bindings(name) if b.at < before), key=lambda b: b.at, default=None)
            if made is not None and (name, made.at) not in found:
                found.add((name, made.at))
                source = made.node.iter if isinstance(made.node, (ast.For, ast.AsyncFor)) else made.value
                todo += [(read, made.at) for read in names_in(source)]
        return found

    def _defined(self, name: str, before: int) -> Iterator[ast.AST]:
        """The last definition of this name that a cell up to this one has made; of a class what making one runs."""
        for cell in reversed(self.mentioning(name)):
            if (
                cell.number > before
                or not (cell.mentions(f"def {name}") or cell.mentions(f"class {name}"))
                or (name not in cell.functions)
            ):
                continue
            for node in cell.functions[name]:
                inner = node.body if isinstance(node, ast.ClassDef) else [node]
                yield from (
                    part
                    for part in inner
                    if not isinstance(node, ast.ClassDef)
                    or getattr(part, "name", "") in ("__init__", "forward", "__call__", "__post_init__")
                )
            return


def nodes(reached: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of what a cell runs. A function that is only defined there is not among them."""
    for root in reached:
        called = isinstance(root, FUNCTIONS)
        todo: list[ast.AST] = list(root.body) if called else [root]  # type: ignore[attr-defined]
        while todo:
            node = todo.pop()
            yield node
            if not isinstance(node, DEFINED):  # the body of a loop has statements of its own
                todo += [c for c in ast.iter_child_nodes(node) if called or not isinstance(c, ast.stmt)]


def methods_of(reached: Iterable[ast.AST]) -> set[str]:
    """The names of the methods that are called there."""
    calls = (n.func for n in nodes(reached) if isinstance(n, ast.Call))
    return {of.attr for of in calls if isinstance(of, ast.Attribute)}


def read_by(reached: Iterable[ast.AST]) -> set[str]:
    """The notebook's variables that these statements and functions read."""
    read = set[str]()
    for root in reached:
        inside = [n for n in nodes([root]) if isinstance(n, ast.Name)]
        own = {a.arg for a in ast.walk(getattr(root, "args", root)) if isinstance(a, ast.arg)}
        shared = {name for n in ast.walk(root) if isinstance(n, ast.Global) for name in n.names}
        if isinstance(root, FUNCTIONS):
            own |= {n.id for n in inside if isinstance(n.ctx, ast.Store)} - shared
        read |= {n.id for n in inside} - own
    return read


def _callees(root: ast.AST) -> set[str]:
    """The names of what it calls, or passes on to be called: `model.apply(init)`."""
    names = set()
    for node in nodes([root]):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func))
            names |= {value.id for value in arguments_of(node) if isinstance(value, ast.Name)}
    return names - {""}


def scopes(root: ast.AST, body: list[ast.stmt]) -> list[dict[str, str]]:
    """What each name stands for, as text: of a function one dict for each call of it in the body, else of the body."""
    if not isinstance(root, FUNCTIONS):
        return [{name: name for s in body for name in names_in(s)}]
    parameters = [a.arg for a in (*root.args.posonlyargs, *root.args.args)]
    defaults = dict(zip(parameters[::-1], root.args.defaults[::-1]))
    defaults |= {a.arg: value for a, value in zip(root.args.kwonlyargs, root.args.kw_defaults) if value is not None}
    left_out = {name: ast.unparse(value) for name, value in defaults.items()}
    calls = [n for n in nodes(body) if isinstance(n, ast.Call) and dotted(n.func) == root.name]
    named = [{str(k.arg): ast.unparse(k.value) for k in n.keywords} for n in calls]
    return [{**left_out, **dict(zip(parameters, map(ast.unparse, n.args))), **k} for n, k in zip(calls, named)]


IDLE = frozenset(
    "state_dict load_state_dict zero_grad eval parameters named_parameters to modules named_modules get_last_lr "
    "add_param_group children cpu cuda close".split()
)
"""Methods that train nothing."""


def root_of(path: str) -> str:
    """The variable of a name: "models" of "models[0].fc"."""
    return path.partition("[")[0].partition(".")[0]


def calls_after(history: CellHistory, at: At, word: str) -> Iterator[tuple[Cell, ast.Call]]:
    """(cell, call) of the calls that ran after this place, in cells that can reach the word."""
    for cell, root, _ in history.after(at, word, inner=True):
        yield from ((cell, node) for node in nodes([root]) if isinstance(node, ast.Call) and word in names_in(node))


def first_training_use(history: CellHistory, name: str, at: At) -> Where | None:
    """The first cell after this place that calls a training method of the variable, or passes it to a function."""
    for cell, call in calls_after(history, at, name):
        of = dotted(call.func)
        own = of.startswith(f"{name}.") and of.rpartition(".")[2] not in IDLE
        if own or any(dotted(value) == name for value in arguments_of(call)) and not reads_only(of):
            return cell.place_of(call)
    return None


def reads_only(function: str) -> bool:
    """Whether a function that is given a variable only shows or stores it, or makes something new from it."""
    last = function.rpartition(".")[2]
    return last in ("print", "display", "len", "type", "id", "repr", "str", "isinstance", "save", "dir", "vars") or (
        last[:1].isupper()
    )


def first_read(history: CellHistory, name: str, at: At) -> Where | None:
    """The first cell after this place that reads the variable."""
    for cell, root, own in history.after(at, name):
        for node in nodes([root]):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                return cell.place(node.lineno if own else None)
    return None


def keeps_object(binding: CellBinding) -> bool:
    """Whether a statement leaves a variable what it was: `model = model.to(device)`, `model = torch.compile(model)`."""
    name, value = binding.path, binding.value
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Name) and value.id == name
    of = value.func
    while isinstance(of, (ast.Attribute, ast.Call)):
        of = of.value if isinstance(of, ast.Attribute) else of.func
    last = dotted(value.func).rpartition(".")[2]
    return (
        isinstance(of, ast.Name)
        and of.id == name
        or (name in names_in(value) and last in ("compile", "DataParallel", "DistributedDataParallel", "prepare", "to"))
    )


SEEDING = ("manual_seed", "seed", "seed_everything", "set_seed", "fix_seed", "seed_all", "manual_seed_all")
"""Functions that begin a sequence of random numbers."""


def seeding(roots: Iterable[ast.AST]) -> list[ast.Call]:
    """The calls that begin a sequence of random numbers."""
    calls = (n for root in roots for n in ast.walk(root) if isinstance(n, ast.Call))
    return [n for n in calls if dotted(n.func).rpartition(".")[2] in SEEDING]


LIBRARIES = ("torch", "np", "numpy", "random")
DRAWN = re.compile(r"rand\w*|permutation|choices?|sample|shuffle|normal_?|uniform_?|bernoulli_?|multinomial|integers")
GENERATORS = ("default_rng", "Random", "RandomState")
"""Modules with a generator of their own; functions that draw random numbers; those that make a generator of a seed."""


def draws_after(seed: ast.Call, draw: ast.Call) -> bool:
    """Whether a call seeds with constants what a later call draws from: a library's, or one made there."""
    of, does = ast.unparse(seed.func).rpartition(".")[::2]
    fixed = arguments_of(seed) and all(isinstance(value, ast.Constant) for value in arguments_of(seed))
    by, draws = ast.unparse(draw.func).rpartition(".")[::2]
    given = any(keyword.arg in ("generator", "random_state") for keyword in draw.keywords)
    own = given or root_of(by) not in LIBRARIES  # of a generator of its own
    made = does in GENERATORS or "Generator(" in of
    if not fixed or does not in (*SEEDING, *GENERATORS) or seed.lineno > draw.lineno or not DRAWN.fullmatch(draws):
        return False
    return seed is not draw and own is made and (made or not of or root_of(of) == root_of(by))


def takes(function: Any, call: ast.Call) -> bool:
    """Whether a call gives a function all that it needs, and nothing else."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    needed, given = names[: len(names) - len(function.args.defaults)], {keyword.arg for keyword in call.keywords}
    return len(call.args) <= len(names) and set(needed[len(call.args) :]) <= given <= set(names[len(call.args) :])
