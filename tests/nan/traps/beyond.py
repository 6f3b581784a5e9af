"""Beyond the ordinary tape: vmap, torch.func, Python loops over samples, folded batches, random draws."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault("log-of-nonpositive", phase=["forward", "backward"], op="log", step=1)
def gradients_of_a_function():
    weights = {"w": torch.ones(3, 4)}
    steps = iter(range(9))

    def loss_of(w, x, floor):
        level = (x @ w["w"]).square() * floor
        return torch.log(level + (floor > 0)).mean()  # here

    def step():
        i = next(steps)
        slope = torch.func.grad(loss_of)(weights, seeded((5, 3)), 1.0 - i)
        weights["w"] = weights["w"] - 0.1 * slope["w"]
        return loss_of(weights, seeded((5, 3)), 1.0 - i)

    return SimpleNamespace(model=None, optimizer=None, step=step, parameters=[])


@fault("sqrt-of-negative", op="sqrt", step=0)
def mapped_over_the_batch():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def one(x, low):
        return torch.sqrt(model(x).square().sum() + low)  # here

    low = torch.tensor([1.0, 1, -99, 1, 1])
    return train(model, lambda i: torch.vmap(one)(seeded((5, 3)), low).mean())


@silent()
def mapped_gradients_all_well():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    named = dict(model.named_parameters())

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    def step():
        slopes = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(
            {k: v.detach() for k, v in named.items()}, seeded((5, 3))
        )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter -= 0.1 * slopes[name].mean(0)
        return model(seeded((5, 3))).square().mean()

    return SimpleNamespace(model=model, optimizer=None, step=step)


@fault("div-by-zero", op="div", step=1, rows=(3,))
def a_loop_over_samples():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    sizes = torch.tensor([[2, 1, 2, 1, 2], [2, 1, 2, 0, 2]])

    def loss_of(i):
        each = []
        for x, size in zip(model(seeded((5, 3))), sizes[i]):
            each.append(x[:size].sum() / size)  # here
        return torch.stack(each).square().mean()

    return train(model, loss_of)


@fault("log-of-nonpositive", op="log", module="head", step=0, rows=(1,))
def batch_folded_with_time():
    class Head(nn.Module):
        def forward(self, x):
            return torch.log(x)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = nn.Linear(3, 4), Head()

        def forward(self, x, size):
            h = (self.lin(x).square() + 1) * size[..., None]
            return self.head(h.flatten(0, 1)).view(h.shape)

    torch.manual_seed(0)
    model = Net()
    sizes = torch.ones(5, 6)
    sizes[1, 4] = 0
    return train(model, lambda i: model(seeded((5, 6, 3)), sizes).mean())


@fault("log-of-nonpositive", op="log", step=0)
def noise_drawn_in_the_step():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        drawn = torch.rand(5, 4).round()
        gumbel = -torch.log(-torch.log(drawn))  # here
        return (model(seeded((5, 3))) + gumbel).softmax(-1).square().mean()

    return train(model, loss_of)


@silent()
def gumbel_softmax_all_well():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return train(model, lambda i: F.gumbel_softmax(F.dropout(model(seeded((5, 3))), 0.1), hard=True).square().mean())


@fault("log-of-nonpositive", op="log", step=1)
def logistic_regression_by_hand():
    weight, bias = torch.zeros(3, requires_grad=True), torch.zeros((), requires_grad=True)
    x, y = seeded((20, 3)) + 3, torch.ones(20)
    y[7] = 0

    def step():
        p = 1 / (1 + torch.exp(-(x @ weight + bias)))
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # here
        loss.backward()
        with torch.no_grad():
            for parameter in (weight, bias):
                parameter -= 9 * parameter.grad
                parameter.grad = None
        return loss

    return SimpleNamespace(model=None, optimizer=None, step=step, parameters=[weight, bias])


@fault("div-by-zero", op="div", step=0, module="pool")
def a_graph_with_an_empty_node():
    class Pool(nn.Module):
        def forward(self, x, owner, count):
            total = torch.zeros(count, x.size(-1)).index_add(0, owner, x)
            size = torch.zeros(count).index_add(0, owner, torch.ones(len(owner)))
            return total / size[:, None]  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.pool = nn.Linear(3, 4), Pool()

        def forward(self, x, owner, count):
            return self.pool(self.lin(x), owner, count)

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((6, 3)), torch.tensor([0, 0, 1, 3, 3, 3]), 4).mean())


@fault("overflow", op=["exp"], step=0)
def overflow_that_another_branch_hides():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3)))
        closed = out.masked_fill(torch.arange(4) == 1, float("-inf")).softmax(-1)
        grown = torch.exp(out * 0 + 400)  # here
        return (closed * grown).mean()

    return train(model, loss_of)
