"""Every optimizer of torch, as ways to train a small model: what the guard must work with, and be silent about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.observe.photograph import deep, raw


@dataclasses.dataclass(frozen=True)
class Kind:
    """How an optimizer is made for a model. closure: `step` is given one. sparse: its gradients are. flat: parameters
    of two dimensions only."""

    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    closure: bool = False
    sparse: bool = False
    flat: bool = False


def _of(name: str, **settings: Any) -> Kind:
    return Kind(lambda parameters: getattr(torch.optim, name)(parameters, **settings))


FOREACH = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
FUSED = ["Adagrad", "Adam", "AdamW", "SGD"]
KINDS: dict[str, Kind] = {
    **{f"{name} plain": _of(name, lr=1e-2, foreach=False) for name in FOREACH},
    **{f"{name} foreach": _of(name, lr=1e-2, foreach=True) for name in FOREACH},
    **{f"{name} fused": _of(name, lr=1e-2, fused=True) for name in FUSED},
    "SGD momentum": _of("SGD", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": _of("SGD", lr=1e-2, maximize=True, momentum=0.5, dampening=0.1),
    "Adam amsgrad": _of("Adam", lr=1e-2, amsgrad=True),
    "AdamW tensor lr": Kind(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2))),
    "RMSprop centered": _of("RMSprop", lr=1e-2, momentum=0.5, centered=True),
    "SGD groups": Kind(lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=1e-2)),
    "Adam closure": Kind(lambda p: torch.optim.Adam(p, lr=1e-2), closure=True),
    "SGD closure": Kind(lambda p: torch.optim.SGD(p, lr=1e-2), closure=True),
    "LBFGS": Kind(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=3), closure=True),
    "LBFGS wolfe": Kind(lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"), closure=True),
    "SparseAdam": Kind(lambda p: torch.optim.SparseAdam(p, lr=1e-2), sparse=True),
    "SGD sparse": Kind(lambda p: torch.optim.SGD(p, lr=1e-2), sparse=True),
    "Adagrad sparse": Kind(lambda p: torch.optim.Adagrad(p, lr=1e-2), sparse=True),
}
if hasattr(torch.optim, "Muon"):
    KINDS["Muon"] = Kind(lambda p: torch.optim.Muon(p, lr=1e-2), flat=True)

ROWS, WIDTH, WORDS = 5, 4, 9


class Words(nn.Module):
    """Words looked up in a table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(3).long() % WORDS).tanh().sum(-1)


class Network(nn.Module):
    """Buffers that each forward changes, masks drawn at random, a frozen layer, and one that is never used."""

    def __init__(self, flat: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 6, bias=not flat)
        self.norm = nn.BatchNorm1d(6, affine=not flat)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2, bias=not flat)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(6, WIDTH, bias=not flat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.frozen(self.norm(self.stem(x))))))


class Training:
    """A model, its optimizer and a step with a number; in the steps of `bad` a row gives a NaN.

    fault: "loss" (log of zero in the loss code) or "gradient" (sqrt at zero: the loss stays finite). The row's weight,
    `weights[i]`, brings it about; all else of a bad step is as in a good one.
    """

    def __init__(self, kind: str, bad: tuple[int, ...] = (), fault: str = "loss", dropout: float | None = None) -> None:
        made = KINDS[kind]
        self.closure, self.fault = made.closure, fault
        torch.manual_seed(0)
        dropout = (0.0 if made.closure else 0.3) if dropout is None else dropout
        self.model = Words() if made.sparse else Network(made.flat, dropout)
        self.optimizer = made.make([p for p in self.model.parameters() if p.requires_grad])
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(20, ROWS, WIDTH, generator=draw)
        self.weights = torch.ones(20, ROWS, 1)
        self.weights[list(bad), 3] = 0.0

    def loss(self, i: int) -> torch.Tensor:
        out = self.model(self.inputs[i])
        out = out[:, None] if out.dim() == 1 else out
        level = (out.square() + 0.1) * self.weights[i]
        if self.fault == "loss":
            return -torch.log(level).mean()  # the line at fault
        return torch.sqrt(level).mean()  # the line at fault, in its derivative

    def step(self, i: int) -> float:
        """One whole training step on batch i."""

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(i)
            loss.backward()
            return loss

        if self.closure:
            return self.optimizer.step(closure).item()
        loss = closure()
        self.optimizer.step()
        return loss.item()

    def kept(self) -> dict[str, Any]:
        """Weights, buffers, optimizer state with its settings: what a bad step must not touch, as bytes."""
        return kept([self.model], [self.optimizer])

    def left_out(self, i: int) -> None:
        """Run step i, and undo by hand what it did to all that is kept; random numbers stay drawn."""
        before = [t.clone() for t in self._tensors()]
        moved = {
            id(p): {k: v.clone() if isinstance(v, torch.Tensor) else _copied(v) for k, v in s.items()}
            for p, s in self.optimizer.state.items()
        }
        self.step(i)
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), before, strict=True):
                tensor.copy_(value)
        for p in list(self.optimizer.state):
            if id(p) in moved:
                self.optimizer.state[p] = moved[id(p)]
            else:
                del self.optimizer.state[p]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]


def kept(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Weights, buffers, optimizer state and its settings, as bytes. No mode sees this look: it is no part of a step."""
    with _disable_current_modes():
        return _kept(models, optimizers)


def _kept(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for n, model in enumerate(models):
        found |= {f"model {n}.{name}": raw(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for n, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        found |= {f"optimizer {n}.state.{k}": repr(deep(v)) for k, v in state["state"].items() if v}  # NaN equals NaN
        found |= {f"optimizer {n}.group {k}": repr(deep(v)) for k, v in enumerate(state["param_groups"])}
    return found


def changed(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same, to the last bit."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _copied(value: Any) -> Any:
    """Lists of tensors and numbers, as LBFGS keeps them."""
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
