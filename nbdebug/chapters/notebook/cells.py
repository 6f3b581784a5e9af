"""The cells that were run, in order, read as Python: what each of them binds, deletes, calls and imports.

The shell keeps the text of every cell. It is parsed only where a word that matters stands in it, and never run. What a
cell runs is more than its own lines: a call of a function that a cell has defined leads on to that function's lines.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nbdebug.chapters.notebook.statements import DEFINED, FUNCTIONS, bound, dotted, running, unwrapped
from nbdebug.finding import Where

_WORD = re.compile(r"[^\W\d]\w*")
LONGEST = 200_000
"""Characters of a cell; a longer one holds data, and is not parsed."""


class Binding(NamedTuple):
    """A statement that gives a name a value. path: "model" or "model.fc"; how: "assign", "def", "class", "import",
    "for" or "del"; value: the expression, where there is one."""

    number: int
    path: str
    how: str
    node: ast.stmt
    value: ast.expr | None

    @property
    def at(self) -> tuple[int, int]:
        """Which of two was later: the cell, then the line."""
        return self.number, self.node.lineno


class Cell:
    """One cell as it ran: its execution count, its text as Python, and as it was typed."""

    def __init__(self, number: int, source: str, typed: str) -> None:
        self.number, self.source, self.typed = number, source, typed

    def says(self, word: str) -> bool:
        """Whether a word stands in its text. A quick look, before it is parsed."""
        return word in self.source

    @functools.cached_property
    def body(self) -> list[ast.stmt]:
        """Its statements; none where it is no Python."""
        try:
            tree = ast.parse(self.source) if len(self.source) < LONGEST else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError):
            return []
        return [inner for statement in tree.body for inner in unwrapped(statement)]

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Those that run with the cell, also within loops and branches, without the bodies of functions."""
        return list(running(self.body))

    @functools.cached_property
    def bindings(self) -> list[Binding]:
        return [Binding(self.number, *one) for statement in self.statements for one in bound(statement)]

    @functools.cached_property
    def functions(self) -> dict[str, list[ast.AST]]:
        """The functions, methods and classes that it defines, by their names."""
        found: dict[str, list[ast.AST]] = {}
        for statement in self.body:
            for node in ast.walk(statement):
                if isinstance(node, DEFINED):
                    found.setdefault(node.name, []).append(node)
        return found

    def place(self, line: int | None = None, text: str | None = None) -> Where:
        """A place in it. text: the source, left out: that line."""
        lines = self.typed.splitlines()
        line = 1 if line is None else line
        given = lines[line - 1].strip() if text is None and 0 < line <= len(lines) else text
        return Where(line=line, text=given or None, cell=f"In [{self.number}]")

    def text_of(self, node: ast.AST) -> str:
        same = self.source.strip() == self.typed.strip()
        return same and ast.get_source_segment(self.source, node) or ast.unparse(node)


class History:
    """All cells of a session, and which file name stands for which of them."""

    def __init__(self, cells: Mapping[int, tuple[str, str]], files: Mapping[str, int]) -> None:
        self.cells = {number: Cell(number, *texts) for number, texts in cells.items() if texts[0].strip()}
        self.files = files
        self._reached: dict[int, list[ast.AST]] = {}
        self._bindings: dict[str, list[Binding]] = {}

    @classmethod
    def of(cls, shell: Any) -> History:
        """What the shell keeps of this session; nothing where none runs."""
        manager = getattr(shell, "history_manager", None)
        parsed, typed = (getattr(manager, f"input_hist_{kind}", None) or [] for kind in ("parsed", "raw"))
        files = getattr(getattr(shell, "compile", None), "_filename_map", None) or {}
        return cls({n: texts for n, texts in enumerate(zip(parsed, typed)) if n}, files)

    @functools.cached_property
    def _words(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, cell in self.cells.items():
            for word in set(_WORD.findall(cell.source)):
                found.setdefault(word, []).append(number)
        return found

    def saying(self, *words: str) -> list[Cell]:
        """The cells whose text holds one of these words, in the order in which they ran."""
        if all(word.isidentifier() for word in words):
            return [self.cells[n] for n in sorted({n for word in words for n in self._words.get(word, ())})]
        return [cell for cell in self.cells.values() if any(cell.says(word) for word in words)]

    def leading_to(self, *words: str) -> list[Cell]:
        """The cells that say one of these words, or call a function of a cell that does, directly or not."""
        known, todo = set(words), list(words)
        while todo:
            new = [
                name
                for cell in self.saying(*todo)
                for name, made in cell.functions.items()
                if name not in known
                and any(word in _WORD.findall(cell.text_of(node)) for word in todo for node in made)
            ]
            known.update(new)
            todo = list(dict.fromkeys(new))
        return self.saying(*known)

    def bindings(self, path: str, *hows: str) -> list[Binding]:
        """The statements that bind this name ("model") or attribute ("model.fc"), in order."""
        if path not in self._bindings:
            last = re.escape(path.rpartition(".")[2])
            binds = re.compile(
                rf"\b{last}\b[^\n]*?(?<![=!<>])=(?!=)"
                rf"|\b(?:def|class|import|as|for|del)\b[^\n]*\b{last}\b|\b{last}\b\s*,\s*\n"
            )
            self._bindings[path] = [
                b
                for cell in self.saying(path.rpartition(".")[2])
                if binds.search(cell.source)
                for b in cell.bindings
                if b.path == path
            ]
        return [b for b in self._bindings[path] if (b.how in hows if hows else b.how != "del")]

    def place(self, binding: Binding) -> Where:
        """Where a binding stands: its first line."""
        return self.cells[binding.number].place(binding.node.lineno)

    def text(self, binding: Binding) -> str:
        return self.cells[binding.number].text_of(binding.node)

    def cell_of(self, file: str) -> int | None:
        """The number of the cell that this file name stands for: of cells with the same text, the last."""
        match = re.match(r"<ipython-input-(\d+)-", file)
        number = int(match[1]) if match else self.files.get(file)
        return number if number in self.cells else None

    def same(self, number: int) -> list[int]:
        """The runs of a cell with the very text of this one, in order."""
        text = self.cells[number].source.strip()
        return [n for n, cell in self.cells.items() if cell.source.strip() == text]

    def reach(self, number: int) -> list[ast.AST]:
        """What the cell runs: its own statements, and the functions of cells that they call, as far as names tell."""
        if number not in self._reached:
            found: list[ast.AST] = [s for s in self.cells[number].statements if not isinstance(s, DEFINED)]
            known: set[str] = set()
            todo = [*found]
            while todo and len(found) < 5000:
                for name in _called(todo.pop()) - known:
                    known.add(name)
                    more = list(self._defined(name, number))
                    found += more
                    todo += more
            self._reached[number] = found
        return self._reached[number]

    def _defined(self, name: str, before: int) -> Iterator[ast.AST]:
        """The last definition of this name that a cell up to this one has made; of a class what making one runs."""
        for cell in reversed(self.saying(name)):
            if (
                cell.number > before
                or not (cell.says(f"def {name}") or cell.says(f"class {name}"))
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
            if not isinstance(node, DEFINED):  # what stands below a loop's head is a statement of its own
                todo += [c for c in ast.iter_child_nodes(node) if called or not isinstance(c, ast.stmt)]


def _called(root: ast.AST) -> set[str]:
    """The names of what it calls, or hands on to be called: `model.apply(init)`."""
    found = set()
    for node in nodes([root]):
        if isinstance(node, ast.Call):
            found.add(node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func))
            given = (*node.args, *(keyword.value for keyword in node.keywords))
            found |= {value.id for value in given if isinstance(value, ast.Name)}
    return found - {""}
