"""A snapshot puts everything back, bit for bit."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import bits, fingerprint
from tests.observe.photograph import network, photograph, prove

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_gradients_are_restored_into_the_same_tensor():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    model.bias.grad = None
    held, value = model.weight.grad, model.weight.grad.clone()
    snapshot = Snapshot.take(model)
    model(torch.randn(4, 3)).square().sum().backward()
    assert "model.bias.grad" in snapshot.differences() and "model.weight.grad" in snapshot.differences()
    model.zero_grad(set_to_none=True)
    snapshot.restore()
    assert model.weight.grad is held and torch.equal(held, value) and model.bias.grad is None


def test_gradients_zeroed_in_place_come_back():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    prove(lambda: (model.zero_grad(set_to_none=False), torch.rand(1)), model)


def test_nan_payloads_and_minus_zero_are_bits_too():
    model = nn.Module()
    odd = torch.tensor([0x7FC00001, -0x400000, -0x80000000, 1], dtype=torch.int32)
    model.register_buffer("kept", odd.view(torch.float32))
    before = bits(model.kept).tolist()
    snapshot = Snapshot.take(model)
    bits(model.kept)[0] += 1  # another NaN
    assert snapshot.differences() == ["model.kept"]
    snapshot.restore()
    assert bits(model.kept).tolist() == before
    model.kept[2] = 0.0  # was -0.0
    assert snapshot.differences()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_every_dtype_goes_back(dtype):
    model = nn.Module()
    model.register_buffer("kept", torch.randn(5, 3).to(dtype))
    model.register_buffer("scalar", torch.tensor(1.0).to(dtype), persistent=False)
    model.register_buffer("turned", torch.randn(3, 5).to(dtype).t())
    model.register_buffer("empty", torch.zeros(0, 2).to(dtype))

    def step():
        for buffer in model.buffers():
            buffer.copy_(torch.zeros_like(buffer))
        model.kept = torch.rand(2).to(dtype)

    prove(step, model)


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model["head"](model["embed"](torch.tensor([1, 2]))).square().sum().backward()
        optimizer.step()

    prove(step, model, optimizer)
    assert model["head"].weight is model["embed"].weight


def test_a_tie_that_the_step_cuts_is_tied_again():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    snapshot = Snapshot.take(model)
    model["b"].weight = nn.Parameter(torch.zeros(2, 2))
    assert snapshot.differences() == ["model.b.weight"]
    snapshot.restore()
    assert model["b"].weight is model["a"].weight


def test_aliasing_buffers_are_copied_once_and_stay_aliases():
    model = nn.Module()
    model.register_buffer("whole", torch.arange(12.0))
    model.register_buffer("part", model.whole[3:7])
    model.register_buffer("wide", model.whole[:1].expand(4))
    before = photograph(model)
    snapshot = Snapshot.take(model)
    model.part.mul_(2)
    model.part.data = torch.zeros(2)
    snapshot.restore()
    assert photograph(model) == before
    model.whole[3] = 99
    assert model.part[0] == 99


def test_replaced_data_goes_back_to_the_same_memory():
    model = nn.Linear(3, 2)
    place, value = model.weight.data_ptr(), model.weight.detach().clone()
    snapshot = Snapshot.take(model)
    model.weight.data = torch.zeros(5, 5)
    model.weight.grad = torch.ones(5, 5)
    snapshot.restore()
    assert model.weight.data_ptr() == place and torch.equal(model.weight, value) and model.weight.grad is None


def test_parameters_made_half_in_the_step_are_float_again():
    model = network()
    prove(lambda: (model.half(), torch.rand(1)), model)


def test_what_the_step_adds_is_gone_and_what_it_takes_away_is_back():
    model = network()

    def step():
        model.add_module("extra", nn.Linear(2, 2))
        model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
        model[0].register_buffer("seen", torch.zeros(1), persistent=False)
        model[0].note = "here"
        model[1]._buffers.pop("num_batches_tracked", None)
        model[4].weight.requires_grad_(False)
        model.eval()

    before = set(vars(model[0]))
    prove(step, model, steps=1)
    snapshot = Snapshot.take(copy.deepcopy(model))
    assert set(vars(model[0])) == before | {"note"} and not snapshot.differences()


def test_module_order_comes_back():
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))
    first = model._modules.pop("0")
    model._modules["0"] = first
    snapshot, names = Snapshot.take(model), list(model._modules)
    model._modules.move_to_end("1") if hasattr(model._modules, "move_to_end") else model._modules.update(
        {"1": model._modules.pop("1")}
    )
    assert snapshot.differences() == ["model (its order)"]
    snapshot.restore()
    assert list(model._modules) == names


def test_plain_attributes_go_back_too():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.losses, self.seen, self.recent = 0, [], {"a"}, deque([1, 2], maxlen=2)
            self.cache = {"k": torch.zeros(2)}
            self.noise = torch.Generator().manual_seed(3)

    model = Counting()
    held = model.cache["k"]
    snapshot = Snapshot.take({"net": model})
    model.calls += 1
    model.losses.append(0.5)
    model.seen.add("b")
    model.recent.append(3)
    model.cache["k"].add_(1)
    model.cache["v"] = torch.ones(1)
    torch.rand(1, generator=model.noise)
    assert set(snapshot.differences()) == {
        "net.calls",
        "net.losses[0]",
        "net.seen.b",
        "net.recent[0]",
        "net.recent[1]",
        "net.cache.k",
        "net.cache.v",
        "net.noise",
    }
    snapshot.restore()
    assert (model.calls, model.losses, model.seen, list(model.recent)) == (0, [], {"a"}, [1, 2])
    assert model.cache == {"k": held} and held.tolist() == [0, 0]
    assert not snapshot.differences()


def test_a_buffer_that_got_into_the_graph_is_out_of_it_again():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model.register_buffer("memory", torch.zeros(2))

    def step():
        model.memory.add_(model.weight)
        model.memory.sum().backward()

    snapshot = Snapshot.take(model)
    for _ in range(3):  # without restoring it would be "backward through the graph a second time"
        step()
        assert "model.memory.requires_grad" in snapshot.differences()
        snapshot.restore()
        assert model.memory.is_leaf and not model.memory.requires_grad and model.memory.tolist() == [0, 0]


def test_lazy_modules_are_lazy_again():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    snapshot = Snapshot.take(model)
    results = []
    for _ in range(2):
        results.append(model(torch.ones(4, 5)).sum().item())
        assert type(model[0]) is nn.Linear and "model.0 (its class)" in snapshot.differences()
        snapshot.restore()
        assert type(model[0]) is nn.LazyLinear and model[0].has_uninitialized_params() and not snapshot.differences()
    assert results[0] == results[1]
    assert model(torch.ones(4, 7)).shape == (4, 3)  # still free to take another size


def test_random_numbers_repeat():
    snapshot = Snapshot.take([])
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())
    first = draw()
    assert snapshot.differences() == ["Python's random numbers", "NumPy's random numbers", "torch's random numbers"]
    snapshot.restore()
    assert draw() == first


def test_differences_name_what_a_person_knows():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = Snapshot.take({"": model}, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    found = snapshot.differences()
    assert {"0.weight", "0.weight.grad", "1.running_mean", "optimizer.state[0.weight]"} <= set(found)
    assert "torch's random numbers" in found
    assert len(found) == len(set(found)) and not any("_parameters" in name or "_buffers" in name for name in found)


def test_tensors_made_of_others_go_back():
    model = nn.Module()
    ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    model.register_buffer("ragged", ragged)
    model.register_buffer("rows", torch.randn(3, 3).to_sparse_csr())
    before = [fingerprint(b) for b in model.buffers()]
    snapshot = Snapshot.take(model)
    model.ragged.values().zero_()
    model.rows.values().zero_()
    assert snapshot.differences() == ["model.ragged", "model.rows"]
    snapshot.restore()
    assert [fingerprint(b) for b in model.buffers()] == before


def test_recurrent_and_meta_and_frozen_models():
    lstm = nn.LSTM(2, 3)
    prove(lambda: nn.init.normal_(lstm.weight_hh_l0), lstm)
    meta = nn.Linear(2, 2, device="meta")
    snapshot = Snapshot.take(meta)
    meta.requires_grad_(False)
    snapshot.restore()
    assert not snapshot.differences() and meta.weight.requires_grad


def test_a_snapshot_costs_one_copy_and_keeps_nothing_alive(monkeypatch):
    copied = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda self: copied.append(self.nbytes()) or clone(self))
    model = nn.ModuleDict({"embed": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    snapshot = Snapshot.take(model)
    assert sum(copied) == 50 * 40 * 4
    alive = weakref.ref(model["head"].weight)
    del model, snapshot
    gc.collect()
    assert alive() is None


def test_other_things_are_refused_by_name():
    with pytest.raises(TypeError, match=r"modules, optimizers.*'model'"):
        Snapshot.take(["model"])
