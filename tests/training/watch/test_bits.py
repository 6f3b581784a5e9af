"""A watched training is the same to the last bit, nothing is left behind, and a fault of the watch's own stays
there."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.backward import EngineWatch
from tests.nan.guard.kinds import KINDS, Training, changed
from tests.nan.leftovers import assert_nothing_is_left, hooks_of


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_without(kind: str) -> None:
    bare, watched = Training(kind), Training(kind)
    random = torch.get_rng_state()
    for i in range(6):
        bare.step(i)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    with nbdebug.grad_watch(watched.model, watched.optimizer, ratios_every=2, activations_every=2) as watch:
        watch.live(lambda html: None)
        for i in range(6):
            watched.step(i)
    assert watch.fault == "" and watch.steps == 6
    assert torch.equal(torch.get_rng_state(), after)
    assert changed(bare.kept(), watched.kept()) == []


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("how", ["close", "with", "error", "never used", "twice"])
def test_nothing_is_left(how: str) -> None:
    model, optimizer = network()
    step(model, optimizer)
    attributes = {*vars(optimizer), *(k for m in model.modules() for k in vars(m))}
    watch = nbdebug.grad_watch(model, optimizer)
    try:
        with watch:
            if how != "never used":
                step(model, optimizer)
            if how == "error":
                raise KeyError("mine")
    except KeyError as error:
        assert error.args == ("mine",)
    if how == "twice":
        watch.close()
    assert not watch.active and watch.fault == ""
    assert hooks_of(model) == 0 and not [v for k, v in vars(optimizer).items() if k.endswith("_hooks") and v]
    assert {*vars(optimizer), *(k for m in model.modules() for k in vars(m))} == attributes
    assert not EngineWatch._attached and not EngineWatch._wrapped
    assert_nothing_is_left()


def test_a_closed_watch_holds_no_model() -> None:
    model, optimizer = network()
    watch = nbdebug.grad_watch(model, optimizer)
    step(model, optimizer)
    watch.close()
    gone = weakref.ref(model), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert watch.frame.name.tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"] and watch.report()


def test_copies_of_a_watched_model_know_nothing_of_it() -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer) as watch:
        step(model, optimizer)
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (twin, loaded):
            other(torch.ones(2, 4)).sum().backward()
        assert watch.steps == 1
    assert "nbdebug" not in repr([vars(m) for m in twin.modules()])


@pytest.mark.parametrize(
    "where",
    [
        "nbdebug.tools.grad_watch.probe.group_norms",
        "nbdebug.tools.grad_watch.steps.joint_norm",
        "nbdebug.tools.grad_watch.probe.group_norms",
        "nbdebug.tools.grad_watch.probe.is_capturing_graph",
        "nbdebug.tools.grad_watch.probe.GradientProbe.began",
        "nbdebug.tools.grad_watch.probe.Updates.after",
    ],
)
def test_a_fault_of_its_own_never_reaches_the_training(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, watched = network(), network()
    for _ in range(4):
        step(*bare)

    def broken(*given: object, **named: object) -> None:
        raise ZeroDivisionError("planted")

    watch = nbdebug.grad_watch(*watched)
    step(*watched)
    monkeypatch.setattr(where, broken)
    watch.pace = type(watch.pace)(1, 1, 1)
    watch._steps.ratios_every = 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            step(*watched)
    assert [str(w.message) for w in told if "planted" in str(w.message)] and len(told) == 1
    assert "ZeroDivisionError" in watch.fault and not watch.active
    assert not EngineWatch._attached and hooks_of(watched[0]) == 0
    assert "stopped after" in str(watch.report()) and all(
        torch.equal(a, b) for a, b in zip(bare[0].parameters(), watched[0].parameters())
    )


def test_a_fault_of_the_live_view_is_told_and_ends_it_alone() -> None:
    model, optimizer = network()

    def broken(html: str) -> None:
        raise OSError("no screen")

    with nbdebug.grad_watch(model, optimizer).live(broken) as watch:
        step(model, optimizer)
        step(model, optimizer)
        assert watch.active
    assert watch.steps == 2 and any("no screen" in note for note in watch.report().notes)


def test_two_watches_and_a_guard_at_once() -> None:
    model, optimizer = network()
    with (
        nbdebug.grad_watch(model, optimizer) as one,
        nbdebug.guard(model, optimizer) as guard,
        nbdebug.grad_watch(model, optimizer) as two,
    ):
        for _ in range(3):
            step(model, optimizer)
    assert one.steps == two.steps == guard.steps == 3 and not one.fault and not two.fault and not guard.fault
    assert one.frame.norm.tolist() == two.frame.norm.tolist()
    assert_nothing_is_left()


def test_memory_is_bounded() -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer, keep=10) as watch:
        for _ in range(300):
            step(model, optimizer)
    steps = sorted(set(watch.frame.step))
    assert watch.steps == 300 and len(steps) <= 20 and steps[-10:] == list(range(290, 300)) and steps[0] < 150
    assert len(watch.totals) == 300


def test_a_compiled_model() -> None:
    model, optimizer = network()
    try:
        compiled = torch.compile(model, backend="aot_eager")
        with nbdebug.grad_watch(compiled, optimizer) as watch:
            for _ in range(3):
                step(compiled, optimizer)
    except Exception as error:
        if "nbdebug" in str(error):
            raise
        pytest.skip(f"this torch can't compile here: {error}")
    assert watch.fault == "" and watch.steps == 3
    assert set(watch.frame.name) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "compiled" in " ".join(watch.report().unchecked)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"model": 3}, "3"),
        ({"optimizer": "adam"}, "'adam'"),
        ({"model": None, "optimizer": []}, "none"),
        ({"every": 0}, "0"),
        ({"ratios_every": -1}, "-1"),
        ({"keep": 2.5}, "2.5"),
        ({"scaler": "x"}, "'x'"),
        ({"every": True}, "True"),
    ],
)
def test_arguments_that_make_no_sense_are_quoted(given: dict, word: str) -> None:
    model, optimizer = network()
    with pytest.raises((TypeError, ValueError), match=word):
        nbdebug.grad_watch(**{"model": model, "optimizer": optimizer, **given})
    assert not EngineWatch._attached
