"""Tensors that require a gradient and are no nn.Parameter: named where nothing trains them, and left in peace where
they are data, where the loop moves them by hand, or where somebody looks at their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from tests.training.loops import clusters, loaders, made

X, Y = clusters(400)


class Offset(nn.Module):
    """An offset of the inputs, kept as `how`: a tensor, in a list or dict, a buffer, a parameter, a leaf that is asked
    for its gradient, or the state of a recurrent layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, start = how, torch.randn(12)
        if how == "parameter":
            self.offset = nn.Parameter(start)
        elif how == "buffer":
            self.register_buffer("offset", start.requires_grad_())
        elif how == "list":
            self.parts = [start.requires_grad_()]
        elif how == "dict":
            self.parts = {0: start.requires_grad_()}
        elif how == "state":
            self.offset, self.cell = torch.zeros(1, 1, 12, requires_grad=True), nn.GRU(12, 12, batch_first=True)
        else:
            self.offset = start.requires_grad_()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "state":
            return self.body(self.cell(x[:, None], self.offset.expand(-1, len(x), -1).contiguous())[0][:, 0])
        return self.body(x + (self.parts[0] if hasattr(self, "parts") else self.offset))


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def training(model: nn.Module, loss_fn: Any = plain_loss, each: Any = None, optimizer: Any = None) -> Any:
    ns = made(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, loaders(X, Y), 2)

    def train(callback: Any) -> None:
        step = 0
        for _ in range(2):
            for batch in ns.train_loader:
                ns.optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                ns.optimizer.step()
                if each is not None:
                    each()
                callback(step, loss.item())
                step += 1

    ns.train = train
    return ns


def asked(ns: Any) -> nbdebug.Report:
    parts = {name: getattr(ns, name) for name in ("model", "optimizer", "loss_fn", "train_loader", "val_loader")}
    return nbdebug.diagnose(ns.train, **parts, progress=False)


def missing(report: nbdebug.Report) -> list[str]:
    found = [f for f in report if f.code == "training/parameters-not-in-optimizer"]
    return found[0].evidence["missing"] if found else []


@pytest.mark.parametrize(
    ("how", "name"), [("tensor", "offset"), ("list", "parts.0"), ("dict", "parts.0"), ("buffer", "offset")]
)
def test_one_of_the_model_is_named_before_and_after_the_run(how: str, name: str) -> None:
    torch.manual_seed(0)
    ns = training(Offset(how))
    assert missing(nbdebug.preflight(ns.model, ns.train_loader, ns.loss_fn, optimizer=ns.optimizer)) == [name]
    assert missing(asked(ns)) == [name]


def test_a_parameter_is_not_nor_is_the_first_state_of_a_recurrent_layer() -> None:
    for how in ("parameter", "state"):
        ns = training(Offset(how))
        assert not missing(asked(ns)), how
        assert not missing(nbdebug.preflight(ns.model, ns.train_loader, ns.loss_fn, optimizer=ns.optimizer)), how


def test_one_that_the_loop_moves_or_clears_by_hand_is_not() -> None:
    for how in ("moved", "cleared", "zeroed"):
        model = Offset("tensor")

        def by_hand(how: str = how, offset: torch.Tensor = model.offset) -> None:
            if how == "moved":
                offset.data -= 0.1 * offset.grad
            if how == "cleared":
                offset.grad = None
            else:
                offset.grad.zero_()

        before = model.offset.detach().clone()
        assert not missing(asked(training(model, each=by_hand))), how
        assert torch.equal(model.offset, before) and model.offset.grad is None  # put back, as the model is


def test_one_that_another_optimizer_holds_is_not() -> None:
    model = Offset("tensor")
    other = torch.optim.SGD([model.offset], lr=0.0)
    assert not missing(asked(training(model))) and other.param_groups


def test_a_variable_of_the_loss_is_named_by_the_run_alone_and_data_are_not() -> None:
    torch.manual_seed(0)
    prompt, points = torch.randn(12, requires_grad=True), torch.randn(9, 12, requires_grad=True)

    def prompted(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0] + prompt), batch[1])

    def with_slope(model: Any, batch: Any) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(points * 1.0).sum(), points, create_graph=True)
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * slope.square().mean()

    def with_points(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * model(points).square().mean()

    for loss_fn, names in ((prompted, ["prompt"]), (with_slope, []), (with_points, [])):
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
        ns = training(model, loss_fn)
        assert missing(asked(ns)) == names
        assert not missing(nbdebug.preflight(model, ns.train_loader, loss_fn, optimizer=ns.optimizer))
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    both = torch.optim.SGD([*model.parameters(), prompt], lr=0.1)
    assert not missing(asked(training(model, prompted, optimizer=both)))
