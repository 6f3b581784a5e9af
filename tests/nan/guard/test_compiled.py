"""`torch.compile` in all its forms under the guard: the same bits, and the place is named."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.nan.leftovers import assert_nothing_is_left

pytestmark = pytest.mark.filterwarnings("ignore")
INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler"
    ),
)


@pytest.fixture(autouse=True)
def a_fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert_nothing_is_left()


class Body(nn.Module):
    """Divides by what a row adds up to."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        asked = torch.sigmoid(self.rate(x)) * keep
        return asked / asked.sum(-1, keepdim=True)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.BatchNorm1d(4), Body(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(x), keep))


class Compiled:
    """form: what is guarded, and what is called."""

    def __init__(self, form: str, backend: str, bad: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = Whole()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.guarded = self.called = self.model
        if form == "in place":
            self.model.compile(backend=backend)
        elif form == "part":
            self.model.body = torch.compile(self.model.body, backend=backend)
        elif form != "eager":
            self.called = torch.compile(self.model, backend=backend, fullgraph=form == "full graph")
            self.guarded = self.model if form == "wrapper called" else self.called
        self.inputs, self.keep = torch.randn(8, 5, 4), torch.ones(8, 5, 1)
        if bad is not None:
            self.keep[bad, 2] = 0

    def step(self, i: int) -> float:
        self.optimizer.zero_grad()
        loss = self.called(self.inputs[i], self.keep[i]).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def kept(self) -> dict:
        return kept([self.model], [self.optimizer])


FORMS = ["wrapper guarded", "wrapper called", "in place", "full graph", "part"]


@pytest.mark.parametrize("form", FORMS)
def test_healthy_steps_end_in_the_same_bits(form: str) -> None:
    bare = Compiled(form, "eager")
    losses = [bare.step(i) for i in range(5)]
    torch._dynamo.reset()
    guarded = Compiled(form, "eager")
    with nbdebug.guard(guarded.guarded, guarded.optimizer) as guard:
        assert [guarded.step(i) for i in range(5)] == losses
    assert not changed(bare.kept(), guarded.kept())
    assert guard.report().ok and guard.steps == 5 and guard.fault == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("warm", [False, True], ids=["guarded first", "compiled first"])
def test_the_place_is_named(form: str, warm: bool) -> None:
    training = Compiled(form, "eager", bad=3)
    if warm:
        training.step(0)
    with nbdebug.guard(training.guarded, training.optimizer):
        for i in range(1 if warm else 0, 3):
            training.step(i)
        before = training.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            training.step(3)
    assert not changed(before, training.kept())
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.module, finding.where.op) == ("nan/div-by-zero", "body", "div")
    assert finding.where.samples == (2,)
    assert "asked / asked.sum" in finding.where.text


def test_the_guard_does_not_make_the_compiler_compile_again() -> None:
    counted = torch._dynamo.testing.CompileCounter()
    training = Compiled("eager", "eager")
    training.called = torch.compile(training.model, backend=counted)
    for i in range(2):
        training.step(i)
    before = counted.frame_count
    with nbdebug.guard(training.model, training.optimizer):
        for i in range(2, 7):
            training.step(i)
    again = counted.frame_count - before
    for i in range(3):
        training.step(i)
    assert again <= 1, f"compiled {again} times under the guard"
    assert counted.frame_count - before - again <= 1


@pytest.mark.parametrize("backend", [INDUCTOR])
def test_inductor(backend: str) -> None:
    bare = Compiled("wrapper called", backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [bare.step(i) for i in range(3)]
        guarded = Compiled("wrapper called", backend, bad=3)
        with nbdebug.guard(guarded.guarded, guarded.optimizer) as guard:
            assert [guarded.step(i) for i in range(3)] == losses
            before = guarded.kept()
            assert not changed(bare.kept(), before)
            with pytest.raises(nbdebug.NonFiniteStep) as caught:
                guarded.step(3)
    assert not changed(before, guarded.kept()) and guard.fault == ""
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.module, finding.where.samples) == ("nan/div-by-zero", "body", (2,))


def test_a_compiled_optimizer_step() -> None:
    """Some compile the step function itself, optimizer and all; the guard works or says that it does not watch."""
    training = Compiled("eager", "eager", bad=3)
    step = torch.compile(training.optimizer.step, backend="eager")

    def train(i: int) -> None:
        training.optimizer.zero_grad()
        training.model(training.inputs[i], training.keep[i]).square().mean().backward()
        step()

    with nbdebug.guard(training.model, training.optimizer, on_trip="raise") as guard:
        for i in range(3):
            train(i)
        before = training.kept()
        try:
            train(3)
        except nbdebug.NonFiniteStep:
            assert not changed(before, training.kept())
        else:
            assert guard.fault or guard.steps == 0, "a bad step went by in silence"
