"""%fit in a real shell: what it takes, what it says, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdebug import Report
from nbdebug.magics.mem import MemoryMagics
from tests.shell import Notebook, started

SETUP = """
import functools
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
batch = torch.randn(32, 64), torch.randint(10, (32,))
criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        if "fit" not in book.shell.magics_manager.magics["line"]:
            book.shell.register_magics(MemoryMagics(book.shell))
        yield book


def test_it_takes_what_is_among_the_variables_and_says_which(notebook: Notebook) -> None:
    done = notebook.run("%fit --device cpu")
    assert done.error is None
    report = done.result
    assert isinstance(report, Report) and report.ok and report.question == "%fit --device cpu"
    for taken in ("model `net`", "batch `batch`", "loss_fn `criterion`", "optimizer `opt`", "32 rows"):
        assert taken in report.subject


def test_names_and_a_limit(notebook: Notebook) -> None:
    notebook.run(
        'rep = %fit net batch criterion --optimizer "functools.partial(torch.optim.SGD, lr=0.1)" '
        "--memory 60KiB --device cpu"
    )
    done = notebook.run("rep.facts['fit']['fits'], rep.facts['fit']['largest']['rows']")
    assert done.error is None and done.result[0] is False and done.result[1] < 32


def test_a_trainer_stands_for_its_model(notebook: Notebook) -> None:
    notebook.run("import types\nbox = types.SimpleNamespace(model=net)")
    done = notebook.run("%fit box --device cpu")
    notebook.run("del box")
    assert done.error is None and "model `box.model`" in done.result.subject


def test_a_semicolon_silences_it_and_h_helps(notebook: Notebook) -> None:
    done = notebook.run("%fit --device cpu;")
    assert done.error is None and done.result is None and done.shown.strip() == ""
    assert "--memory" in notebook.run("%fit -h").printed


@pytest.mark.parametrize(
    "typed, said",
    [
        ("%fit nowhere", "cannot be evaluated"),
        ("%fit --memory lots --device cpu", "a size is"),
        ("%fit net 3 criterion", "must hold tensors"),
        ("del net\n%fit", "%fit needs a model, and none of your variables is one"),
    ],
)
def test_what_is_wrong_is_said(notebook: Notebook, typed: str, said: str) -> None:
    done = notebook.run(typed)
    assert type(done.error).__name__ == "UsageError" and said in str(done.error)
