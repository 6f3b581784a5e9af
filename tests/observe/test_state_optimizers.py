"""A snapshot puts optimizers, their state, GradScalers and schedulers back, also where the state did not exist yet."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import fingerprint
from tests.observe.photograph import OPTIMIZERS, network, prove

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("begun", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_back(kind, begun):
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure():
        optimizer.zero_grad()
        loss = (model(x + random.random() + np.random.rand()) - y).square().mean()
        loss.backward()
        return loss

    def step():
        return optimizer.step(closure)

    if begun:
        step()
    prove(step, model, optimizer)


def test_sparse_gradients_and_their_optimizer_go_back():
    model = nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step():
        model(torch.randint(0, 7, (5,))).square().sum().backward()  # no zero_grad: the sparse gradient grows
        optimizer.step()

    prove(step, model, optimizer)  # no gradient at first
    step()
    prove(step, model, optimizer)  # a sparse gradient


def test_a_scaler_and_a_scheduler_go_back():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step():
        scaler.scale(model(torch.tensor([[1.0, float("inf")]])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    snapshot = Snapshot.take(model, optimizer, others=[scaler, scheduler])
    for _ in range(2):
        step()
        assert scaler.get_scale() == 4.0 and optimizer.param_groups[0]["lr"] == 0.5 == scheduler.get_last_lr()[0]
        snapshot.restore()
        assert not snapshot.differences()
        assert scaler.get_scale() == 8.0 and optimizer.param_groups[0]["lr"] == 1.0 == scheduler.get_last_lr()[0]


def test_groups_and_settings_of_an_optimizer_go_back():
    model = network()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)

    def step():
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 3.0})
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        optimizer.param_groups[0]["lr"] *= 2

    snapshot = Snapshot.take(model, optimizer)
    step()
    assert set(snapshot.differences()) == {
        "optimizer.param_groups[1]",
        "optimizer.param_groups[0].lr",
        "optimizer.param_groups[0].betas",
    }
    snapshot.restore()
    prove(step, model, optimizer, steps=1)


def test_parameters_that_only_the_optimizer_knows_go_back():
    free = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([free], lr=1.0)
    snapshot = Snapshot.take({}, [optimizer])
    free.sum().backward()
    optimizer.step()
    snapshot.restore()
    assert free.tolist() == [0, 0] and free.grad is None and not snapshot.differences()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW foreach", "SGD"])
def test_cuda_state_and_random_numbers_go_back(kind):
    model = network().cuda()
    optimizer = OPTIMIZERS[kind](model.parameters())
    x = torch.randn(8, 4, device="cuda")

    def step():
        optimizer.zero_grad()
        model(x + torch.rand(1, device="cuda")).square().mean().backward()
        optimizer.step()

    step()
    snapshot = Snapshot.take(model, optimizer)
    step()
    assert "the random numbers of cuda:0" in snapshot.differences()
    after = [fingerprint(p) for p in model.parameters()]
    snapshot.restore()
    assert not snapshot.differences()
    step()
    assert [fingerprint(p) for p in model.parameters()] == after
