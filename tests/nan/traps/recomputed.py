"""Blocks that run twice: nested checkpoints, modules that are used again."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, train


def checkpointed(reentrant: bool):
    class Length(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, size):
            squares = (self.lin(x) * size[:, None]).square().sum(-1)
            return x + squares.sqrt()[:, None]  # here

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Length()

        def forward(self, x, size):
            return checkpoint(self.inner, x.tanh(), size, use_reentrant=reentrant)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Linear(3, 4), nn.ModuleList([Block(), Block()])

        def forward(self, x, sizes):
            x = self.stem(x)
            for block, size in zip(self.blocks, sizes):
                x = checkpoint(block, x, size, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    model = Net()
    sizes = torch.ones(2, 5)
    sizes[1, 3] = 0
    return train(model, lambda i: model(seeded((5, 3)), sizes).square().mean())


def _marked(build, *sources):
    """The line at fault stands in another function."""
    build.__wrapped__ = sources[0]
    return build


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", module="blocks.1.inner", rows=(3,), step=0)
def nested_checkpoint():
    return checkpointed(False)


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", module="blocks.1.inner", rows=(3,), step=0)
def nested_reentrant_checkpoint():
    return checkpointed(True)


_marked(nested_checkpoint, checkpointed)


_marked(nested_reentrant_checkpoint, checkpointed)


@fault("log-of-nonpositive", op="log", module="shared", rows=(1,), step=0)
def reused_module_fails_the_second_time():
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.shared = nn.Linear(3, 4), Log()

        def forward(self, x, size):
            h = self.shared(self.lin(x).square() + 1)
            return self.shared((h.square() + 1) * size[:, None])

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3)), torch.tensor([1.0, 0, 1, 1, 1])).mean())


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", module="shared", rows=(4,), step=0)
def reused_module_whose_first_use_has_the_bad_derivative():
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.shared = nn.Linear(3, 4), Root()

        def forward(self, x, size):
            h = self.shared(self.lin(x).square() * size[:, None])
            return self.shared(h.square() + 1)

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3)), torch.tensor([1.0, 1, 1, 1, 0])).mean())
