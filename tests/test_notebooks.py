"""Every notebook runs afresh from its first cell to its last, and is committed as it ran."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HERE = re.compile(r"(?:/(?:home|root|Users|tmp|work)/|\b[A-Z]:\\)[\w.-]+|" + re.escape(str(ROOT)))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks() -> None:
    assert {path.name for path in NOTEBOOKS} >= {"00_first_aid.ipynb", "01_nan.ipynb", "02_training.ipynb"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_afresh(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = [cell.outputs for cell in code_cells(notebook)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": paths})
    assert codes(committed) == codes([cell.outputs for cell in code_cells(notebook)]), (
        f"{path.name} says other causes than when it was committed: run `make notebooks`"
    )
    assert_exercises_check_themselves(notebook)


def codes(outputs: list[list[nbformat.NotebookNode]]) -> list[list[str]]:
    """The causes that each cell's reports name."""
    texts = [[out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell] for cell in outputs]
    return [re.findall(r"^(?:Cause|Most likely): (\S+)$", "\n".join(cell), re.MULTILINE) for cell in texts]


def exercises(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """What the check of each exercise prints below the exercise as it stands, and below its solution."""
    cells = code_cells(notebook)
    for at, cell in enumerate(cells):
        if "exercise" in cell.metadata.get("tags", ()):
            unsolved = next(c for c in cells[at:] if c.source.endswith("check();"))
            assert any("solution" in c.metadata.get("tags", ()) for c in cells[at:]), "an exercise without a solution"
            solved = next(c for c in cells[at:] if c.source == "assert check()")
            yield printed(unsolved), printed(solved)


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(out.get("text", "") for out in cell.outputs)


def assert_exercises_check_themselves(notebook: nbformat.NotebookNode) -> None:
    seen = list(exercises(notebook))
    assert seen, "no exercise"
    for unsolved, solved in seen:
        assert "not yet" in unsolved, "an exercise that is done before it is begun"
        assert "done" in solved and "not yet" not in solved


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_outputs_name_no_place_of_this_machine(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            found = HERE.findall(
                str(output.get("text", ""))
                + str(output.get("data", {}).get("text/plain", ""))
                + re.sub(r"base64,[\w+/=]+", "", str(output.get("data", {}).get("text/html", "")))
                + " ".join(output.get("traceback", []))
            )
            assert not found, f"cell {cell.execution_count}: {found[:3]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_can_be_opened_anywhere(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3", "without a kernel's name JupyterLab asks before it runs"
    assert path.stat().st_size < 3_000_000
