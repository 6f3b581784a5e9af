"""What is held now: every owner by its name, every storage once, and nothing kept by the look itself."""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbdebug.tools.memory.facts import HeldMemory, Holding
from nbdebug.tools.memory.inventory import held_memory
from nbdebug.tools.memory.mem import held_report

ROWS = 1031
"""A length that nothing else in this process has."""


def owners(held: HeldMemory) -> dict[str, Holding]:
    return {holding.name: holding for holding in held.holdings}


def ours(held: HeldMemory, count: int) -> list[tuple[str, str]]:
    """(kind, name) of what holds so many bytes."""
    return [(holding.kind, holding.name) for holding in held.holdings if holding.bytes == count]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, ROWS), nn.BatchNorm1d(ROWS))
        self.head = nn.Linear(ROWS, 1)
        self.cache = {"k": torch.zeros(ROWS, 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_parameters_gradients_state_and_buffers_by_the_users_names() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    held = held_memory({"net": net}, {"opt": optimizer}, {"net": net, "opt": optimizer})
    found = owners(held)
    assert found["net.body.0.weight"].kind == "parameter" and found["net.body.0.weight"].bytes == ROWS * 8 * 4
    assert found["net.body.0.weight"].shape == (ROWS, 8) and found["net.body.0.weight"].dtype == "float32"
    assert found["net.body.0.weight.grad"].kind == "gradient"
    assert found["net.body.1.running_mean"].kind == "buffer"
    assert found["opt.state[net.body.0.weight]['exp_avg_sq']"].kind == "optimizer state"
    assert (found["net.cache['k']"].kind, found["net.cache['k']"].bytes) == ("variable", ROWS * 12)


def test_variables_by_their_paths_and_each_storage_once() -> None:
    base = torch.zeros(ROWS, 5)
    names = {
        "history": [{"loss": torch.zeros(ROWS)}, (torch.zeros(ROWS, 2),)],
        "base": base,
        "view": base[3:],
        "wide": torch.zeros(ROWS, 1).expand(ROWS, 7),
        "table": numpy.zeros((ROWS, 9)),
    }
    held = held_memory({}, {}, names)
    found = owners(held)
    assert found["history[0]['loss']"].bytes == ROWS * 4 and found["history[1][0]"].bytes == ROWS * 8
    assert found["base"].bytes == ROWS * 20 and found["base"].also[0] == "view" and "view" not in found
    assert found["wide"].bytes == ROWS * 4, "an expanded tensor has what it was made of"
    assert found["table"].bytes == ROWS * 72 and found["table"].dtype == "numpy float64"
    assert sum(h.storages for h in held.holdings) == held.storages


def test_the_owner_is_the_first_in_the_order_of_kinds() -> None:
    net = nn.Linear(ROWS, 2)
    tied = nn.Linear(ROWS, 2)
    tied.weight = net.weight
    both = nn.ModuleList([net, tied])
    found = owners(held_memory({"both": both}, {}, {"weight": net.weight, "both": both, "trainer": [both]}))
    assert found["both.0.weight"].kind == "parameter" and "weight" in found["both.0.weight"].also
    assert "both.1.weight" in found["both.0.weight"].also and "weight" not in found


def test_a_model_in_an_object_has_parameters_too() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net = nn.Linear(ROWS, 2)
            self.best = {k: v.clone() for k, v in self.net.state_dict().items()}

    found = owners(held_memory({}, {}, {"trainer": Trainer()}))
    assert found["trainer.net.weight"].kind == "parameter" and found["trainer.best['weight']"].kind == "variable"


def test_a_tensor_at_the_end_of_a_data_set_has_its_name() -> None:
    records: list[Any] = [{"label": n} for n in range(25_000)]
    records.append(torch.zeros(ROWS, 53))
    assert ours(held_memory({}, {}, {"records": records}), ROWS * 212) == [("variable", "records[25000]")]


def test_closures_caches_and_hooks() -> None:
    def recording() -> Callable[..., None]:
        seen = [torch.zeros(ROWS, 11)]
        return lambda module, args, out: seen.append(out)

    @functools.cache
    def encoded(number: int) -> torch.Tensor:
        return torch.zeros(ROWS, number)

    net = nn.Sequential(nn.Linear(4, 4))
    net[0].register_forward_hook(recording())
    encoded(13)
    held = held_memory({"net": net}, {}, {"net": net, "step": recording(), "encoded": encoded})
    assert ("closure", "seen[0] in the closure of `step`") in ours(held, ROWS * 44)
    assert ("closure", "seen[0] in the hook `<lambda>` of net.0") in ours(held, ROWS * 44)
    assert ours(held, ROWS * 52) == [("variable", "the cache[13] of `encoded`")]


def test_a_traceback_that_is_kept() -> None:
    def step(rows: int) -> None:
        activations = torch.zeros(rows, 17)
        raise ValueError(len(activations))

    errors = []
    try:
        step(ROWS)
    except ValueError as error:
        errors.append(error)
    line = step.__code__.co_firstlineno + 2
    held = held_memory({}, {}, {"errors": errors})
    assert ours(held, ROWS * 68) == [("traceback", f"activations in step, test_holding.py, line {line}")]
    assert owners(held)[ours(held, ROWS * 68)[0][1]].where.line == line


def test_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        batch = torch.zeros(ROWS, 19)
        raise ValueError(len(batch))

    try:
        step()
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    report = held_report(names={})
    row = next(row for row in report.tables[0].rows if row[2] == ROWS * 76)
    assert row[:2] == ["sys.last_value", "traceback"]


def test_outputs_of_a_notebook() -> None:
    shown = torch.zeros(ROWS, 23)
    names = {"Out": {7: shown}, "_oh": {}, "_7": shown, "_": shown}
    del shown
    names["_oh"] = names["Out"]
    assert ours(held_memory({}, {}, names), ROWS * 92) == [("cell output", "Out[7]")]


def test_the_tensor_that_keeps_a_graph_is_named() -> None:
    net = nn.Sequential(nn.Linear(ROWS, 29), nn.Sigmoid(), nn.Linear(29, 1))
    history = [{"loss": net(torch.randn(5 + n, ROWS)).mean()} for n in range(2)]
    names = {"history": history, "net": net}
    held = held_memory({"net": net}, {}, names)
    for number, kept in enumerate(owners(held)[f"graph of `history[{n}]['loss']`"] for n in range(2)):
        rows = 5 + number
        assert kept.kind == "graph" and rows * ROWS * 4 + rows * 29 * 4 <= kept.bytes < rows * ROWS * 5
    table = held_report(net, None, names).tables[0].rows
    assert any(row[0] == "graphs kept by history" and row[1] == "graph" for row in table)


def test_nothing_is_unpacked_and_nothing_recomputed() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append("forward")
        return x.sigmoid().exp()

    def unpacked(kept: torch.Tensor) -> torch.Tensor:
        calls.append("unpack")
        return kept

    x = torch.randn(ROWS, 31, requires_grad=True)
    out = checkpoint(block, x * 2, use_reentrant=False).sum()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpacked):
        packed = x.exp().sum()
    calls.clear()
    held = held_memory({}, {}, {"x": x, "out": out, "packed": packed})
    assert calls == []
    graphs = {h.name: h.bytes for h in held.holdings if h.kind == "graph"}
    assert ROWS * 31 * 4 <= graphs["graph of `out`"] < ROWS * 31 * 5, "the input of the block"
    assert graphs["graph of `packed`"] >= ROWS * 31 * 4
    out.backward()
    packed.backward()
    assert "unpack" in calls and "forward" in calls


def test_a_gradient_that_python_has_not_seen_and_leaves_of_no_model() -> None:
    latent = torch.zeros(ROWS, 37, requires_grad=True)
    (latent * 2).sum().backward()
    names = {"latent": latent}
    assert ("gradient", "latent.grad") in ours(held_memory({}, {}, names), ROWS * 37 * 4)


def test_parts_of_sparse_tensors_and_of_wrappers_and_no_data_at_all() -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float64)

        def __init__(self, inner: torch.Tensor) -> None:
            self.__dict__["payload"] = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, *rest: Any) -> Any:
            raise AssertionError(f"{func} ran")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state"
        csr = torch.eye(ROWS).to_sparse_csr()
    names = {
        "sparse": torch.eye(ROWS).to_sparse(),
        "csr": csr,
        "wrapped": Wrapped(torch.zeros(ROWS, 41)),
        "meta": torch.zeros(ROWS, 43, device="meta"),
    }
    held = held_memory({}, {}, names)
    found = owners(held)
    assert found["sparse"].bytes == ROWS * (16 + 4) and found["sparse"].storages == 2
    assert found["csr"].bytes >= ROWS * (8 + 4) + (ROWS + 1) * 8 and found["csr"].storages == 3
    assert found["wrapped.payload"].bytes == ROWS * 41 * 4
    assert "meta" not in found and "wrapped" not in found


def test_what_no_name_leads_to_is_listed_with_what_holds_it() -> None:
    ring: list[Any] = [torch.zeros(ROWS, 47)]
    ring.append(ring)
    gc.disable()
    del ring
    try:
        held = held_memory({}, {}, {})
    finally:
        gc.enable()
    (name,) = [name for kind, name in ours(held, ROWS * 47 * 4) if kind == "unknown"]
    assert name == "held by a list of 2, in itself (`gc.collect()` frees it)"


def test_nothing_is_kept_by_the_look_or_the_report() -> None:
    net = nn.Linear(ROWS, 2)
    loss = net(torch.randn(3, ROWS)).sum()
    refs = [weakref.ref(net), weakref.ref(loss), weakref.ref(net.weight)]
    names = {"net": net, "loss": loss, "history": [loss]}
    report, held = held_report(names=names), held_memory({"net": net}, {}, names)
    names.clear()
    del net, loss
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert report.facts["storages"] >= 4 <= held.storages


def test_files_with_very_many_objects_take_no_name_from_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = types.ModuleType("crowd_of_objects")
    crowd.__file__ = __file__
    crowd.records = [[{"n": n}] for n in range(400)]
    monkeypatch.setitem(sys.modules, "crowd_of_objects", crowd)
    monkeypatch.setattr("nbdebug.tools.memory.owners.MOST", 200)
    shown, history = torch.zeros(ROWS, 37), [torch.zeros(ROWS, 1, requires_grad=True).exp().sum()]
    names = {"Out": {7: shown}, "history": history}
    del shown
    held = held_memory({}, {}, names)
    assert ours(held, ROWS * 37 * 4) == [("cell output", "Out[7]")]
    assert "graph of `history[0]`" in owners(held)
