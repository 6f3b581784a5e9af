"""Loops of other forms: several optimizers, accumulation, closures, clipping, a callback now and then. Experiments do
what the loop did, and say why where they can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from nbdebug.tools.training.retrain import LoopSchedule, loop_schedule, loss_share
from tests.training.healthy import KINDS
from tests.training.loops import clusters, cross_entropy, cured_loss, loaders


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


Step = Callable[[Any, Any], Any]


def asked(model, optimizer, each, *, passes=4, pair=None, every=1):
    """diagnose of a loop that calls `each(number, batch)` for every batch, and its callback with what that returns."""
    pair = pair or loaders(*clusters(400))
    before = Snapshot.take(model, optimizer)

    def train(callback):
        number = told = 0
        for _ in range(passes):
            for batch in pair[0]:
                loss = each(number, batch)
                number += 1
                if loss is not None and number % every == 0:
                    callback(told, loss)
                    told += 1

    report = nbdebug.diagnose(
        train,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        progress=False,
    )
    assert before.differences() == []
    return report


def proof(report):
    assert [f.code for f in report] == ["training/lr-too-high"], report
    fix = report.findings[0].fixes[0]
    assert cured_loss(fix) < 0.5
    assert set(report.plot("losses")["curves"]) == {"as it is", "with the fix"}
    return fix


def test_several_optimizers_that_step_together() -> None:
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), 100.0), torch.optim.SGD(model[2].parameters(), 100.0)]

    def each(number, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    fix = proof(asked(model, optimizers, each))
    assert fix.code.startswith("for optimizer in optimizers:") and "group['lr'] *= 0." in fix.code


@pytest.mark.parametrize("cleared", ["where one has stepped", "each time"])
def test_several_optimizers_that_take_turns(cleared: str) -> None:
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), 100.0), torch.optim.SGD(model[2].parameters(), 100.0)]

    def each(number, batch):
        loss = cross_entropy(model, batch)
        loss.backward()
        stepping = optimizers[number % 2]
        stepping.step()
        for optimizer in optimizers if cleared == "each time" else [stepping]:
            optimizer.zero_grad()
        return loss.item()

    proof(asked(model, optimizers, each))


@pytest.mark.parametrize("shared", [True, False], ids=["divided", "summed"])
@pytest.mark.parametrize("told", ["each", "mean", "last"])
def test_accumulation(shared: bool, told: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 100.0)
    kept: list[float] = []

    def each(number, batch):
        loss = cross_entropy(model, batch)
        (loss / 2 if shared else loss).backward()
        kept.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if told == "each":
            return kept[-1]
        return sum(kept[-2:]) / 2 if told == "mean" else kept[-1]

    proof(asked(model, optimizer, each, passes=6, every=1 if told == "each" else 2))


def test_a_closure() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=60.0, max_iter=2)

    def each(number, batch):
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    report = asked(model, optimizer, each)
    assert not [line for line in report.unchecked if line.startswith("Experiments")]
    assert report.findings and cured_loss(report.findings[0].fixes[0]) < 1.0


def test_a_closure_beside_another_optimizer_is_said_to_be_the_loops_own() -> None:
    model = network()
    optimizers = [torch.optim.LBFGS(model[0].parameters(), lr=1.0), torch.optim.SGD(model[2].parameters(), 1e-9)]

    def each(number, batch):
        optimizers[1].zero_grad()

        def closure():
            optimizers[0].zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            return loss

        loss = optimizers[0].step(closure)
        optimizers[1].step()
        return loss.item()

    report = asked(model, optimizers, each, passes=1)
    assert any("takes a closure" in line and "only your own loop knows" in line for line in report.unchecked)


def test_clipping_is_done_alike() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 300.0)

    def each(number, batch):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item()

    proof(asked(model, optimizer, each))


def test_gradients_changed_in_another_way_are_told() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 200.0)

    def each(number, batch):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.1 + 0.1 * (number % 7))
        optimizer.step()
        return loss.item()

    report = asked(model, optimizer, each, passes=2)
    assert any("changes gradients between backward and step" in line for line in report.unchecked)


def test_a_loss_that_is_told_now_and_then() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 100.0)

    def each(number, batch):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    proof(asked(model, optimizer, each, passes=6, every=5))


def test_gradients_cleared_before_the_step_are_tried_left_standing() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def each(number, batch):
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss.item()

    report = asked(model, optimizer, each)
    assert [f.code for f in report] == ["training/gradients-cleared-before-step"]
    assert cured_loss(report.findings[0].fixes[0]) < 0.5
    assert not [line for line in report.unchecked if line.startswith("Experiments")]


def test_a_gan_is_said_to_be_the_loops_own() -> None:
    training = KINDS["gan"]()
    report = nbdebug.diagnose(
        training.train,
        model=training.model,
        optimizer=training.optimizer,
        loss_fn=lambda model, batch: next(model.parameters()).square().mean(),
        train_loader=training.train_loader,
        progress=False,
    )
    assert report.ok
    assert not report.plot("losses")["curves"].get("with the fix")


@pytest.mark.parametrize(
    ("stepped", "told", "read", "expected"),
    [
        ([[0], [0]], [1, 2], 2, LoopSchedule()),
        ([[], [0], [], [0]], [2, 4], 4, LoopSchedule(((), (0,), (), (0,)), (2, 4))),
        ([[], [0]], [1, 2], 0, LoopSchedule(((), (0,)), (1, 2))),
        ([], [0, 0], 2, LoopSchedule()),
        ([[0], [0], [0], [0]], [2, 4], 2, None),
        ([[0]], [1, 1], 0, None),
    ],
)
def test_the_routine_of_what_was_seen(stepped, told, read, expected) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    if expected is None:
        read *= 20
        stepped, told = stepped * 20, [t * 20 for t in told] if read else told
    found, why = loop_schedule(stepped, told, read, [optimizer], False)
    assert found == expected and bool(why) == (expected is None)


def test_what_a_loss_is_divided_by() -> None:
    assert loss_share(0.5, 2.0, 4) == 0.25 and loss_share(2.0, 2.0, 4) == 1.0 and loss_share(None, 2.0, 4) == 1.0
    assert LoopSchedule(((), (), (0,)) * 3, (3, 6, 9)).every == 3


@pytest.mark.parametrize("ahead", ["all of it", "a pass", "the same again"])
def test_a_loop_that_reads_ahead(ahead: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 100.0)
    train, val = loaders(*clusters(400))

    def passes():
        if ahead == "all of it":
            yield [batch for _ in range(4) for batch in train]
        elif ahead == "a pass":
            yield from (list(train) for _ in range(4))
        else:
            yield list(train) * 4

    def loop(callback):
        step = 0
        for batches in passes():
            for batch in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss)
                step += 1

    proof(
        nbdebug.diagnose(
            loop,
            model=model,
            optimizer=optimizer,
            loss_fn=cross_entropy,
            train_loader=train,
            val_loader=val,
            progress=False,
        )
    )
