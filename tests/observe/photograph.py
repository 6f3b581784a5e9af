"""A full copy of a model, its optimizers and the random numbers, made by other means than a snapshot: its oracle."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot


def raw(tensor):
    """A tensor's content as bytes, its type and its shape."""
    if tensor is None:
        return None
    if tensor.layout == torch.sparse_coo:
        return "sparse", tensor.is_coalesced(), raw(tensor._indices()), raw(tensor._values())
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def deep(value):
    """Nested containers with their tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, dict):
        return {k if not isinstance(k, torch.Tensor) else id(k): deep(v) for k, v in value.items()}
    return tuple(map(deep, value)) if isinstance(value, (list, tuple, deque)) else value


def photograph(model, *optimizers):
    """All that must come back, and which objects hold it."""
    return {
        "parameters": {
            n: (id(p), raw(p), p.requires_grad, raw(p.grad), id(p.grad) if p.grad is not None else None)
            for n, p in model.named_parameters(remove_duplicate=False)
        },
        "buffers": {n: (id(b), raw(b)) for n, b in model.named_buffers(remove_duplicate=False)},
        "modules": [(n, id(m), type(m), m.training) for n, m in model.named_modules()],
        "saved": list(model.state_dict()),
        "optimizers": [
            (
                deep(o.state),
                deep([{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]),
                [[id(p) for p in g["params"]] for g in o.param_groups],
            )
            for o in optimizers
        ],
        "random": (random.getstate(), np.random.get_state()[1].tobytes(), raw(torch.get_rng_state())),
    }


def prove(step, model, *optimizers, steps=2):
    """`step` changes something; restoring undoes it, to the last bit, and the run goes on as it first did."""
    before = photograph(model, *optimizers)
    snapshot = Snapshot.take(model, optimizers)
    assert snapshot.differences() == []
    for _ in range(steps):
        step()
    after = photograph(model, *optimizers)
    assert after != before and snapshot.differences()
    snapshot.restore()
    assert photograph(model, *optimizers) == before
    assert snapshot.differences() == []
    for _ in range(steps):
        step()
    again = photograph(model, *optimizers)
    for part in ("saved", "random"):
        assert again[part] == after[part]
    assert [p[1] for p in again["parameters"].values()] == [p[1] for p in after["parameters"].values()]


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=2, max_iter=3),
    "Rprop": torch.optim.Rprop,
}
