"""Every notebook runs afresh from its first cell to its last, and is committed as it ran.

`python -m tests.test_notebooks notebooks/*.ipynb` executes them again, in place.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import pathlib
import re
import symtable
import sys
import time
from collections.abc import Iterator

import nbclient
import nbformat
import pytest

from nbdebug.views.widgets import WITHOUT
from tests.shell import in_this_checkout

WIDGET = "application/vnd.jupyter.widget-view+json"
ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEACHING = ROOT / "notebooks" / "TEACHING.md"
HERE = re.compile(r"(?:/(?:home|root|Users|tmp|work)/|\b[A-Z]:\\)[\w.-]+|" + re.escape(str(ROOT)))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks() -> None:
    numbers = sorted({path.name[:2] for path in NOTEBOOKS})
    assert numbers == [f"{number:02d}" for number in range(len(numbers))] and len(numbers) >= 16
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = nbformat.read(NOTEBOOKS[0], as_version=4).cells[-1].source + nbformat.read(NOTEBOOKS[0], 4).cells[-2].source
    for path in NOTEBOOKS:
        assert f"`{path.stem}`" in readme and f"{path.stem}" in first, f"the lists of the course lack {path.stem}"


FORM = ("failure", "diagnosis", "cure", "proof", "exercise")


@pytest.mark.parametrize("path", NOTEBOOKS[:-1], ids=lambda path: path.name)
def test_it_goes_from_a_failure_to_its_proof_and_to_an_exercise(path: pathlib.Path) -> None:
    """The last one is an exercise as a whole."""
    cells = code_cells(nbformat.read(path, as_version=4))
    places = [next(i for i, cell in enumerate(cells) if tag in cell.metadata.get("tags", ())) for tag in FORM]
    assert places == sorted(places), dict(zip(FORM, places))
    said = {tag: codes([cells[i].outputs])[0] for tag, i in zip(FORM, places)}
    assert said["diagnosis"], "no cause is named where one should be"
    assert places[3] == places[1] or not said["proof"], "a cause is named after the cure"
    assert cells[places[3]].outputs, "a proof that shows nothing"


def reading_minutes(notebook: nbformat.NotebookNode) -> float:
    """Text and visible code, 200 words a minute; outputs are looked at, and not counted."""
    shown = [cell for cell in notebook.cells if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    return sum(len(cell.source.split()) for cell in shown) / 200


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_read_in_a_quarter_of_an_hour_and_the_teachers_page_has_its_times(path: pathlib.Path) -> None:
    minutes = reading_minutes(nbformat.read(path, as_version=4))
    assert minutes < 15
    row = re.search(rf"^\| {path.stem} \| (\d+) min \| (\d+) s \|", TEACHING.read_text(encoding="utf-8"), re.MULTILINE)
    assert row, f"{path.stem} is not in the table of TEACHING.md"
    assert int(row[1]) == max(1, round(minutes)), f"reading takes {minutes:.1f} minutes"
    assert int(row[2]) < 90, "it was measured to run for too long"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_right_answers_are_taken_and_wrong_ones_are_not(path: pathlib.Path) -> None:
    """Answers in words are compared by digest: those of the teachers' page fit, those in the exercise don't.
    What is computed is tried by the notebook itself: once as it stands, once with the solution."""
    line = re.search(rf"^- {path.stem}: (.*)$", TEACHING.read_text(encoding="utf-8"), re.MULTILINE)
    answers = re.findall(r"`([^`]+)`", line[1]) if line else []
    right = {hashlib.sha256(answer.encode()).hexdigest()[:12] for answer in answers}
    for cells in exercises(nbformat.read(path, as_version=4)):
        (check,) = tagged(cells, "check")
        digests = set(re.findall(r"\"([0-9a-f]{12})\"", check.source))
        assert digests <= right, f"{path.stem}: an answer is missing on the teachers' page"
        source = "\n".join(line for line in cells[0].source.splitlines() if not line.startswith("%"))
        assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
        given = {str(node.value) for each in assigned for node in ast.walk(each) if isinstance(node, ast.Constant)}
        assert not digests & {hashlib.sha256(answer.encode()).hexdigest()[:12] for answer in given}
        assert not any(answer in check.source for answer in answers if "/" in answer), "the check shows the answer"


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


@pytest.mark.parametrize(("name", "parts"), [("02_training", 3), ("02b_overfitting", 2)])
def test_the_training_notebooks_have_an_exercise_for_each_part(name: str, parts: int) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    headings = [
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("## ") and line != "## All at a glance"
    ]
    assert len(headings) == len(list(exercises(notebook))) == parts


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
        begin = time.monotonic()
        book = nbformat.read(name, as_version=4)
        execute(book, pathlib.Path(name).resolve().parent, 600)
        print(f"{name} ran for {time.monotonic() - begin:.0f} s", flush=True)
        nbformat.write(without_progress_bars(book), name)
