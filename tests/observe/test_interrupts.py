"""Ctrl-C at random moments of every tool: it arrives at once, whatever runs then, and nothing is left half done.

`python -m tests.observe.test_interrupts 50` tries so many moments of each tool, and prints a table.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.interrupts import interruptible, uninterrupted
from tests.nan.leftovers import assert_nothing_is_left, hooks_of

LATEST = 10.0
"""Seconds after which Ctrl-C comes too late; a step takes some milliseconds, on a loaded machine a second."""


class Training:
    """Small, with buffers, and an optimizer whose update is one op."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), *(nn.Linear(32, 32) for _ in range(12)), nn.Linear(32, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self.x, self.y = torch.randn(8, 16), torch.randint(4, (8,))

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int = 30) -> None:
        for _ in range(steps):
            self.step()

    def weights(self) -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())


def guarded(training: Training) -> None:
    with nbdebug.guard(training.model, training.optimizer):
        training.train()


def skipping(training: Training) -> None:
    """Every step is bad, so that it is rolled back."""
    training.x = training.x / 0
    with nbdebug.guard(training.model, training.optimizer, on_trip="skip"):
        training.train()


def watched(training: Training) -> None:
    with nbdebug.grad_watch(training.model, training.optimizer, ratios_every=2, activations_every=2):
        training.train()


def stepped_through(training: Training) -> None:
    stepper = nbdebug.step_through(training.model, (training.x, training.y), nn.CrossEntropyLoss())
    try:
        stepper.finish()
    finally:
        try:
            stepper.abandon()
        finally:  # once more: Ctrl-C may come as the first call begins
            stepper.abandon()


def stopped(training: Training) -> None:
    with nbdebug.stop_at(training.model, "0", when=lambda step: step < 0):
        training.train()


def diagnosed(training: Training) -> None:
    def train(callback: Callable[..., Any]) -> None:
        for number in range(20):
            callback(number, training.step())

    nbdebug.diagnose(train, model=training.model, optimizer=training.optimizer, progress=False)


def traced(training: Training, strategy: str) -> None:
    nbdebug.nan_trace(training.step, model=training.model, optimizer=training.optimizer, max_steps=6, strategy=strategy)


def located(training: Training, strategy: str) -> None:
    training.x = training.x / 0
    nbdebug.nan_trace(
        training.step, model=training.model, optimizer=training.optimizer, strategy=strategy, restore=True
    )


TOOLS: dict[str, Callable[[Training], Any]] = {
    "bare": lambda t: t.train(),
    "nan_trace, trace": functools.partial(traced, strategy="trace"),
    "nan_trace, replay": functools.partial(traced, strategy="replay"),
    "nan_trace, trace, located": functools.partial(located, strategy="trace"),
    "nan_trace, replay, located": functools.partial(located, strategy="replay"),
    "guard": guarded,
    "guard, skip": skipping,
    "grad_watch": watched,
    "mem": lambda t: nbdebug.mem(t.step, steps=3, model=t.model, progress=False),
    "diagnose": diagnosed,
    "preflight": lambda t: nbdebug.preflight(
        t.model, [(t.x, t.y)] * 4, nn.CrossEntropyLoss(), optimizer=t.optimizer, seconds=2
    ),
    "precision": lambda t: nbdebug.precision(t.model, (t.x, t.y), nn.CrossEntropyLoss(), progress=False),
    "step_through": stepped_through,
    "stop_at": stopped,
}
ANSWERS = ("precision",)
"""Tools that answer with what they have by then."""
RESTORED = ("located", "diagnose", "preflight", "precision", "skip", "step_through")
"""Tools after which, and after Ctrl-C in which, the weights are those of before."""


def interrupt(tool: str, moment: float) -> str:
    """Run it, press Ctrl-C after so many seconds: "arrived", "over" (it was faster), or what was wrong."""
    training = Training()
    before, hook, handler = training.weights(), sys.unraisablehook, signal.getsignal(signal.SIGINT)
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(moment, press)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            timer.start()
            TOOLS[tool](training)
            outcome = "over" if not sent or time.monotonic() - sent[0] < LATEST and tool in ANSWERS else "lost"
            timer.cancel()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            waited = time.monotonic() - (sent or [0])[0]
            outcome = "arrived" if waited < LATEST else f"after {waited:.1f} s"
    if outcome in ("arrived", "over"):
        if sys.unraisablehook is not hook or signal.getsignal(signal.SIGINT) is not handler:
            return "a hook or a handler is left"
        if hooks_of(training.model) or any(v for k, v in vars(training.optimizer).items() if k.endswith("_hooks")):
            return "hooks are left"
        try:
            assert_nothing_is_left()
        except KeyboardInterrupt:
            pass
        except AssertionError as left:
            return f"left behind: {left}"
        if tool.endswith(RESTORED) and training.weights() != before:
            return "weights are changed"
    return outcome


def outcomes(tool: str, times: int, seed: int = 0) -> dict[str, int]:
    """How often each outcome came, at so many random moments."""
    interrupt(tool, 1000.0)  # what it imports takes longer than what it does
    began = time.monotonic()
    interrupt(tool, 1000.0)
    length = time.monotonic() - began
    draw, counts = random.Random(seed), dict[str, int]()
    for _ in range(times):
        outcome = interrupt(tool, draw.uniform(0, length))
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


@pytest.mark.usefixtures("no_gc_callbacks")
@pytest.mark.parametrize("tool", TOOLS)
def test_ctrl_c_arrives(tool: str) -> None:
    counts = outcomes(tool, 4)
    assert set(counts) <= {"arrived", "over"}, counts


def test_ctrl_c_as_the_end_of_a_tool_begins_waits_until_it_is_done() -> None:
    """Python looks for signals as a function begins, before its first line: the end of a context would be left out."""
    before, ended = signal.getsignal(signal.SIGINT), []
    end = uninterrupted(lambda: ended.append(True))

    @interruptible
    def tool() -> None:
        press = signal.getsignal(signal.SIGINT)
        assert callable(press)
        press(signal.SIGINT, types.SimpleNamespace(f_code=end.__code__))  # as Python calls it there
        assert not ended
        end()
        ended.append(False)

    with pytest.raises(KeyboardInterrupt):
        tool()
    assert ended == [True] and signal.getsignal(signal.SIGINT) is before


if __name__ == "__main__":
    for name in sys.argv[2:] or TOOLS:
        print(f"{name:28} {outcomes(name, int(sys.argv[1]))}", flush=True)
