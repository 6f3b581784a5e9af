"""Training goes on as if no stop had been: bit for bit, through exceptions, checkpoints, compilers, threads and copies;
and nothing is left."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nbdebug.tools.breakpoints.stop_at import LayerStop, _EagerSwitch, active, stop_at
from tests.stop.nets import Block, Net, made, nothing_left, place, rows, step


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_training_with_stops_that_never_hold_is_the_same_to_the_last_bit(phase: str) -> None:
    ends = []
    for watched in (False, True):
        net, x = made()
        optimizer = torch.optim.Adam(net.parameters())
        stop = (
            stop_at(
                net,
                "*",
                when="(grad if False else out).sum() > 1e30" if phase == "backward" else "out.sum() > 1e30",
                phase=phase,
            )
            if watched
            else None
        )
        for _ in range(4):
            optimizer.zero_grad()
            step(net, x)
            optimizer.step()
        assert stop is None or not stop.hits and not stop.fault and stop.active
        ends.append([p.detach().clone() for p in net.parameters()] + [torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_gradients_are_those_of_the_output_and_inputs_are_asked_aside() -> None:
    net, x = made()
    asked = []
    stop = stop_at(net, "layers.1", phase="backward", when=lambda grad, out, inp: bool(asked.append((grad, out, inp))))
    seen = []
    net.layers[1].register_forward_hook(lambda module, given, out: seen.append(out) or out.retain_grad())
    step(net, x)
    ((grad, out, inp),) = asked
    assert torch.equal(grad, seen[0].grad) and torch.equal(out, seen[0]) and inp.shape == (8, 4) and not stop.hits
    assert not out.requires_grad, "a detached one keeps no graph"


@pytest.mark.parametrize("pattern", ["head.0", "head.1", "layers.2.drop"])
def test_backward_of_what_is_changed_in_place_or_made_in_place(pattern: str) -> None:
    net, x = made()
    stop = stop_at(net, pattern, phase="backward")
    step(net, x)
    assert stop.hits == 1 and not stop.fault and nothing_left(net)
    assert list(rows(stop.records[0])) == ["grad", "inp", "out"]
    assert stop.records[0].headline.endswith(f"{place('loss.backward()')}.")


def test_a_graph_that_nobody_runs_backward_through_is_not_kept() -> None:
    net, x = made()
    stop = stop_at(net, "*", phase="backward", when="False", once=False)

    class Sentinel:
        pass

    out = net(x.requires_grad_())
    sentinel = Sentinel()
    out.grad_fn.metadata["sentinel"] = sentinel
    gone = weakref.ref(sentinel)
    del sentinel
    gc.collect()
    gc.disable()
    try:
        del out
        assert gone() is None
    finally:
        gc.enable()
    stop.clear()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_stops_once_a_step(phase: str, reentrant: bool) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    net = Saved()
    stop = stop_at(net, "block", phase=phase, once=False)
    step(net, torch.randn(8, 4, requires_grad=True))
    assert stop.hits == 1 and stop.step == 0


class Failing(nn.Module):
    """Raises after it has made something."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = x + 1  # noqa: F841 (a local to look at)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("torn"), KeyboardInterrupt()])
@pytest.mark.parametrize("when, hits", [(None, 1), ("out.sum() > 0", 0), ("begun.sum() > 0", 0)])
def test_an_exception_passes_and_leaves_nothing(error: BaseException, when: str | None, hits: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Failing(error))
    with stop_at(net, "1", when=when) as stop, contextlib.suppress(ValueError, KeyboardInterrupt):
        step(net, torch.randn(2, 4))
    assert stop.hits == hits and not stop.fault and not stop.condition.warned and nothing_left(net)
    if hits:
        assert "exception left" in stop.records[0].headline and "begun" in rows(stop.records[0], 1)


def test_a_layer_of_torchs_own_that_fails_is_recorded_with_its_input() -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    stop = stop_at(net, "0")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        net(torch.randn(2, 5))
    assert "exception left" in stop.records[0].headline and rows(stop.records[0])["inp"][0] == "(2, 5)"


@pytest.mark.parametrize("way", ["wrapper", "in place"])
def test_a_compiled_model_runs_uncompiled_while_a_stop_waits(way: str) -> None:
    net, x = made()
    compiled = torch.compile(net, backend="eager") if way == "wrapper" else net
    if way == "in place":
        net.compile(backend="eager")
    compiled(x)
    stop = stop_at(compiled, "layers.1", when="hidden.numel() > 0", once=False)
    assert "uncompiled" in repr(stop)
    compiled(x)
    assert stop.hits == 1 and stop.names == ("layers.1",)
    stop.clear()
    assert _EagerSwitch.count == 0 and nothing_left(net)


def test_a_forward_that_is_compiled_by_itself_and_a_compiler_that_reads_along() -> None:
    class Own(nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = x + 1
            return inside * 2

    net, x = Own(), torch.randn(4)
    net(x)
    with stop_at(net, "", when="inside.dim() == 1") as stop:
        net(x)
    assert stop.hits == 1 and _EagerSwitch.count == 0
    net, x = made()
    stop = stop_at(net, "*", when="out.sum() > 1e30")
    torch.compile(net, backend="eager", fullgraph=True)(x)  # the hooks are nothing that could break its graph
    assert not stop.fault


def test_a_function_in_the_place_of_a_forward_and_a_condition_that_calls_the_model() -> None:
    net, x = made()
    net.layers[0].forward = lambda x: x + 1
    stop = stop_at(net, "layers.0", when="module(inp).sum() == out.sum() and x.dim() == 2", once=False)
    net(x)
    net(x)
    assert stop.hits == 2 and stop.step == 1 and "place" in stop.records[0].facts["stop"]


def test_copies_have_no_stop_and_a_stop_does_not_keep_the_model() -> None:
    net, x = made()
    stop = stop_at(net, "*", once=False)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        twin(x)
    assert not stop.hits
    gone = weakref.ref(net)
    del net, twin
    gc.collect()
    assert gone() is None and not stop.active and stop not in active()


def test_another_thread_is_recorded_and_steps_on_fake_tensors_are_no_steps() -> None:
    net, x = made()
    stop = stop_at(net, "layers.0", once=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        net(x)
    assert not stop.hits
    thread = threading.Thread(target=net, args=(x,))
    thread.start()
    thread.join()
    assert stop.hits == 1 and sys.getprofile() is None


def test_with_another_profiler_on_it_stops_at_the_calling_line_and_says_so(capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    stop = stop_at(net, "layers.0")

    def mine(*event: object) -> None:
        pass

    sys.setprofile(mine)
    try:
        net(x)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert stop.hits == 1 and "before its forward" in stop.records[0].headline
    assert "another profiler" in capsys.readouterr().err


def test_a_recursive_layer_and_one_that_takes_words() -> None:
    class Down(nn.Module):
        def forward(self, x: torch.Tensor, *, depth: int, mask: torch.Tensor | None = None) -> tuple:
            return (x,) if not depth else (self(x + 1, depth=depth - 1)[0] * 2, None)

    net = Down()
    stop = stop_at(net, "", when="depth == 1 and out.dim() == 1", once=False)
    net(torch.zeros(3), depth=2)
    (report,) = stop.records
    assert (
        rows(report)["inp[0]"][3:] == [1.0, 1.0, 1.0, 0]
        and rows(report)["out"][3] == 4.0
        and isinstance(stop, LayerStop)
    )


def test_a_tracer_that_runs_meanwhile_sees_none_of_the_ops_of_a_condition_or_a_record() -> None:
    class Counted(TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    net, x = made()
    stop = stop_at(net, "layers.1", when="out.isfinite().sum() == 32")
    with Counted() as counted:
        net(x)
    assert stop.hits == 1 and "aten.addmm.default" in counted.seen and "aten.mean.default" not in counted.seen
    assert not [op for op in counted.seen if "isfinite" in op or "eq" in op]


def test_a_fault_of_our_own_ends_the_stop_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    net, x = made()
    monkeypatch.setattr("nbdebug.tools.breakpoints.hooks.own_code", lambda module: 1 / 0)
    stop = stop_at(net, "layers.0")
    assert step(net, x).isfinite() and "ZeroDivisionError" in stop.fault and nothing_left(net)
    assert "fault of its own" in capsys.readouterr().err and "fault" in repr(stop)
    assert isinstance(net, Net)
