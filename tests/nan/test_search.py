"""The search by replay: the right module within the bound, the right rows, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from nbdebug.chapters.nan.search import StepDoesNotRepeat, search
from nbdebug.finding import Finding, Report, Where
from nbdebug.observe.bits import fingerprint
from nbdebug.observe.state import Snapshot

BATCH = 6


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4) / 4)

    def forward(self, x, side):
        return x + torch.tanh(nn.functional.dropout(x @ self.mix, 0.1))


class MaskedSoftmax(nn.Module):
    """A decoy: hands on what an intended -inf was absorbed in."""

    def forward(self, x, side):
        return x + torch.softmax(x.masked_fill(torch.eye(4, dtype=torch.bool)[0], -math.inf), -1)


class Unused(nn.Module):
    """A decoy: makes NaN and inf in some rows, and drops them."""

    def forward(self, x, side):
        quotient = (x.detach() / side[:, None]).nan_to_num(0.0, 0.0, 0.0)
        return x + 0.01 * quotient.clamp(-1, 1)


class Log(nn.Module):
    """A fault in the forward: log(0) where `side` is 0."""

    def forward(self, x, side):
        return x + torch.log(side)[:, None]


class Distance(nn.Module):
    """A fault in the backward: the derivative of sqrt at 0 where `side` is 0."""

    def forward(self, x, side):
        return x + ((x * side[:, None]) ** 2).sum(-1, keepdim=True).sqrt()


class Tower(nn.ModuleList):
    def forward(self, x, side):
        for part in self:
            x = part(x, side)
        return x


def tower(fault, place):
    """64 modules: the root, 7 floors, 56 rooms; a third of the rooms are decoys, one has the fault."""
    rooms = [(Plain, MaskedSoftmax, Unused, Plain)[i % 4]() for i in range(56)]
    rooms[place] = fault()
    return Tower([Tower(rooms[i:i + 8]) for i in range(0, 56, 8)]), f"{place // 8}.{place % 8}"


def side_with(rows):
    side = torch.ones(BATCH)
    side[list(rows)] = 0
    return side


class Case:
    """A step with its model, and a tracer that only says what it was told to say."""

    def __init__(self, model, loss, *, optimizer=torch.optim.SGD, says=None, **where):
        self.model, self.loss, self.calls = model, loss, 0
        self.optimizer = optimizer(model.parameters(), lr=0.01) if list(model.parameters()) else None
        self.says = says
        self.where = Where(**{"step": 0, "phase": "forward", **where})

    def step(self):
        self.calls += 1
        if self.optimizer:
            self.optimizer.zero_grad()
        loss = self.loss(self.model)
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        return loss

    def trace(self):
        self.step()
        found = (Finding("nan/overflow", "It overflows.", self.where),) if self.says is None else self.says
        return Report("nan_trace(step)", found, notes=("traced",), facts={"dtype": "float32"})

    def search(self, **more):
        optimizers = [self.optimizer] if self.optimizer else []
        return search(self.step, {"model": self.model}, optimizers, trace=self.trace, **more)


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
        return Case(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4)).append(model[2]),
                    lambda m: m[3](m[:3](x + random.random()), side).square().mean(), optimizer=torch.optim.Adam)

    def photograph(case):
        tensors = [*case.model.parameters(), *case.model.buffers(), *(p.grad for p in case.model.parameters()),
                   *(t for state in case.optimizer.state.values() for t in state.values()), torch.get_rng_state()]
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


def no_hooks(model):
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) and (
        torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
        and torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph")


def test_a_sound_step_gives_an_ok_report_after_two_runs():
    x = torch.randn(BATCH, 4)
    case = Case(tower(Plain, 0)[0], lambda m: m(x, side_with({1})).square().mean())
    report = case.search()
    assert report.ok and case.calls == 2 and report.facts["replays"] == {"repeat": 2, "modules": 0, "ops": 0, "rows": 0}
    assert report.notes == ("The step was run 2 times: 2 to see that it repeats.",)


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


@pytest.mark.parametrize("loss", [lambda y, side: y.mean() + torch.log(side).mean(),
                                  lambda y, side: y.mean() + (y * side[:, None]).square().sum(-1).sqrt().mean()])
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
    assert where["phase"] == "input" or "any one row in place of all others" in report.notes[1]


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
    report = search(step, {"a": a, "b": b}, trace=lambda: step() or found)
    assert report.facts["replays_point_at"] == "b.1" and report.findings[0].where.samples == (1,)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict


class Unpacks(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.mix, self.act = nn.Linear(4, 4), act

    def forward(self, batch, *, ids=None):
        return {"out": (self.mix(batch.x) + self.act(batch.more["sides"][0])[:, None], ids)}


@pytest.mark.parametrize(("act", "bad", "smallest"), [
    (torch.log, (1, 4), (1,)),  # each row fails alone
    (lambda side: torch.log(side.sum() - (BATCH - 1.5)) + side, (1, 4), (1, 4)),  # two rows fail only together
])
def test_rows_in_nested_arguments_alone_and_together(act, bad, smallest):
    batch = Batch(torch.randn(BATCH, 4), {"sides": [side_with(bad)], "name": "x"})
    case = Case(Unpacks(act), lambda m: m(batch, ids=torch.arange(BATCH))["out"][0].mean(), module="")
    report = case.search()
    assert report.findings[0].where.samples == bad and report.facts["rows"]["smallest"] == smallest
    said = "Row 1 alone is enough" if smallest == (1,) else "Rows 1, 4 make the step fail together"
    assert any(said in note for note in report.notes)


def test_a_right_hint_saves_replays_and_a_wrong_one_is_corrected():
    counts = {}
    for hint in (None, (3,), (2,)):
        x, side = torch.randn(BATCH, 4), side_with({3})
        report = Case(Tower([Plain(), Log()]), lambda m: m(x, side).mean(), samples=hint).search()  # noqa: B023
        assert report.findings[0].where.samples == (3,)
        corrected = "The op tracer saw the fault in rows 2; by replay it takes 3."
        assert (corrected in report.notes) == (hint == (2,))
        counts[hint] = report.facts["replays"]["rows"]
    assert counts[(3,)] == 3 < counts[None] <= counts[(2,)]


def test_rows_that_replay_cannot_tell_apart_stay_as_the_tracer_says():
    y = torch.tensor([1.0, 0, 1])
    model = nn.Linear(2, 1)
    report = Case(model, lambda m: (m(torch.ones(3, 2))[:, 0] * torch.log(y)).mean(), samples=(1,), module="").search()
    assert report.findings[0].where.samples == (1,)  # labels do not come in through the model
    report = Case(model, lambda m: m(torch.full((1, 2), math.inf)).mean()).search()
    assert report.findings[0].where.samples is None and "not given a batch of several rows" in report.notes[1]


def test_a_batch_that_no_longer_fails_is_not_called_a_cause():
    """Something outside of model and optimizer was changed by the run under the tracer."""
    model, x, side = Tower([Plain(), Log()]), torch.randn(BATCH, 4), side_with({3})
    case = Case(model, lambda m: m(x, side).mean(), samples=(3,))
    found = case.trace
    case.trace = lambda: (found(), side.fill_(1))[0]
    report = case.search()
    assert report.findings[0].where.samples == (3,) and "did not fail again" in " ".join(report.notes)


def test_the_bar_comes_after_two_seconds_and_goes(monkeypatch):
    import tqdm.auto

    seen = []

    class Bar:
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
    assert report.ok and "Replays point at `0`, but the op tracer judged that there is no fault." in report.notes


def unseeded(x, model, side):
    noise, counter, w = random.Random(), itertools.count(1), torch.ones(1, requires_grad=True)
    batches, shuffled = itertools.cycle([x, x + 1, x * 2]), iter([x])
    generator = np.random.default_rng(0)
    loss = lambda batch: model(batch, side).square().mean()
    return {
        "an iterator": (lambda: loss(next(batches)), "given another batch the second time"),
        "an iterator that ends": (lambda: loss(next(shuffled)), "iterator that it takes its batches from had run out"),
        "its own generator": (lambda: loss(x + noise.random()), "given another batch the second time"),
        "numpy's generator": (lambda: loss(x) * generator.random(), "although the model was given the same batch"),
        "a counter": (lambda: loss(x) / next(counter), "loss came out differently although .* (a counter"),
        "other calls": (lambda: sum(loss(x) for _ in range(next(counter))), "called other modules .*8 calls, then 16"),
        "a new seed": (lambda: loss(x) + 0 * torch.seed(), "random numbers differ"),
        "an error": (lambda: loss(x) if next(counter) == 1 else 1 / 0, "second time it raised ZeroDivisionError"),
        "a second backward": (lambda: [w.sum().backward() for _ in range(next(counter))] and loss(x), "another number"),
    }


@pytest.mark.parametrize("kind", unseeded(torch.zeros(1), nn.Linear(1, 1), None))
def test_a_step_that_does_not_repeat_is_refused_with_the_reason(kind):
    model, x = Tower([Plain(), Tower([MaskedSoftmax(), Log()]), Plain(), Unused(), Plain()]), torch.randn(BATCH, 4)
    loss, reason = unseeded(x, model, torch.ones(BATCH))[kind]
    case = Case(model, lambda m: loss(), optimizer=torch.optim.Adam)
    before = Snapshot.take(model, case.optimizer)
    with pytest.raises(StepDoesNotRepeat, match=reason.replace("(", r"\(")) as caught:
        case.search()
    assert "strategy=\"trace\"" in str(caught.value) and caught.value.reasons
    assert before.differences() in ([], ["Python's random numbers"]) and no_hooks(model)


def test_global_random_numbers_repeat_since_their_state_is_restored():
    model, x, side = Tower([Plain(), Log()]), torch.randn(BATCH, 4), side_with({1})
    draw = lambda: random.random() + np.random.rand() + torch.rand(1)
    assert Case(model, lambda m: m(x + draw(), side).mean()).search().findings


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
    assert case.calls == call and before.same_as_now() and no_hooks(model)


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
