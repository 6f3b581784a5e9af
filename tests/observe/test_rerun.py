"""One run of a step, watched and changed at its module calls."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbdebug.observe.rerun import Rerun, RerunChange, cut_gradient, has_nonfinite, map_tensors, repair


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def rerun(model, step, **more):
    return Rerun({"": model}, lambda: dict(model.named_parameters()), **more).run(step)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1))

    def forward(self, x):
        return self.b(self.a(x))


def test_calls_are_kept_in_the_order_in_which_they_begin_and_end():
    model = Nested()
    x = torch.ones(5, 3)
    run = rerun(model, lambda: model(x).sum().backward())
    assert [c.module for c in run.calls] == [model, model.a, model.b, model.b[0], model.b[1]]
    assert [c.module for c in run.ended] == [model.a, model.b[0], model.b[1], model.b, model]
    assert [c.end for c in run.ended] == [0, 1, 2, 3, 4] and [c.batch for c in run.calls] == [5] * 5
    assert [c.module for c in run.ended[1].stack] == [model, model.b, model.b[0]]
    assert [e.what for e in run.events] == ["loss", "gradients", "loss", "parameters"]
    assert run.first_bad_event is None and run.events[0].ended == 5 and run.events[0].running is None


def test_events_say_what_is_bad_and_when():
    model = Nested()

    def step():
        model(torch.ones(2, 3)).sum().backward()
        (model(torch.ones(2, 3)) * math.inf).sum().backward()
        return {"loss": torch.tensor(1.0), "logits": torch.tensor([math.nan])}

    run = rerun(model, step)
    assert [e.what for e in run.events] == ["loss", "gradients", "loss", "gradients", "loss", "parameters"]
    assert [bool(e.bad) for e in run.events] == [False, False, True, True, False, False]
    assert run.first_bad_event == 2 and "a.weight" in run.events[3].bad


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_backward_computes_again_do_not_count(reentrant):
    model = Nested()
    x = torch.ones(5, 3, requires_grad=True)
    run = rerun(model, lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward())
    assert len(run.calls) == 5 and [e.what for e in run.events] == ["loss", "gradients", "loss", "parameters"]


def test_a_call_that_raises_and_is_caught_leaves_the_order_right():
    class Picky(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.picky, self.next = Picky(), nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.picky(x)
            except ValueError:
                return self.next(x)

    model = Tries()
    run = rerun(model, lambda: model(torch.ones(1, 3)).sum())
    assert run.error is None and run.calls[2].parent is run.calls[0] and run.ended[-1].module is model


def test_an_exception_is_kept_and_no_hook_stays():
    model, error = Nested(), ZeroDivisionError()

    def step():
        model(torch.ones(1, 3))
        raise error

    engine = torch.autograd._engine_run_backward
    run = rerun(model, step)
    assert run.error is error and not run.events and torch.autograd._engine_run_backward is engine
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_on_the_users_own_tensors_are_removed():
    class Looks(RerunChange):
        def enter(self, call, args, kwargs):
            self.handles.append(args[0].register_hook(lambda g: None))

    model, x = nn.Linear(3, 1), torch.ones(2, 3, requires_grad=True)
    rerun(model, lambda: model(x).sum().backward(), change=Looks())
    assert not x._backward_hooks


def test_a_run_keeps_no_tensor_alive():
    model, kept = Nested(), []

    def step():
        loss = model(torch.ones(2, 3)).sum()
        kept.append(weakref.ref(loss))
        loss.backward()
        return loss

    run = rerun(model, step, proof=True)
    gc.collect()
    assert run.events and kept[0]() is None


def test_fingerprints_are_taken_only_for_a_proof():
    model, x = Nested(), torch.ones(2, 3)
    proofs = [rerun(model, lambda: model(x).sum().backward() or model.zero_grad(), proof=True) for _ in range(2)]
    assert proofs[0].inputs == proofs[1].inputs and len(proofs[0].inputs) == 1
    assert [e.prints for e in proofs[0].events] == [e.prints for e in proofs[1].events]
    assert set(proofs[0].events[1].prints) == {"a.weight", "a.bias", "b.1.weight", "b.1.bias"}
    assert not rerun(model, lambda: model(x).sum()).inputs


def test_compiled_modules_are_watched_inside():
    model = Nested()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 3))
    run = rerun(model, lambda: compiled(torch.ones(2, 3)).sum())
    assert [c.module for c in run.calls] == [model, model.a, model.b, model.b[0], model.b[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_mended_tensors_are_finite_and_elsewhere_the_same(dtype):
    x = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 6.0]).to(dtype)
    new = repair(x)
    assert not has_nonfinite(new) and new.dtype is dtype and new[[0, 2, 5]].equal(x[[0, 2, 5]]) and has_nonfinite(x)
    assert set(new.tolist()) <= {1, 3, 6}
    good = x[:1]
    assert repair(good) is good


def test_where_nothing_is_finite_numbers_come_that_any_function_takes():
    for x in (torch.full((3, 4), math.nan), torch.tensor(math.inf)):
        new = repair(x)
        for function in (torch.log, torch.sqrt, torch.acos, torch.reciprocal, lambda t: torch.log1p(-t), torch.atanh):
            assert not has_nonfinite(function(new))
    assert (repair(torch.full((3, 4), math.nan)).var(-1) > 0).all()


def test_no_gradient_flows_through_what_was_mended():
    x = torch.tensor([1.0, math.nan, 2.0], requires_grad=True)
    (repair(x) * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [3, 0, 5]


def test_a_cut_ends_backward_and_tells_what_arrives():
    x, seen = torch.ones(3, requires_grad=True), []
    y = cut_gradient(x * 2, seen.append)
    torch.relu_(y)  # code after it may change it in place
    (y * 5).sum().backward()
    assert x.grad is None and seen[0].tolist() == [5, 5, 5] and y.tolist() == [2, 2, 2]
    whole, frozen = torch.arange(3), torch.ones(2)
    assert cut_gradient(whole, seen.append) is whole and cut_gradient(frozen, seen.append) is frozen


@dataclasses.dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: list


Named = collections.namedtuple("Named", "a b")


def test_nested_outputs_are_changed_and_untouched_ones_stay_the_same_objects():
    x = torch.ones(2)
    tree = {
        "t": (x, [x, 3]),
        "n": Named(x, "b"),
        "d": Pair(x, [x]),
        "o": collections.OrderedDict(k=x),
        "s": x.max(0),
        "z": None,
    }
    kept = copy.copy(tree)
    new = map_tensors(tree, lambda t: t + 1)
    assert new["t"][0].tolist() == [2, 2] and new["t"][1][0].tolist() == [2, 2] and new["t"][1][1] == 3
    assert new["n"].a.tolist() == [2, 2] and new["n"].b == "b" and isinstance(new["n"], Named)
    assert new["d"].left.tolist() == [2, 2] and new["d"].right[0].tolist() == [2, 2] and new["s"].values == 2
    assert type(new["o"]) is collections.OrderedDict and new["o"]["k"].tolist() == [2, 2]
    assert tree == kept and x.tolist() == [1, 1] and map_tensors(tree, lambda t: t) is tree


def test_outputs_of_transformers_are_changed():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.BaseModelOutput(last_hidden_state=torch.ones(1), hidden_states=(torch.ones(1), torch.ones(1)))
    new = map_tensors(given, lambda t: t * 2)
    assert type(new) is type(given) and new.last_hidden_state == 2 and new["hidden_states"][1] == 2 and new[0] == 2
    assert given.last_hidden_state == 1
