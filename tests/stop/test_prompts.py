"""Stopped for real: ipdb at a kernel's stdin and at a terminal, debugpy over the Debug Adapter Protocol."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from tests.shell import in_this_checkout
from tests.stop.kernel import WAIT, Kernel, kernel

SETUP = """import sys, threading
import torch
from torch import nn
from nbdebug.tools.breakpoints.stop_at import stop_at

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        result = hidden.relu() + x
        return result

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

net, batch = Net(), torch.randn(8, 4)

def train():
    loss = net(batch).pow(2).mean()
    loss.backward()
    return loss

def left():
    held = sum(len(v) for m in net.modules() for k, v in vars(m).items() if k.endswith("_hooks"))
    return f"left: {held} hooks, {sys.gettrace()}, {sys.getprofile()}"
"""


def at(shown: str, line: str) -> int:
    """Where in the output the prompt stands at this line of code. Raises where it never does."""
    found = re.search(r"-+> *\d+ +" + re.escape(line), shown)
    assert found is not None, f"not at {line!r}: {shown}"
    return found.start()


NOTHING = "left: 0 hooks, None, None"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel(SETUP) as started:
        yield started


@pytest.fixture
def debugged(notebook: Kernel) -> Iterator[Kernel]:
    notebook.attach()
    yield notebook
    notebook.debug("disconnect", restart=False, terminateDebuggee=False)


# ipdb


def test_ipdb_stops_at_the_first_line_of_the_layers_own_forward(notebook: Kernel) -> None:
    shown = notebook.run(
        "stop = stop_at(net, 'layers.2')\ntrain(); print(stop, left())",
        ["p x.shape, inp is x, name, step", "n", "p hidden.shape", "u", "c"],
    )
    assert "Stopped at `layers.2` (Block) at the start of its forward, in step 0: In [1], line" in shown
    assert "(torch.Size([8, 4]), True, 'layers.2', 0)" in shown and "inp: float32 (8, 4) on cpu" in shown
    assert at(shown, "hidden = self.fc(x)") < at(shown, "result = hidden") < at(shown, "x = layer(x)")
    assert "1 hit" in shown and NOTHING in shown


def test_ipdb_stops_at_the_return_where_the_condition_asks_for_it_and_steps_on_to_the_users_next_line(
    notebook: Kernel,
) -> None:
    shown = notebook.run(
        "stop = stop_at(net, 'layers.0', when='hidden.numel() == len(out) * 4')\ntrain(); print(left())",
        ["p hidden.shape, out is result", "n", "w", "c"],
    )
    assert "(torch.Size([8, 4]), True)" in shown and NOTHING in shown
    assert at(shown, "return result") < at(shown, "for layer in self.layers")


@pytest.mark.parametrize("more", ["", ", when='out is not None'", ", phase='backward'"])
def test_q_leaves_the_training_past_its_except_exception(notebook: Kernel, more: str) -> None:
    shown = notebook.run(
        f"stop = stop_at(net, 'layers.1'{more})\ntry:\n    train()\nexcept Exception:\n    print('swallowed')", ["q"]
    )
    assert "KeyboardInterrupt: Left at a stop, with q" in shown and "swallowed" not in shown
    assert "site-packages" not in shown and NOTHING in notebook.run("print(left())")


def test_a_layer_of_torchs_own_stops_at_the_users_line_and_leaves_no_name_there(notebook: Kernel) -> None:
    shown = notebook.run(
        "stop, out = stop_at(net.head, '', when='out.numel() == 8'), 7\nnet.head(batch)\n"
        "print(out, [name for name in ('inp', 'layer_out', 'module') if name in globals()], left())",
        ["p out, layer_out.shape, inp.shape", "c"],
    )
    assert at(shown, "net.head(batch)") and "`out` is a variable of yours" in shown
    assert "(7, torch.Size([8, 1]), torch.Size([8, 4]))" in shown and f"7 [] {NOTHING}" in shown


def test_what_is_called_at_the_prompt_stops_nowhere(notebook: Kernel) -> None:
    shown = notebook.run(
        "stop = stop_at(net, 'layers.1', once=False)\ntrain()\ntrain()\nstop.clear(); print(stop, left())",
        ["p net(batch).shape", "c", "p net(batch).shape", "c"],
    )
    assert shown.count("torch.Size([8, 1])") == shown.count("Stopped at") == 2 and "2 hits" in shown


def test_backward_stops_with_the_gradients_at_hand(notebook: Kernel) -> None:
    shown = notebook.run(
        "stop = stop_at(net, 'layers.1', phase='backward')\ntrain(); print(left())",
        ["p grad.shape, out.requires_grad, loss.dim()", "p [g.shape for g in grad_in()]", "n", "c"],
    )
    assert "when its gradient arrives" in shown and "(torch.Size([8, 4]), False, 0)" in shown
    assert "[torch.Size([8, 4])]" in shown and "return loss" in shown and NOTHING in shown


def test_backward_in_a_thread_of_the_engine_asks_as_well(notebook: Kernel) -> None:
    """On a GPU hooks run in a thread of the engine's, while the main thread waits in it: here made by hand."""
    shown = notebook.run(
        """
    class Aside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            thread = threading.Thread(target=inner.backward)
            thread.start()
            thread.join()
            return grad

    stop, inner = stop_at(net, 'layers.1', phase='backward'), net(batch).sum()
    outer = Aside.apply(torch.ones(1, requires_grad=True))
    outer.backward(); print(stop, left())
    """,
        ["p grad.shape, threading.current_thread() is threading.main_thread()", "c"],
    )
    assert "(torch.Size([8, 4]), False)" in shown and "outer.backward()" in shown and "1 hit" in shown


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: hooks run in the thread that calls backward")
def test_backward_on_a_gpu_stops_in_the_line_that_called_it(notebook: Kernel) -> None:
    code = (
        "net.to('cuda'); batch = batch.to('cuda'); stop = stop_at(net, 'layers.1', phase='backward')\n"
        "train(); print(stop, left())"
    )
    shown = notebook.run(code, ["p grad.device.type, loss.dim(), [g.shape for g in grad_in()]", "c"])
    assert at(shown, "loss.backward()") and "('cuda', 0, [torch.Size([8, 4])])" in shown and "1 hit" in shown
    assert NOTHING in shown
    assert "KeyboardInterrupt: Left at a stop" in notebook.run(code, ["q"])
    notebook.run("net.to('cpu'); batch = batch.to('cpu'); torch.cuda.synchronize()")


def test_a_front_end_that_cannot_ask_shows_a_record(notebook: Kernel) -> None:
    shown = notebook.run(
        "stop = stop_at(net, 'layers.1')\ntrain(); print(len(stop.records), left())", allow_stdin=False
    )
    assert "Locals of Block.forward" in shown and "Nobody can type here" in shown and f"1 {NOTHING}" in shown


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_a_plain_script_at_a_terminal_asks_there(tmp_path: object) -> None:
    import pty

    code = (
        SETUP + "\nmain = sys.modules['__main__']\nstop_at(net, 'layers.1')\ntrain()\n"
        "print('END', sys.modules['__main__'] is main, left())"
    )
    script = os.path.join(str(tmp_path), "train.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(code)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**in_this_checkout(), "TERM": "dumb", "IPYTHONDIR": str(tmp_path)},
    )
    os.close(theirs)
    shown, lines, until = "", ["p x.shape, name", "c"], time.monotonic() + WAIT
    while time.monotonic() < until and "left:" not in shown:
        if select.select([ours], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # what a closed terminal reads as
                shown += os.read(ours, 4096).decode(errors="replace")
        if lines and shown.count("ipdb>") > 2 - len(lines):
            os.write(ours, f"{lines.pop(0)}\n".encode())
    process.wait(WAIT)
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "(torch.Size([8, 4]), 'layers.1')" in shown and "hidden = self.fc(x)" in shown
    assert f"END True {NOTHING}" in shown


# debugpy


@pytest.mark.parametrize(
    "asked, line, names, following",
    [
        ("'layers.1'", "hidden = self.fc(x)", {"x", "inp", "module"}, "result = hidden.relu() + x"),
        (
            "'layers.1', when='hidden is not None'",
            "return result",
            {"hidden", "result", "out"},
            "for layer in self.layers:",
        ),
        ("'head'", "return self.head(x)", {"layer", "inp"}, ""),
        ("'layers.1', phase='backward'", "loss.backward()", {"loss", "grad", "inp", "out"}, "return loss"),
    ],
)
def test_debugpy_stops_in_the_users_frame_and_goes_on(
    debugged: Kernel, asked: str, line: str, names: set[str], following: str
) -> None:
    debugged.start(f"stop = stop_at(net, {asked})\ntrain()")
    thread = debugged.event("stopped")["threadId"]
    frame, local = debugged.top(thread)
    assert SETUP.splitlines()[frame["line"] - 1].strip() == line and names <= set(local)
    if following:
        assert debugged.value(frame, "tuple(inp.shape)") == "(8, 4)"
        debugged.debug("next", threadId=thread)
        thread = debugged.event("stopped")["threadId"]
        assert SETUP.splitlines()[debugged.top(thread)[0]["line"] - 1].strip() == following
    debugged.debug("continue", threadId=thread)
    assert "1 hit" in debugged.run("print(stop)") and "0 hooks" in debugged.run("print(left())")
