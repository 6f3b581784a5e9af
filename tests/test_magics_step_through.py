"""%step_through in a real shell: what it takes, what it gives, what it refuses, how it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shell import Notebook, started
from tests.stepper.models import threads

SETUP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
batch = (torch.randn(16, 4), torch.randn(16, 1))
criterion = nn.MSELoss()
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book
        book.run("%step_through --abandon")


def test_it_takes_what_is_among_the_variables_and_waits_while_other_cells_run(notebook: Notebook) -> None:
    done = notebook.run("step = %step_through")
    assert done.error is None and done.shown == ""
    step = notebook.shell.user_ns["step"]
    for taken in ("%step_through", "model `net` (Sequential)", "batch `batch`", "loss `criterion`"):
        assert taken in str(step)
    shown = notebook.run("step.run_to('2')\nstep.inputs[0].shape")
    assert shown.error is None and shown.result == (16, 8)
    assert "Before `2` (Linear)" in notebook.run("step").shown and "In [2]" not in str(step.at)
    assert notebook.run("net[0].weight.sum() > 0").error is None
    assert notebook.run("step.finish().ok").result is True and threads() == []


def test_it_is_shown_where_it_comes_last_and_silenced(notebook: Notebook) -> None:
    assert "Before the model (Sequential): all finite." in notebook.run("%step_through").shown
    assert notebook.run("%step_through;").shown == ""


def test_without_a_loss_and_with_a_loader(notebook: Notebook) -> None:
    notebook.run("del criterion; loader = [batch]; del batch")
    shown = notebook.run("%step_through --forward").shown
    assert "batch `next(iter(loader))`" in shown and "no loss" in shown
    notebook.run("def loss(m, b):\n    return m(b[0]).sum()")
    step = notebook.run("%step_through --loss-fn loss --keep --model net").result
    step.finish()
    assert notebook.run("net[0].weight.grad is not None").result is True


def test_the_users_error_points_at_the_users_cell(notebook: Notebook) -> None:
    notebook.run("def loss(m, b):\n    return m(b[0]) @ b[1]")
    notebook.run("step = %step_through --loss-fn loss")
    shown = notebook.run("step.finish()").shown
    assert "The step failed: RuntimeError" in shown and "In [3], line 2" in shown and "return m(b[0]) @ b[1]" in shown


def test_it_ends_on_request_and_with_the_extension(notebook: Notebook) -> None:
    notebook.run("step = %step_through")
    assert threads() and "before the model" in notebook.shell.magics_manager.registry["StepMagics"].active()[0]
    assert "is ended" in notebook.run("%step_through --abandon").shown and threads() == []
    assert "No step waits" in notebook.run("%step_through --abandon").shown
    assert notebook.shell.magics_manager.registry["StepMagics"].active() == []


@pytest.mark.parametrize("off", ["%nbdebug off", "%unload_ext nbdebug"])
def test_off_ends_a_step_that_waits(notebook: Notebook, off: str) -> None:
    notebook.run("step = %step_through")
    assert threads()
    notebook.run(off)
    assert threads() == [] and notebook.shell.user_ns["step"].abandoned
    notebook.run("%load_ext nbdebug")


@pytest.mark.parametrize(
    "line, said",
    [
        ("%step_through --loss-fn nothing", "nothing"),
        ("%step_through --batch rows", "'rows'"),
        ("%step_through --model other", "other"),
        ("%step_through --loss-fn batch", "got tuple"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(notebook: Notebook, line: str, said: str) -> None:
    done = notebook.run(line)
    assert type(done.error).__name__ == "UsageError" and said in str(done.error)


def test_help_and_two_models(notebook: Notebook) -> None:
    assert "waits at each layer" in notebook.run("%step_through -h").printed
    notebook.run("other = nn.Linear(1, 1)")
    assert "`net` and `other`" in str(notebook.run("%step_through").error)
