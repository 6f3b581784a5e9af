"""The shape of the code: one direction of imports, files that hold an idea, names of the field, short walks.

The directions themselves are contracts of import-linter, in pyproject.toml; what it can't say is said here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from importlinter.cli import lint_imports

import nbdebug

PACKAGE = pathlib.Path(nbdebug.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {
    path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES
}
PURE = [path for path in FILES if re.search(r"nbdebug\.tools\..*\.(facts|rules)\b", NAMES[path])]
ROLES = {"arguments", "probe", "facts", "rules", "wording", "report"}


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: pathlib.Path) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in it; `from a import b` gives a and a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import hides where it leads"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lines(path: pathlib.Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


MODULES = {name: path for path, name in NAMES.items()}


@functools.cache
def edges(path: pathlib.Path) -> set[pathlib.Path]:
    """What a module imports of ours; `from package import module` means the module. The loader itself is left out."""
    names = {name for name in imports(path) if name in MODULES and name != "nbdebug"}
    parents = {name.rpartition(".")[0] for name in names}
    return {MODULES[n] for n in names - parents} - {path}


def test_the_import_contracts_are_kept() -> None:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        failed = lint_imports(config_filename=str(PACKAGE.parent / "pyproject.toml"), no_cache=True)
    assert not failed, told.getvalue()


def test_no_module_leads_back_to_itself() -> None:
    done: set[pathlib.Path] = set()

    def walk(path: pathlib.Path, above: tuple[pathlib.Path, ...]) -> None:
        assert path not in above, " -> ".join(NAMES[p] for p in (*above, path))
        if path not in done:
            for other in edges(path):
                walk(other, (*above, path))
            done.add(path)

    for path in FILES:
        if path != PACKAGE / "__init__.py":  # the loader asks for the magics, late and by name
            walk(path, ())


@pytest.mark.parametrize("path", PURE, ids=lambda p: NAMES[p])
def test_facts_and_rules_do_no_io(path: pathlib.Path) -> None:
    top = {name.split(".")[0] for name in imports(path)}
    assert not top & {"os", "io", "pathlib", "shutil", "subprocess", "socket", "requests", "urllib", "tempfile"}
    called = {n.func.id for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: NAMES[p])
def test_a_file_opens_with_its_idea_and_is_not_endless(path: pathlib.Path) -> None:
    assert ast.get_docstring(tree(path)), f"{NAMES[path]} does not say what it is for"
    assert lines(path) <= 900, f"{NAMES[path]} has {lines(path)} lines: which two ideas are in it?"
    assert "ipywidgets" not in imports(path) or NAMES[path] == "nbdebug.views.widgets"
    assert "matplotlib.pyplot" not in imports(path), "pyplot keeps state of its own; draw with Figure"


def test_every_folder_says_how_to_read_it_and_is_read_in_one_go() -> None:
    folders = Counter(path.parent for path in FILES)
    assert all((folder / "__init__.py").exists() for folder in folders)
    assert max(folders.values()) <= 21, "at most 20 modules and the prose"  # what a person takes in at one look
    assert len(FILES) <= 300


WORDS = {
    "training",
    "wording",
    "casting",
    "batch_mixing",
    "overfitting",
    "distributed",
    "lightning",
    "speed",
}
"""Ends of participles that are nouns of the field, or the name of a package."""
VAGUE = {"utils", "helpers", "manager", "base", "common", "misc", "found", "said", "told", "given", "asked", "seen"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: NAMES[p])
def test_modules_are_named_by_nouns_of_the_field(path: pathlib.Path) -> None:
    stem = (path.parent if path.stem == "__init__" else path).stem
    assert stem not in VAGUE
    assert stem in WORDS or not re.search(r"(ed|ing)$", stem), f"{stem}: which noun does the field use?"


def test_a_public_function_and_a_magic_stand_in_the_file_of_their_name() -> None:
    for name, home in nbdebug._HOMES.items():
        if name.islower() and name not in ("keep_fp32", "add_pages"):  # of casting, and of the catalogue
            assert home.rpartition(".")[2] == name
    magics = importlib.import_module("nbdebug.magics")
    for group in magics.OURS:
        stem = group.__module__.rpartition(".")[2]
        if not stem.startswith("_"):
            kinds = group.magics["line"] | group.magics["cell"] if hasattr(group, "magics") else {}
            assert not kinds or stem in kinds or (stem == "panel" and "nbdebug" in kinds), (stem, list(kinds))


SMALL: dict[str, str] = {}
"""Modules under 120 lines that one other module of their folder imports. A reason each; the list may only shrink."""


def test_nothing_is_shredded() -> None:
    importers = defaultdict(set)
    for path, others in [(path, edges(path)) for path in FILES]:
        for other in others if path.stem != "__init__" else ():  # that only collects its folder
            importers[other].add(path)
    alone = {
        NAMES[path] for path in FILES if lines(path) < 120 and [p.parent for p in importers[path]] == [path.parent]
    }
    assert alone == set(SMALL)


def test_a_class_name_means_one_thing() -> None:
    """Private names are the business of their file; a callback is named alike for each package."""
    places = defaultdict(list)
    for path in FILES:
        if path.parent.name == "integrations":
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(NAMES[path])
    assert not {name: where for name, where in places.items() if len(where) > 1}


BUDGETS = {"nan_trace": 42, "explain": 44, "grad_watch": 29}
"""Files of ours that one question may run through, magic to HTML: what a newcomer reads. It may only fall. An error of
a cell asks the checks of the notebook, too."""


def test_the_walk_of_a_question_is_short() -> None:
    command = [sys.executable, "-m", "tests.walk", *BUDGETS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    walks = {q: re.search(rf"^{q}:\n(.*?)^  (\d+) files", done.stdout, re.MULTILINE | re.DOTALL) for q in BUDGETS}
    for question, match in walks.items():
        assert match and int(match[2]) <= BUDGETS[question], f"{question}: {match and match[0]}{done.stderr}"


MAKERS = "empty zeros ones full arange linspace logspace tensor scalar_tensor rand randn randint randperm eye".split()


@pytest.mark.parametrize("path", FILES, ids=NAMES.get)
def test_a_tensor_that_is_made_names_its_device(path: pathlib.Path) -> None:
    """With `torch.set_default_device("cuda")` the others would be made on the card: they can't be pinned, nor filled by
    a generator of the processor."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{maker}" for maker in MAKERS}:
            assert {keyword.arg for keyword in node.keywords} & {"device", None}, f"{path.name}:{node.lineno}"
