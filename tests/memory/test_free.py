"""free(): what is kept is told by name and byte, what is chosen goes, and nothing else does."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbdebug import Report
from nbdebug.tools.memory.free import free
from nbdebug.tools.memory.reachability import ReachabilityWalk

ROWS = 2048
MIB = 1 << 20


def listed(names: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kept["name"]: kept for kept in free(names=names).facts["notebook"]}


def freed(report: Report) -> int:
    return int(report.facts["freed"]["bytes"])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))


def test_a_healthy_script_keeps_nothing(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    losses, outputs = [], []
    for _ in range(3):
        loss = model(torch.randn(8, 64)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hidden = [model[0](torch.ones(ROWS, 64))]
    hidden += [model[1](hidden[0])]
    hidden += [model[2](hidden[1])]  # the outputs of one forward: a list of graphs, and no fault
    names = {
        "model": model,
        "optimizer": optimizer,
        "losses": losses,
        "loss": loss,
        "hidden": hidden,
        "out": {"logits": hidden[2], "loss": hidden[2].mean()},
        "outputs": outputs,
    }
    report = free(names=names)
    assert report.facts["notebook"] == [] and report.headline.startswith("There is nothing to free")
    assert "nothing to free" in free("graphs", names=names).headline
    assert hidden[2].grad_fn is not None


def test_losses_with_their_graph_are_detached_only_when_chosen(model: nn.Module) -> None:
    losses = [model(torch.randn(ROWS, 64)).mean() for _ in range(4)]
    values = [loss.item() for loss in losses]
    names = {"model": model, "history": {"train": losses}}
    kept = listed(names)["history"]
    assert kept["how"] == "loss" and kept["items"] == 4
    each = ROWS * (64 + 256) * 4  # the input, and what relu has kept
    assert kept["bytes"] == 4 * each
    assert all(loss.grad_fn is not None for loss in losses)
    assert freed(free("history", names=names)) == 4 * each
    assert [loss.item() for loss in losses] == values and all(loss.grad_fn is None for loss in losses)


def test_after_a_backward_the_nodes_remain_and_are_told(model: nn.Module) -> None:
    losses = []
    for _ in range(3):
        losses.append(model(torch.randn(ROWS, 64)).mean())
        losses[-1].backward()
    kept = listed({"model": model, "losses": losses})["losses"]
    assert kept["bytes"] < 1000 and kept["nodes"] > 10
    free("graphs", names={"losses": losses})
    assert listed({"model": model, "losses": losses}) == {}


def test_exceptions_in_a_list_keep_their_frames() -> None:
    attempts: list[Exception] = []

    def attempt(rows: int) -> None:
        activations = torch.zeros(rows, 256)
        met.append(weakref.ref(activations))
        raise RuntimeError(f"{rows} rows do not fit")

    met: list[weakref.ref[torch.Tensor]] = []
    for rows in (1000, 2000):
        try:
            attempt(rows)
        except RuntimeError as error:
            attempts.append(error)
    kept = listed({"attempts": attempts})["attempts"]
    assert kept["bytes"] == 3000 * 1024 and kept["items"] == 2
    assert kept["where"]["text"].startswith("raise RuntimeError")
    assert freed(free("attempts", names={"attempts": attempts})) == 3000 * 1024
    assert [ref() for ref in met] == [None, None] and str(attempts[0]) == "1000 rows do not fit"


def test_what_sys_keeps_is_found_without_a_shell() -> None:
    def fail() -> None:
        big = numpy.zeros((ROWS, 256))
        raise ValueError(len(big))

    try:
        fail()
    except ValueError as error:
        sys.last_type, sys.last_value, sys.last_traceback = ValueError, error, error.__traceback__
    kept = listed({})["sys.last_value"]
    assert kept["bytes"] == ROWS * 256 * 8 and "sys.last_traceback" in kept["also"]
    assert freed(free("traceback", names={})) == ROWS * 256 * 8
    assert not hasattr(sys, "last_value") and not hasattr(sys, "last_type")


class Probe:
    def __init__(self) -> None:
        self.seen = torch.zeros(ROWS, 64)

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        pass


def test_hooks_of_a_cell_that_ran_twice(model: nn.Module) -> None:
    for _ in range(2):

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            pass

        model[0].register_forward_hook(hook)
        probe = Probe()
        model[1].register_forward_hook(probe.note)
    for name in ("a", "b"):
        model[2].register_forward_hook(lambda module, args, output, name=name: None)
    kept = listed({"model": model, "probe": probe})
    assert set(kept) == {"model.0", "model.1"}, "two of different names are meant to be there"
    assert kept["model.1"]["bytes"] == ROWS * 256 and "`note`, 2 times" in kept["model.1"]["what"]
    report = free("hooks", names={"model": model, "probe": probe})
    assert "2 duplicate hooks removed" in report.headline and freed(report) == ROWS * 256
    assert [len(layer._forward_hooks) for layer in model] == [1, 1, 2]
    assert list(model[1]._forward_hooks.values()) == [probe.note]


def test_outputs_of_a_stand_in_for_a_shell() -> None:
    names: dict[str, Any] = {"Out": {3: torch.zeros(ROWS, 64), 4: "text"}}
    names["_"] = names["_3"] = names["Out"][3]
    kept = free(names=names).facts["notebook"]
    assert [(k["name"], k["bytes"], k["also"]) for k in kept] == [("Out[3]", ROWS * 256, ("_", "_3"))]
    assert freed(free("outputs", names=names)) == ROWS * 256
    assert names["Out"] == {4: "text"} and "_3" not in names


def test_words_are_checked() -> None:
    with pytest.raises(ValueError, match=r"traceback, outputs, .*got 'everything'"):
        free("everything", names={})
    with pytest.raises(TypeError, match="del name"):
        free(torch.zeros(1), names={})  # type: ignore[arg-type]


def test_the_cache_is_given_back_with_numbers() -> None:
    report = free("cache", names={})
    assert "the system got" in report.headline.lower()
    assert [row[0] for row in report.tables[0].rows][-1] == "this process"


def test_a_walk_runs_nothing_of_the_users() -> None:
    class Touchy:
        __slots__ = ("held",)

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            raise AssertionError("opened")

        __len__ = __bool__ = __repr__ = __hash__ = __eq__ = __iter__  # type: ignore[assignment]

    touchy = Touchy()
    touchy.held = torch.zeros(100)
    ran = []

    def block(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.exp().sin()

    out = checkpoint(block, torch.ones(50, requires_grad=True), use_reentrant=False)
    assert sum(b.bytes for b in ReachabilityWalk()([touchy, touchy])) == 400 and listed({"touchy": touchy}) == {}
    ReachabilityWalk()(out)
    assert ran == [1], "a checkpointed block is not computed again to look at it"


def test_memory_is_counted_once_and_seen_to_go() -> None:
    base = torch.zeros(1000)
    array = numpy.zeros(500)
    blocks = ReachabilityWalk()([base, base[10:], base.view(10, 100), array, array[3:]])
    assert sorted(b.bytes for b in blocks) == [4000, 4000] and not any(b.gone() for b in blocks)
    del base, array
    gc.collect()
    assert all(b.gone() for b in blocks)
