"""What a recorded step is good for: finding the place without a look while it ran, and failing again alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import runpy

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.replay import Replay
from nbdebug.tools.nan.locate import NotLocated
from nbdebug.tools.nan.nan_trace import trace_cell
from tests.test_patients import PATIENTS, ask


def load(path):
    spec = importlib.util.spec_from_file_location("replayed_" + path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OTHERS = {"compiled-differs", "not-located"}  # no op is at fault in these
EAGER = [load(path) for path in PATIENTS if path.parent.name == "nan" and path.stem not in OTHERS]
named = pytest.mark.parametrize("patient", EAGER, ids=lambda p: p.CODE)


def traced(patient, made, strategy):
    return nbdebug.nan_trace(
        made.step, model=made.model, optimizer=made.optimizer, max_steps=made.steps, strategy=strategy
    )


@named
def test_a_replay_names_what_a_look_names(patient):
    looked, replayed = (traced(patient, patient.sick(), strategy).findings[0] for strategy in ("trace", "replay"))
    assert replayed.code == looked.code
    by_chance = {"samples"} if patient.CODE == "nan/uninitialized-memory" else set()  # what unfilled memory holds
    for part in {"phase", "module", "op", "file", "line", "step", "samples"} - by_chance:
        assert getattr(replayed.where, part) == getattr(looked.where, part), part


@named
def test_a_replay_is_silent_on_a_healthy_twin(patient):
    assert traced(patient, patient.healthy(), "replay").ok


@named
def test_the_fault_fails_alone(patient, tmp_path):
    if patient.CODE == "nan/uninitialized-memory":  # what lay in that memory can't be had again
        with pytest.raises(ValueError, match="nothing to reproduce"):
            ask(patient, patient.sick()).save_repro(tmp_path)
        return
    path = ask(patient, patient.sick()).save_repro(tmp_path)
    assert "nbdebug" not in [line.split()[1] for line in path.read_text().splitlines() if line.startswith("import")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(path))  # ends with SystemExit where everything came out finite
    assert "not finite" in said.getvalue()


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x  # the division


def by_its_own_derivative():
    weight = torch.zeros(3, requires_grad=True)

    def step():
        loss = Reciprocal.apply(weight).sum()
        loss.backward()
        return loss

    return step


def test_a_backward_of_the_users_own_is_refused_and_said_so():
    with pytest.raises(NotLocated, match=r"custom autograd Function.*strategy='trace'"):
        nbdebug.nan_trace(by_its_own_derivative(), strategy="replay")
    report = nbdebug.nan_trace(by_its_own_derivative(), strategy="trace")
    assert (report.findings[0].where.op, "# the division" in report.findings[0].where.text) == ("div", True)


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["parts of one storage", "a gradient that is sparse"])
def test_weights_that_an_update_changes_are_replayed_as_they_were(layout, fault):
    """cuDNN wants the weights of an RNN in one storage; an update by a sparse gradient can't be replayed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 6, sparse=layout.endswith("sparse")), nn.Tanh(), nn.Linear(6, 2))
    parameters = list(net.parameters())
    if layout == "parts of one storage":
        flat = torch.cat([p.detach().flatten() for p in parameters])
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.data = part.view_as(p)
    optimizer, zero = torch.optim.SGD(parameters, lr=0.1), torch.zeros(2)

    def step():
        optimizer.zero_grad()
        out = net(torch.arange(9))
        loss = out.square().mean()
        if fault == "forward":
            loss = loss / zero.sum()
        else:
            loss = loss + (out - out.detach()).square().sum().sqrt()
        loss.backward()
        optimizer.step()
        return loss

    finding = nbdebug.nan_trace(step, model=net, optimizer=optimizer, strategy="replay").findings[0]
    assert finding.code == {"forward": "nan/div-by-zero", "backward": "nan/sqrt-grad-at-zero"}[fault]
    assert "zero.sum()" in finding.where.text or "sqrt()" in finding.where.text


def test_a_model_built_inside_the_cell_is_taken():
    stale = torch.nn.Linear(2, 2)

    def cell():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for n in range(4):
            x = torch.randn(5, 4)
            if n == 2:
                x[3] = float("nan")
            loss = model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    report = trace_cell(cell, models={"stale": stale}, optimizers={})
    where = report.findings[0].where
    assert (report.findings[0].code, where.step, where.samples) == ("nan/input-nonfinite", 2, (3,))
    assert "Sequential" in report.subject


def test_a_loop_without_a_module_counts_its_steps():
    def cell():
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for n in range(4):
            loss = (weight * (0.0 if n == 2 else 1.0)).sum().log()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    report = trace_cell(cell, models={"elsewhere": torch.nn.Linear(2, 2)}, optimizers={})
    assert (report.findings[0].code, report.findings[0].where.step) == ("nan/log-of-nonpositive", 2)


def sick(code):
    return next(patient for patient in EAGER if code == patient.CODE).sick()


class Full:
    """A device whose memory is full: some op can't be run in the first replays of it."""

    def __init__(self, monkeypatch, times):
        self.times, run = times, Replay.run

        def full(replay, *args, **kwargs):
            if self.times:
                self.times -= 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return run(replay, *args, **kwargs)

        monkeypatch.setattr(Replay, "run", full)


@pytest.mark.parametrize("code", ["nan/sqrt-grad-at-zero", "nan/log-of-nonpositive"])
def test_with_too_little_memory_activations_go_to_the_host(monkeypatch, code):
    training = sick(code)
    plain = nbdebug.nan_trace(training.step, model=training.model, strategy="replay", max_steps=training.steps)
    Full(monkeypatch, times=1)
    training = sick(code)
    report = nbdebug.nan_trace(training.step, model=training.model, strategy="replay", max_steps=training.steps)
    assert report.findings[0].where == plain.findings[0].where
    assert "activations in the host's" in str(report.full()) and "activations" not in str(plain.full())


def test_without_any_memory_the_report_says_so(monkeypatch):
    Full(monkeypatch, times=10)
    training = sick("nan/sqrt-grad-at-zero")
    report = nbdebug.nan_trace(training.step, model=training.model, strategy="replay", max_steps=training.steps)
    assert report.findings[0].code == "nan/not-located"
    assert "not enough memory" in report.findings[0].title


@pytest.mark.parametrize("times", [1, 10])
def test_a_guard_stops_the_step_however_full_the_memory_is(monkeypatch, times):
    training = sick("nan/sqrt-grad-at-zero")
    Full(monkeypatch, times)
    with pytest.raises(nbdebug.NonFiniteStep) as stopped, nbdebug.guard(training.model, training.optimizer):
        for _ in range(training.steps):
            training.step()
    report = stopped.value.trip.report
    assert report.findings[0].code == ("nan/sqrt-grad-at-zero" if times == 1 else "nan/not-located")


def test_a_loss_is_located_without_keeping_activations(monkeypatch):
    graphs = []
    run = Replay.run
    monkeypatch.setattr(Replay, "run", lambda replay, *a, **k: (graphs.append(replay.graph), run(replay, *a, **k))[1])
    training = sick("nan/log-of-nonpositive")
    nbdebug.nan_trace(training.step, model=training.model, strategy="replay", max_steps=training.steps)
    assert graphs[:2] == [False, False]
