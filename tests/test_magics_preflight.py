"""%preflight in a real shell: what it takes, what it says, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdebug import Report
from tests.shell import Notebook, completions, started

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(256, 8)
train_loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32, shuffle=True)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(net[0].parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def test_it_takes_what_is_among_the_variables_and_says_which(notebook: Notebook) -> None:
    done = notebook.run("%preflight")
    assert done.error is None
    report = done.result
    assert isinstance(report, Report)
    assert [f.code for f in report] == ["training/parameters-not-in-optimizer"]
    assert report.question == "%preflight"
    for taken in (
        "model `net`",
        "optimizer `opt`",
        "train_loader `train_loader`",
        "loss_fn `criterion`",
        "loss_fn(outputs, targets)",
    ):
        assert taken in report.subject


def test_names_and_expressions_are_taken(notebook: Notebook) -> None:
    notebook.run("class T: pass\nt = T(); t.model = net; t.loader = train_loader")
    notebook.run("full = torch.optim.SGD(net.parameters(), 0.1)")
    done = notebook.run(
        "rep = %preflight --model t.model --train-loader t.loader --optimizer full --loss-fn criterion\nrep.ok"
    )
    assert done.error is None and done.result is True


def test_a_semicolon_silences_it(notebook: Notebook) -> None:
    done = notebook.run("%preflight --model net;")
    assert done.error is None and done.result is None and done.shown.strip() == ""


@pytest.mark.parametrize(
    "before, typed, said",
    [
        ("del criterion", "%preflight", "--loss-fn NAME"),
        ("del train_loader", "%preflight", "--train-loader NAME"),
        ("other = nn.Linear(2, 2)", "%preflight", "Say which: --model NAME"),
        ("", "%preflight --loss-fn nowhere", "cannot be evaluated"),
        ("train_loader = iter(train_loader)", "%preflight", "read more than once"),
    ],
)
def test_what_is_missing_is_said_with_what_to_type(notebook: Notebook, before: str, typed: str, said: str) -> None:
    notebook.run(before or "pass")
    done = notebook.run(typed)
    assert type(done.error).__name__ == "UsageError" and said in str(done.error)


def test_help_and_completion(notebook: Notebook) -> None:
    assert "--train-loader" in notebook.run("%preflight -h").printed
    assert "--val-loader" in completions(notebook, "%preflight --v")


def test_the_users_own_error_passes(notebook: Notebook) -> None:
    notebook.run("def loss_fn(model, batch):\n    raise ValueError('my own')")
    done = notebook.run("%preflight")
    assert isinstance(done.error, ValueError) and str(done.error) == "my own"
