"""Number formats, optimizers, memory, and what leaves torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault("overflow", op=["linear", "addmm", "mm"], module="1", step=1, rows=(0,))
def autocast_to_float16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 2))
    with torch.no_grad():
        model[1].weight.abs_()
        model[0].weight.fill_(1.0)
    x = torch.ones(2, 5, 3)
    x[1, 0] = 9000

    def loss_of(i):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x[i])  # here
        return out.float().square().mean()

    return train(model, loss_of, optimizer=torch.optim.SGD(model.parameters(), lr=1e-7))


@fault("log-of-nonpositive", op="log", step=0)
def a_clamp_that_bfloat16_rounds_away():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).bfloat16()

    def loss_of(i):
        p = torch.sigmoid(model(seeded((5, 3)).bfloat16()) * 0 + 30 + model.bias)
        p = p.clamp(1e-4, 1 - 1e-4)
        return -torch.log(1 - p).mean()  # here

    return train(model, loss_of)


@fault("div-by-zero", op="div", step=1, rows=(3,))
def an_epsilon_that_half_rounds_away():
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).half()
    x = torch.stack([seeded((5, 3)), seeded((5, 3))]).half()
    x[1, 3] = 0

    def loss_of(i):
        out = model(x[i])
        return (out / (out.norm(dim=-1, keepdim=True) + 1e-8)).float().square().mean()  # here

    return train(model, loss_of)


@fault("overflow", op="sum", step=0)
def a_sum_in_half():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).half()
    return train(model, lambda i: (model(seeded((5, 3)).half()).square() + 9000).sum())  # here


@fault("lr-divergence overflow", phase="optimizer", module="", step=0)
def a_step_too_far():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38)

    def step():
        optimizer.zero_grad()
        loss = (model(seeded((5, 3))) * 30).square().sum()
        loss.backward()
        optimizer.step()  # here
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("lr-divergence", phase="optimizer", module=None, step=None, steps=60)
def a_rate_too_high():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)  # here

    def step():
        optimizer.zero_grad()
        loss = (model(seeded((16, 3))) - 3).square().mean()
        loss.backward()
        optimizer.step()  # here
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("optimizer-eps-underflow", phase="optimizer", op=["addcdiv", "div"], module="1", step=0)
def adam_in_half():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)).half()
    optimizer = torch.optim.Adam(model[1].parameters(), lr=1e-3, foreach=False)  # here

    def step():
        optimizer.zero_grad()
        loss = (model(torch.tensor([0, 1])) * 1e-4).float().mean()
        loss.backward()
        optimizer.step()  # here
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("optimizer-eps-underflow", phase="optimizer", op=["addcdiv", "div"], module="unused", step=0)
def adam_without_eps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.used(x) + 0 * self.unused(x)

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0, foreach=True)  # here

    def step():
        optimizer.zero_grad()
        loss = model(seeded((5, 3))).square().mean()
        loss.backward()
        optimizer.step()  # here
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault(None, phase="optimizer", module="", step=0)
def the_rate_is_nan():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = float("nan")

    def step():
        optimizer.zero_grad()
        loss = model(seeded((5, 3))).square().mean()
        loss.backward()
        optimizer.step()  # here
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("uninitialized-memory", phase=["forward", "input"], op=["empty", "", "new_empty", "empty_like"], step=0)
def memory_never_written():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3)))
        torch.use_deterministic_algorithms(True)  # then torch fills new memory with NaN, so that this trap repeats
        try:
            store = torch.empty(5, 4)  # here
        finally:
            torch.use_deterministic_algorithms(False)
        store[:3] = out[:3]
        return store.square().mean()

    return train(model, loss_of)


@silent()
def memory_written_in_full():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3)))
        torch.use_deterministic_algorithms(True)
        try:
            store = torch.empty(5, 4)
        finally:
            torch.use_deterministic_algorithms(False)
        for row in range(5):
            store[row] = out[row]
        return store.square().mean()

    return train(model, loss_of)


@fault("log-of-nonpositive", op="log", step=1, rows=(2,))
def through_numpy_and_back():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    sizes = torch.ones(2, 5)
    sizes[1, 2] = 0

    def loss_of(i):
        out = model(seeded((5, 3)))
        level = out.detach().square().sum(-1) * sizes[i]
        logs = torch.log(level)  # here
        weights = torch.from_numpy(logs.numpy() * 2.0)
        return (out * weights[:, None]).mean()

    return train(model, loss_of)


@fault("input-nonfinite", phase=["input", "forward"], op=None, step=1, rows=(2,))
def made_in_numpy():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    sizes = np.ones((2, 5), dtype=np.float32)
    sizes[1, 2] = -1

    def loss_of(i):
        with np.errstate(invalid="ignore"):
            weights = torch.from_numpy(np.log(sizes[i]))
        return (model(seeded((5, 3))) * weights[:, None] + 1).mean()

    return train(model, loss_of)


@fault("div-by-zero", op="div", step=1, rows=(0, 4))
def whole_numbers():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    kept = torch.ones(2, 5, 3, dtype=torch.int64)
    kept[1, [0, 4]] = 0

    def loss_of(i):
        share = torch.full((5,), 3) / kept[i].sum(-1)  # here
        return (model(seeded((5, 3))) * share[:, None]).square().mean()

    return train(model, loss_of)


@fault("log-of-nonpositive", op="log", step=0, rows=(1,))
def in_place_on_a_view():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3))).square() + 1
        out = out * torch.tensor([1.0, 0, 1, 1, 1])[:, None]
        out[:, 1].log_()  # here
        return out.mean()

    return train(model, loss_of)


@fault("div-by-zero", op="div", step=0, rows=(4,))
def into_a_given_tensor():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    store = torch.zeros(5)

    def loss_of(i):
        torch.div(torch.ones(5), torch.tensor([1.0, 1, 1, 1, 0]), out=store)  # here
        return (model(seeded((5, 3))) * store[:, None]).mean()

    return train(model, loss_of)


@fault("log-of-nonpositive", op="logdet", step=0, rows=(3,))
def determinant_below_zero():
    torch.manual_seed(0)
    model = nn.Linear(3, 9)

    def loss_of(i):
        signs = torch.tensor([1.0, 1, 1, -1, 1])[:, None, None]
        square = 5 * signs * torch.eye(3) + 0.01 * model(seeded((5, 3))).view(5, 3, 3)
        return torch.logdet(square).mean()  # here

    return train(model, loss_of)


@fault("overflow", op="pow", step=1)
def double_precision():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    return train(model, lambda i: ((model(seeded((5, 3)).double()) + 3) * 10.0 ** (120 * i)).pow(4).mean())  # here
