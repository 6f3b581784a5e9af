"""%nbdebug in a real shell: what it says is on, what was found, and what its buttons do to a training that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from nbdebug import Report
from tests.shell import Notebook, started

SETUP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
x = torch.randn(16, 4)

def step(x=x):
    opt.zero_grad()
    loss = net(x).log().mean() if x is None else net(x).square().mean()
    loss.backward()
    opt.step()
    return loss
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def panel(notebook: Notebook):
    return notebook.shell.magics_manager.magics["line"]["nbdebug"].__self__.state


def tables(notebook: Notebook) -> dict[str, list]:
    report = notebook.run("%nbdebug status").result
    assert isinstance(report, Report) and report.ok
    return {table.title: table.rows for table in report.tables}


def elsewhere(deed) -> None:
    """As ipykernel 7 hears a click while a cell runs: in another thread."""
    thread = threading.Thread(target=deed)
    thread.start()
    thread.join()


def test_alone_it_says_that_nothing_is_on_and_what_can_be_typed(notebook: Notebook) -> None:
    said = notebook.run("%nbdebug").shown
    assert "nothing on, no finding so far" in said and "watches only when you ask for it" in said
    magics = dict(tables(notebook)["What you can type"])
    assert magics["%nan_trace"].startswith("Name the cause of a NaN") and all(magics.values())


def test_what_is_on_stands_in_it_with_its_counts(notebook: Notebook) -> None:
    notebook.run("%guard on\n%grad_watch on\nfor _ in range(3): step()")
    report = notebook.run("%nbdebug status").result
    assert "2 on" in report.headline and sum("3 steps watched" in note for note in report.notes) == 2
    assert report.plot("gradients")["steps seen"] == 3
    assert "<img" in report._repr_mimebundle_()["text/html"]


def test_what_was_found_is_listed_once_however_it_came(notebook: Notebook) -> None:
    notebook.run("%nan_trace net(x).log().mean().backward()")
    notebook.run("again = %nan_trace net(x).log().mean().backward()")
    notebook.run("%guard on")
    notebook.run("with torch.no_grad(): net[0].weight.fill_(float('inf'))\nstep()")
    rows = tables(notebook)["Found so far"]
    assert [row[3] for row in rows].count("nan/log-of-nonpositive") == 2  # at two lines, of two cells
    assert any(row[3].startswith("nan/") and row[0] == "In [6]" for row in rows)
    assert len(rows) == len({tuple(row[1:]) for row in rows})


def test_a_report_that_is_listed_is_not_kept_alive(notebook: Notebook) -> None:
    import gc
    import weakref

    notebook.run("rep = %nan_trace net(x).log().mean().backward()")
    held = weakref.ref(notebook.shell.user_ns["rep"])
    notebook.run("del rep")
    gc.collect()
    assert held() is None and tables(notebook)["Found so far"]


def test_a_traced_step_is_told_by_layer_and_leaves_no_hook(notebook: Notebook) -> None:
    notebook.run("import copy\nbefore, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()")
    notebook.run(
        "plain = step().item(); after = copy.deepcopy(net.state_dict()); net.load_state_dict(before)\n"
        "opt = torch.optim.Adam(net.parameters())"
    )
    panel(notebook).trace()
    assert panel(notebook).message == "Waiting for the next step …"
    notebook.run("traced = step().item()")
    space = notebook.shell.user_ns
    assert space["traced"] == space["plain"]
    assert all(torch.equal(a, b) for a, b in zip(space["after"].values(), space["net"].state_dict().values()))
    rows = {row[0]: row for row in tables(notebook)["The step that was traced, by layer"]}
    assert list(rows) == ["0", "1", "2", "(the model)"]
    out = space["before"]["0.weight"] @ space["x"].T + space["before"]["0.bias"][:, None]
    assert rows["0"][4:7] == pytest.approx([out.min().item(), out.max().item(), out.std(correction=0).item()], rel=1e-4)
    assert rows["1"][7] == 0 and rows["2"][8] > 0
    assert not any(m._forward_hooks for m in space["net"].modules())
    assert "4 layers are finite" in panel(notebook).message


def test_a_traced_step_names_the_first_layer_that_is_not_finite(notebook: Notebook) -> None:
    panel(notebook).trace()
    notebook.run("with torch.no_grad(): net[2].weight.fill_(float('nan'))\nstep()")
    assert "2 is the first layer whose output is not finite" in panel(notebook).message


def test_stop_ends_a_running_cell_after_a_whole_step(notebook: Notebook) -> None:
    notebook.shell.user_ns.update(panel=panel(notebook), elsewhere=elsewhere)
    done = notebook.run("""\
        count = 0
        while True:
            count += 1
            if count == 3:
                elsewhere(panel.stop)
            step()
            whole = count
        """)
    assert type(done.error).__name__ == "TrainingStopped" and isinstance(done.error, KeyboardInterrupt)
    assert "after a whole step" in str(done.error) and notebook.shell.user_ns["count"] == 3
    assert notebook.run("step()").error is None  # once


def test_stop_while_nothing_runs_says_so(notebook: Notebook) -> None:
    panel(notebook).stop()
    assert panel(notebook).message == "No cell is running."
    assert notebook.run("step()").error is None


def test_a_switch_clicked_beside_the_training_waits_for_the_end_of_a_step(notebook: Notebook) -> None:
    notebook.shell.user_ns.update(panel=panel(notebook), elsewhere=elsewhere)
    notebook.run("""\
        for i in range(6):
            if i == 2:
                elsewhere(lambda: panel.switch("grad_watch", True))
                waited = panel.is_on("grad_watch")
            step()
        on = panel.is_on("grad_watch")
        """)
    assert notebook.shell.user_ns["waited"] is False and notebook.shell.user_ns["on"] is True
    assert notebook.run("%grad_watch").result.plot("gradients")["steps seen"] == 3
    panel(notebook).off()
    assert not panel(notebook).is_on("grad_watch") and panel(notebook).message == "Everything is off."


def test_a_switch_without_a_model_waits_for_one(notebook: Notebook) -> None:
    notebook.run("del net, opt")
    panel(notebook).switch("guard", True)
    assert "no model among your variables yet" in panel(notebook).message and panel(notebook).is_on("guard")
    panel(notebook).switch("guard", False)
    assert not panel(notebook).is_on("guard")


def test_free_lets_go_of_the_last_traceback(notebook: Notebook) -> None:
    import gc
    import weakref

    notebook.run(
        "def lost():\n    big = torch.zeros(1000)\n    keep.append(weakref.ref(big))\n    1 / 0\n"
        "import weakref\nkeep = []\nlost()"
    )
    held: weakref.ref = notebook.shell.user_ns["keep"][0]
    assert held() is not None
    panel(notebook).free()
    gc.collect()
    assert held() is None


def test_off_leaves_no_event_behind(notebook: Notebook) -> None:
    events = notebook.shell.events.callbacks
    notebook.run("%nbdebug off")
    assert not [
        c for calls in events.values() for c in calls if type(getattr(c, "__self__", None)).__name__ == "PanelState"
    ]


def test_a_stop_that_came_too_late_does_not_stop_the_next_cell(notebook: Notebook) -> None:
    notebook.shell.user_ns.update(panel=panel(notebook), elsewhere=elsewhere)
    assert notebook.run("step()\nelsewhere(panel.stop)").error is None
    assert notebook.run("step()").error is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_output_that_can_not_be_summed_up_ends_the_look_and_not_the_training(notebook: Notebook) -> None:
    notebook.run("""\
        class Ragged(nn.Module):
            def forward(self, x):
                return torch.nested.as_nested_tensor([x[:2], x[2:]])

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.ragged = nn.Linear(4, 4), Ragged()
            def forward(self, x):
                return torch.cat([part for part in self.ragged(self.first(x)).unbind()])

        net = Whole(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
        """)
    panel(notebook).trace()
    assert notebook.run("step()").error is None
    assert "the training continues" in panel(notebook).message or "Traced a step" in panel(notebook).message
    assert not any(m._forward_hooks for m in notebook.shell.user_ns["net"].modules())
