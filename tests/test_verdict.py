"""The verdict of a report: green for a run that was seen to be well, and for no other."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug import verdict
from nbdebug.report import FOUND, HEALTHY, UNKNOWN, Report, Symptom
from nbdebug.tools.guard.record.trips import report_from
from nbdebug.views import html


def curve(start: float, end: float, count: int = 120, noise: float = 0.02, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [end + (start - end) * math.exp(-5 * i / count) + chance.gauss(0, noise) for i in range(count)]


SICK = {
    "nan at once": [math.nan, math.nan, math.inf],
    "nan alone": [math.nan],
    "inf on the way": [*curve(2, 1)[:20], math.inf, *curve(2, 1)[20:40]],
    "rises": [1.39, 1.5, 3.0, 8.1, 20.0, 300.0, 4e3, 2e4, 2.08e5],
    "rises slowly": curve(0.7, 1.1),
    "jumps and comes back": [*curve(1, 0.5)[:60], 6e4, 2e5, *curve(0.6, 0.5)[:40]],
    "jumps in a short run": [1.2, 1.1, 1.0, 60_000.0, 0.9],
    "level": curve(0.693, 0.693, noise=0.004),
    "zero": [0.0] * 12,
    "falls and climbs": [*curve(2, 0.3)[:80], *(0.3 + 0.03 * i for i in range(60))],
}
HEALTHY_CURVES = {
    "falls": curve(2.3, 0.2),
    "falls to its noise": curve(0.7, 0.5, noise=0.1),
    "short": [2.3, 2.1, 2.2, 1.9, 1.7, 1.8],
    "one step": [2.3],
    "negative": curve(1.2, -3.0),
    "large": curve(5e4, 60, noise=5),
    "converged": [*curve(2, 0.1)[:100], *curve(0.1, 0.1, noise=0.004)],
    "warm-up": [2.3, 2.4, 2.6, 2.5, 2.2, *curve(2.2, 0.3)],
}


@pytest.mark.parametrize("kind", SICK)
def test_a_sick_curve_has_a_symptom_with_its_numbers(kind: str) -> None:
    found = verdict.of_losses(SICK[kind])
    assert found and any(character.isdigit() for character in found[0].what) or "nan" in found[0].what
    assert found[0].what.endswith(".") and found[0].look.endswith(".")


@pytest.mark.parametrize("kind", HEALTHY_CURVES)
def test_a_healthy_curve_has_none(kind: str) -> None:
    assert verdict.of_losses(HEALTHY_CURVES[kind]) == []


@pytest.mark.parametrize("seed", range(40))
def test_noise_alone_is_no_rise_and_no_jump(seed: int) -> None:
    chance = random.Random(seed)
    heavy = [1 + abs(chance.gauss(0, 1)) ** 3 * 0.05 - i * 1e-3 for i in range(200)]
    assert verdict.of_losses(heavy, resumed=True) == []


def test_a_short_record_of_noise_has_no_rise() -> None:
    """The noise of few losses is known badly: of 1,000 records without a trend 1 is called rising, at most 5 may be."""
    chance = random.Random(0)
    records = [[math.exp(chance.gauss(0, 0.4)) for _ in range(chance.randint(6, 20))] for _ in range(1000)]
    assert sum(bool(verdict.of_losses(record)) for record in records) <= 5
    assert verdict.of_losses([1.0, 1.3, 1.5, 1.9, 2.2, 2.9])  # steady: six are enough


def test_losses_that_pull_at_each_other_need_not_fall() -> None:
    pair = curve(0.6, 0.75)
    assert verdict.of_losses(pair) and not verdict.of_losses(pair, several=True)
    assert verdict.of_losses(curve(0.6, 5.0), several=True), "but a loss that rises eightfold is not well"


def test_a_run_that_goes_on_may_have_converged() -> None:
    level = curve(0.4, 0.4, noise=0.004)
    assert verdict.of_losses(level) and not verdict.of_losses(level, resumed=True)


@pytest.mark.parametrize(
    ("rows", "guess", "said"),
    [
        ([(1.386, 1.39, 0.01), (1.38, 1.4, 0.01)], 1.386, "stayed level: from 1.39 to 1.38"),
        ([(2.0, None, 0), (1.4, None, 0)], 1.386, "a constant answer has 1.39"),
        ([(0.5, None, 0), (3.2, None, 0)], None, "rose from 0.5 to 3.2"),
        ([(math.nan, None, 0), (1, None, 0)], None, "not finite"),
        (
            [(1.0, 1.0, 0.01), (0.5, 0.6, 0.01), (0.3, 0.5, 0.01), (0.1, 0.8, 0.01), (0.05, 0.9, 0.01)],
            None,
            "rose from 0.5 to 0.8",
        ),
        ([(1.4, 1.4, 0.01), (0.2, 1.5, 0.01)], None, "while training fell to 0.2"),
    ],
)
def test_losses_on_the_same_batches(rows: list, guess: float | None, said: str) -> None:
    (symptom,) = verdict.of_evaluations(rows, guess=guess)
    assert said in symptom.what


@pytest.mark.parametrize(
    ("rows", "guess"),
    [
        ([(0.412, 0.4, 0.01), (0.41, 0.4, 0.01)], 1.386),  # fine-tuned, and far better than a constant
        ([(1.4, 1.4, 0.01), (0.2, 0.3, 0.01)], 1.386),
        ([(7.5, 7.3, 0.1), (1.0, 1.1, 0.1)], 0.4),  # the loss has further terms
        ([(1.4, None, 0)], 1.386),
    ],
)
def test_and_none_of_a_healthy_run(rows: list, guess: float | None) -> None:
    assert verdict.of_evaluations(rows, guess=guess) == []


def test_validation_may_not_be_above_a_constant_answer_once_training_is_below() -> None:
    course = [(4.6, 4.6, 0.01), (1.05, 1.19, 0.01), (0.9, 1.25, 0.02)]  # of 3 labels, by a model with 100 outputs
    (symptom,) = verdict.of_evaluations(course, guess=4.6, constant=verdict.entropy_of([100, 100, 100]))
    assert "an answer that does not look at the input has 1.1" in symptom.what
    assert verdict.of_evaluations(course, guess=4.6) == []
    for healthy in (
        [(4.6, 4.6, 0.01), (1.5, 1.6, 0.01)],
        [(4.6, 4.6, 0.1), (0.9, 1.2, 0.1)],
        [(4.6, 4.6, 0), (0.8, 1, 0)],
    ):
        assert verdict.of_evaluations(healthy, guess=4.6, constant=1.0986) == []


def test_the_verdict_is_the_headline_the_colour_and_a_field() -> None:
    sick = Report("q", steps=3, symptoms=(Symptom("The loss is inf in step 2.", "Look there."),))
    assert (sick.verdict, sick.ok) == (UNKNOWN, False) and sick.to_dict()["verdict"] == UNKNOWN
    assert str(sick).startswith("The loss is inf in step 2; no known cause.") and "Next: Look there." in str(sick)
    drawn = html.render(sick)
    assert html.FAULT in drawn and html.FINE not in drawn and "Not well, no cause known" in drawn
    well = Report("q", steps=3)
    assert (well.verdict, well.ok) == (HEALTHY, True) and html.FINE in html.render(well)
    shows_facts = Report("mem()", headline="3 GiB are held.")
    assert shows_facts.ok and html.FINE not in html.render(shows_facts) and html.FAULT not in html.render(shows_facts)
    found = Report("q", (nbdebug.Finding("a/b", "t"),), symptoms=sick.symptoms)
    unlocated = Report("q", (nbdebug.Finding("nan/not-located", "t"),))
    assert (unlocated.verdict, unlocated.ok) == (UNKNOWN, False) and html.FAULT in html.render(unlocated)
    assert (found.verdict, found.ok) == (FOUND, False) and "no known cause" not in str(found)


def test_a_saved_report_keeps_it() -> None:
    report = Report("q", steps=3, symptoms=(Symptom("It is bad.", "Look."),))
    again = report_from(json.loads(json.dumps(report.to_dict())))
    assert again.symptoms == report.symptoms and again.verdict == UNKNOWN


# The tools


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def loop(model, optimizer, steps, factor):
    for i in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 4)) - 1).pow(2).mean() * factor(i)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("watch", [nbdebug.guard, nbdebug.grad_watch])
def test_watches_are_green_for_a_run_that_is_well_alone(watch) -> None:
    for factor, ok in ((lambda i: 1, True), (lambda i: 1 + 500 * (i == 40), False)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with watch(model, optimizer) as seen:
            loop(model, optimizer, 60, factor)
        report = seen.report()
        assert report.ok is ok and (report.verdict == HEALTHY) is ok, str(report)


@pytest.mark.parametrize("watch", [nbdebug.guard, nbdebug.grad_watch])
def test_a_watch_that_saw_no_step_is_not_well(watch) -> None:
    model = network()
    with watch(model, torch.optim.SGD(model.parameters(), 1e-3)) as seen:
        assert seen.report().ok and not seen.report().examined
    assert seen.report().verdict == UNKNOWN and str(seen.report()).startswith("No step was watched.")


@pytest.mark.parametrize("watch", [nbdebug.guard, nbdebug.grad_watch])
def test_a_blind_watch_is_not_well(watch) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    seen = watch(model, optimizer)
    loop(model, optimizer, 3, lambda i: 1)
    with pytest.warns(RuntimeWarning, match="fault of its own"):
        (seen.disable if watch is nbdebug.guard else seen._disable)(ValueError("broken\nin many lines"))
    loop(model, optimizer, 3, lambda i: 1)
    assert seen.report().verdict == UNKNOWN and "in many lines" not in seen.fault
    seen.close()


@pytest.mark.parametrize(("factor", "said"), [(1.0, "could not be watched"), (-math.inf, "The loss is -inf")])
def test_nan_trace_is_not_well_after_a_fault_of_its_own_and_judges_the_loss(monkeypatch, factor, said) -> None:
    from nbdebug.tools.nan.taint import TaintTracker

    def broken(self, op, *more):
        if op.name == "relu":
            raise KeyError("ours")

    monkeypatch.setattr(TaintTracker, "before", broken)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 4)).abs().mean().add(1) * factor
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(RuntimeWarning, match="fault of its own"):
        report = nbdebug.nan_trace(step, model=model, optimizer=optimizer)
    assert report.verdict == UNKNOWN and said in report.symptoms[0].what, report.symptoms


@pytest.mark.parametrize("strategy", ["trace", "replay"])
@pytest.mark.parametrize("bad", [False, True])
def test_strided_nested_tensors_are_read(strategy: str, bad: bool) -> None:
    """nn.TransformerEncoder makes them by itself, in eval mode and of padded rows."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    body = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    head = nn.Linear(16, 1)
    x, padding = torch.randn(4, 6, 16), torch.arange(6).repeat(4, 1) > 3
    optimizer = torch.optim.SGD(head.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        with torch.no_grad():
            encoded = body(x, src_key_padding_mask=padding)
        loss = (head(encoded).mean() * (0.0 if bad else 1.0) + (0.0 if bad else 10.0)).log()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.ModuleDict({"body": body, "head": head})
    report = nbdebug.nan_trace(step, model=model, optimizer=optimizer, strategy=strategy)
    assert [f.code for f in report] == ["nan/log-of-nonpositive"] * bad and report.ok is not bad
    assert not any("fault" in text for text in report.unchecked)


@pytest.mark.parametrize("bad", [False, True])
def test_preflight_says_what_the_first_loss_is(bad: bool) -> None:
    model = network()
    batches = [(torch.randn(16, 4), torch.randn(16, 1)) for _ in range(4)]

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean() * (math.nan if bad else 1.0)

    report = nbdebug.preflight(model, batches, loss_fn, seconds=5)
    assert report.ok is not bad
    assert not bad or str(report).startswith("The loss is nan; no known cause.")


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda i: math.nan if i else math.inf, "nan"), (lambda i: 1 + 3e4 * (i in (30, 31)), "jumped")],
)
def test_diagnose_has_no_green_bar_over_a_run_that_was_not_well(change, said: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def train(callback):
        for i in range(60):
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 4)) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            callback(i, loss.item() * change(i))

    report = nbdebug.diagnose(train, model=model, optimizer=optimizer, progress=False)
    assert not report.ok and any(said in symptom.what for symptom in report.symptoms)


def test_diagnose_of_a_loop_that_raises() -> None:
    model = network()

    def train(callback):
        callback(0, 1.0)
        raise LookupError("gone")

    with pytest.raises(LookupError) as raised:
        nbdebug.diagnose(train, model=model, optimizer=torch.optim.SGD(model.parameters(), 1e-3), progress=False)
    assert raised.value.report.verdict == UNKNOWN and "LookupError" in raised.value.report.symptoms[0].what


# GradScaler, and a model that takes another's place


@pytest.mark.parametrize("given", [False, True])
def test_the_guard_finds_the_scaler_and_an_infinite_loss_waits_for_no_scale(given: bool) -> None:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    before = [p.clone() for p in model.parameters()]
    guard = nbdebug.guard(model, optimizer, on_trip="raise", scaler=scaler if given else None)
    with pytest.raises(nbdebug.NonFiniteStep, match="In step 0 the loss is -inf"), guard:
        loss = model(torch.randn(16, 4)).sum() * 0
        scaler.scale(loss.exp().sub(1).log()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and "update" not in vars(scaler)


def test_a_scaler_that_looks_for_its_scale_is_still_no_trip() -> None:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with nbdebug.guard(model, optimizer) as guard:
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(torch.ones(16, 4)) - 1).pow(2).mean() * 40
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert guard.steps == 6 and guard.scaler_skips > 0 and not guard.bad and guard.report().ok
