"""A small network of our own in the model's place: can this data be learnt, with this loss, in so many steps?

Two hidden layers of 128 units, Adam, the user's loss function and batches. If it gets far below what the model reaches
on data that neither was trained on, the model is what holds the loss up, and neither the data nor the loss. The output
is shaped and squashed as the model's own is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.run.checkup import Checkups, loss_root, mean_and_error, mode
from nbdebug.chapters.training.run.sources import unnoticed
from nbdebug.observe.tensors import tensors_in

WIDTH = 128
RATE = 3e-3
MOST_INPUTS = 20_000


class Reference(nn.Module):
    """Takes what the model takes, gives what it gives in shape and range."""

    def __init__(self, given: torch.Tensor, out: torch.Tensor):
        super().__init__()
        self.shape, self.squash = out.shape[1:], squash_of(out)
        size = given[0].numel()
        self.tokens = None
        if not given.is_floating_point():
            self.tokens = nn.Embedding(int(given.max()) + 64, 16)
            size *= 16
        self.mean, self.spread = (0.0, 1.0) if self.tokens else (float(given.mean()), float(given.std()) + 1e-6)
        self.layers = nn.Sequential(
            nn.Linear(size, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, math.prod(self.shape)),
        )

    def forward(self, given: Any, *more: Any, **named: Any) -> torch.Tensor:
        if self.tokens is not None:
            given = self.tokens(given.clamp(0, self.tokens.num_embeddings - 1)).flatten(1)
        flat = (given.flatten(1) - self.mean) / self.spread
        return self.squash(self.layers(flat).reshape(len(flat), *self.shape))


def squash_of(out: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings any numbers into the range of this output, along its last dimension."""
    out = out.detach().float()
    if out.dim() > 1 and out.shape[-1] > 1:
        if bool((out >= 0).all()) and torch.allclose(out.sum(-1), torch.ones(()).to(out), atol=1e-3):
            return lambda t: t.softmax(-1)
        if torch.allclose(out.exp().sum(-1), torch.ones(()).to(out), atol=1e-3):
            return lambda t: t.log_softmax(-1)
    if bool(((out >= 0) & (out <= 1)).all()):
        return torch.sigmoid
    return lambda t: t


def reference(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    steps: int,
    on_train: Checkups,
    on_val: Checkups,
) -> dict[str, float] | None:
    """Its losses on the fixed batches after so many steps; None where it can't stand in for the model by its form.
    Raises what the loss raises, which may want something of the model that the stand-in has not."""
    seen: list[tuple[Any, Any]] = []
    handle = model.register_forward_hook(lambda module, args, out: seen.append((args, out)))
    try:
        with unnoticed(loss_fn), torch.enable_grad():
            with torch.no_grad(), mode(model, training=False):
                loss_fn(model, batches[0])
            handle.remove()
            args, out = seen[0]
            given = tensors_in(args)
            if len(seen) != 1 or len(given) != 1 or not isinstance(out, torch.Tensor) or len(out) != len(given[0]):
                return None
            if given[0][0].numel() > MOST_INPUTS or out[0].numel() > MOST_INPUTS or out.dtype != torch.float32:
                return None
            torch.manual_seed(0)
            stand_in = Reference(given[0], out).to(out.device)
            _train(stand_in, loss_fn, batches, steps)
            train, val = on_train.of(stand_in), on_val.of(stand_in)
            found = {"train": mean_and_error(train)[0]} if train else {}
            return (
                found
                | ({"val": mean_and_error(val)[0]} if val else {})
                | {"parameters": float(sum(p.numel() for p in stand_in.parameters()))}
            )
    finally:
        handle.remove()


def _train(stand_in: nn.Module, loss_fn: Callable[[Any, Any], Any], batches: Sequence[Any], steps: int) -> None:
    optimizer = torch.optim.Adam(stand_in.parameters(), RATE)
    for step in range(steps):
        optimizer.zero_grad()
        loss_root(loss_fn(stand_in, batches[step % len(batches)])).backward()
        optimizer.step()
