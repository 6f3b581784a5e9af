"""What a tool must not do to the user's objects: run into their code, keep them alive, leave them changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.notebook import stale_code
from tests.shell import started


def own(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of the user's")


class Strange:
    """Whatever it is asked, it raises."""

    def __init__(self, x: torch.Tensor):
        object.__setattr__(self, "x", x)

    __getattr__ = __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __repr__ = own  # type: ignore[assignment]
    __hash__ = object.__hash__


class Proxy:
    """Stands for an object that is not there: even its class can not be had."""

    __getattribute__ = __setattr__ = __eq__ = __hash__ = __bool__ = __len__ = __repr__ = own  # type: ignore[assignment]


class Record(list[int]):
    __iter__ = __len__ = __getitem__ = __eq__ = __bool__ = __repr__ = own  # type: ignore[assignment]


class Table(dict[str, int]):
    items = keys = values = get = __getitem__ = __iter__ = __len__ = __eq__ = __bool__ = __repr__ = own  # type: ignore[assignment]


class Compiled:
    """As Cython has its functions: where a class has the name of its module there is a descriptor."""


type.__setattr__(Compiled, "__module__", property(own))


def hostile() -> dict[str, Any]:
    """By name; the last one is a weak reference to what has died."""
    things = {"strange": Strange(torch.ones(2)), "proxy": Proxy(), "record": Record([1]), "table": Table(a=1)}
    things["compiled"] = Compiled()
    return {
        **things,
        "dead": weakref.proxy(nn.Linear(1, 1)),
        "within": [*things.values()],
        "space": SimpleNamespace(**things),
    }


class Layer(nn.Linear):
    __eq__ = __ne__ = __repr__ = own  # type: ignore[assignment]
    __hash__ = object.__hash__


class Net(nn.Module):
    __eq__ = __ne__ = __repr__ = own  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(4, 8), Layer(8, 2)
        vars(self).update(hostile())

    def forward(self, batch: Strange) -> torch.Tensor:
        return self.b(torch.relu(self.a(batch.x)))


def training(bad: bool) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Strange]]:
    torch.manual_seed(0)
    net, batch = Net(), Strange(torch.randn(8, 4) / (0 if bad else 1))
    optimizer, others = torch.optim.SGD(net.parameters(), lr=0.1), hostile()

    def step() -> Strange:
        assert others
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        return batch

    return net, optimizer, step


def watched(watch: Any, step: Callable[[], Any]) -> None:
    with watch:
        for _ in range(3):
            step()


def loss(model: nn.Module, batch: Strange) -> torch.Tensor:
    return model(batch).square().mean()


def failed(net: nn.Module) -> BaseException:
    others = hostile()
    try:
        net.a(torch.ones(2, 3)) if others else None
    except RuntimeError as error:
        return error
    raise AssertionError


def diagnosed(net: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    def train(callback: Callable[..., None]) -> None:
        for number in range(3):
            step()
            callback(number, 1.0)

    nbdebug.diagnose(train, model=net, optimizer=optimizer, progress=False)


TOOLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "trace": lambda net, optimizer, step: nbdebug.nan_trace(step, model=net, optimizer=optimizer, strategy="trace"),
    "replay": lambda net, optimizer, step: nbdebug.nan_trace(step, model=net, optimizer=optimizer, strategy="replay"),
    "bisect": lambda net, optimizer, step: nbdebug.nan_trace(step, model=net, optimizer=optimizer, strategy="bisect"),
    "guard": lambda net, optimizer, step: watched(nbdebug.guard(net, optimizer, on_trip="record"), step),
    "grad_watch": lambda net, optimizer, step: watched(nbdebug.grad_watch(net, optimizer), step),
    "mem": lambda net, optimizer, step: nbdebug.mem(step, model=net, optimizer=optimizer, progress=False),
    "diagnose": diagnosed,
    "preflight": lambda net, optimizer, step: nbdebug.preflight(net, [step()] * 4, loss, optimizer=optimizer),
    "precision": lambda net, optimizer, step: nbdebug.precision(net, step(), loss, optimizer=optimizer, progress=False),
    "fit": lambda net, optimizer, step: nbdebug.fit(
        net, step().x, lambda net, x: loss(net, Strange(x)), optimizer=optimizer
    ),
    "step_through": lambda net, optimizer, step: nbdebug.step_through(net, step(), loss, optimizer=optimizer).finish(),
    "stop_at": lambda net, optimizer, step: watched(nbdebug.stop_at(net, "a", when=lambda step: False), step),
    "check_notebook": lambda net, optimizer, step: nbdebug.check_notebook(
        names={"net": net, "step": step, **hostile()}
    ),
    "free": lambda net, optimizer, step: nbdebug.free(),
    "explain": lambda net, optimizer, step: nbdebug.explain(failed(net)),
}


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("tool", TOOLS)
def test_objects_that_raise_whatever_they_are_asked(tool: str, bad: bool) -> None:
    TOOLS[tool](*training(bad))


@pytest.mark.parametrize("strategy", ["trace", "replay"])
def test_a_traced_step_leaves_no_tensors_to_the_garbage_collector(strategy: str) -> None:
    model = nn.Linear(4, 2)
    optimizer, x = torch.optim.Adam(model.parameters()), torch.ones(2, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    nbdebug.nan_trace(step, model=model, optimizer=optimizer, strategy=strategy)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        nbdebug.nan_trace(step, model=model, optimizer=optimizer, strategy=strategy)
        gc.collect()
        assert not [thing for thing in gc.garbage if issubclass(type(thing), torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_what_a_function_of_the_graph_holds_can_die_after_mem() -> None:
    def graph() -> tuple[torch.Tensor, weakref.ref[nn.Module]]:
        net = nn.Linear(2, 2)

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return 2 * gradient * net.weight.sum()

        return Twice.apply(net(torch.ones(2))).sum(), weakref.ref(net)

    loss, net = graph()
    nbdebug.mem(names={"loss": loss})
    nbdebug.mem(lambda: None, model=nn.Linear(2, 2), names={"loss": loss}, progress=False)
    del loss
    gc.collect()
    gc.collect()  # the class goes after its instances
    assert net() is None


def test_diagnose_leaves_random_numbers_and_models_that_only_the_loop_knows_as_they_were() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    average, scaler = copy.deepcopy(net), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))

    def train(callback: Callable[..., None]) -> None:
        for number in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), net.parameters()):
                    mean.lerp_(weight, 0.1)
            callback(number, loss)

    tensors = [*net.parameters(), *average.parameters()]
    before, random, scale = [t.clone() for t in tensors], torch.get_rng_state(), scaler.state_dict()
    nbdebug.diagnose(train, model=net, optimizer=optimizer, progress=False)
    assert all(map(torch.equal, before, tensors)) and scaler.state_dict() == scale
    assert torch.equal(random, torch.get_rng_state())


def test_a_module_that_can_not_be_compared_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(*_: Any) -> Any:
        raise KeyError("name")

    monkeypatch.setattr(stale_code, "_stale_module", strange)
    monkeypatch.setattr(stale_code, "_old_references", strange)
    notes = stale_code.stale_modules({}, stale_code.CellHistory({}, {}), 0.0)[1]
    assert not notes or "it could not be compared (KeyError: 'name')" in notes[0]


SAVES = """
import copy, io, pickle
import torch, nbdebug
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler("cpu")
train_loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,))), batch_size=8)
def train():
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    states = [thing.state_dict() for thing in (model, optimizer, scheduler, scaler)]
    for thing in (*states, model, optimizer, scaler, train_loader):
        torch.save(thing, io.BytesIO())
        copy.deepcopy(thing)
        pickle.dumps(thing)
    return loss
"""


@pytest.mark.parametrize(
    "cells",
    [
        ("%%diagnose\ntrain()",),
        ("%%nan_trace\ntrain()",),
        ("%nan_trace train()",),
        ("%%bottleneck\ntrain()",),
        ("%mem train()",),
        ("%guard on", "train()", "%guard off"),
        ("%grad_watch on", "train()", "%grad_watch off"),
        ("%bottleneck --watch", "train()", "%bottleneck --watch off"),
        ("%monitor on", "train()", "%monitor off"),
    ],
    ids=lambda cells: cells[0].split("\n")[0],
)
def test_what_is_watched_can_be_saved_and_copied(cells: tuple[str, ...]) -> None:
    with started(SAVES) as book:
        for cell in cells:
            ran = book.run(cell)
            assert ran.error is None, ran.shown
        assert "step" not in vars(book.shell.user_ns["scheduler"])
