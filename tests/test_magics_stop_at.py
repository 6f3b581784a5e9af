"""%stop_at in a real shell: what it sets, lists and clears, what it refuses, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shell import Notebook, completions, started

SETUP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        return hidden.relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

net, x, limit = Net(), torch.ones(2, 4), -1.0
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setattr("nbdebug.tools.breakpoints.stop._can_ask", lambda: False)
    with started(SETUP) as book:
        yield book
        book.run("%stop_at --clear")


def waiting(notebook: Notebook) -> list[str]:
    return notebook.run("%stop_at --list").printed.splitlines()


def test_a_stop_is_set_in_the_model_that_is_found_and_its_record_shown_where_training_ran(notebook: Notebook) -> None:
    done = notebook.run('stop = %stop_at "layers.1" --when "hidden.max() > limit and out.numel() == 8"')
    assert done.error is None and not done.shown.strip()
    assert "found among your variables" in waiting(notebook)[0] and "model `net` (Net)" in waiting(notebook)[0]
    shown = notebook.run("loss = net(x).sum()")
    assert "Stopped at `layers.1` (Block) at the return of its forward, in step 0: In [2], line" in shown.shown
    assert [tuple(output) for output in shown.data] == [("text/plain", "text/html")]
    stop = notebook.shell.user_ns["stop"]
    assert stop.hits == 1 and not stop.active and waiting(notebook) == ["No stop waits. %stop_at LAYER sets one."]


def test_the_stop_is_the_result_and_says_what_it_waits_for(notebook: Notebook) -> None:
    done = notebook.run("%stop_at layers.2 --every --phase backward")
    assert "stop" in repr(done.result) and "waits, for each hit" in done.shown and done.result.phase == "backward"
    assert notebook.run("%stop_at Linear;").result is None and len(waiting(notebook)) == 2


def test_a_condition_sees_the_variables_of_the_function_that_the_magic_stands_in(notebook: Notebook) -> None:
    notebook.run(
        "def set_it():\n    mine = 8\n    get_ipython().run_line_magic('stop_at', "
        "'layers.0 --when \"inp.numel() == mine\"')\nset_it()\nnet(x);"
    )
    assert "0 calls" not in " ".join(waiting(notebook))


def test_stops_are_cleared_by_number_by_pattern_and_all_together(notebook: Notebook) -> None:
    for layer in ("layers.0", "layers.1", "layers.2", '""'):
        notebook.run(f"%stop_at {layer}")
    number = waiting(notebook)[0].split()[1]
    assert notebook.run(f"%stop_at --clear {number}").printed == "1 stop removed: layers.0.\n"
    assert notebook.run("%stop_at --clear layers.2").printed == "1 stop removed: layers.2.\n"
    assert notebook.run("%stop_at --clear").printed == "2 stops removed: layers.1, the model.\n"
    assert notebook.run("%stop_at --clear").printed == "No stop waits. %stop_at LAYER sets one.\n"
    names = notebook.shell.user_ns
    assert not any(vars(module)["_forward_pre_hooks"] for module in names["net"].modules())


@pytest.mark.parametrize(
    "line, said",
    [
        ("%stop_at", "takes a layer"),
        ("%stop_at layers.9", "'layers.0'"),
        ("%stop_at layers.0 --when 'out.('", "out.("),
        ("%stop_at layers.0 --when 'grad > 1'", "--phase backward"),
        ("%stop_at layers.0 --model other", "'other'"),
        ("%stop_at --list layers.0", "takes no 'layers.0'"),
        ("%stop_at --clear --every", "takes no --every"),
        ("%stop_at --list --clear", "takes no --clear"),
        ("%stop_at --clear 99999", "'99999'. Stops that wait: none"),
        ("%stop_at layers.0 --phase sideways", "sideways"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(notebook: Notebook, line: str, said: str) -> None:
    done = notebook.run(line)
    assert type(done.error).__name__ == "UsageError" and said in str(done.error)


def test_of_several_models_the_one_with_such_a_layer_is_taken(notebook: Notebook) -> None:
    notebook.run("other = nn.Sequential(nn.Dropout())")
    assert "model `other`" in notebook.run("%stop_at Dropout").shown
    notebook.run("third = nn.Sequential(nn.Dropout())")
    assert "--model NAME" in str(notebook.run("%stop_at Dropout").error)
    assert "model `third` (Sequential)\n" in notebook.run("%stop_at Dropout --model third").shown
    notebook.run("del net, other, third")
    assert "needs a model" in str(notebook.run("%stop_at Dropout").error)


def test_status_off_and_unloading(notebook: Notebook) -> None:
    notebook.run("%stop_at layers.0\nimport nbdebug\nown = nbdebug.stop_at(net, 'layers.1')")
    status = notebook.run("%nbdebug").printed
    assert status.count("Active: stop") == 2 and "%stop_at --clear" in status
    notebook.run("%nbdebug off")
    assert not notebook.shell.user_ns["own"].active
    notebook.run("%load_ext nbdebug\n%stop_at layers.0\n%unload_ext nbdebug")
    assert not any(vars(m)["_forward_pre_hooks"] for m in notebook.shell.user_ns["net"].modules())
    notebook.run("%load_ext nbdebug")


@pytest.mark.parametrize("cell", ["net = Net()", "old, net = net, Net()", "del net"])
def test_a_stop_that_waits_in_a_model_that_was_made_anew_says_so(notebook: Notebook, cell: str) -> None:
    notebook.run("%stop_at layers.0;")
    notebook.run(f"{cell}\nimport gc; gc.collect();")
    told = "`net` was replaced or deleted after stop"
    assert told in waiting(notebook)[-1] and told in notebook.run("%nbdebug").printed
    notebook.run("%stop_at --clear")
    assert waiting(notebook) == ["No stop waits. %stop_at LAYER sets one."]


def test_help_and_completion(notebook: Notebook) -> None:
    assert "breakpoint" in notebook.run("%stop_at -h").printed
    assert {"layers.0", "layers.0.fc"} <= set(completions(notebook, "%stop_at lay"))
    assert completions(notebook, "%stop_at Bl") == ["Block"]
    assert "--when" in completions(notebook, "%stop_at layers.0 --w")
    assert completions(notebook, "%stop_at layers.0 --phase b") == ["backward"]
    assert completions(notebook, "%stop_at layers.0 --model n") == ["net"]
