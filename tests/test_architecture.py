"""The shape of the code, checked by walking its imports: one direction of data, knowledge apart from machinery."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "nbdebug"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PURE = [
    path
    for path in FILES
    if "chapters" in path.parts
    and re.match(
        r"(facts|rules)",
        path.relative_to(PACKAGE / "chapters").parts[-1] if path.parent.parent.name == "chapters" else path.parent.name,
    )
]


def name_of(path: pathlib.Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path, tree: ast.AST | None = None) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in it; `from a import b` gives a and a.b."""
    for node in ast.walk(tree or TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import hides where it leads"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def top(path: pathlib.Path) -> set[str]:
    """The packages that a module imports."""
    return {name.split(".")[0] for name in imports(path)}


def reached(path: pathlib.Path) -> set[pathlib.Path]:
    """This module and all of nbdebug that it imports, directly or not."""
    modules, seen, todo = {name_of(p): p for p in FILES}, set(), [path]
    while todo:
        seen.add(now := todo.pop())
        todo += [modules[name] for name in imports(now) if name in modules and modules[name] not in seen]
    return seen


def test_there_is_something_to_check() -> None:
    assert {name_of(path).split(".")[-1] for path in PURE} >= {"facts", "rules"}


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_facts_and_rules_know_neither_torch_nor_the_notebook(path: pathlib.Path) -> None:
    for part in reached(path):
        assert not top(part) & {"torch", "numpy", "IPython", "ipywidgets"}, f"{name_of(path)} reaches {name_of(part)}"


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_facts_and_rules_do_no_io(path: pathlib.Path) -> None:
    assert not top(path) & {"os", "io", "pathlib", "shutil", "subprocess", "socket", "requests", "urllib", "tempfile"}
    called = {
        node.func.id for node in ast.walk(TREES[path]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("path", [p for p in FILES if "chapters" in p.parts], ids=name_of)
def test_a_chapter_imports_no_view_no_magic_and_no_other_chapter(path: pathlib.Path) -> None:
    own = ".".join(name_of(path).split(".")[:3])
    for name in imports(path):
        assert not name.startswith(("nbdebug.views", "nbdebug.magics", "nbdebug.__main__"))
        assert not name.startswith("nbdebug.chapters.") or (name + ".").startswith(own + "."), name


@pytest.mark.parametrize("path", [p for p in FILES if "observe" in p.parts], ids=name_of)
def test_observe_stands_below_the_chapters(path: pathlib.Path) -> None:
    assert not [n for n in imports(path) if n.startswith(("nbdebug.chapters", "nbdebug.views", "nbdebug.magics"))]


@pytest.mark.parametrize("path", [p for p in FILES if "views" in p.parts], ids=name_of)
def test_views_draw_reports_and_know_no_chapter_and_no_tensor(path: pathlib.Path) -> None:
    assert "torch" not in top(path)
    assert not [name for name in imports(path) if name.startswith(("nbdebug.chapters", "nbdebug.observe"))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_notebook_is_known_in_few_places(path: pathlib.Path) -> None:
    name = name_of(path)
    assert "ipywidgets" not in top(path) or name == "nbdebug.views.panel"
    magics = (name + ".").startswith("nbdebug.magics.")
    assert "IPython" not in top(path) or magics
    assert magics or name == "nbdebug" or not [n for n in imports(path) if (n + ".").startswith("nbdebug.magics.")]
    assert "matplotlib.pyplot" not in imports(path), "pyplot keeps state of its own; draw with Figure"


def test_the_search_knows_no_torch() -> None:
    assert not top(PACKAGE / "bisect.py") & {"torch", "IPython", "nbdebug"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short_and_open_with_their_idea(path: pathlib.Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < 300, f"{name_of(path)} has {lines} lines"
    assert not TREES[path].body or ast.get_docstring(TREES[path]), f"{name_of(path)} does not say what it is for"
    assert not {"utils", "helpers", "manager", "base"} & {path.stem, path.parent.name}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_are_short(path: pathlib.Path) -> None:
    functions = [n for n in ast.walk(TREES[path]) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {n.name: size for n in functions if (size := (n.end_lineno or 0) - n.lineno + 1) >= 40}
    assert not long, f"functions of 40 lines or more in {name_of(path)}: {long}"
