"""%mem in a real shell: owners by the user's names, outputs and failures, the options, and what ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbdebug import Report
from tests.shell import Notebook, started

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(1051, 2)
opt = torch.optim.Adam(model.parameters())
history = [torch.zeros(1051, 3)]
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def owners(report: Report) -> dict[tuple[str, str], int]:
    rows: list[list[Any]] = report.tables[0].rows
    return {(row[0], row[1]): row[2] for row in rows}


def test_owners_of_a_notebook(notebook: Notebook) -> None:
    notebook.run("loss = model(torch.randn(4, 1051)).sum()\nloss.backward(); opt.step()")
    notebook.run("torch.zeros(1051, 5)")
    number = max(notebook.shell.user_ns["Out"])
    done = notebook.run("%mem")
    found = owners(done.result)
    assert found["model's parameters", "parameter"] == found["model's gradients", "gradient"] == 1051 * 8 + 8
    assert found["opt's state", "optimizer state"] == 2 * (1051 * 8 + 8) + 8
    assert found["history", "variable"] == 1051 * 12 and found[f"Out[{number}]", "cell output"] == 1051 * 20
    assert done.result.question == "%mem" and done.result.subject.startswith("model `model` and optimizer `opt`")
    assert "By owner" in done.shown and "history" in done.shown


def test_it_can_be_assigned_silenced_and_asked_for_help(notebook: Notebook) -> None:
    assert notebook.run("%mem;").result is None
    assert notebook.run("rep = %mem\nrep.frame().shape[1]").result == 6
    assert "who" in notebook.run("%mem -h").printed.lower() or "owner" in notebook.run("%mem -h").printed
    assert "--device" in notebook.run("%mem -h").printed


def test_options(notebook: Notebook) -> None:
    report = notebook.run("%mem --model model --device cpu").result
    assert report.question == "%mem --model model --device cpu" and "found among" not in report.subject
    assert "names no model" in str(notebook.run("%mem --model nothing").error)
    assert "cuda:0" in str(notebook.run("%mem --device nowhere").error)


def test_the_frames_of_a_failed_cell(notebook: Notebook) -> None:
    notebook.run("def step(rows):\n    batch = torch.zeros(rows, 7)\n    raise ValueError\n")
    assert notebook.run("step(1051)").error is not None

    def kept() -> list[list[Any]]:
        """What the shell's traceback keeps; test files that ran before may hold exceptions in their globals."""
        rows = notebook.run("%mem").result.tables[0].rows
        return [row for row in rows if row[:2] == ["sys.last_value", "traceback"]]

    ((_, _, held, _, _, largest),) = kept()
    assert held == 1051 * 28 and largest.startswith("batch in step, In [")
    notebook.run("%free traceback;")
    assert not kept()


def test_a_notebook_with_no_model_and_no_tensor() -> None:
    with started("x = 1") as book:
        done = book.run("%mem")
        assert done.error is None and done.result.question == "%mem"
