"""%free in a real shell: what it lists, what comes back, and that nothing else is touched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbdebug import Report
from nbdebug.magics.mem import out_of_memory_report
from tests.shell import Notebook, completions, started

MIB = 1 << 20
SETUP = """
import gc, weakref
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(64, 64)
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def names(report: Report) -> list[str]:
    return [kept["name"] for kept in report.facts["notebook"]]


def held(report: Report, name: str) -> int:
    return next(kept["bytes"] for kept in report.facts["notebook"] if kept["name"] == name)


def alive(rows: int) -> int:
    """Live tensors with so many rows, whoever holds them."""
    gc.collect()
    return sum(thing.shape[:1] == (rows,) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def test_a_healthy_notebook_has_nothing_to_free(notebook: Notebook) -> None:
    notebook.run("for _ in range(3):\n    loss = model(torch.randn(4, 64)).mean()\n    loss.backward()")
    notebook.run("loss")
    report = notebook.run("%free").result
    assert report.ok and report.headline.startswith("There is nothing to free")
    assert not report.tables
    shown = notebook.run("%free outputs").result
    assert shown.facts["freed"]["bytes"] < 1000


def test_an_output_that_del_does_not_free(notebook: Notebook) -> None:
    notebook.run("scores = torch.randn(1231, 1024)\nscores")
    number = max(notebook.shell.user_ns["Out"])
    assert names(notebook.run("rep = %free\nrep").result) == [], "a variable holds it: it costs nothing more"
    notebook.run("del scores\ngc.collect();")
    report = notebook.run("rep = %free\nrep").result
    assert names(report) == [f"Out[{number}]"] and held(report, f"Out[{number}]") == 1231 * 4096
    assert alive(1231) == 1
    freed = notebook.run(f"%free Out[{number}]").result
    assert freed.facts["freed"]["bytes"] == 1231 * 4096 and alive(1231) == 0
    assert number not in notebook.shell.user_ns["Out"] and f"_{number}" not in notebook.shell.user_ns


def test_the_traceback_of_a_failed_cell(notebook: Notebook) -> None:
    notebook.run("""
        def work():
            hidden = model(torch.randn(2311, 64))
            deep = hidden.exp()
            raise ValueError('no')""")
    notebook.run("work()")
    notebook.run("1 + 1")
    report = notebook.run("rep = %free\nrep").result
    kept = next(k for k in report.facts["notebook"] if k["how"] == "traceback")
    assert kept["bytes"] >= 3 * 2311 * 256 and kept["where"]["line"] == 4
    assert "ValueError" in str(report) and "%debug" in str(report)
    assert "hidden" in notebook.run("%tb").shown, "nothing has been freed that was not chosen"
    freed = notebook.run("%free traceback").result
    assert freed.facts["freed"]["bytes"] == kept["bytes"] and alive(2311) == 0
    assert notebook.run("%tb").error is None, "%tb says that there is none"
    assert [k for k in notebook.run("%free").result.facts["notebook"] if k["how"] == "traceback"] == []


def test_what_a_variable_holds_is_not_promised(notebook: Notebook) -> None:
    notebook.run("x = torch.randn(2311, 64)\ndef work(given):\n    raise ValueError('no')")
    notebook.run("work(x)")
    assert [k for k in notebook.run("rep = %free\nrep").result.facts["notebook"] if k["how"] == "traceback"] == []
    notebook.run("%free traceback")
    assert "x" in notebook.shell.user_ns


def test_semicolon_help_and_wrong_words(notebook: Notebook) -> None:
    assert notebook.run("%free ;").result is None
    assert "%free alone frees nothing" in notebook.run("%free -h").shown
    done: Any = notebook.run("%free everything")
    assert done.result is None and "traceback, outputs" in str(done.error) + done.printed


def test_all_and_assignment(notebook: Notebook) -> None:
    notebook.run("losses = [model(torch.randn(3011, 64)).mean() for _ in range(3)]")
    report = notebook.run("rep = %free --all\nrep").result
    assert report.question == "%free --all" and alive(3011) == 0
    assert all(loss.grad_fn is None for loss in notebook.shell.user_ns["losses"])
    assert "this process" in str(report)


def test_tab_offers_its_words_and_the_outputs(notebook: Notebook) -> None:
    notebook.run("torch.zeros(3)")
    number = max(notebook.shell.user_ns["Out"])
    assert {"traceback", "outputs", "cache", f"Out[{number}]"} <= set(completions(notebook, "%free "))
    assert completions(notebook, "%free traceback ou") == ["outputs"]
    assert completions(notebook, "%free --a") == ["--all"]


def test_explain_and_the_card_of_a_failed_cell(notebook: Notebook) -> None:
    notebook.run("held = torch.zeros(4096, 256)\ndef pairs(x):\n    return torch.zeros(len(x) << 40)")
    assert notebook.run("%explain").result.ok, "nothing has failed yet"
    assert notebook.run("pairs(held)").error is not None
    report = notebook.run("%explain").result
    (finding,) = report.findings
    assert finding.code == "error/out-of-memory" and report.question == "%explain"
    assert finding.where.text == "return torch.zeros(len(x) << 40)"
    assert "held" in [row[0] for row in report.tables[0].rows]
    assert notebook.run("%explain ;").result is None
    assert notebook.run("%explain").result.findings, "other cells may have run since"
    assert out_of_memory_report(notebook.shell) is None, "other cells have run since"
    notebook.run("try:\n    pairs(held)\nexcept RuntimeError as e:\n    raise ValueError('training failed') from e")
    assert out_of_memory_report(notebook.shell) is not None, "what led to the error counts as well"
    notebook.run("1 / 0")
    assert notebook.run("%explain").result.headline.startswith("No cause is known for this ZeroDivisionError"), (
        "the last one did not"
    )


KERNEL = [
    "%load_ext nbdebug\nimport gc, os, torch\nfrom torch import nn\nmodel = nn.Linear(256, 256)",
    "def work(rows):\n    deep = model(torch.randn(rows, 256)).exp()\n    return torch.empty(1 << 50)",
    "work(4000)",
    "1 + 1",
    "scores = torch.randn(4000, 256)\nscores",
    "del scores\ngc.collect();",
    "rep = %free\nprint({kept['how']: kept['bytes'] for kept in rep.facts['notebook']})",
    "rep = %explain\nprint(rep.findings[0].where.text)",
    "rep = %free traceback outputs\nprint(rep.facts['freed'])",
    "gc.collect()\nprint(sum(t.shape == (4000, 256) for t in gc.get_objects() if type(t) is torch.Tensor))",
    "rep = %free\nprint(rep.headline)",
]


def test_bytes_come_back_in_a_real_kernel() -> None:
    """After a failing cell and after an output that was displayed; the kernel is ipykernel's, not the tests' shell."""
    import nbformat
    from nbclient import NotebookClient

    from tests.shell import in_this_checkout

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in KERNEL])
    NotebookClient(book, timeout=120, allow_errors=True, kernel_name="python3").execute(env=in_this_checkout())
    printed = ["".join(out.get("text", "") for out in cell.outputs).strip() for cell in book.cells]
    each = 4000 * 256 * 4
    assert book.cells[2].outputs[-1].ename == "RuntimeError"
    assert printed[6] == str({"traceback": 2 * each, "output": each})  # deep, and what the layer has saved
    assert printed[7] == "return torch.empty(1 << 50)"
    assert f"'bytes': {3 * each}" in printed[8] and printed[9] == "0"
    assert printed[10].startswith("There is nothing to free")
