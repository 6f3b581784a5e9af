"""Modules that are not quite modules: parametrized, compiled, called as functions, not yet made."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault(
    "div-by-zero domain-error",
    op=["weight_norm_interface", "weight_norm", "div"],
    step=0,
    module=[
        "lin.parametrizations.weight.0",
        "lin.parametrizations.weight",
        "lin",
        "0.parametrizations.weight.0",
        "0.parametrizations.weight",
        "0",
    ],
)
def weight_norm_of_zeros():
    torch.manual_seed(0)
    lin = nn.Linear(3, 4)
    nn.init.zeros_(lin.weight)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(lin), nn.Tanh())
    return train(model, lambda i: model(seeded((5, 3))).square().mean())  # here


@fault("div-by-zero", op="div", step=0, module=["0.parametrizations.weight.0", "0.parametrizations.weight", "0"])
def spectral_norm_of_zeros():
    torch.manual_seed(0)
    lin = nn.Linear(3, 4)
    nn.init.zeros_(lin.weight)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(lin), nn.Tanh())
    return train(model, lambda i: model(seeded((5, 3))).square().mean())  # here


@silent()
def parametrizations_all_well():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    )
    return train(model, lambda i: model(seeded((5, 3))).square().mean())


@fault("log-of-nonpositive", op="log", module=["head", "_orig_mod.head"], step=1, rows=(1,))
def compiled_with_the_eager_backend():
    class Head(nn.Module):
        def forward(self, x, size):
            return torch.log(x * size[:, None])  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = nn.Linear(3, 4), Head()

        def forward(self, x, size):
            return self.head(self.lin(x).exp(), size)

    torch.manual_seed(0)
    model = torch.compile(Net(), backend="eager")
    sizes = torch.ones(2, 5)
    sizes[1, 1] = 0
    return train(model, lambda i: model(seeded((5, 3)), sizes[i]).mean())


@silent()
def compiled_all_well():
    torch.manual_seed(0)
    model = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), backend="eager")
    return train(model, lambda i: model(seeded((5, 3))).square().mean())


@fault("log-of-nonpositive", op="log", module="head", step=0)
def functional_call():
    class Head(nn.Module):
        def forward(self, x):
            return torch.log(x.relu() * 0)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = nn.Linear(3, 4), Head()

        def forward(self, x):
            return self.head(self.lin(x))

    torch.manual_seed(0)
    model = Net()
    own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return train(
        model, lambda i: torch.func.functional_call(model, own, (seeded((5, 3)),)).mean(), parameters=list(own.values())
    )


@silent()
def lazy_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    optimizer = None

    def step():
        nonlocal optimizer
        loss = model(seeded((5, 3))).square().mean()
        optimizer = optimizer or torch.optim.Adam(model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=None, step=step, parameters=[])
