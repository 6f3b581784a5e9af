"""The search by replay: the right module within the bound, and nothing left behind."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import fingerprint
from nbdebug.report import Finding, Report, Where
from nbdebug.tools.nan.bisect import bisect
from tests.nan.towers import BATCH, Case, Distance, Log, Plain, Tower, no_hooks, side_with, tower


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("place", [1, 7, 8, 30, 31, 54, 55])
@pytest.mark.parametrize(("fault", "phase"), [(Log, "forward"), (Distance, "backward")])
def test_the_module_is_found_within_the_bound(fault, phase, place):
    model, name = tower(fault, place)
    x, side = torch.randn(BATCH, 4), side_with({1, 4})
    case = Case(model, lambda m: m(x, side).square().mean(), phase=phase, module=name)
    report = case.search()
    assert report.facts["replays_point_at"] == name and "Replays" not in " ".join(report.notes)
    replays = report.facts["replays"]
    assert replays["repeat"] + replays["modules"] <= math.ceil(math.log2(64)) + 3
    assert replays["ops"] == 1 and case.calls == sum(replays.values())
    assert report.findings[0].where.samples == (1, 4) == report.facts["rows"]["at_fault"]
    assert f"The step was run {case.calls} times" in report.notes[-1]
    assert report.notes[0] == "traced" and report.facts["dtype"] == "float32"


@pytest.mark.parametrize("fault", [Log, Distance])
def test_everything_is_where_one_plain_step_leaves_it(fault):
    def made():
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        model, _ = tower(fault, 20)
        x, side = torch.randn(BATCH, 4), side_with({2})
        return Case(
            nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4)).append(model[2]),
            lambda m: m[3](m[:3](x + random.random()), side).square().mean(),
            optimizer=torch.optim.Adam,
        )

    def photograph(case):
        tensors = [
            *case.model.parameters(),
            *case.model.buffers(),
            *(p.grad for p in case.model.parameters()),
            *(t for state in case.optimizer.state.values() for t in state.values()),
            torch.get_rng_state(),
        ]
        return [t if t is None else fingerprint(t) for t in tensors], random.getstate()

    plain, searched = made(), made()
    torch.manual_seed(4), random.seed(4)
    plain.step()
    expected = photograph(plain)
    torch.manual_seed(4), random.seed(4)
    report = searched.search()
    assert report.findings and report.facts["replays"]["rows"] and report.facts["replays"]["plain"] == 1
    assert photograph(searched) == expected
    assert no_hooks(searched.model)


def test_a_sound_step_gives_an_ok_report_after_two_runs():
    x = torch.randn(BATCH, 4)
    case = Case(tower(Plain, 0)[0], lambda m: m(x, side_with({1})).square().mean())
    report = case.search()
    assert report.ok and case.calls == 2 and report.facts["replays"] == {"repeat": 2, "modules": 0, "ops": 0, "rows": 0}
    assert report.notes == ("The step was run 2 times: 2 to check that it repeats.",)


class Around(nn.Module):
    """Its own code is at fault, before, between or after the calls inside it."""

    def __init__(self, when, fault):
        super().__init__()
        self.when, self.fault = when, [fault]
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, side):
        for when, part in (("before", self.first), ("between", self.second), ("after", nn.Identity())):
            x = self.fault[0](x, side) if self.when == when else x
            x = x + part(x)  # what is bad passes the inner call by as well
        return x


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("fault", [Log, Distance])
def test_a_module_own_code_is_told_from_the_calls_inside_it(when, fault):
    model = Tower([Plain(), Around(when, fault().forward), Plain()])
    x, side = torch.randn(BATCH, 4), side_with({0})
    assert Case(model, lambda m: m(x, side).square().mean()).search().facts["replays_point_at"] == "1"


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, side: y.mean() + torch.log(side).mean(),
        lambda y, side: y.mean() + (y * side[:, None]).square().sum(-1).sqrt().mean(),
    ],
)
def test_loss_code_is_told_from_modules(loss):
    model, x, side = Tower([Plain(), Plain()]), torch.randn(BATCH, 4), side_with({3})
    report = Case(model, lambda m: loss(m(x, side), side), module="0").search()
    assert report.facts["replays_point_at"] == ""
    assert any("Replays point at code outside of modules, the op tracer at `0`" in note for note in report.notes)


def test_a_reused_module_is_found_by_its_calls():
    log, plain = Log(), Plain()
    sides = [torch.ones(BATCH), side_with({5}), torch.ones(BATCH)]

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.log, self.plain = log, plain

        def forward(self, x):
            for side in sides:
                x = self.log(self.plain(x, side), side)
            return x

    x = torch.randn(BATCH, 4)
    report = Case(Loop(), lambda m: m(x).mean(), module="plain").search()
    replays = report.facts["replays"]
    assert replays["repeat"] + replays["modules"] <= math.ceil(math.log2(3)) + 3
    assert report.facts.get("replays_point_at", "log") == "log"


@pytest.mark.parametrize("where", [{"phase": "input", "module": ""}, {"phase": "parameter", "module": "0"}])
def test_a_bad_batch_and_a_bad_weight(where):
    model, x = Tower([Plain(), Plain()]), torch.randn(BATCH, 4)
    if where["phase"] == "input":
        x[2, 0] = math.nan
    else:
        with torch.no_grad():
            model[0].mix[1, 1] = math.nan
    report = Case(model, lambda m: m(x, torch.ones(BATCH)).mean(), **where).search()
    assert report.facts["replays_point_at"] == where["module"]
    assert report.findings[0].where.samples == ((2,) if where["phase"] == "input" else None)
    assert where["phase"] == "input" or "the step also fails with row 0 or 1 or 3 or 4 in place" in report.notes[1]


def test_parameters_that_only_the_update_breaks_go_straight_to_the_tracer():
    model, x = Tower([Plain()]), torch.randn(BATCH, 4)
    case = Case(model, lambda m: m(x, x[:, 0]).mean(), phase="optimizer", module="0")
    case.optimizer.param_groups[0]["lr"] = math.inf
    report = case.search()
    assert report.facts["replays"]["modules"] == 0 and report.facts["replays"]["ops"] == 1 and report.findings


def test_several_models_and_several_losses():
    a, b = Tower([Plain(), Plain()]), Tower([Plain(), Log()])
    x, good, bad = torch.randn(BATCH, 4), torch.ones(BATCH), side_with({1})

    def step():
        a(x, good).mean().backward()  # this loss is sound
        (a(x, good).detach() + b(x, bad)).mean().backward()

    found = Report("q", (Finding("nan/x", "t", Where(module="b.1")),))
    report = bisect(step, {"a": a, "b": b}, trace=lambda: step() or found)
    assert report.facts["replays_point_at"] == "b.1" and report.findings[0].where.samples == (1,)


def test_the_bar_comes_after_two_seconds_and_goes(monkeypatch):
    import tqdm.auto

    seen = []

    class Bar:
        n = 2

        def __init__(self, **how):
            seen.append(how["delay"])

        def update(self):
            seen.append("run")

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    x = torch.randn(BATCH, 4)
    Case(Tower([Plain()]), lambda m: m(x, x[:, 0]).mean()).search()
    assert seen == [2, "run", "run", "closed"]


def test_when_the_tracer_sees_no_fault_its_report_is_given_with_a_note():
    model, x, side = Tower([Log()]), torch.randn(BATCH, 4).requires_grad_(), side_with({3})
    report = Case(model, lambda m: m(x, side).mean(), says=()).search()
    assert (
        report.verdict == "not well, no cause known"
        and "Replays point at `0`, but the op tracer found no fault." in report.notes
    )


@pytest.mark.parametrize("call", [1, 2, 3, 5, 11])
def test_an_interrupt_leaves_everything_as_it_was(call):
    model, x = Tower([Plain(), Log(), Plain()]), torch.randn(BATCH, 4)

    def loss(m):
        out = m(x, side_with({1}))
        if case.calls == call:
            raise KeyboardInterrupt
        return out.mean()

    case = Case(model, loss, optimizer=torch.optim.Adam)
    before = Snapshot.take(model, case.optimizer)
    with pytest.raises(KeyboardInterrupt):
        case.search()
    assert case.calls == call and not before.differences() and no_hooks(model)


def test_the_steps_own_exception_passes_unchanged():
    model = Tower([Plain()])
    error = ZeroDivisionError("mine")

    def loss(m):
        m(torch.ones(BATCH, 4), torch.ones(BATCH))
        raise error

    case = Case(model, loss)
    with pytest.raises(ZeroDivisionError) as caught:
        case.search()
    assert caught.value is error and no_hooks(model)
