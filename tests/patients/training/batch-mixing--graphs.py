"""Graphs of some nodes, joined into one: the edges of all count from 0, and lie in the first. The twin shifts them."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.loops import made, mse

CODE, WHERE, RUN = "training/batch-mixing", ["collate_fn", "train_loader"], True


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 24), nn.Linear(24, 1)

    def forward(self, graphs):
        x, (source, target), begins = graphs
        near = torch.zeros_like(x).scatter_add(0, target[:, None].expand(-1, x.shape[1]), x[source])
        hidden = self.inner(torch.cat([x, near], 1)).relu().cumsum(0)
        hidden = torch.cat([torch.zeros_like(hidden[:1]), hidden])
        return self.outer(hidden[begins[1:]] - hidden[begins[:-1]]).squeeze(1)


def graph():
    n = int(torch.randint(4, 9, ()))
    x, edges = torch.randn(n, 2), torch.randint(0, n, (2, 2 * n))
    return x, edges, x[edges[0], 0] @ x[edges[1], 1] / n


def training(shifted):
    def joined(graphs):
        xs, edges, values = zip(*graphs)
        begins = torch.tensor([0, *map(len, xs)]).cumsum(0)
        edges = [own + before * shifted for own, before in zip(edges, begins)]
        return (torch.cat(xs), torch.cat(edges, 1), begins), torch.stack(values)

    torch.manual_seed(96)
    pair = [DataLoader([graph() for _ in range(n)], 16, shuffle=n > 200, collate_fn=joined) for n in (480, 120)]
    model = Neighbours()
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), mse, pair, 10)


def sick():
    return training(shifted=False)


def healthy():
    return training(shifted=True)
