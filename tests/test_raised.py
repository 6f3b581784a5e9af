"""Where the traceback of an error from inside a hook ends: at the user's own line."""

from __future__ import annotations

import traceback

from nbdebug.interrupts import ShownAtUsersLine
from tests.shell import started

SETUP = """
import torch
from nbdebug.interrupts import ShownAtUsersLine

class Stopped(ShownAtUsersLine, RuntimeError):
    pass

weight = torch.nn.Parameter(torch.ones(2))
opt = torch.optim.SGD([weight])
space = {"__name__": "nbdebug.watching", "Stopped": Stopped}
exec("def hook(opt, args, kwargs): raise Stopped('step 3 is not finite')", space)
opt.register_step_pre_hook(space["hook"])

def train():
    opt.step()
"""


def test_torchs_frames_and_ours_are_not_shown_behind_it() -> None:
    with started(SETUP) as notebook:
        done = notebook.run("x = 1\ntrain()")
        again = notebook.run("%tb")
    for printed in (done.printed, again.printed):
        assert "----> 2 train()" in printed and "opt.step()" in printed
        assert "torch/optim" not in printed and "hook" not in printed and "hidden" not in printed
        assert printed.rstrip().endswith("Stopped: step 3 is not finite")
    assert [frame.name for frame in traceback.extract_tb(done.error.__traceback__)][-1] == "train"


def test_a_mode_that_the_user_chose_is_kept() -> None:
    with started(SETUP) as notebook:
        notebook.run("%xmode Minimal")
        assert notebook.run("train()").printed.strip() == "Stopped: step 3 is not finite"


def test_the_users_own_code_behind_torch_is_shown() -> None:
    with started(SETUP) as notebook:
        printed = notebook.run(
            "def closure():\n    raise Stopped('here')\nopt._optimizer_step_pre_hooks.clear()\nopt.step(closure)"
        ).printed
    assert "torch/optim" in printed and "raise Stopped('here')" in printed


def test_without_a_notebook_it_is_a_plain_error() -> None:
    try:
        raise ShownAtUsersLine("plain")
    except ShownAtUsersLine as error:
        assert "raise ShownAtUsersLine" in "".join(error._render_traceback_())
        assert "".join(error._render_traceback_()).rstrip().endswith("plain")
