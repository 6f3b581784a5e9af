"""diagnose's own looks: what fails in them is told, the loop's batches and random numbers are met again, and nothing is
shown twice."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.tools.training import signals
from tests.training.loops import clusters, cross_entropy, loaders
from tests.training.test_routines import asked, network, one_thread, proof

__all__ = ["one_thread"]  # a fixture for every test


def test_a_fault_of_ours_is_told_with_what_is_not_known_for_it(monkeypatch) -> None:
    from nbdebug.tools.training import loop, probe

    def broken(*given):
        raise LookupError("ours")

    monkeypatch.setattr(probe, "gradient_flow", broken)
    monkeypatch.setattr(probe, "penalty", broken)
    monkeypatch.setattr(loop.UpdateWatch, "_stepped", broken)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []

    def each(number, batch):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return losses[-1]

    report = asked(model, optimizer, each)
    told = "\n".join(report.unchecked)
    assert report.ok and losses[-1] < losses[0]
    for what in ("How gradients grow or fade", "How much of the loss is a penalty", "the order of backward, step"):
        assert what in told
    assert told.count("LookupError: ours") == 3
    assert "LookupError" in str(report)


def test_a_loss_that_fails_in_eval_mode_is_told() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model, batch):
        if not model.training:
            raise RuntimeError("train only")
        return F.cross_entropy(model(batch[0]), batch[1])

    train, _ = loaders(*clusters(200))

    def loop(callback):
        for step, batch in enumerate(train):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss)

    report = nbdebug.diagnose(
        loop, model=model, optimizer=optimizer, loss_fn=loss_fn, train_loader=train, progress=False
    )
    assert any("fixed training batches" in line and "train only" in line for line in report.unchecked)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_loop_that_validates_with_loaders_that_draw_from_the_global_numbers(dropout: float) -> None:
    """Validation's loader draws, so that the next pass is shuffled otherwise; dropout draws from the same numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 200.0)
    x, y = clusters(400)
    train = DataLoader(TensorDataset(x[:320], y[:320]), 64, shuffle=True)
    val = DataLoader(TensorDataset(x[320:], y[320:]), 40)

    def loop(callback):
        step = 0
        for _ in range(6):
            model.train()
            for batch in train:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                batch[0].zero_()  # a loop may write into its batches
                callback(step, loss.item())
                step += 1
            model.eval()
            with torch.no_grad():
                sum(cross_entropy(model, batch).item() for batch in val)
                sum(cross_entropy(model, batch).item() for batch in train)  # and read its training batches twice

    report = nbdebug.diagnose(
        loop,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=train,
        val_loader=val,
        progress=False,
    )
    proof(report)
    assert not [line for line in report.unchecked if line.startswith("Experiments")]


def test_our_looks_show_no_warnings_and_the_loops_own_are_shown_once(recwarn) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, _ = clusters(200)
    train, val = loaders(x, x.mean(1))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def loop(callback):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            for step, batch in enumerate(list(train) * 8):
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss)

    warnings.simplefilter("always")
    report = nbdebug.diagnose(
        loop, model=model, optimizer=optimizer, loss_fn=loss_fn, train_loader=train, val_loader=val, progress=False
    )
    assert [f.code for f in report] == ["training/wrong-loss-shape"]
    assert 1 <= len([w for w in recwarn if "target size" in str(w.message)]) <= 2  # the last batch has another size


def test_masks_of_outlines_and_of_depths_were_not_resized_by_averages() -> None:
    """A class of its own for outlines lies between one pair of classes; depths next to each other follow each other."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 6, (12, 8, 8)).repeat_interleave(5, 1).repeat_interleave(5, 2)
    halved = (
        torch.nn.functional.interpolate(blocks[:, None].float(), size=(27, 27), mode="bilinear")[:, 0].round().long()
    )
    outlines = 2 * (torch.rand(12, 40, 40) > 2).long()
    outlines[:, 10:30, 10:30] = 2
    outlines[:, 9:30:20, 9:31] = outlines[:, 9:31, 9:31:20] = 1
    slope = (torch.arange(40)[:, None] * torch.tensor([0.3, 0.7, 1.4])[:, None, None]).long()
    depths = slope.expand(3, 40, 40) + slope.transpose(1, 2)
    assert signals.interpolated([halved])
    for masks in (blocks, outlines, depths, torch.randint(0, 9, (4, 40, 40))):
        assert not signals.interpolated([masks])


@pytest.mark.parametrize("seen", ["all of it", "its size", "nothing", "its sine"])
def test_a_target_wraps_only_where_its_ends_alone_are_alike(seen):
    torch.manual_seed(5)
    place = torch.rand(600, 1)
    turn = 2 * math.pi * place
    told = {
        "all of it": [turn.sin(), turn.cos()],
        "its size": [(place - 0.5).abs()],  # no input tells on which side
        "nothing": [torch.randn(600, 2)],
        "its sine": [turn.sin()],
    }[seen]
    x = torch.cat([*told, 0.1 * torch.randn(600, 3)], 1)
    model = nn.Linear(x.shape[1], 1)
    loader = DataLoader(TensorDataset(x, place), 32)
    report = nbdebug.preflight(model, loader, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    assert ("training/target-wraps" in [finding.code for finding in report]) == (seen == "all of it")
