"""diagnose as a guest: it runs the loop once, changes nothing, leaves nothing behind, and says what it could not do."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from tests.training.healthy import KINDS
from tests.training.loops import clusters, cross_entropy, cured_loss, loaders, made, mse


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training(lr=0.1, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return made(model, optimizer, cross_entropy, loaders(*clusters(400)), 4, scheduler=scheduler, each="pass", **more)


def ask(ns, **more):
    given = {
        "model": ns.model,
        "optimizer": ns.optimizer,
        "loss_fn": ns.loss_fn,
        "train_loader": ns.train_loader,
        "val_loader": ns.val_loader,
        "scheduler": ns.scheduler,
        "progress": False,
        **more,
    }
    return nbdebug.diagnose(given.pop("train", ns.train), **given)


def generators(ns):
    return ns.train_loader.generator.get_state(), torch.get_rng_state(), random.getstate()


def hooks(model):
    everywhere = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return (
        [len(h) for h in everywhere],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        DataLoader.__iter__,
        torch.amp.GradScaler.unscale_,
        torch.amp.GradScaler.scale,
    )


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b))


@pytest.mark.parametrize("lr", [0.1, 50.0], ids=["nothing to try", "experiments"])
def test_everything_is_put_back(lr):
    ns = training(lr)
    before = Snapshot.take(ns.model, ns.optimizer, others=[ns.scheduler])
    drawn, hooked = generators(ns), hooks(ns.model)

    ask(ns)

    assert before.differences() == []
    assert same(generators(ns), drawn)
    assert hooks(ns.model) == hooked
    assert "step" not in vars(ns.scheduler)


def test_the_loop_runs_once_and_comes_to_the_same_losses_and_weights_as_alone():
    alone, watched = training(), training()
    losses, seen, calls = [], [], []
    alone.train(lambda step, loss: losses.append(loss))

    def train(callback):
        calls.append(1)
        torch.manual_seed(0)  # where `training` left off is elsewhere for the second one
        watched.train(lambda step, loss: (seen.append(loss), callback(step, loss)))

    torch.manual_seed(0)
    again = training()
    again_losses = []

    def plain():
        torch.manual_seed(0)
        again.train(lambda step, loss: again_losses.append(loss))

    plain()
    ask(watched, train=train, keep=True)

    assert calls == [1]
    assert seen == again_losses
    assert same(watched.model.state_dict().values(), again.model.state_dict().values())
    assert len(losses) == len(seen)


def test_keep_leaves_the_model_as_the_loop_left_it():
    ns = training()
    before = copy.deepcopy(ns.model.state_dict())

    ask(ns, keep=True)

    assert not torch.equal(before["0.weight"], ns.model.state_dict()["0.weight"])
    assert ns.optimizer.state


def test_the_users_own_exception_passes_and_leaves_no_hook():
    ns = training()
    hooked = hooks(ns.model)
    before = Snapshot.take(ns.model, ns.optimizer)

    def train(callback):
        batch = next(iter(ns.train_loader))
        cross_entropy(ns.model, batch).backward()
        ns.optimizer.step()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        ask(ns, train=train)
    assert isinstance(raised.value.report, nbdebug.Report)
    assert hooks(ns.model) == hooked
    assert before.differences() == []


def test_ctrl_c_leaves_the_model_as_it_was():
    ns = training()
    before = Snapshot.take(ns.model, ns.optimizer)

    def interrupt(step, loss):
        if step == 5:
            raise KeyboardInterrupt

    def train(callback):
        ns.train(interrupt)

    with pytest.raises(KeyboardInterrupt):
        ask(ns, train=train)
    assert before.differences() == []


def test_a_loop_that_calls_no_callback_is_followed_by_its_steps():
    ns = training()

    report = ask(ns, train=lambda callback: ns.train(lambda step, loss: None))

    assert report.ok
    assert report.steps == 40
    assert all(math.isfinite(loss) for _, loss in report.plot("losses")["curves"]["as it is"])


def test_without_a_loss_function_the_report_says_what_was_not_checked():
    ns = training()

    def train(callback):
        for batch in list(ns.train_loader):
            ns.optimizer.zero_grad()
            backward = ns.loss_fn(ns.model, batch).backward  # no call of that name tells the loss
            backward()
            ns.optimizer.step()

    report = ask(ns, train=train, loss_fn=None, train_loader=None)

    assert any("no loss_fn" in line for line in report.unchecked)
    assert "Not checked" in str(report)


def test_a_loader_that_can_be_read_once_is_left_to_the_loop():
    ns = training()
    batches = iter(list(ns.train_loader))
    model, optimizer = ns.model, ns.optimizer

    def train(callback):
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    report = ask(ns, train=train, train_loader=batches)

    assert report.steps == 10
    assert any("read again" in line for line in report.unchecked)


def test_a_fix_that_was_tried_comes_with_both_curves():
    report = ask(training(lr=200.0))

    finding = report.findings[0]
    assert finding.code == "training/lr-too-high"
    assert cured_loss(finding.fixes[0]) < 0.5 * finding.fixes[0].after.get("loss as it is", math.inf)
    curves = report.plot("losses")["curves"]
    assert set(curves) == {"as it is", "with the fix"}
    assert json.loads(json.dumps(report.to_dict()))["plots"][0]["data"]["curves"]["with the fix"]


def test_consequences_are_told_within_their_cause():
    """A missing zero_grad that drives the loss apart is one finding, and not a learning rate as well."""
    ns = training(lr=0.5)
    model, optimizer = ns.model, ns.optimizer

    def train(callback):
        for step, batch in enumerate(list(ns.train_loader) * 6):
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    report = ask(ns, train=train, scheduler=None)

    assert [f.code for f in report] == ["training/zero-grad-missing"]
    assert "train" in report.findings[0].evidence["where"]
    assert report.findings[0].where.text == "loss.backward()"


def test_the_first_step_with_a_loss_that_is_not_finite_is_named():
    torch.manual_seed(3)
    x = torch.randn(400, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    ns = made(model, torch.optim.SGD(model.parameters(), lr=2.0), mse, loaders(x, x[:, :1]), 5)

    report = ask(ns)

    assert report.findings[0].code == "training/lr-too-high"
    assert any("nan_trace" in note for note in report.notes)
    assert report.findings[0].where.step is not None


def test_a_model_that_is_copied_while_it_is_watched_is_copied_without_hooks():
    ns = training()
    copies = []

    def train(callback):
        ns.train(callback)
        copies.append(copy.deepcopy(ns.model))

    ask(ns, train=train)

    copies[0](torch.randn(4, 12))
    assert not any(hasattr(hook, "note") for m in copies[0].modules() for hook in m._forward_pre_hooks.values())


def test_batches_may_be_dicts_and_losses_may_come_in_tuples():
    ns = training()
    batches = [{"x": x, "labels": y} for x, y in ns.train_loader]

    def loss_fn(model, batch):
        out = model(batch["x"])
        return nn.functional.cross_entropy(out, batch["labels"]), out

    def train(callback):
        for step, batch in enumerate(batches * 5):
            ns.optimizer.zero_grad()
            loss, _ = loss_fn(ns.model, batch)
            loss.backward()
            ns.optimizer.step()
            callback(step, loss)

    report = ask(ns, train=train, loss_fn=loss_fn, train_loader=batches, val_loader=None, scheduler=None)

    assert report.ok, [f.title for f in report]
    assert not [line for line in report.unchecked if "fixed" in line or "Experiments" in line]


@pytest.mark.parametrize(
    "wrong", [{"train": 3}, {"model": "net"}, {"optimizer": 3}, {"loss_fn": 3}, {"train_loader": 5}], ids=str
)
def test_wrong_arguments_are_quoted(wrong):
    with pytest.raises((TypeError, ValueError), match=r"got|takes"):
        ask(training(), **wrong)


def test_the_report_is_drawn_and_saved(tmp_path):
    report = ask(training(lr=200.0))

    assert "lr=200" in str(report)
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "lr-too-high" in page
    assert len(report._repr_mimebundle_()["text/html"].encode()) < 100_000


def test_the_whole_takes_no_more_than_a_few_times_the_loop(monkeypatch):
    """The budget is kept by the clock: with none left, experiments are reported as not done."""
    from nbdebug.tools.training import probe

    monkeypatch.setattr(probe, "TIMES", 0.0)
    monkeypatch.setattr(probe, "LEAST_SECONDS", 0.0)

    report = ask(training(lr=200.0))

    assert any("there was no time" in line for line in report.unchecked)


def test_several_optimizers_are_watched_each_by_itself():
    report = ask(KINDS["gan"](), train_loader=None)

    assert report.ok
    assert any("no loss_fn" in line for line in report.unchecked)


@pytest.mark.parametrize("bad", [True, False])
def test_a_loop_that_breaks_at_a_bad_batch_was_not_well(bad):
    """The loop tells no loss of that batch; one that has had enough steps is healthy."""
    ns = training()
    batches = list(ns.train_loader)
    batches[-1][0][0] = math.nan if bad else 0.0

    class Reading:
        def __iter__(self):
            return iter([*batches, *batches])

    loader = Reading()

    def loop(callback):
        for step, batch in enumerate(loader):
            ns.optimizer.zero_grad()
            loss = cross_entropy(ns.model, batch)
            if not math.isfinite(loss) or step > 15:
                break
            loss.backward()
            ns.optimizer.step()
            callback(step, loss.item())

    report = ask(ns, train=loop, train_loader=loader, scheduler=None)
    assert ("The loop stopped at the batch after" in str(report)) == bad
    assert report.ok != bad


def test_a_fix_in_the_loop_is_tried_by_the_loop_itself():
    """And what the loop has told the user stays as it is."""
    ns, told = training(), []

    def train(callback):
        step = 0
        for _ in range(4):
            for batch in ns.train_loader:
                loss = cross_entropy(ns.model, batch)
                loss.backward()
                ns.optimizer.step()
                told.append(step)
                callback(step, loss.item())
                step += 1

    before = Snapshot.take(ns.model, ns.optimizer)
    report = ask(ns, train=train, scheduler=None)
    fix = report.findings[0].fixes[0]
    assert report.findings[0].code == "training/zero-grad-missing"
    assert (
        "ns.optimizer.zero_grad()" in fix.code and fix.verified is True and "your whole loop" in fix.after["tried on"]
    )
    assert told == list(range(40)) and not before.differences()
    assert "+ns.optimizer.zero_grad()" in report.patch().replace(" ", "")


def test_a_schedulers_step_moves_to_where_it_belongs():
    """Out of the loop over the batches, into it, or behind the optimizer's."""

    def often(callback):
        for epoch in range(6):
            for i, batch in enumerate(ns.train_loader):
                ns.optimizer.zero_grad()
                loss = cross_entropy(ns.model, batch)
                loss.backward()
                ns.optimizer.step()
                ns.scheduler.step()  # of a decay for each pass
                callback(epoch * 10 + i, loss.item())

    def seldom(callback):
        for epoch in range(6):
            for i, batch in enumerate(ns.train_loader):
                ns.optimizer.zero_grad()
                loss = cross_entropy(ns.model, batch)
                loss.backward()
                ns.optimizer.step()
                callback(epoch * 10 + i, loss.item())
            ns.scheduler.step()

    def early(callback):
        for i, batch in enumerate(ns.train_loader):
            ns.optimizer.zero_grad()
            loss = cross_entropy(ns.model, batch)
            loss.backward()
            ns.scheduler.step()
            ns.optimizer.step()
            callback(i, loss.item())

    schedulers = torch.optim.lr_scheduler
    for train, scheduler, gap in (
        (often, lambda o: schedulers.ExponentialLR(o, 0.2), 12),
        (seldom, lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=900, div_factor=1e5), 16),
        (early, lambda o: schedulers.ExponentialLR(o, 0.9), None),
    ):
        ns = training(lr=0.02)
        ns.scheduler = scheduler(ns.optimizer)
        report = ask(ns, train=train)
        fix = report.findings[0].fixes[0]
        assert report.findings[0].code == "training/scheduler-order" and fix.verified is True
        added = [line[1:] for line in report.patch().splitlines()[2:] if line.startswith("+")]
        assert added == ([" " * 12 + "ns.optimizer.step()"] if gap is None else [" " * gap + "ns.scheduler.step()"]), (
            added
        )


@pytest.mark.parametrize("made_apart", [True, False])
def test_class_weights_are_an_edit_of_the_loss(made_apart):
    torch.manual_seed(3)
    x, y = clusters(1800, classes=3)
    rare = torch.cat([(y == 0).nonzero()[:, 0], (y == 1).nonzero()[:40, 0], (y == 2).nonzero()[:40, 0]])
    rare = rare[torch.randperm(len(rare))]
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    criterion = nn.CrossEntropyLoss()

    def by_criterion(model, batch):
        return criterion(model(batch[0]), batch[1])

    def by_function(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loss_fn = by_criterion if made_apart else by_function
    ns = made(model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, loaders(x[rare], y[rare]), 3)
    report = ask(ns)
    fix = report.findings[0].fixes[0]
    assert report.findings[0].code == "training/class-imbalance" and fix.verified is True
    line = "criterion = nn.CrossEntropyLoss(weight=" if made_apart else "model(batch[0]), batch[1], weight="
    assert line + "torch.tensor([" in fix.code and fix.after["with the fix"] > fix.after["score of the other classes"]


def test_what_was_not_run_as_a_text_is_a_suggestion_with_its_experiment():
    report = ask(training(lr=200.0))
    fix = report.findings[0].fixes[0]
    assert fix.edit is None and fix.verified is None
    text = " ".join(str(report).split())
    assert "A suggestion. In an experiment with the rate divided by" in text and "it works" not in text
