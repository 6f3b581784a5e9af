"""resume_proof: loops of many kinds, sick in one thing and healthy; what was not saved is named, the rest is silent."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from tests.shell import started

SPLIT, TOTAL = 5, 11
X = torch.randn(TOTAL, 16, 6, generator=torch.Generator().manual_seed(3))


class Average:
    """A slow copy of the weights, kept by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)


class Run:
    """A run with many parts; `uses` says which of them the loop needs."""

    def __init__(self, uses: str) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        drop = nn.Dropout(0.3) if uses == "dropout" else nn.Identity()
        norm = nn.BatchNorm1d(8) if uses == "buffers" else nn.Identity()
        self.uses, self.step = uses, 0
        self.model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drop, nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        if uses == "scheduler":
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.ema = Average(self.model)
        self.generator = torch.Generator().manual_seed(4)

    def train(self, last: int) -> list[float]:
        losses = []
        for step in range(self.step, last):
            self.step = step
            x = X[self.step]
            if self.uses == "generator":
                x = x + torch.randn(x.shape, generator=self.generator)
            if self.uses == "python":
                x = x + random.random()
            if self.uses == "numpy":
                x = x + np.random.rand()
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            if self.uses == "scaler":
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                losses.append(self.scaler.get_scale())
            else:
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
            self.ema.update(self.model)
            losses.append(self.ema.shadow["0.weight"].sum().item() if self.uses == "ema" else loss.item())
        self.step = last
        return losses

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.shadow,
            "generator": self.generator.get_state(),
            "rng": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [v.tolist() if hasattr(v, "tolist") else v for v in np.random.get_state()],
            "step": self.step,
        }

    def load(self, state: dict) -> None:
        for name in ("model", "optimizer", "scheduler", "scaler"):
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.ema.shadow = state.get("ema", self.ema.shadow)
        self.step = state.get("step", 0)
        if "generator" in state:
            self.generator.set_state(state["generator"])
        if "rng" in state:
            torch.set_rng_state(state["rng"])
        if "python" in state:
            random.setstate(eval(repr(state["python"])))
        if "numpy" in state:
            np.random.set_state(tuple(state["numpy"]))


def proof(uses: str, lacks: tuple[str, ...], tmp_path) -> nbdebug.Report:
    run = Run(uses)
    run.train(SPLIT)
    torch.save({name: part for name, part in run.state().items() if name not in lacks}, tmp_path / "run.pt")
    start = 0 if "step" in lacks else SPLIT

    def resumed(path):
        again = Run(uses)
        again.load(torch.load(path))
        return again.train(start + TOTAL - SPLIT)

    def uninterrupted():
        whole = Run(uses)
        return whole.train(TOTAL)[-(TOTAL - SPLIT) * (2 if uses == "scaler" else 1) :]

    return nbdebug.resume_proof(resumed, uninterrupted, tmp_path / "run.pt")


KINDS = {
    "optimizer": ("plain", "optimizer", "optimizer-missing"),
    "scheduler": ("scheduler", "scheduler", "scheduler-missing"),
    "scaler": ("scaler", "scaler", "scaler-missing"),
    "average": ("ema", "ema", "ema-missing"),
    "dropout": ("dropout", "rng", "rng-not-restored"),
    "generator": ("generator", "generator", "rng-not-restored"),
    "python": ("python", "python", "rng-not-restored"),
    "numpy": ("numpy", "numpy", "rng-not-restored"),
    "step": ("plain", "step", "step-missing"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_saved_is_named(kind, tmp_path) -> None:
    uses, lacks, code = KINDS[kind]
    report = proof(uses, (lacks,), tmp_path)
    assert [finding.code for finding in report] == [f"checkpoint/{code}"], report
    assert not report.ok and "Both runs" in [table.title for table in report.tables]


@pytest.mark.parametrize("uses", ["plain", "scheduler", "scaler", "ema", "dropout", "generator", "numpy", "buffers"])
def test_a_complete_file_is_silent(uses, tmp_path) -> None:
    before = random.getstate(), torch.get_rng_state()
    report = proof(uses, (), tmp_path)
    assert report.ok and "equals the one that never stopped" in report.headline
    del before


def test_a_part_that_the_run_does_not_need_is_not_missed(tmp_path) -> None:
    assert proof("plain", ("rng", "python", "numpy", "generator", "scaler", "ema"), tmp_path).ok


def test_two_things_at_once_are_both_named(tmp_path) -> None:
    report = proof("dropout", ("rng", "optimizer"), tmp_path)
    assert {f.code for f in report} == {"checkpoint/rng-not-restored", "checkpoint/optimizer-missing"}


def test_a_run_that_does_not_repeat_says_so_first(tmp_path) -> None:
    torch.save({"model": nn.Linear(2, 1).state_dict()}, tmp_path / "run.pt")

    def anything(path=None):
        import os

        return [int.from_bytes(os.urandom(4), "little")]

    report = nbdebug.resume_proof(anything, anything, tmp_path / "run.pt")
    assert not report.ok and not report.findings and "does not repeat" in report.headline


@pytest.mark.parametrize("sick", [True, False])
def test_a_shuffled_loader_in_the_middle_of_its_epoch(sick, tmp_path) -> None:
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))

    def train(model, optimizer, skip, last):
        seen = []
        loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(8))
        for place, (x,) in enumerate(loader):
            if place < skip:
                continue
            if place == last:
                break
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    def fresh():
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model, optimizer = fresh()
    train(model, optimizer, 0, 5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    torch.save(copy.deepcopy(state), tmp_path / "run.pt")

    def resumed(path):
        model, optimizer = fresh()
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return train(model, optimizer, 0, 7) if sick else train(model, optimizer, 5, 12)

    def uninterrupted():
        return train(*fresh(), 0, 12)[5:]

    report = nbdebug.resume_proof(resumed, uninterrupted, tmp_path / "run.pt")
    assert [f.code for f in report] == (["checkpoint/sampler-not-resumed"] if sick else [])
    assert not sick or "batch 0 of the other run" in report.findings[0].title


def test_a_broken_file_is_told_before_anything_runs(tmp_path) -> None:
    (tmp_path / "run.pt").write_bytes(b"")
    report = nbdebug.resume_proof(lambda path: [], lambda: pytest.fail("it ran"), tmp_path / "run.pt")
    assert [f.code for f in report] == ["checkpoint/truncated-file"]


def test_the_users_error_comes_through_and_the_magic_answers(tmp_path) -> None:
    torch.save({"model": nn.Linear(2, 1).state_dict()}, tmp_path / "run.pt")
    with pytest.raises(KeyError, match="optimizer"):
        nbdebug.resume_proof(lambda path: torch.load(path)["optimizer"], lambda: [1], tmp_path / "run.pt")
    setup = (
        f"import torch\npath = {str(tmp_path / 'run.pt')!r}\ndef go_on(path): return [1, 2]\ndef whole(): return [1, 2]"
    )
    with started(setup) as book:
        assert book.run("%resume_proof go_on whole path").result.ok
        assert "UsageError" in book.run("%resume_proof go_on nothing path").printed
