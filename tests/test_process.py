"""Copies of the process: forks, and the fresh processes that stand in where a GPU is in use here."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug import process
from tests.shell import started

TRAINED = """
import torch, nbdebug
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
x = torch.randn(8, 4)
class Run:
    pass
def build():
    torch.manual_seed(0)
    run = Run()
    run.model = Net()
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=0.01)
    return run
def step(run):
    loss = run.model(x).square().mean()
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    return loss.item()
def save(run, path):
    torch.save({"model": run.model.state_dict()}, path)
def load(run, path):
    run.model.load_state_dict(torch.load(path)["model"])
"""


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU is in use."""
    monkeypatch.setattr(process, "can_copy", lambda: False)


def test_a_fresh_process_begins_as_this_one_and_changes_nothing_here(no_copy: None) -> None:
    model = nn.Linear(2, 1)
    torch.manual_seed(5)
    random.seed(5)
    here = torch.get_rng_state(), random.getstate()

    def trained() -> tuple[int, float, float, float]:
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.weight.zero_()
        return os.getpid(), model.bias.grad.item(), torch.rand(()).item(), random.random()

    (first, *values), (second, *again) = process.in_process(trained), process.in_process(trained)
    assert len({first, second, os.getpid()}) == 3 and values == again
    assert model.weight.grad is None and model.weight.abs().sum() > 0
    assert torch.equal(here[0], torch.get_rng_state()) and here[1] == random.getstate()
    assert values == [1.0, torch.rand(()).item(), random.random()]


def test_what_fails_there_fails_here(no_copy: None) -> None:
    def fails() -> None:
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        process.in_process(fails)
    running = iter(n for n in range(3))
    with pytest.raises(process.CopyFailed, match="sent to a fresh process"):
        process.in_process(lambda: next(running))
    with pytest.raises(process.CopyFailed, match="no answer within"):
        process.in_process(lambda: time.sleep(100), 0.5)
    with pytest.raises(process.CopyFailed, match="no answer"):
        process.in_process(lambda: os._exit(3))
    assert process.in_process(lambda: 1) == 1


def test_a_resumed_run_of_a_notebook_is_proven_there(no_copy: None) -> None:
    with started(TRAINED) as book:
        report = book.run("nbdebug.resume_proof(build, step, at=2, steps=4, save=save, load=load)").result
        assert [f.code for f in report] == ["checkpoint/optimizer-missing"], report
        assert book.run("nbdebug.resume_proof(build, step, at=2, steps=4)").result.ok


def test_a_loading_of_the_users_is_tried_there(no_copy: None, tmp_path) -> None:
    model = nn.Linear(3, 2)
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "a.pt")

    def load(path: str) -> None:
        model.load_state_dict({n.removeprefix("module."): v for n, v in torch.load(path).items()})

    assert nbdebug.check_checkpoint(tmp_path / "a.pt", model=model).findings
    assert not nbdebug.check_checkpoint(tmp_path / "a.pt", model=model, load=load).findings


@pytest.mark.skipif(not process.can_fork(), reason="no fork")
def test_a_gpu_that_is_in_use_is_not_there_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert process.in_copy(lambda: torch.cuda.is_available()) is False
    assert process.in_copy(lambda: torch.accelerator.is_available()) is False

    def needs() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

    with pytest.raises(process.NeedsGpu):
        process.in_copy(needs)
