"""%grad_watch in a real shell: what it takes, says and shows, live and afterwards, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nbclient
import nbformat
import pytest

import nbdebug
from nbdebug import Report
from tests.shell import Notebook, completions, in_this_checkout, started

SETUP = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)

def step(net=net, opt=opt):
    opt.zero_grad()
    loss = net(torch.ones(3, 4)).square().mean()
    loss.backward()
    opt.step()
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `nbdebug.grad_watch` was called with."""
    calls: list[dict[str, Any]] = []
    real = nbdebug.grad_watch

    def grad_watch(model: Any, optimizer: Any, **options: Any) -> Any:
        calls.append({"model": model, "optimizer": optimizer, **options})
        return real(model, optimizer, **options)

    monkeypatch.setattr("nbdebug.tools.grad_watch.grad_watch.grad_watch", grad_watch)
    return calls


def hooks(notebook: Notebook) -> int:
    names = notebook.shell.user_ns
    return sum(
        len(value)
        for thing in [*names["net"].modules(), names["opt"]]
        for key, value in vars(thing).items()
        if key.endswith("_hooks")
    )


def test_on_show_off(notebook: Notebook, asked: list[dict[str, Any]]) -> None:
    done = notebook.run("%grad_watch on")
    assert done.error is None and done.result is None
    assert "watching model `net` and optimizer `opt` (found among your variables)" in done.printed
    names = notebook.shell.user_ns
    assert asked == [{"model": {"net": names["net"]}, "optimizer": {"opt": names["opt"]}}]
    notebook.run("for _ in range(3): step()")
    shown = notebook.run("%grad_watch")
    assert isinstance(shown.result, Report) and shown.result.ok and shown.result.question == "%grad_watch"
    assert "3 steps watched" in shown.shown and shown.result.figure() is not None
    status = notebook.run("%nbdebug").printed
    assert "Active: the gradient watch of model `net` and optimizer `opt` (3 steps watched)" in status
    ended = notebook.run("%grad_watch off")
    assert ended.result.question == "%grad_watch off" and "3 steps" in str(ended.result) and hooks(notebook) == 0
    assert "3 steps" in str(notebook.run("%grad_watch").result)  # also after the run
    assert "No gradient watch is on" in notebook.run("%grad_watch --off").printed


@pytest.mark.parametrize("typed", ["%grad_watch --every 5", "%grad_watch on --every 5", "%grad_watch --every 5 on"])
def test_options_reach_the_function_and_alone_mean_on(
    notebook: Notebook, asked: list[dict[str, Any]], typed: str
) -> None:
    assert notebook.run(f"{typed} --ratios-every 20 --keep 50 --model net").error is None
    assert {k: asked[0][k] for k in ("every", "ratios_every", "keep")} == {"every": 5, "ratios_every": 20, "keep": 50}


@pytest.mark.parametrize("cell", ["%grad_watch;", "%grad_watch off ; ", "rep = %grad_watch", "%grad_watch --off;"])
def test_silenced_and_assigned(notebook: Notebook, cell: str) -> None:
    notebook.run("%grad_watch on\nstep()")
    assert notebook.run(cell).result is None
    if cell.startswith("rep"):
        assert isinstance(notebook.shell.user_ns["rep"], Report)


def test_another_one_replaces_it(notebook: Notebook) -> None:
    notebook.run("%grad_watch on\nstep()")
    done = notebook.run("%grad_watch on --every 2")
    assert "The gradient watch of model `net` and optimizer `opt` (1 step watched) is closed" in done.printed
    notebook.run("%grad_watch off")
    assert hooks(notebook) == 0


def test_what_is_wrong_leaves_the_running_one_alone(notebook: Notebook) -> None:
    notebook.run("%grad_watch on\nstep()")
    for typed, word in [
        ("%grad_watch on --model nett", "nett"),
        ("%grad_watch on --every 0", "every"),
        ("%grad_watch --off --every 2", "--every"),
        ("%grad_watch status --live", "--live"),
        ("%grad_watch on --off", "not both"),
    ]:
        assert word in str(notebook.run(typed).error), typed
    assert "1 step watched" in notebook.run("%grad_watch").shown


def test_without_a_model_it_begins_where_a_loop_first_calls_one() -> None:
    with started("import torch") as book:
        assert "%grad_watch on starts one" in book.run("%grad_watch").printed
        assert "no model among your variables yet" in book.run("%grad_watch on --live").printed
        assert (
            "waits" in book.run("%grad_watch off").printed
            and "%grad_watch on starts" in book.run("%grad_watch").printed
        )
        book.run("%grad_watch on --live")
        ran = book.run("""
            def main():
                own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
                optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
                for step in range(6):
                    optimizer.zero_grad()
                    own(torch.ones(2, 3)).square().mean().backward()
                    optimizer.step()
            main()
        """)
        assert ran.error is None and any("text/html" in data for data in ran.data)
        report = book.run("%grad_watch off").result
        assert report.plot("gradients")["steps seen"] == 6 and "model `own`" in report.subject


def test_a_model_that_was_replaced_is_noted(notebook: Notebook) -> None:
    notebook.run("%grad_watch on")
    notebook.run("net = nn.Linear(4, 1)")
    (note,) = [n for n in notebook.run("%grad_watch").result.notes if "was replaced" in n]
    assert note.startswith("`net` was replaced or deleted after %grad_watch on. The gradient watch still watches")


def test_a_watch_of_ones_own_is_known(notebook: Notebook) -> None:
    notebook.run("mine = __import__('nbdebug').grad_watch(net, opt)\nstep()")
    assert "`mine` is one of your own" in notebook.run("%grad_watch").printed
    assert "Active: the gradient watch `mine` (1 step watched)" in notebook.run("%nbdebug").printed
    notebook.run("%nbdebug off")
    assert not notebook.shell.user_ns["mine"].active


def test_unloading_ends_it(notebook: Notebook) -> None:
    notebook.run("%grad_watch on")
    assert hooks(notebook) > 0
    notebook.run("%unload_ext nbdebug")
    assert hooks(notebook) == 0 and "grad_watch" not in notebook.shell.magics_manager.magics["line"]
    notebook.run("%load_ext nbdebug")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%grad_watch --mo", {"--model"}),
        ("%grad_watch o", {"on", "off"}),
        ("%grad_watch on --model n", {"net"}),
        ("%grad_watch --optimizer ", {"opt"}),
        ("w = %grad_watch --o", {"--optimizer"}),
    ],
)
def test_completion(notebook: Notebook, typed: str, offered: set[str]) -> None:
    assert set(completions(notebook, typed)) == offered


def test_help(notebook: Notebook) -> None:
    said = notebook.run("%grad_watch -h").printed
    assert "--every" in said and "nbdebug.grad_watch(model, optimizer)" in said and "%%" not in said


def test_live_in_a_kernel_ends_as_the_whole_run() -> None:
    """The picture stands below the cell that asked for it, and is drawn anew by later ones."""
    cells = [
        "%load_ext nbdebug",
        SETUP.lstrip(),
        "%grad_watch on --live",
        "for _ in range(7): step()",
        "%grad_watch --off;",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=120).execute(env=in_this_checkout())
    (picture,) = [o for o in book.cells[2].outputs if o.output_type == "display_data"]
    assert "over 7 steps" in picture.data["text/html"] and "data:image/svg+xml" in picture.data["text/html"]
    assert not [o for o in book.cells[3].outputs if o.output_type != "stream"]


def test_live_can_be_asked_for_later(notebook: Notebook) -> None:
    notebook.run("%grad_watch on\nstep()")
    done = notebook.run("%grad_watch --live")
    assert done.error is None and any("Gradient norms" in data.get("text/html", "") for data in done.data)
    assert "1 step watched" in notebook.run("%grad_watch").shown


def test_a_panel_starts_a_watch_or_opens_over_the_one_there_is(notebook: Notebook) -> None:
    started = notebook.run("%grad_watch --panel")
    assert started.error is None and "The gradient watch is on" in started.printed
    notebook.run("for _ in range(3): step()")
    again = notebook.run("%grad_watch --panel")
    assert "watch is on" not in again.printed and "3 steps watched so far." in again.data[-1]["text/html"]
    notebook.run("%grad_watch --off")
    after = notebook.run("%grad_watch --panel")
    assert "3 steps watched: gradients finite" in after.data[-1]["text/html"] and hooks(notebook) == 0
    assert "is on" in notebook.run("%grad_watch on --panel --every 2").printed
    assert "off takes no options" in str(notebook.run("%grad_watch off --panel").error)


def test_a_panel_of_a_watch_of_ones_own(notebook: Notebook) -> None:
    notebook.run("mine = __import__('nbdebug').grad_watch(net, opt)\nstep()")
    assert "1 step watched so far." in notebook.run("%grad_watch --panel").data[-1]["text/html"]
    assert "1 step watched so far." in notebook.run("mine.panel()").data[-1]["text/html"]
    notebook.run("mine.close()")
