"""A loss_fn that makes the whole step itself: the order of scaler and clipping is named, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import nbdebug
from nbdebug.tools.precision.casting import CastCopies
from nbdebug.tools.precision.trial import OwnStep

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Training:
    """A model, its optimizer and its scaler, and a step of the user's: `turns` are what it does, in order."""

    def __init__(self, *turns: str, clip: Callable[[list[Any]], Any] | None = None, enabled: bool = True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        self.turns, self.clip = turns, clip or (lambda parameters: clip_grad_norm_(parameters, 0.5))

    def loss_fn(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (model(x).float() - 3).square().mean()
        for turn in self.turns:
            {
                "backward": lambda: self.scaler.scale(loss).backward(),
                "plain": lambda: loss.backward(),
                "unscale": lambda: self.scaler.unscale_(self.optimizer),
                "clip": lambda: self.clip(list(model.parameters())),
                "step": lambda: self.scaler.step(self.optimizer),
                "bare": lambda: self.optimizer.step(),
                "update": lambda: self.scaler.update(),
            }[turn]()
        return loss

    def ask(self) -> nbdebug.Report:
        return nbdebug.precision(self.model, X, self.loss_fn, mode="cast", progress=False)


def codes(report: nbdebug.Report) -> list[str]:
    return [finding.code for finding in report]


@pytest.mark.parametrize(
    "clip",
    [
        lambda p: clip_grad_norm_(p, 0.5),
        lambda p: clip_grad_value_(p, 0.01),
        lambda p: [q.grad.clamp_(-0.01, 0.01) for q in p],
    ],
)
def test_clipping_before_the_scale_is_taken_out_is_named_at_its_line(clip: Callable) -> None:
    for turns in (
        ("backward", "clip", "unscale", "step", "update"),
        ("backward", "clip", "step", "update"),
        ("backward", "clip"),
    ):
        report = Training(*turns, clip=clip).ask()
        assert codes(report) == ["precision/unscale-order"] and report.fp32_modules == ()
        where = report.findings[0].where
        assert where.file == __file__ and "clip" in where.text or "clamp_" in where.text
        assert report.findings[0].fixes[0].verified is True
    assert codes(Training("backward", "unscale", "clip", "step", "update", clip=clip).ask()) == []


def test_a_scale_that_is_never_taken_out_is_named() -> None:
    report = Training("backward", "bare").ask()
    assert codes(report) == ["precision/unscale-order"] and "never unscaled" in report.findings[0].title


@pytest.mark.parametrize(
    "turns",
    [
        ("backward", "step", "update"),
        ("plain", "clip", "bare"),
        ("plain", "bare"),
        (),
        ("backward",),
        ("backward", "unscale", "step"),
    ],
)
def test_right_orders_are_left_in_peace(turns: tuple[str, ...]) -> None:
    assert codes(Training(*turns).ask()) == []


def test_division_by_a_constant_or_by_the_scale_itself_and_a_scaler_that_is_off_are_no_fault() -> None:
    assert codes(Training("backward", "clip", "step", clip=lambda p: [q.grad.div_(4) for q in p]).ask()) == []
    own = Training("backward", "clip", "bare")
    own.clip = lambda p: [q.grad.div_(own.scaler.get_scale()) for q in p] + [clip_grad_norm_(p, 0.5)]
    assert codes(own.ask()) == []
    assert codes(Training("backward", "clip", "step", "update", enabled=False).ask()) == []


def test_nothing_of_the_users_changes() -> None:
    training = Training("backward", "clip", "step", "update")
    training.model(X).sum().backward()
    things = training.model, training.optimizer, training.scaler
    before, grads = copy.deepcopy([t.state_dict() for t in things]), [p.grad for p in training.model.parameters()]
    values, methods = [g.clone() for g in grads], dict(vars(torch.amp.GradScaler))
    training.ask()
    for was, now in zip(before, (t.state_dict() for t in things)):
        assert str(was) == str(now)
    assert all(p.grad is g and torch.equal(g, v) for p, g, v in zip(training.model.parameters(), grads, values))
    assert dict(vars(torch.amp.GradScaler)) == methods


def test_modules_are_found_in_a_step_of_its_own_too() -> None:
    from tests.precision import models

    training = Training("backward", "unscale", "clip", "step", "update")
    training.model = nn.Sequential(models.Calm(), models.Overflows(), nn.Linear(models.WIDTH, 1))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    report = nbdebug.precision(training.model, models.batch(), training.loss_fn, mode="cast", progress=False)
    assert report.fp32_modules == ("1",) and codes(report) == ["precision/half-overflow"]


def test_a_step_beside_the_loss_is_looked_at_too_and_one_that_does_not_repeat_is_left_in_peace() -> None:
    def asked(*turns: str, draws: bool = False, clip: Callable | None = None) -> nbdebug.Report:
        training = Training(*turns, clip=clip)
        sizes = iter(range(1, 99))
        return nbdebug.precision(
            training.model,
            X,
            lambda model, x: model(x).float().square().mean(),
            mode="cast",
            progress=False,
            step=lambda: training.loss_fn(training.model, X * next(sizes) if draws else X),
        )

    def halved(parameters: list[Any]) -> None:
        for parameter in parameters:
            parameter.grad.div_(2)

    assert codes(asked("backward", "clip", "step", "update")) == ["precision/unscale-order"]
    assert codes(asked("backward", "unscale", "clip", "step", "update")) == []
    assert codes(asked("plain", "clip", "bare")) == []
    assert codes(asked("backward", "clip", "step", "update", draws=True, clip=halved)) == []
    with pytest.raises(TypeError, match="step is a function without arguments; got str"):
        nbdebug.precision(nn.Linear(4, 1), X, lambda m, x: m(x).sum(), step="step()")  # type: ignore[arg-type]


def test_what_the_step_raises_passes_and_all_is_put_back() -> None:
    training, scale = Training("backward"), torch.amp.GradScaler.scale

    def raises(parameters: Any) -> None:
        raise LookupError("mine")

    training.turns, training.clip = ("backward", "clip", "step"), raises
    with pytest.raises(LookupError, match="mine"):
        training.ask()
    assert torch.amp.GradScaler.scale is scale
    with OwnStep() as own, CastCopies(training.model, torch.float16, "cast").running():
        pass
    assert not own.backward
