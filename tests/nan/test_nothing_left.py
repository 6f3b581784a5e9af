"""Nothing is left when a trace is over: no hook, no mode, no patch, no tensor; and the model is where it should be."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug import nan_trace
from nbdebug.tools.nan.probe import Probe
from tests.nan.leftovers import assert_nothing_is_left, hooks_of
from tests.nan.small import small


@pytest.mark.parametrize("strategy", ["trace", "auto"])
@pytest.mark.parametrize("sick", [False, True])
def test_nothing_is_left_after_it_returns(sick, strategy):
    made = small(sick)
    report = nan_trace(made.step, model=made.model, optimizer=made.optimizer, strategy=strategy, max_steps=2)
    assert report.ok is not sick
    assert_nothing_is_left()
    assert hooks_of(made.model) == 0
    assert not made.optimizer._optimizer_step_pre_hooks and not made.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("when", ["before", "forward", "backward", "optimizer"])
def test_nothing_is_left_after_an_interruption(error, when):
    made = small()

    def interrupt(*given):
        raise error("stop")

    def step():
        if when == "before":
            interrupt()
        out = made.model(torch.randn(5, 3))
        if when == "forward":
            interrupt()
        if when == "backward":
            out.register_hook(interrupt)
        out.mean().backward()
        if when == "optimizer":
            made.optimizer.register_step_post_hook(interrupt)
        made.optimizer.step()

    with pytest.raises(error, match="stop"):
        nan_trace(step, model=made.model, optimizer=made.optimizer)
    assert_nothing_is_left()
    assert hooks_of(made.model) == 0


def test_after_an_interruption_restore_puts_everything_back():
    made = small()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    generator = torch.get_rng_state()

    def step():
        made.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nan_trace(step, model=made.model, optimizer=made.optimizer, restore=True)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not made.optimizer.state


@pytest.mark.parametrize("sick", [False, True])
def test_the_model_ends_where_a_plain_step_leaves_it(sick):
    plain, traced = small(sick), small(sick)
    count = 1 if sick else 3
    torch.manual_seed(5)
    for _ in range(count):
        plain.step()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    nan_trace(traced.step, model=traced.model, optimizer=traced.optimizer, max_steps=count)
    assert torch.equal(torch.get_rng_state(), after)
    for (name, one), (_, other) in zip(plain.model.state_dict().items(), traced.model.state_dict().items()):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan()), name
    for one, other in zip(plain.model.parameters(), traced.model.parameters()):
        assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())


@pytest.mark.parametrize("sick", [False, True])
def test_restore_leaves_all_as_it_was(sick):
    made = small(sick)
    made.model[1].eval()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    flags, generator = [m.training for m in made.model.modules()], torch.get_rng_state()
    nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=2, restore=True)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in made.model.modules()] == flags
    assert not made.optimizer.state
    assert all(p.grad is None for p in made.model.parameters())


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))


@pytest.mark.parametrize("sick", [False, True])
def test_no_tensor_outlives_the_report(sick):
    def once() -> None:
        made = small(sick)
        nan_trace(made.step, model=made.model, optimizer=made.optimizer)

    once()  # what is cached once for all does not count
    before = tensors_alive()
    for _ in range(3):
        once()
    assert tensors_alive() <= before


@pytest.mark.parametrize("sick", [False, True])
def test_the_report_keeps_neither_the_model_nor_its_graph(sick):
    made = small(sick)
    watched = [weakref.ref(made.model), weakref.ref(made.model[0].weight), weakref.ref(made.optimizer)]
    report = nan_trace(made.step, model=made.model, optimizer=made.optimizer)
    del made
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    assert report.ok is not sick


def test_the_activations_of_the_step_are_freed_when_it_is_over():
    held = []
    model = nn.Linear(3, 4)

    def step():
        out = model(torch.ones(2, 3)).square()
        held.append(weakref.ref(out))
        loss = out.mean()
        loss.backward()
        return loss.detach()

    nan_trace(step, model=model)
    gc.collect()
    assert held[0]() is None


def test_tracing_inside_tracing_is_refused_or_works():
    made = small(sick=True)
    inner: list[nbdebug.Report] = []

    def step():
        inner.append(nan_trace(made.step, model=made.model, optimizer=made.optimizer))
        return 1.0

    try:
        nan_trace(step)
    except RuntimeError as error:
        assert "nan_trace" in str(error)
    else:
        assert inner[0].findings[0].where.op == "log"
    assert_nothing_is_left()


def test_a_hook_that_another_thread_calls_after_the_end_does_nothing() -> None:
    model = torch.nn.Linear(2, 1)
    probe = Probe({"model": model}, {})
    with probe:
        model(torch.ones(1, 2)).sum().backward()
    probe.close()
    assert probe._optimizer_done(None) is None and probe._model_called(model, (), {}, None) is None
