"""Programs in which a non-finite value is meant, or never matters: silence is right."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import silent, train


def linear(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, width)


@silent()
def best_so_far_starts_at_infinity():
    model, best = linear(), [torch.tensor(float("inf"))]

    def loss_of(i):
        loss = model(seeded((5, 3))).square().mean()
        best[0] = torch.minimum(best[0], loss.detach())
        return loss

    return train(model, loss_of)


@silent()
def perplexity_overflows():
    model, seen = linear(), []

    def loss_of(i):
        loss = F.cross_entropy(model(seeded((5, 3))), torch.arange(5) % 4)
        seen.append(torch.exp(loss.detach() * 1000))
        return loss

    return train(model, loss_of)


@silent()
def gaps_in_the_input_are_filled():
    model = linear()

    def loss_of(i):
        x = seeded((5, 3))
        x[2, 1] = x[4, 0] = float("nan")
        return model(torch.where(torch.isnan(x), torch.zeros_like(x), x)).square().mean()

    return train(model, loss_of)


@silent()
def gaps_in_the_input_are_filled_in_place():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(6, 4)

        def forward(self, x):
            gap = torch.isnan(x)
            x = x.clone()
            x[gap] = 0.0
            return self.lin(torch.cat([x, gap.float()], -1))

    torch.manual_seed(0)
    model = Net()
    x = seeded((5, 3))
    x[2, 1] = float("nan")
    return train(model, lambda i: model(x).square().mean())


@silent()
def forward_algorithm_with_closed_states():
    torch.manual_seed(0)
    scores = nn.Linear(3, 4)
    steps = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).tril(-2).bool(), float("-inf"))

    def loss_of(i):
        emitted = scores(seeded((6, 5, 3))).log_softmax(-1)
        alpha = torch.full((5, 4), float("-inf"))
        alpha[:, 0] = 0.0
        alpha = alpha + emitted[0]
        for now in emitted[1:]:
            alpha = torch.logsumexp(alpha[:, :, None] + steps, 1) + now
        return -torch.logsumexp(alpha, -1).mean()

    return train(scores, loss_of)


@silent()
def sampling_keeps_the_best_only():
    model = linear(6)

    def loss_of(i):
        scores = model(seeded((5, 3)))
        order = scores.argsort(-1, descending=True)
        closed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[:, 3:], True)
        logs = scores.masked_fill(closed, float("-inf")).log_softmax(-1)
        return -logs.gather(-1, order[:, :1]).mean()

    return train(model, loss_of)


@silent()
def a_row_of_the_batch_is_thrown_away():
    model = linear()

    def loss_of(i):
        each = model(seeded((5, 3))).square().mean(-1).detach() / torch.tensor([1.0, 0, 1, 1, 1])
        good = torch.isfinite(each)
        return model(seeded((5, 3))[good]).square().mean()

    return train(model, loss_of)


@silent()
def nan_is_overwritten_piece_by_piece():
    model = linear()

    def loss_of(i):
        store = torch.full((5, 4), float("nan"))
        out = model(seeded((5, 3)))
        store[:, ::2] = out[:, ::2]
        store[:, 1] = out[:, 1]
        store.select(1, 3).copy_(out[:, 3])
        return store.square().mean()

    return train(model, loss_of)


@silent()
def zero_learning_from_a_bad_head():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.main, self.spare = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            h = self.body(x)
            return self.main(h), torch.log(self.spare(h) - 99)

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3)))[0].square().mean())


@silent()
def straight_through_and_frozen():
    model = linear()

    def loss_of(i):
        out = model(seeded((5, 3)))
        hard = (out / (out.detach() - out.detach())).sign().nan_to_num()
        return (out + (hard - out).detach()).square().mean()

    return train(model, loss_of)


@silent()
def variance_of_one_is_not_used():
    model = linear()

    def loss_of(i):
        out = model(seeded((1, 3)))
        spread = out.std(0)
        return (
            out.square().mean() + torch.where(torch.isfinite(spread), spread, torch.zeros_like(spread)).detach().sum()
        )

    return train(model, loss_of)
