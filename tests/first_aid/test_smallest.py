"""smallest(): a failing program shrunk while it fails alike, and the script that it writes."""

from __future__ import annotations

import os
import pathlib
import runpy
import textwrap
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbdebug import smallest
from nbdebug.tools.first_aid import smallest as module
from tests.shell import started


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Any) -> Any:
        h = self.net(x)
        if h.shape[-1] == 1:
            raise RuntimeError(f"no head for {len(h)} rows")
        return h


def what(report: Any) -> dict[str, tuple[Any, Any]]:
    return {row[0]: (row[1], row[2]) for row in report.tables[0].rows}


@pytest.fixture
def not_run(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_runs_alone", lambda *_: "")


def in_this_process(path: pathlib.Path, failure: Any) -> str:
    """What `_runs_alone` does, without another process."""
    with torch.random.fork_rng(), pytest.raises(AssertionError, match=r"not finite: .*the loss"):
        runpy.run_path(str(path), run_name="__main__")
    return ""


def test_a_nan_in_a_notebook_becomes_a_script_that_runs_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not os.environ.get("NBDEBUG_ALL_TESTS"):
        monkeypatch.setattr(module, "_runs_alone", in_this_process)
    setup = """
        import torch, nbdebug
        from torch import nn
        from torch.nn import functional as F

        from dataclasses import dataclass, field
        EPS = 0.0
        SHIFT = 0.0

        @dataclass
        class Settings:
            eps: float = EPS

        class Logs(nn.Module):
            def __init__(self, shift=SHIFT):
                super().__init__()
                self.settings, self.shift = Settings(), shift

            def forward(self, x):
                return (x + self.settings.eps + self.shift).log()

        def scaled(function):
            import functools
            @functools.wraps(function)
            def inner(*args):
                return 1.0 * function(*args)
            return inner

        @scaled

        def loss_of(model, x):
            return F.mse_loss(model(x), x[:, :1])

        def train_step(batch):
            loss = loss_of(model, batch["x"])
            loss.backward()
            return loss

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Logs(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        model[0].weight.data.mul_(1e4)
        batch = {"x": torch.rand(8, 4), "names": ["a"] * 8}
        state = torch.get_rng_state()
    """
    with started(textwrap.dedent(setup)) as book:
        done = book.run("report = nbdebug.smallest(train_step, model, batch=batch)\nreport")
        assert done.error is None, done.printed
        report = done.result
        assert book.run("len(model), torch.equal(state, torch.get_rng_state())").result == (6, True)
        assert book.run("any(p.grad is not None for p in model.parameters())").result is False
    assert report.findings[0].code == "nan/log-of-nonpositive" and report.facts["alike"], str(report)
    taken = what(report)
    assert taken["rows of the batch"] == (8, 1) and taken["layers of model"][1] <= 3
    text = (tmp_path / "smallest" / "smallest.py").read_text()
    assert (
        "class Logs" in text and "def loss_of" in text and "EPS = 0.0" in text and "nbdebug" not in text.split('"""')[2]
    )


def test_the_layers_that_the_error_needs_stay_and_its_numbers_too(not_run, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(9, 1))
    x = torch.rand(6, 4)
    step = lambda: F.mse_loss(model(x), x[:, :1])
    report = smallest(step)
    assert report.findings[0].code == "error/shape-mismatch"
    assert what(report)["layers of model"] == (5, 2), "what makes 8, and what wants 9"
    assert what(report)["rows of the batch"] == (6, 1) and "(1x8 and 9x1)" in str(report.full())
    assert "step = lambda" in (tmp_path / "smallest" / "smallest.py").read_text()


def test_widths_and_the_number_of_rows_in_a_message(not_run) -> None:
    model = Net()

    def step(batch: Any) -> Any:
        return model(batch).mean()

    report = smallest(step, model, batch=torch.rand(5, 4))
    taken = what(report)
    assert taken["layers of model.net"] == (3, 2) and taken["units of model.net[0]"] == (64, 1)
    assert taken["rows of the batch"] == (5, 1)
    assert model.net[0].out_features == 64 and any("test_smallest.py" in note for note in report.notes)


def test_one_step_from_the_state_before_the_failing_one(not_run) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)

    def step() -> Any:
        optimizer.zero_grad()
        loss = (model.weight.sum() + 0 * model(x).sum()).sqrt()
        loss.backward()
        with torch.no_grad():
            model.weight -= 0.3
        return loss

    report = smallest(step, steps=8)
    assert what(report)["steps"] == (8, 1) and report.findings[0].code.startswith("nan/")
    assert model.weight[0, 0] == 0.5


def test_what_it_refuses(not_run) -> None:
    model = nn.Linear(2, 1)
    batches = (b for b in [torch.ones(1, 2)])

    def healthy() -> Any:
        return model(torch.ones(1, 2)).mean()

    def streaming() -> Any:
        return model(next(batches)).log().mean()

    with pytest.raises(ValueError, match="does not fail in 1 call"):
        smallest(healthy)
    with pytest.raises(ValueError, match="can't be copied"):
        smallest(streaming)
    with pytest.raises(ValueError, match="a function of yours"):
        smallest(model)


def test_the_magic(not_run, tmp_path) -> None:
    setup = """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        batch = torch.ones(6, 3)
        def train_step(rows):
            return model(rows).view(5, -1).mean()
    """
    with started(textwrap.dedent(setup)) as book:
        done = book.run("%smallest --folder small")
        assert what(done.result)["rows of the batch"][0] == 6 and (tmp_path / "small" / "smallest.py").exists()
        assert "%smallest train_step" in done.shown
        assert "does not fail" in book.run("%smallest train_step --batch batch[:5]").printed
        assert "cannot be evaluated" in book.run("%smallest nothing").printed
        book.run("del train_step")
        assert "needs a function" in book.run("%smallest").printed
