"""The record of a run on a GPU: replayed on a GPU it gives the same answer, and it opens and replays on a CPU too.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nbdebug

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BAD = 5


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.norm(self.first(x)).relu(), self.dropout, self.training)
        return self.last(hidden)


def train(path, dropout: float = 0.3, autocast: bool = True, **options):
    """Batches are drawn on the GPU, and the loss divides by zero in one row at step BAD."""
    torch.manual_seed(0)
    model = Net(dropout).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    with nbdebug.guard(model, optimizer, on_trip="trace", record=path), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(30):
            x = torch.randn(8, 16, device="cuda")
            y = torch.randint(4, (8,), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                out = model(x)
            noise = torch.rand(8, device="cuda")
            weight = torch.ones(8, device="cuda").index_fill(0, torch.tensor([3], device="cuda"), float(i != BAD))
            ((F.cross_entropy(out.float(), y, reduction="none") + noise) / weight).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, caught.value


def first(report):
    finding = report.findings[0]
    return finding.code, finding.where, finding.title, repr(finding.evidence)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "plain"])
def test_the_answer_is_that_of_the_process_that_trained(tmp_path, options) -> None:
    _, error = train(tmp_path / "r", **options)
    found = nbdebug.open_record(tmp_path / "r")
    (trip,) = found.trips
    assert (trip.step, trip.no_replay, trip.no_weights, trip.problems) == (BAD, "", "", ())
    steps = list(found.runs[0].columns.step)  # what a GPU has computed is read up to two steps later
    assert steps == list(range(len(steps))) and BAD < len(steps) <= BAD + 3 and found.runs[0].alarms == [BAD]
    fresh = Net(0.3).cuda()
    drawn = torch.get_rng_state(), torch.cuda.get_rng_state()
    again = found.replay(fresh)
    assert again.findings[0].code == "nan/div-by-zero" and again.findings[0].where.samples == (3,)
    assert first(again) == first(error.report)
    assert torch.equal(drawn[0], torch.get_rng_state()) and torch.equal(drawn[1], torch.cuda.get_rng_state())


def test_it_replays_on_a_cpu(tmp_path) -> None:
    _, error = train(tmp_path / "r", autocast=False)
    again = nbdebug.open_record(tmp_path / "r").replay(Net(0.3))
    assert first(again)[:3] == first(error.report)[:3]
    assert any("random numbers" in note for note in again.notes), "they fall otherwise on a CPU"


def test_a_run_of_the_cpu_replays_on_a_gpu(tmp_path) -> None:
    torch.manual_seed(0)
    model = Net(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = nbdebug.guard(model, optimizer, on_trip="trace", record=tmp_path / "r")
    with guard, pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(6):
            model(torch.randn(8, 16)).div(float(i != 3)).mean().backward()
            optimizer.step()
    again = nbdebug.open_record(tmp_path / "r").replay(Net(0.0).cuda())
    assert first(again)[:3] == first(caught.value.report)[:3]
