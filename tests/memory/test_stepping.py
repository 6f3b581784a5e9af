"""One step followed: its peak against the profiler's own events, what the peak is made of, and nothing left behind."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from nbdebug.tools.memory.facts import CATEGORIES
from nbdebug.tools.memory.mem import mem
from nbdebug.tools.memory.trace import HostMeter

MB = 1 << 20


class Training:
    """A step that leaves no gradients, so that the profiler, which knows no earlier memory, can be compared."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], make: Any = torch.optim.AdamW):
        self.model, self.loss = model, loss
        self.optimizer = make(model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def mlp() -> Training:
    x = torch.randn(256, 128)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    return Training(model, lambda m: m(x).square().mean())


def convolutions() -> Training:
    x = torch.randn(8, 3, 48, 48)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3))
    return Training(model, lambda m: m(x).square().mean(), torch.optim.SGD)


def recurrent() -> Training:
    """Its layer takes workspaces for itself, which no op shows."""
    x = torch.randn(16, 40, 32)
    return Training(nn.LSTM(32, 96, batch_first=True), lambda m: m(x)[0].square().mean())


def checkpointed() -> Training:
    x = torch.randn(128, 64)
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(4))

    def loss(blocks: Any) -> torch.Tensor:
        hidden = x
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()

    return Training(model, loss)


def profiled(step: Callable[[], Any]) -> int:
    """How far memory rises in a step, by the profiler's allocation events."""
    meter = HostMeter()
    meter.start()
    meter.mark()
    meter.mark()
    step()
    return meter.stop()[0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [mlp, convolutions, recurrent, checkpointed])
def test_the_peak_is_what_the_profiler_s_events_add_up_to(make: Callable[[], Training]) -> None:
    training = make()
    training.step()
    training.step()
    told = profiled(training.step)

    report = mem(training.step, model=training.model, optimizer=training.optimizer, names={}, progress=False)
    peak, drawn = report.facts["peak"], report.plot("memory")
    rise = peak - drawn["course"][0][1]

    assert rise == pytest.approx(told, rel=0.01)
    assert sum(count for _, count in drawn["parts"]) == peak


def table(report: Any, title: str) -> dict[str, list[Any]]:
    rows = next(t.rows for t in report.tables if t.title == title)
    return {row[0]: row[1:] for row in rows}


def test_the_peak_is_split_by_use_module_line_and_parameter() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4000, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    report = mem(step, model=model, optimizer=optimizer, names={}, progress=False)
    weights = sum(p.nbytes for p in model.parameters())
    parts = dict(report.plot("memory")["parts"])
    uses, modules = table(report, "At the peak"), table(report, "By module")

    assert set(uses) <= set(CATEGORIES)
    assert parts["parameters"] == weights and parts["optimizer state"] == weights
    assert parts["inputs"] >= x.nbytes and parts["activations"] >= 4000 * 1024 * 4
    assert modules["(the model)"][1] >= modules["3"][1] >= 4000 * 1024 * 4
    assert max(table(report, "Optimizer state").items(), key=lambda row: row[1][0])[0] == "2.weight"
    assert any("model(x).square()" in row[-1] and row[0] > MB for row in table(report, "By line").values())
    assert set(report.plot("memory")["events"]) == {"forward", "backward", "optimizer"}
    assert "backward" in report.notes[0]
    json.dumps(report.to_dict())


def hooks() -> list[int]:
    return [
        len(kept)
        for kept in (
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    ]


def test_a_step_leaves_nothing_of_ours_behind() -> None:
    training = mlp()
    training.step()
    before, engine = hooks(), torch.autograd.graph._engine_run_backward
    kept = weakref.ref(training.model[0].weight.untyped_storage())

    report = mem(training.step, model=training.model, optimizer=training.optimizer, names={}, progress=False)

    assert hooks() == before and torch.autograd.graph._engine_run_backward is engine
    assert torch._C._len_torch_dispatch_stack() == 0
    assert sys.gettrace() is None and not torch._C._autograd._profiler_enabled()
    del training
    gc.collect()
    assert kept() is None, "the report keeps the model alive"
    assert report.ok


def test_a_nested_tensor_that_has_no_shape_is_followed() -> None:
    table = nn.Embedding(50, 16)

    def step() -> None:
        rows = torch.nested.nested_tensor([row[: 3 + n] for n, row in enumerate(table(torch.randint(50, (4, 12))))])
        table.weight.square().mean().backward()
        rows.to_padded_tensor(0.0)

    report = mem(step, model=table)
    assert not report.unchecked and report.verdict == "healthy", report


def test_it_trains_as_without_watch() -> None:
    torch.manual_seed(3)
    plain = mlp()
    torch.manual_seed(3)
    watched = mlp()
    for _ in range(3):
        plain.step()
    mem(watched.step, model=watched.model, optimizer=watched.optimizer, names={}, progress=False)

    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True))


def test_the_user_s_error_passes_with_a_report() -> None:
    training = mlp()
    calls = []

    def step() -> None:
        calls.append(1)
        training.step()
        if len(calls) == 2:
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own") as raised:
        mem(step, model=training.model, optimizer=training.optimizer, names={}, progress=False)
    assert raised.value.report.facts["peak"] > 0  # type: ignore[attr-defined]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_profiler_of_the_user_s_own_is_left_alone() -> None:
    training = recurrent()

    def step() -> None:
        with profile():
            training.step()

    report = mem(step, model=training.model, optimizer=training.optimizer, names={}, progress=False)
    assert report.facts["measured_peak"] is None and report.facts["peak"] > 0


def test_data_that_end_are_no_error() -> None:
    batches = iter([torch.ones(4, 2)] * 2)
    report = mem(lambda: next(batches).sum(), steps=5, names={}, progress=False)
    assert len(table(report, "After each step")) == 2


@pytest.mark.parametrize(
    ("step", "steps", "said"),
    [
        (3, 3, "function without arguments"),
        (nn.Linear(1, 1), 3, "not a model"),
        (lambda x: x, 3, "needs x"),
        (lambda: None, 0, "at least 1"),
        (lambda: None, True, "at least 1"),
    ],
)
def test_wrong_arguments_are_told(step: Any, steps: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        mem(step, steps=steps, names={})
