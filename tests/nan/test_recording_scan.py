"""A step that is known to go bad, looked at while it is recorded: the same answer as from a look at every op."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.nan import locate
from nbdebug.tools.nan.probe import Probe, StopCell
from nbdebug.tools.nan.report import report_of
from nbdebug.tools.nan.suspects import RecordingScan
from tests.nan.test_replay import EAGER

BEYOND = {"nan/running-stats-nonfinite", "nan/lr-divergence", "nan/uninitialized-memory"}
"""Patients whose one bad step does not tell all: the steps before do, or what happens to lie in memory."""


def report_of_recording(step, model, optimizer) -> nbdebug.Report:
    """The report on one step, as a guard gets it."""
    probe = Probe({"model": model}, {"optimizer": optimizer} if optimizer else {}, live=False)
    scan = RecordingScan(probe)
    with probe:
        probe.begin_step(0)
        with contextlib.suppress(StopCell):
            step()
        detection = probe.end_step()
    locate.locate_origins(probe, detection, scan)
    return report_of(probe, detection, "", "", 1)


@pytest.mark.parametrize("patient", [p for p in EAGER if p.CODE not in BEYOND], ids=lambda p: p.CODE)
def test_it_names_what_a_look_at_every_op_names(patient):
    looked = nbdebug.nan_trace(
        (sick := patient.sick()).step, model=sick.model, optimizer=sick.optimizer, max_steps=sick.steps
    ).findings[0]
    sick = patient.sick()
    for _ in range(looked.where.step or 0):
        sick.step()
    found = report_of_recording(sick.step, sick.model, sick.optimizer).findings[0]
    # what only the steps before tell (a rate that is too high, say) is the guard's to know
    for part in ("phase", "module", "op", "file", "line", "samples"):
        assert getattr(found.where, part) == getattr(looked.where, part), part
    if not looked.where.step:
        assert found.code == looked.code


class Roots(nn.Module):
    """Attention with a mask of -inf, and a square root whose derivative fails in one row."""

    def __init__(self, masked: bool):
        super().__init__()
        self.masked, self.lin, self.out = masked, nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x, keep):
        scores = self.lin(x) @ x.transpose(1, 2)
        if self.masked:
            scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), float("-inf"))
        x = self.out(x + scores.softmax(-1) @ x)
        return (x.pow(2) * keep).sum((1, 2)).sqrt().mean()


@pytest.fixture
def roots(request, monkeypatch):
    torch.manual_seed(0)
    model, x, keep = Roots(request.param), torch.randn(4, 3, 6), torch.ones(4, 1, 1)
    keep[2] = 0
    passes = []
    for name in ("scan_replay", "_replay"):
        whole = getattr(locate, name)
        monkeypatch.setattr(locate, name, lambda *a, name=name, whole=whole: passes.append(name) or whole(*a))
    return model, x, keep, passes


@pytest.mark.parametrize(("roots", "expected"), [(False, []), (True, ["_replay"])], indirect=["roots"])
def test_a_fault_born_in_backward_takes_no_more_passes_than_it_must(roots, expected):
    model, x, keep, passes = roots
    report = report_of_recording(lambda: model(x, keep).backward(), model, None)
    where = report.findings[0].where
    assert (report.findings[0].code, where.op, where.samples) == ("nan/sqrt-grad-at-zero", "sqrt", (2,))
    assert report.findings[0].fixes[0].verified
    assert passes == expected  # the graph that is left tells, unless a mask was in the forward


@pytest.mark.parametrize("roots", [False, True], indirect=True)
def test_a_fault_of_the_forward_takes_one_replay(roots):
    model, x, keep, passes = roots
    keep[2] = -1
    report = report_of_recording(lambda: model(x, keep).backward(), model, None)
    assert (report.findings[0].code, report.findings[0].where.samples) == ("nan/sqrt-of-negative", (2,))
    assert passes == ["_replay"]


def test_origins_that_a_shortcut_would_miss_are_found():
    """Two rows fail at one line each, the second where the first is bad already: not all of it is carried on."""
    lin = nn.Linear(4, 4)
    x = torch.rand(3, 4) + 1
    x[0], x[2] = 0, -1

    def step():
        first = torch.log(x * (lin.weight.sum() * 0 + 1))
        second = torch.sqrt(first + torch.tensor([0.0, 9.0, 0.0])[:, None] + torch.tensor([[0.0], [0.0], [-9.0]]))
        second.mean().backward()

    where = report_of_recording(step, lin, None).findings[0].where
    assert (where.op, where.samples) == ("log", (0, 2))


def test_without_a_model_the_batch_is_known_by_what_comes_from_outside():
    weights = [torch.eye(6).requires_grad_() for _ in range(3)]
    x, keep = torch.rand(5, 6) + 1, torch.ones(5, 1)
    keep[3] = 0

    def step():
        h = x @ weights[0] @ weights[1] @ weights[2]
        (h * keep).sum(1).sqrt().mean().backward()

    where = report_of_recording(step, nn.Linear(2, 2), None).findings[0].where
    assert (where.phase, where.op, where.samples) == ("backward", "sqrt", (3,))


def test_it_leaves_nothing_on_the_users_graph_and_gradients_are_whole():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    hooks = len(model._forward_hooks)

    def step():
        model(x).abs().sqrt().mean().backward()

    probe = Probe({"model": model}, {}, live=False)
    scan = RecordingScan(probe)
    with probe:
        probe.begin_step(0)
        step()
        assert probe.end_step() is None
    assert scan.call is None and not scan._nodes and not scan._handles
    assert len(model._forward_hooks) == hooks
    seen = model.weight.grad.clone()
    model.weight.grad = None
    step()
    assert torch.equal(seen, model.weight.grad)


def test_it_lets_go_of_a_graph_whose_backward_ran_out_of_memory(monkeypatch):
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    outs = []

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RecordingScan, "_measure", full)
    probe = Probe({"model": model}, {}, live=False)
    with contextlib.closing(RecordingScan(probe)), probe:
        probe.begin_step(0)
        with pytest.raises(torch.OutOfMemoryError):
            out = model(x)
            outs.append(weakref.ref(out))
            out.abs().sqrt().mean().backward()
    del out, probe
    gc.collect()
    assert outs[0]() is None
