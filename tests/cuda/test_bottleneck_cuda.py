"""On a GPU: reads are named with what dropping them would give, and a batch of one row is called too small."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbdebug

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("reads", [True, False])
def test_reads_of_each_gradient(reads: bool) -> None:
    """Without them the kernels of this size are launched about as fast as they end: that may be said."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(512, 2048)), batch_size=64)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = model(batch[0].cuda(non_blocking=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if reads:
            for parameter in model.parameters():
                parameter.grad.norm().item()
        return loss.detach()

    report = nbdebug.bottleneck(step, loader=loader, model=model, optimizer=optimizer)
    codes = [finding.code for finding in report]
    assert codes == ["speed/host-sync"] if reads else set(codes) <= {"speed/launch-bound"}
