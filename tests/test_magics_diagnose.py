"""%diagnose and %%diagnose in a real shell."""

from __future__ import annotations

import pytest

import nbdebug
from tests.shell import completions, started

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(320, 8)
y = (x[:, 0] > 0).long()
train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
def train(callback, passes=4):
    step = 0
    for _ in range(passes):
        for batch in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss.item())
            step += 1
"""


@pytest.fixture(scope="module")
def notebook():
    with started(SETUP) as book:
        yield book


def test_a_loop_is_named_and_run(notebook):
    done = notebook.run("%diagnose train")

    assert done.error is None
    report = done.result
    assert isinstance(report, nbdebug.Report)
    assert [f.code for f in report] == ["training/lr-too-low"]
    assert report.question == "%diagnose train"
    assert "model `model`" in report.subject
    assert "train_loader `train_loader`" in report.subject
    assert "found among your variables" in report.subject


def test_a_call_with_the_callback_is_run(notebook):
    done = notebook.run("rep = %diagnose train(callback, passes=2)\nrep.steps")

    assert done.error is None
    assert done.result == 20
    assert notebook.run("'callback' in globals()").result is False


def test_the_cell_below_is_the_loop(notebook):
    done = notebook.run(
        """
        %%diagnose
        for batch in list(train_loader) * 4:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
        """.lstrip("\n")
    )

    assert done.error is None
    assert done.result.question == "%%diagnose"
    finding = done.result.findings[0]
    assert finding.code == "training/zero-grad-missing"
    assert finding.where.cell.startswith("In [")
    assert finding.where.text == "loss.backward()"


def test_a_semicolon_silences_it_and_help_is_shown(notebook):
    assert notebook.run("%diagnose train;").result is None
    assert "--train-loader" in notebook.run("%diagnose -h").shown


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("%diagnose", "training loop"),
        ("%diagnose --model nobody train", "names no model"),
        ("%diagnose --loss-fn nobody train", "cannot be evaluated"),
        ("%diagnose --train-loader len train", "train_loader takes"),
    ],
)
def test_what_is_missing_is_said(notebook, typed, said):
    done = notebook.run(typed)

    assert type(done.error).__name__ == "UsageError"
    assert said in str(done.error)


def test_the_users_own_error_begins_at_the_users_code(notebook):
    done = notebook.run("%diagnose 1 / 0")

    assert isinstance(done.error, ZeroDivisionError)
    names = []
    at = done.error.__traceback__
    while at is not None:
        names.append(at.tb_frame.f_code.co_filename)
        at = at.tb_next
    assert not [name for name in names if "chapters" in name]


def test_options_complete(notebook):
    assert "--val-loader" in completions(notebook, "%diagnose --val")


def test_a_criterion_among_the_variables_is_no_second_model(notebook):
    notebook.run("criterion = nn.CrossEntropyLoss()")
    done = notebook.run("%diagnose train")

    assert done.error is None
    assert "model `model`" in done.result.subject and "models" not in done.result.subject


def test_alone_it_names_the_functions_that_train() -> None:
    with started("def fit(net, opt):\n    (lambda: net(1).backward())(), opt.step()\ndef show(): ...") as book:
        error = book.run("%diagnose").error
    assert "Type %diagnose fit for a function of yours (`fit`)" in str(error) and "show" not in str(error)
