"""Where nobody can type: what is recorded, of which moment, and that nothing is left and nothing changed."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from nbdebug.finding import Report
from nbdebug.stop.eager import _Held
from nbdebug.stop.handle import LayerStop, active, stop_at
from tests.stop.nets import Block, Net, hooks, made, place, step


def rows(report: Report, number: int = 0) -> dict[str, list]:
    """One table's rows by name."""
    return {row[0]: row[1:] for row in report.facts["tables"][number]["rows"]}


def nothing_left(net: nn.Module) -> bool:
    return not hooks(net) and sys.getprofile() is None and sys.gettrace() in (None, BEFORE) and not active()


BEFORE = sys.gettrace()  # that of a coverage run


def test_a_layer_of_ones_own_is_recorded_at_its_return_with_its_locals() -> None:
    net, x = made()
    stop = stop_at(net, "layers.1")
    step(net, x)
    (report,) = stop.records
    assert stop.hits == 1 and not stop.active and nothing_left(net)
    assert report.facts["headline"] == (
        f"Stopped at `layers.1` (Block) at the return of its forward, in step 0: {place('return result')}.")
    assert list(rows(report)) == ["inp", "out"] and list(rows(report, 1)) == ["hidden"]  # x and result are those
    assert rows(report)["out"][:3] == ["(8, 4)", "float32", "cpu"] and rows(report)["out"][-1] == 0
    for text in (str(report), report._repr_mimebundle_()["text/html"]):
        assert "hidden" in text and "training goes on" in text and "stop_at(model" in text
    assert "hidden" in report.frame("Locals of Block.forward")["name"].tolist()


def test_a_layer_of_torchs_own_is_recorded_at_the_line_that_calls_it() -> None:
    net, x = made()
    stop = stop_at(net, "layers.2.fc", when="out.numel() == 32")
    step(net, x)
    facts = stop.records[0].facts
    assert "after its forward" in facts["headline"]
    assert facts["stop"]["place"] == place("hidden = self.fc(x)") and facts["stop"]["type"] == "Linear"


def test_numbers_are_those_of_the_finite_elements() -> None:
    net = nn.Sequential(nn.Identity())
    stop = stop_at(net, "0", once=False)
    net(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    net(torch.full((2,), float("nan")))
    net(torch.tensor([[1, 2], [3, 6]]))
    net(torch.zeros(0))
    found = [rows(report)["inp"][3:] for report in stop.records]
    assert found == [[1.0, 3.0, 2.0, 2], [None, None, None, 2], [1, 6, 3.0, 0], [None, None, None, None]]


def test_conditions_pick_the_moment() -> None:
    net, x = made()
    with stop_at(net, "layers.*", when=lambda module, step: isinstance(module, Block) and step == 1) as early, stop_at(
            net, "layers.0", when="hidden.min() < 0 and step == 2") as local:
        for _ in range(4):
            step(net, x)
    assert [r.facts["stop"]["step"] for r in early.records + local.records] == [1, 2]
    assert early.records[0].facts["stop"]["layer"] == "layers.0" and nothing_left(net)


def test_every_hit_counts_where_it_is_not_once(capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    stop = stop_at(net, "Dropout", once=False)
    step(net, x)
    step(net, x)
    assert stop.hits == len(stop.records) == 6 and stop.active and sys.getprofile() is None
    assert capsys.readouterr().err.count("Stopped at") == 3 and "not shown" in str(stop.records[2])
    stop.clear()
    assert nothing_left(net)


def test_a_pattern_of_layer_and_parts_stops_at_the_first_that_is_reached() -> None:
    net, x = made()
    stop = stop_at(net, "layers.1*")
    step(net, x)
    assert [r.facts["stop"]["layer"] for r in stop.records] == ["layers.1"]


def test_a_condition_that_fails_says_so_once_and_stops_nothing(capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    stop = stop_at(net, "layers.*", when="out.no_such_thing > 1", once=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor does a strict filter end the training
        step(net, x)
    said = capsys.readouterr().err
    assert said.count("no_such_thing") == 2 and "AttributeError" in said and "said once" in said
    assert not stop.hits and stop.active


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_training_with_stops_that_never_hold_is_the_same_to_the_last_bit(phase: str) -> None:
    ends = []
    for watched in (False, True):
        net, x = made()
        optimizer = torch.optim.Adam(net.parameters())
        stop = stop_at(net, "*", when="(grad if False else out).sum() > 1e30" if phase == "backward" else
                       "out.sum() > 1e30", phase=phase) if watched else None
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
    assert stop.records[0].facts["headline"].endswith(f"{place('loss.backward()')}.")


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
        begun = x + 1
        raise self.error


@pytest.mark.parametrize("error", [ValueError("torn"), KeyboardInterrupt()])
@pytest.mark.parametrize("when, hits", [(None, 1), ("out.sum() > 0", 0), ("begun.sum() > 0", 0)])
def test_an_exception_passes_and_leaves_nothing(error: BaseException, when: str | None, hits: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Failing(error))
    with stop_at(net, "1", when=when) as stop, contextlib.suppress(ValueError, KeyboardInterrupt):
        step(net, torch.randn(2, 4))
    assert stop.hits == hits and not stop.fault and not stop.condition.told and nothing_left(net)
    if hits:
        assert "exception left" in stop.records[0].facts["headline"] and "begun" in rows(stop.records[0], 1)


def test_a_layer_of_torchs_own_that_fails_is_recorded_with_its_input() -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    stop = stop_at(net, "0")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        net(torch.randn(2, 5))
    assert "exception left" in stop.records[0].facts["headline"] and rows(stop.records[0])["inp"][0] == "(2, 5)"


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
    assert _Held.count == 0 and nothing_left(net)


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
    assert stop.hits == 1 and "before its forward" in stop.records[0].facts["headline"]
    assert "another profiler" in capsys.readouterr().err


def test_a_recursive_layer_and_one_that_takes_words() -> None:
    class Down(nn.Module):
        def forward(self, x: torch.Tensor, *, depth: int, mask: torch.Tensor | None = None) -> tuple:
            return (x,) if not depth else (self(x + 1, depth=depth - 1)[0] * 2, None)

    net = Down()
    stop = stop_at(net, "", when="depth == 1 and out.dim() == 1", once=False)
    net(torch.zeros(3), depth=2)
    (report,) = stop.records
    assert rows(report)["inp[0]"][3:] == [1.0, 1.0, 1.0, 0] and rows(report)["out"][3] == 4.0 and isinstance(
        stop, LayerStop)


def test_a_fault_of_our_own_ends_the_stop_and_not_the_training(monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    monkeypatch.setattr("nbdebug.stop.reaching.own_code", lambda module: 1 / 0)
    stop = stop_at(net, "layers.0")
    assert step(net, x).isfinite() and "ZeroDivisionError" in stop.fault and nothing_left(net)
    assert "fault of its own" in capsys.readouterr().err and "fault" in repr(stop)
    assert isinstance(net, Net)
