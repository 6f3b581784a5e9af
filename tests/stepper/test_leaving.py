"""Nothing is left behind: however a stepper ends, model, random numbers, hooks and threads are as before."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from nbdebug.tools.stepper import run as turns
from nbdebug.tools.stepper.step_through import step_through
from tests.shell import in_this_checkout
from tests.stepper.models import Photograph, batch, model, threads


def moved(stepper) -> None:
    """To somewhere in the middle: buffers have changed by then, and in backward gradients have."""
    stepper.run_to("1.1.drop")
    stepper.run_to("1.0.up")
    assert stepper.at.phase == "backward"
    stepper.into()


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("end", ["abandon", "close", "forgotten", "another", "finish"])
def test_however_it_ends(end: str, restore: bool) -> None:
    net = model()
    net(batch()[0]).sum().backward()  # gradients and running means that are to stay
    torch.manual_seed(3)
    before = Photograph(net)
    stepper = step_through(net, batch(), nn.MSELoss(), restore=restore)
    moved(stepper)
    assert before.snapshot.differences() and threads()
    if end == "forgotten":
        del stepper
        gc.collect()
    elif end == "another":
        other = step_through(model(), batch())
        assert "before this one was abandoned" in str(other) and stepper.abandoned
        other.abandon()
    else:
        getattr(stepper, end)()
    left = before.left()
    if end == "finish" and not restore:
        assert "2.bias.grad" in " ".join(left) or left  # as a plain step leaves it
        assert not [name for name in left if "hook" in name] and not threads()
        return
    assert [name for name in left if "random numbers" not in name] == []
    torch.manual_seed(3)
    assert before.left() == []


def test_what_the_caller_draws_meanwhile_stays_the_callers() -> None:
    net = model()
    torch.manual_seed(7)
    wanted = torch.rand(6)
    torch.manual_seed(7)
    stepper = step_through(net, batch(), nn.MSELoss())
    drawn = []
    for how in ("into", "next", "next"):
        drawn.append(torch.rand(1))
        getattr(stepper, how)()
    drawn.append(torch.rand(1))
    stepper.abandon()
    drawn += [torch.rand(1), torch.rand(1)]
    assert torch.equal(torch.cat(drawn), wanted)


def test_flags_and_attributes_that_the_step_sets() -> None:
    class Caching(nn.Sequential):
        def forward(self, x):
            self.eval()
            self.cache = super().forward(x)
            return self.cache

    net = Caching(nn.Linear(4, 4), nn.Dropout())
    stepper = step_through(net, batch()[0])
    stepper.run_to("1")
    assert not net.training
    stepper.finish()
    assert net.training and net[1].training and not hasattr(net, "cache")


def tensors() -> list[torch.Tensor]:
    """All that there are; asked by their type, because some objects of torch warn when they are asked themselves."""
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def test_no_tensor_of_the_step_outlives_it() -> None:
    net = model()
    gc.collect()
    before = {id(tensor) for tensor in tensors()}
    given = batch()
    stepper = step_through(net, given, nn.MSELoss())
    stepper.finish()
    gc.collect()
    new = [tensor for tensor in tensors() if id(tensor) not in before]
    assert len(new) <= len(given) + 1 and all(tensor.grad_fn is None for tensor in new)


def test_a_second_stepper_ends_the_first_one_only_while_it_waits() -> None:
    first = step_through(model(), batch())
    first.finish()
    assert not first.abandoned and "abandoned" not in str(step_through(model(), batch()).abandon().notes)


class Stubborn(nn.Module):
    """Catches whatever comes, and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        while True:
            try:
                return self.step(x)
            except BaseException:
                continue

    def step(self, x):
        while True:
            try:  # noqa: SIM105
                self.layer(x)
            except BaseException:
                pass


def test_code_that_catches_everything_does_not_keep_the_thread() -> None:
    net = Stubborn()
    before = Photograph(net)
    stepper = step_through(net, batch()[0])
    stepper.run_to("layer")
    stepper.abandon()
    assert stepper.abandoned and before.left() == [] and sys.gettrace() is None


class Looping(nn.Linear):
    def forward(self, x):
        while True:
            pass


def test_ctrl_c_gives_the_notebook_back_and_the_step_can_still_be_ended(monkeypatch) -> None:
    monkeypatch.setattr(turns, "TIMEOUT", 0.2)
    net = nn.Sequential(nn.Linear(4, 4), Looping(4, 4))
    before = Photograph(net)
    stepper = step_through(net, batch()[0])
    others = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test before may have left its own
    try:
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            stepper.finish()
    finally:
        signal.signal(signal.SIGINT, others if others is not None else signal.SIG_DFL)
    assert "running" in str(stepper) and stepper.at is None and not stepper.done
    began = time.monotonic()
    stepper.abandon()
    assert stepper.abandoned and before.left() == [] and time.monotonic() - began < 60


def test_a_step_that_cannot_be_interrupted_is_told(monkeypatch) -> None:
    gate, entered = threading.Event(), threading.Event()

    class Blocking(nn.Linear):
        def forward(self, x):
            entered.set()
            gate.wait()
            return x

    monkeypatch.setattr(turns, "TIMEOUT", 0.1)
    net = nn.Sequential(Blocking(4, 4))
    before = Photograph(net)
    stepper = step_through(net, batch()[0])
    clicked = threading.Thread(target=stepper.finish)
    clicked.start()
    assert entered.wait(30)
    with pytest.raises(RuntimeError, match=r"test_leaving\.py, line"):
        stepper.abandon()
    gate.set()
    clicked.join()
    while not stepper.done:
        time.sleep(0.01)
    assert stepper.abandoned and before.left() == []


def test_copies_that_the_step_makes_of_the_model() -> None:
    copies = []

    def averaging(m, b):
        copies.append(copy.deepcopy(m))
        return nn.functional.mse_loss(m(b[0]), b[1]) + copies[0](b[0]).mean()

    stepper = step_through(model(), batch(), averaging)
    stepper.run_to("2")
    stepper.finish()
    assert stepper.error is None and copies[0](batch()[0]).shape == (16, 1)


def test_its_own_fault_ends_the_stops_and_not_the_step(monkeypatch) -> None:
    from nbdebug.tools.stepper import events as numbers

    stepper = step_through(model(), batch(), nn.MSELoss())
    monkeypatch.setattr(numbers, "value_range", lambda tensors: 1 / 0)
    stepper.into()
    assert stepper.done and stepper.error is None and stepper.result.item() > 0
    assert "could not follow the step any further (ZeroDivisionError" in str(stepper)


def test_a_process_ends_while_a_step_waits() -> None:
    code = (
        "import torch; from nbdebug.tools.stepper.step_through import step_through\n"
        "s = step_through(torch.nn.Linear(2, 2), torch.ones(1, 2)); print(s.at)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=in_this_checkout(), check=False
    )
    assert done.returncode == 0 and "before the model" in done.stdout and not done.stderr
