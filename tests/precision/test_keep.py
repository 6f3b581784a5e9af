"""keep_fp32: modules in float32 under autocast and in a model that was cast; nothing else changes; it can be undone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nbdebug
from tests.precision import models


def sick() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(models.Calm(), models.Guarded(), models.Calm(), nn.Linear(models.WIDTH, 1))


def step(model: nn.Module, x: torch.Tensor) -> tuple[float, bool]:
    model.zero_grad()
    loss = models.loss_fn(model, x)
    loss.backward()
    return loss.item(), all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_model_that_was_cast_works_with_what_precision_found() -> None:
    model = sick()
    wanted = step(model, models.batch())[0]
    found = nbdebug.precision(model, models.batch(), models.loss_fn, mode="cast", progress=False).fp32_modules
    half = copy.deepcopy(model).half()
    x = models.batch().half()
    assert not step(half, x)[1]
    keys = list(half.state_dict())
    with nbdebug.keep_fp32(half, found) as kept:
        loss, finite = step(half, x)
        assert finite and loss == pytest.approx(wanted, rel=0.01)
        assert list(half.state_dict()) == keys and kept.names == ("1",)
        assert half[1].mix.weight.dtype == torch.float32 and half[0].mix.weight.dtype == torch.float16
    assert half[1].mix.weight.dtype == torch.float16 and "forward" not in vars(half[1])
    assert not step(half, x)[1] and "(removed)" in repr(kept)


def test_under_autocast_the_module_runs_in_float32_and_gives_back_what_it_was_given() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            seen.append((x.dtype, y.dtype))
            return y

    model = nn.Sequential(nn.Linear(4, 4), Looks(), nn.Linear(4, 4))
    handle = nbdebug.keep_fp32(model, "1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 4))
        between = model[1](model[0](torch.randn(2, 4)))
        handle.remove()
        model(torch.randn(2, 4))
    assert seen == [(torch.float32, torch.float32)] * 2 + [(torch.bfloat16, torch.bfloat16)]
    assert out.dtype == torch.bfloat16 and between.dtype == torch.bfloat16


def test_patterns_nested_names_keywords_and_trees_of_tensors() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x, *, extra):
            return {"y": self.up(self.norm(x)) + extra[0]}

    model = nn.ModuleList(Block() for _ in range(3)).half()
    kept = nbdebug.keep_fp32(model, ["*.norm", "1"])
    assert kept.names == ("0.norm", "1", "2.norm")
    x = torch.randn(2, 4).half()
    for block in model:
        assert block(x, extra=[x])["y"].dtype == torch.float16
    kept.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_a_forward_of_the_users_own_on_the_instance_comes_back() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = own = lambda x: x * 2
    nbdebug.keep_fp32(nn.Sequential(layer), "0").remove()
    assert layer.forward is own


def test_a_saved_and_copied_model_keeps_working() -> None:
    model = sick().half()
    nbdebug.keep_fp32(model, "1")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].mix.weight.zero_()
    x = models.batch().half()
    assert torch.equal(other(x), other(x)) and not torch.equal(other(x), model(x))
    fresh = sick()
    fresh.load_state_dict(model.state_dict())


@pytest.mark.parametrize("model, names, match", [(nn.Linear(2, 2), "norm", "called 'norm'"), ("net", "x", "got .net.")])
def test_what_is_not_there_is_named(model: object, names: str, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        nbdebug.keep_fp32(model, names)
