"""%guard in a real shell: what it takes, says and shows, when it ends, and what is seen when a step is not finite."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import nbclient
import nbformat
import pytest
import torch

import nbdebug
from nbdebug import Report
from nbdebug.magics.guard import ON_TRIP
from tests.shell import Notebook, completions, in_this_checkout, started
from tests.test_magics import LOG, SETUP


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """In [2] makes net, opt, good, bad and step(x=bad); the loss of bad is -inf."""
    with started(SETUP) as book:
        yield book


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `nbdebug.guard` was called with."""
    calls: list[dict[str, Any]] = []
    real = nbdebug.guard

    def guard(model: Any, optimizer: Any, **options: Any) -> Any:
        calls.append({"model": model, "optimizer": optimizer, **options})
        return real(model, optimizer, **options)

    monkeypatch.setattr(nbdebug, "guard", guard)
    return calls


def hooks(notebook: Notebook) -> int:
    """How many hooks the model and the optimizer have."""
    names = notebook.shell.user_ns
    held = [
        value
        for thing in [*names["net"].modules(), names["opt"]]
        for key, value in vars(thing).items()
        if key.endswith("_hooks")
    ]
    return sum(map(len, held))


# What it takes


def test_on_takes_model_and_optimizer_and_says_which(notebook: Notebook, asked: list[dict[str, Any]]) -> None:
    done = notebook.run("%guard on")
    assert done.error is None and done.result is None
    assert "watching model `net` and optimizer `opt` (found among your variables)" in done.printed
    names = notebook.shell.user_ns
    assert asked == [{"model": {"net": names["net"]}, "optimizer": {"opt": names["opt"]}, "scaler": None}]


def test_named_ones_are_taken(notebook: Notebook, asked: list[dict[str, Any]]) -> None:
    notebook.run("other = nn.Linear(1, 1)\nbox = {'net': net}")
    assert "models `net`, `other`" in notebook.run("%guard on").printed
    done = notebook.run("%guard on --model box['net'] --optimizer opt")
    assert "watching model `box['net']` and optimizer `opt`." in done.printed
    assert asked[-1]["model"] == {"box['net']": notebook.shell.user_ns["net"]}


def test_a_gradient_scaler_among_the_variables_is_taken(notebook: Notebook, asked: list[dict[str, Any]]) -> None:
    notebook.run("idle = torch.amp.GradScaler('cpu', enabled=False)")
    assert "GradScaler" not in notebook.run("%guard on").printed and asked[-1]["scaler"] is None
    notebook.run("scaler = torch.amp.GradScaler('cpu')\nsame = scaler")
    assert "with the GradScaler `scaler` (found among your variables)" in notebook.run("%guard on").printed
    assert asked[-1]["scaler"] is notebook.shell.user_ns["scaler"]
    notebook.run("%guard on --scaler idle")
    assert asked[-1]["scaler"] is notebook.shell.user_ns["idle"]
    notebook.run("second = torch.amp.GradScaler('cpu')")
    assert "--scaler scaler" in str(notebook.run("%guard on").error)


def test_options_reach_the_function(notebook: Notebook, asked: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    notebook.shell.user_ns["path"] = str(tmp_path / "a run.nbdebug")
    done = notebook.run("%guard --max-grad-norm 1.5 --skip-above 8 on --on-trip record --keep 3 --record '{path}'")
    assert done.error is None and "written to the record" in done.printed
    wanted = {
        "max_grad_norm": 1.5,
        "skip_above": 8.0,
        "on_trip": "record",
        "keep": 3,
        "record": notebook.shell.user_ns["path"],
    }
    assert {key: asked[0][key] for key in wanted} == wanted


def test_the_magic_knows_what_the_function_does_on_a_trip() -> None:
    from nbdebug.tools.guard.finite_check import ON_TRIP as KNOWN

    assert tuple(ON_TRIP) == KNOWN


def test_the_variables_of_a_function_are_seen(notebook: Notebook) -> None:
    done = notebook.run("""\
        def train():
            local = nn.Linear(2, 2)
            sgd = torch.optim.SGD(local.parameters())
            %guard on --model local --optimizer sgd
        train()
        """)
    assert done.error is None and "model `local` and optimizer `sgd`" in done.printed
    assert not [note for note in notebook.run("%guard").result.notes if "was replaced" in note]


# What comes back


def test_status_is_a_report(notebook: Notebook) -> None:
    notebook.run("%guard on\nfor _ in range(3): step(good)")
    done = notebook.run("%guard")
    assert isinstance(done.result, Report) and done.result.ok
    assert "3 steps watched, none stopped." in done.shown
    assert done.result.question == "%guard status"
    assert done.result.subject == "model `net` and optimizer `opt` (found among your variables)"
    assert re.search(r"\b3 steps", str(done.result))
    assert notebook.run("rep = %guard status").result is None
    assert notebook.shell.user_ns["rep"] == done.result


def test_status_owns_up_to_updates_that_another_tool_traced(notebook: Notebook) -> None:
    notebook.run("%guard on\nstep(good)")
    notebook.run("%%mem\nstep(good)")
    assert "1 update was not watched: another tool, such as %%mem, traced it." in str(notebook.run("%guard").result)


@pytest.mark.parametrize("cell", ["%guard status;", "%guard status ;", "%guard off;", "%guard off  ; "])
def test_a_semicolon_silences_it(notebook: Notebook, cell: str) -> None:
    notebook.run("%guard on")
    done = notebook.run(cell)
    assert done.error is None and done.result is None and not done.shown.strip()


def test_off_gives_the_last_report_and_leaves_nothing(notebook: Notebook) -> None:
    before = hooks(notebook)
    notebook.run("%guard on\nstep(good)")
    assert hooks(notebook) > before
    done = notebook.run("%guard off")
    assert done.result.question == "%guard off" and re.search(r"\b1 step\b", str(done.result))
    assert hooks(notebook) == before
    assert "No guard is on" in notebook.run("%guard").printed
    assert "No guard is on" in notebook.run("%guard off").printed


def test_a_step_that_is_not_finite(notebook: Notebook) -> None:
    notebook.run("%guard on\nstep(good)\nbefore = {k: v.clone() for k, v in net.state_dict().items()}")
    done = notebook.run(
        "for x in [good, bad, good]:\n    step(x)\n    before = {k: v.clone() for k, v in net.state_dict().items()}"
    )
    assert isinstance(done.error, nbdebug.NonFiniteStep) and done.error.step == 2
    assert done.error.report.findings[0].code == LOG and LOG in done.data[0]["text/plain"] and len(done.data) == 1
    names = notebook.shell.user_ns
    assert all(torch.equal(value, names["before"][key]) for key, value in names["net"].state_dict().items())
    status = notebook.run("%guard").result
    assert status.findings == done.error.report.findings
    assert notebook.run("%guard off").result.findings == status.findings


@pytest.mark.parametrize("choice", ["trace", "raise"])
def test_the_traceback_ends_at_the_users_own_line(notebook: Notebook, choice: str) -> None:
    notebook.run(f"%guard on --on-trip {choice}")
    printed = notebook.run("step(bad)").printed
    trace = printed[printed.index("NonFiniteStep") :]
    assert "----> 1 step(bad)" in trace and "opt.step()" in trace
    assert "site-packages" not in trace and "nbdebug/" not in trace and "hidden" not in trace


def test_skip_goes_on_and_counts(notebook: Notebook) -> None:
    notebook.run("%guard on --on-trip skip")
    assert notebook.run("for x in [good, bad, good]: step(x)").error is None
    assert "(3 steps watched, 1 skipped)" in notebook.run("%nbdebug status").printed


def test_a_record_opens(notebook: Notebook, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a run.nbdebug"
    notebook.run(f"%guard on --record '{path}'\nstep(good)\nstep(good)\n%guard off;")
    notebook.shell.user_ns["path"] = path
    done = notebook.run(f'%guard open "{path}"')
    assert done.error is None and type(done.result) is type(nbdebug.open_record(path))
    assert str(done.result) == str(nbdebug.open_record(path)) and str(done.result) in done.shown
    assert notebook.run("rec = %guard open '{path}'").error is None and notebook.shell.user_ns["rec"] is not None


# One guard at a time, and of what


def test_on_again_replaces_the_first(notebook: Notebook) -> None:
    notebook.run("%guard on\nstep(good)")
    once = hooks(notebook)
    done = notebook.run("%guard on --max-grad-norm 1")
    assert "model `net` and optimizer `opt` (1 step watched) is closed: this one replaces it" in done.printed
    assert hooks(notebook) == once
    assert not notebook.run("%guard off").result.findings and hooks(notebook) == 0


def test_a_wrong_name_leaves_the_first_on(notebook: Notebook) -> None:
    notebook.run("%guard on\nstep(good)")
    assert notebook.run("%guard on --model nett").error
    assert "1 step watched" in notebook.run("%nbdebug").printed
    refused = str(notebook.run("%guard on --max-grad-norm -1").error)
    assert "(1 step watched) is closed" in refused
    assert "No guard is on" in notebook.run("%guard").printed


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("net = nn.Linear(4, 4)", "`net`"),
        ("del opt", "`opt`"),
        ("net = nn.Linear(4, 4); opt = torch.optim.SGD(net.parameters())", "`net` and `opt`"),
        ("scaler = torch.amp.GradScaler('cpu')", "`scaler`"),
    ],
)
def test_status_says_when_the_guard_watches_what_was_there_before(notebook: Notebook, cell: str, named: str) -> None:
    notebook.run("scaler = torch.amp.GradScaler('cpu')\n%guard on")
    notebook.run(cell)
    note = notebook.run("%guard status").result.notes[0]
    assert note.startswith(f"{named} w") and "replaced or deleted after %guard on" in note and "on again" in note
    assert note in notebook.run("%nbdebug").result.notes
    assert note not in notebook.run("%guard off").result.notes


@pytest.mark.parametrize(
    "cell",
    [
        "pass",
        "mine = net; del net",
        "net = nn.Sequential(net)",
        "step(good)",
        "class Wrapped:\n    def __init__(self, inner): self.inner = inner\nopt = Wrapped(opt)",
    ],
)
def test_and_says_nothing_of_it_while_all_is_well(notebook: Notebook, cell: str) -> None:
    notebook.run("%guard on")
    assert notebook.run(cell).error is None
    assert not [note for note in notebook.run("%guard status").result.notes if "was replaced" in note]


# What nbdebug knows of it, and what ends it


def test_nbdebug_status_tells_of_every_guard(notebook: Notebook) -> None:
    notebook.run("import nbdebug\n%guard on\nmine = nbdebug.guard(part, torch.optim.SGD(part.parameters()))")
    notebook.run("%guard on\nstep(good)")
    status = notebook.run("%nbdebug").printed
    assert "Active: the guard of model `net` and optimizer `opt` (1 step watched)" in status
    assert "Active: the guard `mine`" in status and "mine.close()" in status
    notebook.run("%guard off;")
    assert "`mine` is one of your own" in notebook.run("%guard").printed
    assert "its magics and hooks are gone" in notebook.run("%nbdebug off").printed
    assert hooks(notebook) == 0 and not notebook.shell.user_ns["mine"].active


@pytest.mark.parametrize(
    "cell",
    [
        "%unload_ext nbdebug",
        "%reload_ext nbdebug",
        "%nbdebug off",
        "import nbdebug; nbdebug.load_ipython_extension(get_ipython())",
    ],
)
def test_what_ends_it(notebook: Notebook, cell: str) -> None:
    notebook.run("%guard on\nstep(good)")
    assert hooks(notebook)
    assert notebook.run(cell).error is None
    assert hooks(notebook) == 0
    notebook.run("%load_ext nbdebug")
    assert "No guard is on" in notebook.run("%guard").printed


def test_a_users_magic_of_that_name_does_not_keep_it_alive(notebook: Notebook) -> None:
    notebook.run("%guard on")
    notebook.shell.register_magic_function(lambda line: "mine", magic_name="guard")
    notebook.run("%unload_ext nbdebug")
    assert hooks(notebook) == 0 and notebook.run("%guard").result == "mine"


# Help, wrong arguments, Tab


def test_help_is_printed(notebook: Notebook) -> None:
    done = notebook.run("%guard -h")
    assert done.error is None and done.result is None
    assert all(word in done.printed for word in ["%guard", "--max-grad-norm", "--on-trip", "--keep N", "open"])


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%guard start", ["'start'", "on", "off"]),
        ("%guard on --on-trip stop", ["'stop'", "raise"]),
        ("%guard on --max-grad-norm big", ["'big'"]),
        ("%guard on --max-grad-norm 0", ["max_grad_norm", "0"]),
        ("%guard on --keep 0", ["keep", "0"]),
        ("%guard on --model nett", ["'nett'", "net"]),
        ("%guard on --optimizer net", ["'net'", "opt"]),
        ("%guard on --scaler net", ["'net'", "GradScaler", "none"]),
        ("%guard on --model 'net", ["quotation"]),
        ("%guard on run.nbdebug", ["'run.nbdebug'", "open", "--record run.nbdebug"]),
        ("%guard --max-grad-norm 1", ["--max-grad-norm", "%guard on"]),
        ("%guard off --keep 1 --skip-above 2", ["--skip-above and --keep", "%guard on"]),
        ("%guard open", ["%guard open run.nbdebug"]),
        ("%guard open no/such.nbdebug", ["no/such.nbdebug"]),
    ],
)
def test_a_wrong_argument_is_quoted_beside_what_is_accepted(notebook: Notebook, cell: str, words: list[str]) -> None:
    done = notebook.run(cell)
    assert type(done.error).__name__ == "UsageError"
    assert all(word in str(done.error) for word in words), str(done.error)
    assert "Traceback" not in done.printed and hooks_of_nothing(notebook)


LOOP = """
def main(sick):
    own = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step in range(4):
        out = own(torch.ones(2, 3) * (-1) ** step)
        loss = (out - 100).log().sum() if step == sick else out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("sick", [0, 2])
def test_before_any_model_it_begins_where_a_loop_first_calls_one(sick: int) -> None:
    with started("import torch") as book:
        assert "begins where a loop first calls one" in book.run("%guard on").printed
        assert "waits" in book.run("%guard").printed and "waits for a model" in book.run("%nbdebug status").printed
        book.run(LOOP)
        healthy = book.run("main(None)")
        assert healthy.error is None and "watching model `own` and optimizer `optimizer`" in healthy.printed
        stopped = book.run(f"main({sick})").error
        assert stopped is not None and "takes the log of a negative number" in str(stopped)
        report = book.run("%guard off").result
        assert [finding.code for finding in report.findings] == ["nan/log-of-nonpositive"]
        assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


def test_a_model_that_only_gives_features_is_not_waited_for() -> None:
    with started("import torch") as book:
        book.run("%guard on")
        book.run("body = torch.nn.Linear(3, 3)\nfor x in torch.ones(4, 2, 3):\n    kept = body(x).detach()")
        assert "watching" not in book.run("%guard").printed
        assert "watching model `own` and optimizer `optimizer`" in book.run(f"{LOOP}\nmain(None)").printed
        book.run("%guard off")


def hooks_of_nothing(notebook: Notebook) -> bool:
    names = notebook.shell.user_ns
    return not {"net", "opt"} <= set(names) or hooks(notebook) == 0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%guard ", {"on", "off", "status", "open"}),
        ("%guard o", {"on", "off", "open"}),
        ("rep = %guard st", {"status"}),
        ("%guard on --on-trip ", {"trace", "raise", "skip", "record"}),
        ("%guard on --on-trip r", {"raise", "record"}),
        ("%guard on --model ", {"net"}),
        ("%guard on --optimizer ", {"opt"}),
        ("%guard on --scaler ", {"scaler"}),
        ("%guard on --s", {"--scaler", "--skip-above"}),
        (
            "%guard on --",
            {
                "--full",
                "--help",
                "--model",
                "--optimizer",
                "--scaler",
                "--max-grad-norm",
                "--skip-above",
                "--on-trip",
                "--keep",
                "--record",
            },
        ),
    ],
)
def test_tab_offers_requests_options_and_values(notebook: Notebook, typed: str, offered: set[str]) -> None:
    notebook.run("scaler = torch.amp.GradScaler('cpu')")
    assert set(completions(notebook, typed)) == offered


# In a kernel


@pytest.mark.timeout(240)
def test_in_a_kernel_the_report_stands_above_the_error(tmp_path: pathlib.Path) -> None:
    cells = ["%load_ext nbdebug", SETUP.lstrip(), "%guard on", "for x in [good, bad]:\n    step(x)", "%guard off"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        book, timeout=200, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute(env=in_this_checkout())
    shown = [output for output in book.cells[3].outputs if output.output_type != "stream"]
    assert [output.output_type for output in shown] == ["display_data", "error"]
    assert LOG in shown[0].data["text/plain"] and LOG in shown[0].data["text/html"]
    trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown[1].traceback))
    assert "opt.step()" in trace and "site-packages" not in trace
    assert LOG in book.cells[4].outputs[-1].data["text/plain"]


# The cell that makes the model runs again


MAKES = "torch.manual_seed(1); net = nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)"
TRAINS = """
for i in range(5):
    opt.zero_grad()
    loss = net(torch.randn(8, 4)).pow(2).mean() * (float("inf") if i == bad else 1.0)
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("cells", [[MAKES, TRAINS], [MAKES + TRAINS]])
@pytest.mark.parametrize("magic", ["guard", "grad_watch"])
def test_the_watch_follows_a_model_that_is_made_again(notebook: Notebook, magic: str, cells: list[str]) -> None:
    notebook.run(f"bad = -1\n{MAKES}\n%{magic} on")
    assert "new objects" not in notebook.run(TRAINS).printed
    seen = [notebook.run(cell) for cell in cells][-1]
    assert seen.error is None and seen.printed.count("Your names stand for new objects") == 1
    report = notebook.run(f"%{magic}").result
    assert report.steps == 5 and not [note for note in report.notes if "was replaced" in note]
    if magic == "guard":
        notebook.run("bad = 3")
        assert type(notebook.run(cells[-1]).error).__name__ == "NonFiniteStep"
        assert bool(notebook.shell.user_ns["net"].weight.isfinite().all())


def test_and_says_so_where_it_cannot_follow(notebook: Notebook) -> None:
    notebook.run(f"bad = -1\n{MAKES}\n%guard on")
    notebook.run("net = nn.Linear(4, 1)")  # the optimizer still has the old weights
    told = notebook.run(TRAINS).printed
    assert told.count("`net` was replaced") == 1 and "Type %guard on again" in told


def test_a_second_optimizer_is_none_that_takes_anothers_place(notebook: Notebook) -> None:
    notebook.run(f"bad = -1\n{MAKES}\n%guard on --model net --optimizer opt")
    told = notebook.run("other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\nother.step()").printed
    assert "new objects" not in told and "replaced" not in told
