"""What every step leaves behind: who holds it, which line put it there; and what grows on purpose is left in peace."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import heapq
import pathlib
import queue
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from nbdebug.text import size
from nbdebug.tools.memory.mem import mem

HERE = pathlib.Path(__file__)


class Net:
    """A model that trains; `step` gives the loss of one step with its graph, freed by its backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(64, 16)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def losses_by_name() -> tuple[Callable, str, str]:
    net, metrics = Net(), collections.defaultdict(list)

    def step() -> None:
        metrics["loss"].append(net.step())  # blamed

    return step, "metrics['loss']", "graph-retained"


def total() -> tuple[Callable, str, str]:
    net = Net()
    sum_of_losses: Any = 0

    def step() -> None:
        nonlocal sum_of_losses
        sum_of_losses += net.step()  # blamed

    return step, "sum_of_losses", "graph-retained"


class Shadow:
    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def follow(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.weights[name] = 0.9 * self.weights[name] + 0.1 * p  # blamed


def average() -> tuple[Callable, str, str]:
    net = Net()
    shadow = Shadow(net.model)

    def step() -> None:
        net.step()
        shadow.follow(net.model)

    return step, "shadow.weights", "graph-retained"


def state() -> tuple[Callable, str, str]:
    cell, box = nn.GRUCell(8, 64), SimpleNamespace(hidden=torch.zeros(32, 64))

    def step() -> None:
        box.hidden = cell(torch.randn(32, 8), box.hidden)  # blamed

    return step, "box.hidden", "graph-retained"


class Layer:
    """Keeps what it has computed for every input, for all layers together."""

    cache: dict[int, Any] = {}

    def __call__(self, key: int) -> Any:
        Layer.cache[key] = np.full((64, 512), key)  # blamed
        return Layer.cache[key]


def cached_arrays() -> tuple[Callable, str, str]:
    layer, calls = Layer(), []

    def step() -> None:
        calls.append(0)
        layer(len(calls))

    return step, "Layer.cache", "cache-unbounded"


class Words:
    @functools.cache  # noqa: B019 # blamed
    def split(self, text: str) -> list[str]:
        return [text + str(n) for n in range(2000)]


def cached_strings() -> tuple[Callable, str, str]:
    words, calls = Words(), []

    def step() -> None:
        calls.append(0)
        words.split(f"text {len(calls)}")

    return step, "split", "cache-unbounded"


def registered_again() -> tuple[Callable, str, str]:
    net = Net()

    def step() -> None:
        net.model[1].register_forward_hook(lambda module, args, output: None)  # blamed
        net.step()

    return step, "net.model.1._forward_hooks", "hook-held"


def gradients_recorded() -> tuple[Callable, str, str]:
    net, seen = Net(), []

    def step() -> None:
        hidden = net.model[0](torch.randn(300, 16))
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()))  # blamed
        net.model[2](hidden.relu()).square().mean().backward()

    return step, "seen", "hook-held"


def gradients_kept() -> tuple[Callable, str, str]:
    net, log, big = Net(), {}, nn.Linear(600, 600)

    def step() -> None:
        big.zero_grad()  # to None: each backward makes new ones
        big(torch.ones(1, 600)).sum().backward()
        log[len(log)] = [p.grad for p in big.parameters()]  # blamed
        net.step()

    return step, "log", "cache-unbounded"


def weights_hooked_again() -> tuple[Callable, str, str]:
    net = Net()

    def step() -> None:
        net.model[0].weight.register_hook(lambda gradient: gradient * 0.5)  # blamed
        net.step()

    return step, "net.model.0.weight._backward_hooks", "hook-held"


def numbers_beside_a_loss() -> tuple[Callable, str, str]:
    net, curves = Net(), collections.defaultdict(list)

    def step() -> None:
        curves["lr"].append(0.1)
        curves["loss"].append(functools.partial(print, loss=net.step()))  # blamed

    return step, "curves['loss']", "graph-retained"


def read_later() -> tuple[Callable, str, str]:
    net, args = Net(), argparse.Namespace(waiting=queue.Queue())

    def step() -> None:
        loss = net.step()
        args.waiting.put(lambda: loss.item())  # blamed

    return step, "args.waiting.queue", "graph-retained"


def all_predictions() -> tuple[Callable, str, str]:
    box = SimpleNamespace(table=pd.DataFrame())

    def step() -> None:
        box.table = pd.concat([box.table, pd.DataFrame(np.ones((500, 400)))])  # blamed

    return step, "box.table", "cache-unbounded"


def heads_of_all_tasks() -> tuple[Callable, str, str]:
    body = nn.Linear(8, 256)
    optimizer = torch.optim.Adam(body.parameters())

    def step() -> None:
        head = nn.Linear(256, 500)
        optimizer.add_param_group({"params": head.parameters()})  # blamed
        head(body(torch.randn(4, 8))).square().mean().backward()
        optimizer.step()

    return step, "optimizer", "cache-unbounded"


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.prompts.append(nn.Parameter(torch.ones(600, 512)))  # blamed
        return rows + self.prompts[-1].mean(0)


def prompts_of_all_batches() -> tuple[Callable, str, str]:
    model = Prompted()

    def step() -> None:
        model(torch.randn(4, 512)).square().mean().backward()

    return step, "model.prompts", "cache-unbounded"


class Frame:
    def __init__(self, before: Frame | None) -> None:
        self.features, self.before = torch.ones(512, 300), before


def frames_in_a_row() -> tuple[Callable, str, str]:
    box = SimpleNamespace(last=Frame(None))

    def step() -> None:
        box.last = Frame(box.last)  # blamed

    return step, "box.last.before", "cache-unbounded"


@pytest.mark.parametrize(
    "make",
    [
        losses_by_name,
        total,
        average,
        state,
        cached_arrays,
        cached_strings,
        registered_again,
        gradients_recorded,
        gradients_kept,
        weights_hooked_again,
        numbers_beside_a_loss,
        read_later,
        all_predictions,
        heads_of_all_tasks,
        prompts_of_all_batches,
        frames_in_a_row,
    ],
)
def test_the_holder_and_the_line_are_named(make: Callable) -> None:
    step, holder, slug = make()
    report = mem(step, names={}, progress=False)

    assert [f.code for f in report] == [f"memory/{slug}"], str(report)
    where = report.findings[0].where
    assert report.findings[0].evidence["holder"][0] == holder
    assert pathlib.Path(where.file) == HERE and "# blamed" in where.text
    assert report.findings[0].fixes and report.facts["growth"][0]["holder"] == holder


def healthy_records() -> Callable:
    """Numbers, detached losses, the best weights so far, an average without gradients, a cache of few entries."""
    net, history, best = Net(), collections.defaultdict(list), {}
    mean = copy.deepcopy(net.model).requires_grad_(False)
    recent: collections.deque = collections.deque(maxlen=5)

    @functools.cache
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, 256)

    def step() -> None:
        loss = net.step()
        history["loss"].append(loss.item())
        history["tensor"].append(loss.detach())
        best["weights"] = copy.deepcopy(net.model.state_dict())
        recent.append(torch.zeros(256, 256))
        mask(64)
        with torch.no_grad():
            for a, b in zip(mean.parameters(), net.model.parameters(), strict=True):
                a.lerp_(b, 0.1)

    return step


def same_gradients() -> Callable:
    net, log, big = Net(), [], nn.Linear(600, 600)

    def step() -> None:
        big.zero_grad(set_to_none=False)  # one tensor, and ever more references to it
        big(torch.ones(1, 600)).sum().backward()
        log.append([p.grad for p in big.parameters()])
        net.step()

    return step


def replayed() -> Callable:
    """What is emptied when it is full, and log-probabilities that wait for the backward at the episode's end."""
    net, memory, waiting, calls = Net(), [], [], []

    def step() -> None:
        calls.append(0)
        memory.append(torch.zeros(512, 1024))
        if len(memory) > 100:
            memory.pop(0)
        waiting.append(net.model(torch.randn(1, 16)).log_softmax(-1)[0, 0])
        if len(calls) % 50 == 0:
            torch.stack(waiting).sum().backward()
            del waiting[:]

    return step


def by_turns() -> Callable:
    """A gradient that is accumulated over four steps, a record by phase that comes to its end, a ring of references."""
    net, phases, calls = Net(), {}, []

    def step() -> None:
        calls.append(0)
        (net.model(torch.randn(64, 16)).square().mean() / 4).backward()
        if len(calls) % 4 == 0:
            net.optimizer.step()
            net.optimizer.zero_grad()
        phases[len(calls) % 5] = torch.zeros(256, 256)
        ring: list[Any] = [torch.zeros(512, 512)]
        ring.append(ring)

    return step


def hardest() -> Callable:
    """The three largest on a heap, the last three in a list that a slice keeps short, frames that forget."""
    net, heap, recent, calls, box = Net(), [], SimpleNamespace(rows=[]), [], SimpleNamespace(last=Frame(None))

    def step() -> None:
        calls.append(0)
        net.step()
        heapq.heappush(heap, (len(calls), torch.zeros(512, 1024)))
        if len(heap) > 3:
            heapq.heappop(heap)
        recent.rows = [*recent.rows, torch.zeros(512, 1024)][-3:]
        box.last.before = None
        box.last = Frame(box.last)

    return step


@pytest.mark.parametrize("make", [healthy_records, same_gradients, replayed, by_turns, hardest])
def test_what_grows_on_purpose_or_not_at_all_is_left_in_peace(make: Callable) -> None:
    report = mem(make(), names={}, progress=False)
    assert not report.findings, report.findings[0].title


def test_a_flag_that_keeps_the_emptying_line_from_running_is_seen() -> None:
    kept, bounded, calls = {}, False, []

    def step() -> None:
        calls.append(0)
        kept[len(calls)] = torch.zeros(64, 1024)
        if bounded and len(kept) > 100:
            kept.pop(next(iter(kept)))

    assert [f.code for f in mem(step, names={}, progress=False)] == ["memory/cache-unbounded"]


def test_no_grad_is_tried() -> None:
    model, found = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 2)).eval(), []
    report = mem(lambda: found.append(model(torch.randn(100, 32))), names={}, progress=False)

    assert [f.code for f in report] == ["memory/eval-without-no-grad"]
    fix = report.findings[0].fixes[0]
    assert fix.verified and fix.after["with the fix"] == size(100 * 2 * 4)


def test_where_no_name_leads_its_generator_is_named() -> None:
    def collected() -> Any:
        mine = []
        while True:
            mine.append(torch.zeros(1024, 512))
            yield len(mine)

    steps = map(float, collected())  # written in C: no look leads through it
    report = mem(lambda: next(steps), names={}, progress=False)

    assert "collected" in report.findings[0].title


def test_nothing_of_what_grew_is_held_by_the_report() -> None:
    net, kept = Net(), []

    def step() -> None:
        kept.append(net.step())

    report = mem(step, names={}, progress=False)
    seen = weakref.ref(kept[-1])
    kept.clear()
    gc.collect()

    assert seen() is None and not report.ok
