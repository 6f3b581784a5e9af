"""Whole runs of precision() under torch.autocast, on a CPU: float16 and bfloat16, planted modules, the fix tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nbdebug

WIDTH, BLOCKS = 8, 6


class Scores(nn.Module):
    """Attention whose scores are beyond float16 before they are scaled: a matmul, which autocast runs in half."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Parameter(torch.full((WIDTH,), 300.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = x * self.lift
        scores = big @ big.transpose(-1, -2) / 300.0**2
        return torch.softmax(scores, -1) @ x


class Difference(nn.Module):
    """What two long products differ by: 8 significant bits keep nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = 3010.0 + x.float()
        lost = offset @ self.weight - offset.sum(-1, keepdim=True)  # 0, but for rounding
        return x * self.weight[0] + lost * torch.arange(WIDTH, device=x.device)


class Block(nn.Module):
    def __init__(self, hot: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.hot = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), hot

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.hot(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, hot: dict[int, type[nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hot.get(i, nn.Identity)()) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).float() - 1).square().mean()


def asked(hot: dict[int, type[nn.Module]], dtype: str) -> tuple[nn.Module, nbdebug.Report]:
    torch.manual_seed(0)
    model = Net(hot)
    return model, nbdebug.precision(model, torch.randn(2, 5, WIDTH), loss_fn, dtype, mode="autocast", progress=False)


@pytest.mark.parametrize(
    "dtype, kind, code",
    [("float16", Scores, "precision/half-overflow"), ("bfloat16", Difference, "precision/unsafe-op-in-half")],
)
@pytest.mark.parametrize("places", [(2,), (0, 4)])
def test_planted_modules_are_found_and_the_fix_works_on_the_model_itself(
    dtype: str, kind: type[nn.Module], code: str, places: tuple[int, ...]
) -> None:
    model, report = asked(dict.fromkeys(places, kind), dtype)
    assert report.fp32_modules == tuple(f"blocks.{i}.hot" for i in places)
    assert [f.code for f in report] == [code] and report.findings[0].fixes[0].verified is True
    where = report.findings[0].where
    assert where.file == __file__ and where.line
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3))
    wanted = loss_fn(model, x).item()
    with nbdebug.keep_fp32(model, report.fp32_modules), torch.autocast("cpu", dtype=getattr(torch, dtype)):
        loss = loss_fn(model, x)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=0.05)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("dtype, kind", [("float16", Difference), ("bfloat16", Scores)])
def test_what_harms_the_one_dtype_may_suit_the_other(dtype: str, kind: type[nn.Module]) -> None:
    if kind is Scores:
        assert asked({2: kind}, dtype)[1].fp32_modules == ()
    assert asked({}, dtype)[1].ok
