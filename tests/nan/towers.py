"""Models with one planted fault among decoys, and a step around them, for the tests of the search by replay."""

from __future__ import annotations

import math

import torch
from torch import nn

from nbdebug.report import Finding, Report, Where
from nbdebug.tools.nan.bisect import bisect

BATCH = 6


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4) / 4)

    def forward(self, x, side):
        return x + torch.tanh(nn.functional.dropout(x @ self.mix, 0.1))


class MaskedSoftmax(nn.Module):
    """A decoy: hands on what an intended -inf was absorbed in."""

    def forward(self, x, side):
        return x + torch.softmax(x.masked_fill(torch.eye(4, dtype=torch.bool)[0], -math.inf), -1)


class Unused(nn.Module):
    """A decoy: makes NaN and inf in some rows, and drops them."""

    def forward(self, x, side):
        quotient = (x.detach() / side[:, None]).nan_to_num(0.0, 0.0, 0.0)
        return x + 0.01 * quotient.clamp(-1, 1)


class Log(nn.Module):
    """A fault in the forward: log(0) where `side` is 0."""

    def forward(self, x, side):
        return x + torch.log(side)[:, None]


class Distance(nn.Module):
    """A fault in the backward: the derivative of sqrt at 0 where `side` is 0."""

    def forward(self, x, side):
        return x + ((x * side[:, None]) ** 2).sum(-1, keepdim=True).sqrt()


class Tower(nn.ModuleList):
    def forward(self, x, side):
        for part in self:
            x = part(x, side)
        return x


def tower(fault, place):
    """64 modules: the root, 7 floors, 56 rooms; a third of the rooms are decoys, one has the fault."""
    rooms = [(Plain, MaskedSoftmax, Unused, Plain)[i % 4]() for i in range(56)]
    rooms[place] = fault()
    return Tower([Tower(rooms[i : i + 8]) for i in range(0, 56, 8)]), f"{place // 8}.{place % 8}"


def side_with(rows):
    side = torch.ones(BATCH)
    side[list(rows)] = 0
    return side


class Case:
    """A step with its model, and a tracer that only says what it was told to say."""

    def __init__(self, model, loss, *, optimizer=torch.optim.SGD, says=None, **where):
        self.model, self.loss, self.calls = model, loss, 0
        self.optimizer = optimizer(model.parameters(), lr=0.01) if list(model.parameters()) else None
        self.says = says
        self.where = Where(**{"step": 0, "phase": "forward", **where})

    def step(self):
        self.calls += 1
        if self.optimizer:
            self.optimizer.zero_grad()
        loss = self.loss(self.model)
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        return loss

    def trace(self):
        self.step()
        found = (Finding("nan/overflow", "It overflows.", self.where),) if self.says is None else self.says
        return Report("nan_trace(step)", found, notes=("traced",), facts={"dtype": "float32"})

    def search(self, **more):
        optimizers = [self.optimizer] if self.optimizer else []
        return bisect(self.step, {"model": self.model}, optimizers, trace=self.trace, **more)


def no_hooks(model):
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) and (
        torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
        and torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
    )
