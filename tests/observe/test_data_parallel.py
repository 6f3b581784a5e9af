"""DataParallel on several GPUs runs copies of the model in threads: the tools follow it all the same.

Here the copies are on the CPU; on two GPUs `python -m tests.loops --cuda` has it in transformers' Trainer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.observe.modules import ON_ONE_GPU, on_one_gpu
from nbdebug.tools.guard.guard import NonFiniteStep
from tests.shell import started

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the copies are on the CPU, and beside a GPU DataParallel moves them"
)


def replica(module: nn.Module) -> nn.Module:
    copy = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copy._modules[name] = replica(child)
    for name, parameter in module._parameters.items():
        setattr(copy, name, parameter.view_as(parameter))
    return copy


def in_threads(self: nn.DataParallel, x: torch.Tensor) -> torch.Tensor:
    if len(self.device_ids) < 2:
        return self.module(x)
    outputs: dict[int, torch.Tensor] = {}

    def run(number: int, part: torch.Tensor) -> None:
        outputs[number] = replica(self.module)(part)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(x.chunk(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[0], outputs[1]])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain = nn.DataParallel.forward
    monkeypatch.setattr(nn.DataParallel, "forward", in_threads)
    yield
    assert nn.DataParallel.forward is in_threads
    monkeypatch.undo()
    assert nn.DataParallel.forward is plain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 8), nn.Linear(8, 1), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(torch.log(x)))
        return self.last(h)


class Training:
    def __init__(self, bad: bool = False) -> None:
        torch.manual_seed(0)
        x = torch.rand(32, 4) + 0.1
        if bad:
            x[21] = -1.0
        self.net = Net()
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
        self.model = nn.DataParallel(self.net)
        self.model.device_ids = [0, 1]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train(self, *_: Any) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_guard_names_the_place_and_the_row(wrapped: bool, two_gpus: None) -> None:
    run = Training(bad=True)
    with pytest.raises(NonFiniteStep) as caught, nbdebug.guard(run.model if wrapped else run.net, run.optimizer):
        run.train()
    finding = caught.value.report.findings[0]
    assert finding.code == "nan/log-of-nonpositive" and finding.where.samples == (5,), caught.value.report
    assert "torch.log(x)" in finding.where.text


def test_healthy_steps_end_in_the_same_bits(two_gpus: None) -> None:
    plain, watched = Training(), Training()
    plain.train()
    with nbdebug.guard(watched.net, watched.optimizer) as guard:
        watched.train()
    assert guard.report().ok
    assert all(torch.equal(a, b) for a, b in zip(plain.net.parameters(), watched.net.parameters(), strict=True))


def test_a_trace_runs_it_on_one_gpu_and_says_so(two_gpus: None) -> None:
    with started("import torch, nbdebug") as book:
        run = book.shell.user_ns["run"] = Training(bad=True)
        book.shell.user_ns["net"] = run.net
        report = book.run("%%nan_trace\nrun.train()").result
    assert report.findings[0].code == "nan/log-of-nonpositive" and ON_ONE_GPU in report.notes
    assert run.model.device_ids == [0, 1]


def test_a_guard_that_begins_within_and_stays_leaves_no_single_gpu_behind(two_gpus: None) -> None:
    run, counts = Training(), []
    plain = nn.DataParallel.forward
    guard = nbdebug.guard(run.net, run.optimizer)
    with on_one_gpu() as notes:
        guard.__enter__()
        run.train()
    run.net.first.register_forward_hook(lambda *_: counts.append(1))
    run.train()
    guard.__exit__(None, None, None)
    assert notes and len(counts) == 2 * len(run.loader)
    nn.DataParallel.forward = plain


def test_memory_and_a_loop_are_followed(two_gpus: None) -> None:
    run = Training()
    report = nbdebug.mem(run.train, model=run.net, optimizer=run.optimizer, progress=False)
    assert report.verdict == "healthy" and ON_ONE_GPU in report.unchecked
    with torch.no_grad():
        for parameter in run.net.parameters():
            parameter.zero_()
    report = nbdebug.diagnose(run.train, model=run.net, optimizer=run.optimizer, progress=False)
    assert [f.code for f in report] == ["training/dead-relu"], report
