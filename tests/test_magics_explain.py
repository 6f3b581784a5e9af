"""%explain in a real shell: the last failure, a page of the catalogue, and each failing cell by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import nbclient
import nbformat
import pytest

from nbdebug import Report
from nbdebug import registry as catalogue
from tests.shell import Notebook, completions, in_this_checkout, started

SETUP = """
import torch

def resume(state):
    torch.nn.Linear(2, 2).load_state_dict(state)

def unknown(x, password="hunter2"):
    raise LookupError("nobody knows this")
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    for name in ("last_value", "last_exc", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    with started(SETUP) as book:
        yield book


def test_the_last_failure_is_explained_whatever_ran_since(notebook: Notebook) -> None:
    notebook.run("weights = {'module.weight': torch.zeros(2, 2)}\nresume(weights)")
    notebook.run("y = 1")
    done = notebook.run("%explain")
    assert [f.code for f in done.result] == ["error/state-dict-mismatch"]
    assert (done.result.question, done.result.subject) == ("%explain", "the error of In [3]")
    assert "error/state-dict-mismatch" in done.shown and done.result.findings[0].where.cell == "In [2]"
    assert notebook.run("%explain ;").result is None
    rep = notebook.run("rep = %explain\nrep").result
    assert isinstance(rep, Report) and [f.code for f in rep] == [f.code for f in done.result]


def test_an_error_of_no_known_kind_gets_the_facts_and_no_guess(notebook: Notebook) -> None:
    notebook.run("batch = torch.arange(6.).view(2, 3)\nunknown(batch)")
    done = notebook.run("%explain")
    assert not done.result.ok and "No cause is known for this LookupError: nobody knows this" in done.shown
    assert "Nothing was found" not in done.shown and "hunter2" not in done.shown
    assert ["x", "[2, 3]", "float32", "cpu", "0 to 5"] in done.result.tables[0].rows
    assert "In [2], line 7" in done.shown
    html = done.result._repr_mimebundle_()["text/html"]
    assert "#388c5e" not in html and "hunter2" not in html, "no green border: something did fail"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("1 +", "SyntaxError"),
        ("%explain no/such", "magic's own message"),
        ("raise KeyboardInterrupt", "on purpose"),
    ],
)
def test_what_says_itself_what_it_is_is_not_explained(notebook: Notebook, cell: str, said: str) -> None:
    assert "Nothing has failed yet" in notebook.run("%explain").shown
    notebook.run(cell)
    done = notebook.run("%explain")
    assert done.result.ok is (said != "SyntaxError") and said in done.shown


def test_every_failing_cell_is_explained_where_it_is_asked_for(notebook: Notebook) -> None:
    assert "from now on" in notebook.run("%explain --auto").printed
    failed = notebook.run("resume({})")
    assert failed.shown.count("Cause: error/state-dict-mismatch") == 1 and "%explain --auto" in failed.shown
    assert "No cause is known" in notebook.run("unknown(0)").shown
    assert notebook.run("1 + 1").shown.strip().endswith("2")
    for cell in ("%explain no/such", "1 +", "raise KeyboardInterrupt"):
        assert "No cause" not in notebook.run(cell).shown
    assert "%explain --auto off" in notebook.run("%nbdebug status").shown
    notebook.run("%explain --auto off")
    assert "No cause" not in notebook.run("unknown(0)").shown


@pytest.mark.parametrize("end", ["%nbdebug off", "%unload_ext nbdebug"])
def test_it_ends_with_the_magics(notebook: Notebook, end: str) -> None:
    notebook.run("%explain --auto on\n%explain --auto on")
    callbacks = notebook.shell.events.callbacks["post_run_cell"]
    name = "ExplainMagics._after_cell"
    assert [getattr(c, "__qualname__", "") for c in callbacks].count(name) == 1
    notebook.run(end)
    assert "No cause" not in notebook.run("unknown(0)").shown
    assert name not in [getattr(c, "__qualname__", "") for c in callbacks]


def test_a_report_that_a_magic_has_shown_is_not_shown_twice(notebook: Notebook) -> None:
    notebook.run("%explain --auto on")
    done = notebook.run("import nbdebug\nerror = ValueError('mine')\nerror.report = nbdebug.Report('x')\nraise error")
    assert isinstance(done.error, ValueError) and "%explain --auto" not in done.shown


def test_the_page_and_its_completion(notebook: Notebook) -> None:
    page = catalogue.look_up("error/out-of-memory").page()
    (shown,) = notebook.run("%explain error/out-of-memory").data
    assert shown["text/markdown"] == page and "**" not in shown["text/plain"]
    assert completions(notebook, "%explain error/out-of-m") == ["error/out-of-memory"]
    assert completions(notebook, "%explain --auto o") == ["off", "on"]
    assert "error/nonsense" in str(notebook.run("%explain error/nonsense").error)


def test_names_of_the_notebook_itself_are_told(notebook: Notebook) -> None:
    notebook.run("picture = torch.ones(3, 8)\nraise LookupError('in a cell' if len(picture) else '')")
    rows = notebook.run("%explain").result.tables[0].rows
    assert ["picture", "[3, 8]", "float32", "cpu", "1 to 1"] in rows


def test_copied_text_is_explained_on_the_line_and_below_it(notebook: Notebook) -> None:
    message = "mat1 and mat2 shapes cannot be multiplied (4x1568 and 1800x10)"
    for cell in (f"%explain --text RuntimeError: {message}", f"%%explain --text\nRuntimeError: {message}\n"):
        done = notebook.run(cell)
        assert done.error is None and done.result.question == "%explain --text"
        assert [f.code for f in done.result.findings] == ["error/shape-mismatch"], str(done.result)


def test_in_a_kernel_the_report_stands_below_the_traceback() -> None:
    cells = [
        "%load_ext nbdebug\n%explain --auto\nimport torch\nx = torch.zeros(3)",
        "state = {'module.weight': torch.zeros(2, 3), 'module.bias': torch.zeros(2)}\n"
        "net = torch.nn.Linear(3, 2)\nnet.load_state_dict(state)",
        "1 + 1",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, extra_arguments=["--log-level=ERROR"]).execute(
        env=in_this_checkout()
    )
    failed = [output for output in notebook.cells[1].outputs if output.output_type != "stream"]
    assert [output.output_type for output in failed] == ["error", "display_data"]
    shown = failed[1].data
    assert "Cause: error/state-dict-mismatch" in shown["text/plain"] and "`module.`" in shown["text/plain"]
    assert "%explain --auto · the error of In [2]" in shown["text/plain"] and "text/html" in shown
    assert [output.output_type for output in notebook.cells[2].outputs] == ["execute_result"]
