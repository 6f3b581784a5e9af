"""Steps that raise: the exception is the user's own, and carries the report."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=1, raises=RuntimeError, batch=5, rows=(0, 1, 2, 3, 4))
def clipping_raises():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = iter(range(9))

    def step():
        optimizer.zero_grad()
        squares = (model(seeded((5, 3))) * (0.0 if next(steps) == 1 else 1.0)).square().sum(1)
        loss = squares.sqrt().mean()  # here
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("log-of-nonpositive", op="log", module="", raises=ArithmeticError, step=1, rows=(3,))
def the_user_raises_on_nan():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def loss_of(i):
        level = model(seeded((5, 3))).exp() * (torch.arange(5) != 3 * i)[:, None]
        level = level + (i == 0)
        loss = torch.log(level).mean()  # here
        if not torch.isfinite(loss):
            raise ArithmeticError("the loss is not finite")
        return loss

    return train(model, loss_of)


@fault("log-of-nonpositive", op="log", module="head", raises=ValueError, rows=(1, 4))
def a_distribution_refuses_nan():
    class Head(nn.Module):
        def forward(self, x, level):
            return x * torch.log(level)[:, None]  # here

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = nn.Linear(3, 4), Head()

        def forward(self, x, level):
            return self.head(self.lin(x), level)

    torch.manual_seed(0)
    model = Policy()
    levels = torch.tensor([1.0, -1, 2, 1, -2])
    return train(
        model,
        lambda i: (
            -torch.distributions.Categorical(logits=model(seeded((5, 3)), levels), validate_args=True).entropy().mean()
        ),
    )


@fault("sqrt-of-negative", op="sqrt", module="", raises=RuntimeError)
def multinomial_refuses_nan():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        odds = torch.sqrt(model(seeded((5, 3))).square() - 20)  # here
        drawn = torch.multinomial(odds.softmax(-1), 1)
        return odds.gather(-1, drawn).mean()

    return train(model, loss_of)


@silent(raises=KeyError)
def the_users_own_mistake_and_no_nan():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return train(model, lambda i: model(seeded((5, 3))).mean() * {0: 1.0}[i])
