"""%mem EXPR and %%mem: the same answers as mem(step), with cells and lines as the notebook names them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdebug.magics.mem import MemoryMagics
from tests.shell import Notebook, started

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(64, 32) for _ in range(10)]
losses = []
def train(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss
def step():
    losses.append(train(batches[0]))
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        book.shell.register_magics(MemoryMagics)
        yield book


def test_a_step_on_the_line_is_run_several_times(notebook: Notebook) -> None:
    report = notebook.run("%mem step()").result
    where = report.findings[0].where
    assert report.question == "%mem step()" and report.findings[0].code == "memory/graph-retained"
    assert where.place == "In [2], line 15" and where.text == "losses.append(train(batches[0]))"
    assert "found among your variables" in report.subject
    assert notebook.run("%mem --steps 2 step();").result is None


def test_a_cell_tells_its_peak_and_what_it_has_added(notebook: Notebook) -> None:
    report = notebook.run("%%mem\nbig = torch.ones(1024, 1024)\nsmall = (big * 2).sum()").result
    tables = {table.title: table.rows for table in report.tables}
    assert report.ok and report.facts["peak"] - report.plot("memory")["course"][0][1] >= 8 << 20
    assert tables["What the run added and kept"][0][:3] == ["big", "variable", 4 << 20]
    assert any(row[0].endswith("line 2") and row[1] == 4 << 20 for row in tables["By line"])


@pytest.mark.parametrize(
    ("cell", "code", "holder", "line"),
    [
        ("kept = []\nfor b in batches:\n    kept.append(train(b))", "memory/graph-retained", "kept", 4),
        ("total = 0\nfor b in batches:\n    total += train(b)", "memory/graph-retained", "total", 4),
        (
            "out = {}\nmodel.eval()\nfor b in batches:\n    out[len(out)] = model(b)\nmodel.train()",
            "memory/eval-without-no-grad",
            "out",
            5,
        ),
    ],
)
def test_a_leak_in_the_loop_of_a_cell_is_named(
    notebook: Notebook, cell: str, code: str, holder: str, line: int
) -> None:
    report = notebook.run(f"%%mem\n{cell}").result
    assert [f.code for f in report] == [code]
    assert report.findings[0].evidence["holder"] == [holder]
    assert report.findings[0].where.line == line and report.findings[0].where.cell


@pytest.mark.parametrize(
    "cell",
    [
        "numbers = []\nfor b in batches:\n    numbers.append(train(b).item())",
        "cut = []\nfor b in batches:\n    cut.append(train(b).detach())",
        "found = []\nwith torch.no_grad():\n    for b in batches:\n        found.append(model(b))",
        "more = [torch.randn(64, 32) for _ in range(10)]\nfor b in more:\n    last = train(b)",
    ],
)
def test_a_sound_loop_is_left_in_peace(notebook: Notebook, cell: str) -> None:
    report = notebook.run(f"%%mem\n{cell}").result
    assert not report.findings, report.findings[0].title


def test_the_user_s_error_passes_and_what_was_seen_is_shown(notebook: Notebook) -> None:
    out = notebook.run("%%mem\nx = torch.ones(500, 500)\nraise KeyError('mine')")
    assert isinstance(out.error, KeyError) and "At the peak" in out.shown


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("%mem --steps 0 step()", "at least 1"),
        ("%%mem step()\nx = 1", "takes no STEP"),
        ("%mem --model nothing step()", "names no model"),
    ],
)
def test_wrong_use_is_told_in_a_line(notebook: Notebook, typed: str, said: str) -> None:
    out = notebook.run(typed)
    assert type(out.error).__name__ == "UsageError" and said in str(out.error)
