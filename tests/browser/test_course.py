"""A learner's path through the first notebook: run, try, be wrong, be right, and lose nothing by Run All."""

from __future__ import annotations

import pathlib
from typing import Any

import nbformat

FIRST = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "00_first_aid.ipynb"
ANSWER = """
def calibrate():
    read = light > 0
    loss = F.mse_loss(model(torch.log(light[read])[:, None]), degrees[read, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

cause = "{cause}"
row = 7
"""


def place(cells: list[Any], start: str = "", tag: str = "") -> int:
    return next(
        i for i, c in enumerate(cells) if c.source.startswith(start) and (not tag or tag in c.metadata.get("tags", ()))
    )


def test_a_learner_solves_the_exercise_and_run_all_leaves_the_work_alone(lab: Any) -> None:
    notebook = nbformat.read(FIRST, as_version=4)
    end = place(notebook.cells, "## Look inside")
    notebook.cells = notebook.cells[:end]  # the rest is not on the path
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    exercise, check, solution = (
        place(notebook.cells, tag="exercise"),
        place(notebook.cells, "check("),
        place(notebook.cells, tag="solution"),
    )
    book = lab._open(notebook, "first_aid")

    def run(cell: int, text: str = "") -> None:
        book.cell(cell).locator(".jp-InputArea-prompt").first.click()
        if text:
            book.command("notebook:enter-edit-mode")
            book.page.keyboard.press("Control+A")
            book.command("notebook:replace-selection", text=text)
        book.command("notebook:run-cell")
        book.page.wait_for_timeout(300)
        book.wait_idle()

    def said() -> str:
        return str(book.output(check).inner_text())

    book.run_all()
    book.wait_idle(120)
    assert said().count("not yet") >= 2
    assert not book.cell(solution).locator(".jp-InputArea-editor").is_visible(), "the solution is not folded"
    run(exercise, ANSWER.format(cause="nan/overflow"))
    run(check)
    assert said().count("not yet") == 1 and "not yet  the cause" in said()
    run(exercise, ANSWER.format(cause="nan/log-of-nonpositive"))
    run(check)
    assert "not yet" not in said() and said().count("done") == 4
    book.run_all()
    book.wait_idle(120)
    assert "not yet" not in said() and "light[read]" in book.cell(exercise).inner_text()
    assert not book.alarms
