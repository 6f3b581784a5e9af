"""A copy of the model learns each task, and backward leaves gradients with a graph in it: the copy never goes away."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/graph-retained", ["grad"], "loss.backward(create_graph=True)"


def tasks(apart):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 40))

    def step():
        learner = copy.deepcopy(model)
        loss = learner(torch.ones(60, 40)).square().mean()
        if apart:
            grads = torch.autograd.grad(loss, list(learner.parameters()), create_graph=True)
        else:
            loss.backward(create_graph=True)
            grads = [p.grad for p in learner.parameters()]
        return sum(g.square().sum() for g in grads).item()

    return SimpleNamespace(model=model, optimizer=None, step=step, steps=4, names={})


def sick():
    return tasks(apart=False)


def healthy():
    return tasks(apart=True)
