"""The step runs as it would have where it was asked for: what PyTorch keeps for each thread goes with it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nbdebug.tools.stepper.step_through import step_through
from tests.stepper.models import batch, model

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="outside")


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Any:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def variable() -> Any:
    token = VARIABLE.set("inside")
    try:
        yield
    finally:
        VARIABLE.reset(token)


def packs() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda packed: packed[1])


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            (torch.eye(2) @ torch.eye(2)).dtype,
        ),
    ),
    "autocast of another dtype, without cache": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
    ),
    "autocast of a device that is not here": (
        lambda: torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext(),
        lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    ),
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, lambda: (torch.is_inference_mode_enabled(), torch.ones(1).is_inference())),
    "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "default device": (default_device, lambda: (torch.get_default_device().type, torch.ones(1).device.type)),
    "default dtype": (default_dtype, lambda: torch.ones(1).dtype),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "attention": (
        lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "saved tensors": (packs, lambda: torch._C._autograd._top_saved_tensors_default_hooks(False) is not None),
    "context variables": (variable, VARIABLE.get),
    "threads": (contextlib.nullcontext, torch.get_num_threads),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_the_callers_state(state: str, inside: bool) -> None:
    if state == "saved tensors" and not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("torch 2.6 can't read the default hooks on saved tensors")
    enter, read = STATES[state]
    seen = []
    net = nn.Sequential(nn.Identity())
    with enter() if inside else contextlib.nullcontext():
        wanted = read()
        stepper = step_through(net, (torch.ones(2),), lambda m, b: (m(b[0]), seen.append(read()))[0])
        assert read() == wanted  # nor is the caller's own touched
        stepper.into()
    stepper.finish()  # the caller has left the context: the step has not
    assert seen == [wanted] and stepper.error is None


@pytest.mark.parametrize("mode", [Functions, Ops])
def test_modes_see_the_step_and_nothing_of_what_is_measured(mode: type) -> None:
    def seen(step: Callable[[Any, Any, Any], None]) -> list[str]:
        net, (x, y) = model(), batch()
        with mode() as active:
            step(net, x, y)
        return active.seen

    def plain(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(net(x), y).backward()

    def stepped(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        stepper = step_through(net, (x, y), lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
        while not stepper.done:
            stepper.into()

    assert seen(stepped) == seen(plain)


def test_bits_under_autocast_are_those_of_a_plain_step() -> None:
    x, y = batch()
    losses = []
    for stepped in (False, True):
        net = model()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            if stepped:
                stepper = step_through(net, (x, y), nn.MSELoss(), restore=False)
                stepper.run_to("1.1")
        if stepped:
            stepper.finish()
            losses.append((stepper.result, [p.grad for p in net.parameters()]))
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
            losses.append((loss.detach(), [p.grad for p in net.parameters()]))
    (a, first), (b, second) = losses
    assert torch.equal(a, b) and all(map(torch.equal, first, second))


def test_checkpointed_blocks_and_inputs_with_a_graph_of_their_own() -> None:
    from torch.utils.checkpoint import checkpoint

    net = model()
    source = torch.ones(16, 4, requires_grad=True)
    for _ in range(40):  # nodes that bear the numbers of the step's own
        source = source * 1.01
    stepper = step_through(
        net,
        (source, batch()[1]),
        lambda m, b: nn.functional.mse_loss(m[2](checkpoint(m[1], m[0](b[0]), use_reentrant=False)), b[1]),
    )
    places = []
    while not stepper.done:
        stepper.into()
        places.append(str(stepper.at))
    assert stepper.error is None
    back = [p.split("`")[1] for p in places if p.startswith("after the backward of `")]
    assert back == ["2", "1.1.drop", "1.1.up", "1.1.norm", "1.1", "1.0.drop", "1.0.up", "1.0.norm", "1.0", "1", "0"]
    assert len([p for p in places if p.startswith("before `1.0.up`")]) == 1  # not again when it is computed again
