"""Every notebook runs afresh from its first cell to its last, and is committed as it ran.

`python -m tests.test_notebooks notebooks/*.ipynb` executes them again, in place.
"""

from __future__ import annotations

import copy
import pathlib
import re
import symtable
import sys
from collections.abc import Iterator

import nbclient
import nbformat
import pytest

from nbdebug.views.widgets import WITHOUT
from tests.shell import in_this_checkout

WIDGET = "application/vnd.jupyter.widget-view+json"
ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HERE = re.compile(r"(?:/(?:home|root|Users|tmp|work)/|\b[A-Z]:\\)[\w.-]+|" + re.escape(str(ROOT)))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks() -> None:
    assert {path.name for path in NOTEBOOKS} >= {
        "00_first_aid.ipynb",
        "01_nan.ipynb",
        "02_training.ipynb",
        "06_guard.ipynb",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_afresh(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = [cell.outputs for cell in code_cells(notebook)]
    execute(notebook, tmp_path, 240)
    assert codes(committed) == codes([cell.outputs for cell in code_cells(notebook)]), (
        f"{path.name} says other causes than when it was committed: run `make notebooks`"
    )
    assert_exercises_check_themselves(notebook)


def execute(notebook: nbformat.NotebookNode, folder: pathlib.Path, seconds: int) -> None:
    """Run its cells in this folder, each for so many seconds at most."""
    options = {"timeout": seconds, "record_timing": False, "coalesce_streams": True}
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options)
    client.execute(env=in_this_checkout())


def without_progress_bars(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A bar that is over leaves a widget without its model. nbdebug's own controls stay: they say how to get them."""
    for cell in code_cells(notebook):
        cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {}) or is_control(out)]
    if not any(is_control(out) for cell in code_cells(notebook) for out in cell.outputs):
        notebook.metadata.pop("widgets", None)
    return notebook


def is_control(output: nbformat.NotebookNode) -> bool:
    return WIDGET in output.get("data", {}) and WITHOUT in output.data.get("text/plain", "")


def codes(outputs: list[list[nbformat.NotebookNode]]) -> list[list[str]]:
    """The causes that each cell's reports name."""
    texts = [[out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell] for cell in outputs]
    return [re.findall(r"^(?:Cause|Most likely): (\S+)$", "\n".join(cell), re.MULTILINE) for cell in texts]


def tagged(cells: list[nbformat.NotebookNode], tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in cells if tag in cell.metadata.get("tags", ())]


def exercises(notebook: nbformat.NotebookNode) -> Iterator[list[nbformat.NotebookNode]]:
    """The cells of each exercise: the exercise, the folded check, `check(...);`, solutions, `assert check(...)`."""
    cells = code_cells(notebook)
    for start, cell in enumerate(cells):
        if "exercise" in cell.metadata.get("tags", ()):
            end = next(i for i in range(start, len(cells)) if cells[i].source.startswith("assert check("))
            yield cells[start : end + 1]


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(out.get("text", "") for out in cell.outputs)


def assert_exercises_check_themselves(notebook: nbformat.NotebookNode) -> None:
    assert list(exercises(notebook)), "no exercise"
    for cells in exercises(notebook):
        (unsolved,) = (cell for cell in cells if cell.source.splitlines()[-1].startswith("check("))
        assert "not yet" in printed(unsolved), "an exercise that is done before it is begun"
        assert "done" in printed(cells[-1]) and "not yet" not in printed(cells[-1])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_checks_and_solutions_are_folded(path: pathlib.Path) -> None:
    for cells in exercises(nbformat.read(path, as_version=4)):
        (check,) = tagged(cells, "check")
        assert check.metadata.jupyter.source_hidden and not check.outputs, "its source has the answers"
        solutions = tagged(cells, "solution")
        assert solutions, "an exercise without a solution"
        for cell in solutions:
            assert cell.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True} and cell.metadata.collapsed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_solution_does_not_overwrite_what_a_reader_has_written(path: pathlib.Path) -> None:
    for cells in exercises(nbformat.read(path, as_version=4)):
        for cell in tagged(cells, "solution"):
            assert not assigned(cell) & assigned(cells[0]), "Run All would overwrite the reader's own work"


def assigned(cell: nbformat.NotebookNode) -> set[str]:
    """The variables, functions and classes of a cell, without the names inside functions; its magics are not read."""
    lines = "\n".join(re.sub(r"%.*", "0", line) for line in cell.source.splitlines())
    symbols = symtable.symtable(lines, "cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_exercises_are_committed_unsolved_and_solved(path: pathlib.Path) -> None:
    assert_exercises_check_themselves(nbformat.read(path, as_version=4))


def test_the_training_notebook_has_an_exercise_for_each_part() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "02_training.ipynb", as_version=4)
    headings = [
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("## ")
    ]
    assert headings == [
        "## The loss does not go down",
        "## The gradient explodes",
        "## Overfitting",
        "## Underfitting",
        "## Zero loss",
        "## All at a glance",
    ]
    assert len(list(exercises(notebook))) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_committed_with_its_outputs(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not one run from top to bottom: run `make notebooks`"
    assert any(codes([cell.outputs]) != [[]] for cell in code_cells(notebook)), "no report in its outputs"
    assert notebook == without_progress_bars(copy.deepcopy(notebook)), "leftovers of progress bars"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_outputs_name_no_place_of_this_machine(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            places = HERE.findall(
                str(output.get("text", ""))
                + str(output.get("data", {}).get("text/plain", ""))
                + re.sub(r"base64,[\w+/=]+", "", str(output.get("data", {}).get("text/html", "")))
                + " ".join(output.get("traceback", []))
            )
            assert not places, f"cell {cell.execution_count}: {places[:3]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_can_be_opened_anywhere(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3", "without a kernel's name JupyterLab asks before it runs"
    assert path.stat().st_size < 3_000_000


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, flush=True)
        book = nbformat.read(name, as_version=4)
        execute(book, pathlib.Path(name).resolve().parent, 600)
        nbformat.write(without_progress_bars(book), name)
