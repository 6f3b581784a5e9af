"""The magics in a real shell: what is shown, returned, assigned and silenced, and which lines the reports speak of."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from IPython.core.error import UsageError

import nbdebug
from nbdebug import Report
from nbdebug.magics import OURS
from nbdebug.magics._arguments import help_text
from tests.shell import Notebook, completions, in_this_checkout, started

SETUP = """
import torch
from torch import nn

class Head(nn.Module):
    def forward(self, x):
        return torch.log(x)

net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Head())
part = net[0]
opt = torch.optim.SGD(net.parameters(), lr=0.01)
with torch.no_grad():
    net[0].weight.fill_(0.25)
    net[0].bias.zero_()
good = torch.ones(3, 4)
bad = good.clone()
bad[1] = -1

def step(x=bad):
    opt.zero_grad()
    loss = net(x).mean()
    loss.backward()
    opt.step()
    return loss
"""
LOG = "nan/log-of-nonpositive"


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """In [1] loads nbdebug, In [2] is SETUP."""
    with started(SETUP) as book:
        yield book


# What comes back


def test_the_report_is_shown_when_it_comes_last(notebook: Notebook) -> None:
    done = notebook.run("%nan_trace step()")
    assert isinstance(done.result, Report) and done.result.findings[0].code == LOG
    assert LOG in done.shown
    assert set(done.result._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert notebook.shell.user_ns["Out"][3] is done.result


def test_a_healthy_step_gives_a_silent_report(notebook: Notebook) -> None:
    done = notebook.run("%nan_trace step(good)")
    assert isinstance(done.result, Report) and done.result.ok


def test_it_can_be_assigned_and_is_then_not_shown(notebook: Notebook) -> None:
    done = notebook.run("rep = %nan_trace step()")
    assert done.error is None and done.result is None and not done.shown.strip()
    assert notebook.shell.user_ns["rep"].findings[0].code == LOG


def test_it_is_not_shown_when_something_else_comes_last(notebook: Notebook) -> None:
    done = notebook.run("%nan_trace step()\n1 + 1")
    assert done.result == 2 and LOG not in done.shown


@pytest.mark.parametrize(
    "cell",
    [
        "%nan_trace step();",
        "%nan_trace step() ;",
        "%%nan_trace\nloss = step();",
        "%%nan_trace\nloss = step();  # quiet",
    ],
)
def test_a_semicolon_silences_it(notebook: Notebook, cell: str) -> None:
    done = notebook.run(cell)
    assert done.error is None and done.result is None and not done.shown.strip()


@pytest.mark.parametrize("cell", ["%nan_trace --full step()", "%%nan_trace --full\nstep()", "%mem --full"])
def test_full_shows_all_of_a_report(notebook: Notebook, cell: str) -> None:
    report = notebook.run(cell).result
    assert isinstance(report, Report) and not report.folded and "report.full()" not in str(report)
    assert notebook.run(cell.replace("--full", "")).result.folded


def test_function_and_magic_give_the_same_finding(notebook: Notebook) -> None:
    notebook.run("import copy\nbefore = copy.deepcopy(net.state_dict())")
    by_magic = notebook.run("%nan_trace step()").result.findings[0]
    notebook.run("net.load_state_dict(before)")
    by_function = notebook.run("import nbdebug\nnbdebug.nan_trace(step, model=net, optimizer=opt)").result.findings[0]
    assert by_magic == by_function


# Which line it speaks of


def test_a_line_in_an_earlier_cell_is_said_as_the_user_sees_it(notebook: Notebook) -> None:
    where = notebook.run("%nan_trace step()").result.findings[0].where
    assert (where.cell, where.text) == ("In [2]", "return torch.log(x)")
    assert SETUP.strip().splitlines()[where.line - 1].strip() == where.text
    assert where.module == "2" and where.samples == (1,)


def test_the_expression_itself_may_hold_the_line(notebook: Notebook) -> None:
    notebook.run("1")
    where = notebook.run("x = bad\n\n%nan_trace torch.log(x @ part.weight).mean().backward()").result.findings[0].where
    assert where.place == "In [4], line 3"
    assert where.text == "torch.log(x @ part.weight).mean().backward()"


def test_lines_of_a_cell_are_counted_from_the_magic(notebook: Notebook) -> None:
    done = notebook.run("""\
        %%nan_trace
        # a comment

        for i, x in enumerate([good, bad, good]):
            opt.zero_grad()
            value = torch.log(part(x))
            value.mean().backward()
            opt.step()
        """)
    where = done.result.findings[0].where
    assert (where.cell, where.line, where.step) == ("In [3]", 6, 1)
    assert where.text == "value = torch.log(part(x))"


def test_the_cell_stops_after_the_bad_step_and_its_variables_stay(notebook: Notebook) -> None:
    notebook.run("""\
        %%nan_trace
        seen = []
        for x in [good, bad, good, good]:
            seen.append(len(seen))
            loss = step(x)
        finished = True
        """)
    assert notebook.shell.user_ns["seen"] == [0, 1]
    assert "finished" not in notebook.shell.user_ns


def test_a_healthy_cell_runs_to_its_end_as_a_plain_cell_would(notebook: Notebook) -> None:
    done = notebook.run("""\
        %%nan_trace
        from math import pi
        losses = [step(good).item() for _ in range(3)]
        doubled = !echo 6
        %precision 3
        def later():
            return losses[-1]
        """)
    assert done.error is None and done.result.ok
    names = notebook.shell.user_ns
    assert len(names["losses"]) == 3 and names["doubled"] == ["6"] and names["later"]() == names["losses"][-1]
    notebook.run("%precision %r")


def test_an_error_of_the_users_passes_with_its_own_place(notebook: Notebook) -> None:
    done = notebook.run("%%nan_trace\nx = 1\n\nraise KeyError('mine')")
    assert isinstance(done.error, KeyError) and done.error.args == ("mine",)
    assert "raise KeyError('mine')" in done.printed
    assert re.search(r"In ?\[3\].*line 4|ipython-input-3.*:4", done.printed)
    assert "trace_cell" not in done.printed, "the frames that watched are left out"


def test_a_report_that_comes_with_an_error_is_shown_before_it(notebook: Notebook) -> None:
    done = notebook.run("""\
        %%nan_trace
        loss = torch.log(bad @ part.weight).mean()
        loss.backward()
        raise ValueError('the loss is not finite')
        """)
    if done.error is None:  # the cell was stopped after the bad step, before it could raise
        assert done.result.findings[0].code == LOG
    else:
        assert isinstance(done.error, ValueError) and done.error.report.findings[0].code == LOG
        assert LOG in done.shown


def test_the_report_on_an_error_says_what_was_asked(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any, **kwargs: Any) -> Report:
        error = ValueError("mine")
        error.report = Report("nan_trace")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr("nbdebug.tools.nan.nan_trace.nan_trace", fails)
    done = notebook.run("%nan_trace step()")
    assert isinstance(done.error, ValueError)
    assert done.error.report.question == "%nan_trace step()" and "%nan_trace step()" in done.shown


# What is traced


def test_the_text_of_the_expression_is_kept(notebook: Notebook) -> None:
    notebook.run("def say(*words): return words")
    assert notebook.run("rep = %nan_trace --steps 1 seen = say('a  b', \"it's\", -1 - 1)").error is None
    assert notebook.shell.user_ns["seen"] == ("a  b", "it's", -2)
    assert notebook.shell.user_ns["rep"].question == "%nan_trace seen = say('a  b', \"it's\", -1 - 1)"


def test_braces_and_dollars_are_not_expanded(notebook: Notebook) -> None:
    done = notebook.run("value = 3\n%nan_trace text = '{value} $value'")
    assert done.error is None and notebook.shell.user_ns["text"] == "{value} $value"


def test_a_magic_inside_a_function_sees_its_locals(notebook: Notebook) -> None:
    done = notebook.run("""\
        def check(batch):
            rows = [batch]
            report = %nan_trace [step(row) for row in rows][0]
            return report
        check(bad)
        """)
    assert done.error is None and done.result.findings[0].code == LOG


def test_the_models_are_found_and_said(notebook: Notebook) -> None:
    report = notebook.run("%nan_trace step(good)").result
    assert "model `net`" in report.subject and "optimizer `opt`" in report.subject and "found" in report.subject
    assert "part" not in report.subject, "part is a part of net"
    assert report.question == "%nan_trace step(good)"


def test_named_models_are_taken(notebook: Notebook) -> None:
    notebook.run("other = nn.Linear(1, 1)\nbox = {'net': net}")
    assert "models `net`, `other`" in notebook.run("%nan_trace step(good)").result.subject
    report = notebook.run("%nan_trace --model net --optimizer opt step(good)").result
    assert report.subject == "model `net` and optimizer `opt`"
    assert notebook.run("%nan_trace --model box['net'] step()").result.findings[0].code == LOG


def test_steps_and_restore_reach_the_function(notebook: Notebook) -> None:
    notebook.run("rows = iter([good, good, bad])")
    report = notebook.run("%nan_trace --steps 3 step(next(rows))").result
    assert report.findings[0].where.step == 2
    notebook.run("import copy\nnet[0].reset_parameters()\nbefore = copy.deepcopy(net.state_dict())")
    notebook.run("%nan_trace --restore step(good.abs())")
    before, now = notebook.shell.user_ns["before"], notebook.shell.user_ns["net"].state_dict()
    assert all(torch.equal(before[key], now[key]) for key in before)


def test_strategy_reaches_function_and_cell(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdebug.tools.nan import nan_trace as trace

    asked = []
    monkeypatch.setattr(
        "nbdebug.tools.nan.nan_trace.nan_trace", lambda step, **kwargs: asked.append(kwargs) or Report("")
    )
    monkeypatch.setattr(trace, "trace_cell", lambda run, **kwargs: asked.append(kwargs) or Report(""))
    notebook.run("%nan_trace --strategy bisect step()")
    notebook.run("%%nan_trace --strategy trace\nstep()")
    assert [kwargs["strategy"] for kwargs in asked] == ["bisect", "trace"]
    names = notebook.shell.user_ns
    assert asked[0] == {
        "model": names["net"],
        "optimizer": names["opt"],
        "max_steps": 1,
        "strategy": "bisect",
        "restore": False,
    }
    assert asked[1] == {"models": {"net": names["net"]}, "optimizers": {"opt": names["opt"]}, "strategy": "trace"}


# Help and wrong arguments


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%nan_trace -h", ["%nan_trace", "--model", "--strategy", "STEP"]),
        ("%nan_trace --help", ["Name the cause"]),
        ("%explain -h", ["%explain", "CODE"]),
        ("%nbdebug -h", ["%nbdebug", "catalogue", "off"]),
    ],
)
def test_help_is_printed(notebook: Notebook, cell: str, words: list[str]) -> None:
    done = notebook.run(cell)
    assert done.error is None and done.result is None
    assert all(word in done.printed for word in words)


def test_help_fits_80_columns_and_is_the_docstring_as_well(notebook: Notebook) -> None:
    lines = notebook.shell.magics_manager.magics["line"]
    ours = {name: magic for name, magic in lines.items() if isinstance(getattr(magic, "__self__", None), OURS)}
    assert len(ours) == 36
    for name, magic in ours.items():
        text = help_text(magic)
        assert text.startswith(f"%{name} [OPTIONS]") and "  -h, --help  " in text
        assert max(map(len, text.splitlines())) <= 80 and magic.__doc__ == text
        assert sum(line.startswith("    ") and name in line for line in text.splitlines()) >= 2, "two examples"
        assert notebook.run(f"%{name} -h").printed.startswith(f"%{name} [OPTIONS]")  # whatever arguments it needs


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%nan_trace", ["step()"]),
        ("%nan_trace step", ["step is a function", "step()"]),
        ("%nan_trace --model nett step()", ["'nett'", "net"]),
        ("%nan_trace --optimizer net step()", ["'net'", "opt"]),
        ("%nan_trace --strategy fast step()", ["'fast'", "bisect"]),
        ("%nan_trace --steps two step()", ["'two'"]),
        ("%nan_trace --model 'net step()", ["quotation"]),
        ("%nan_trace await step()", ["await", "function"]),
        ("%%nan_trace --steps 3\nstep()", ["--steps"]),
        ("%%nan_trace step()\nstep()", ["STEP"]),
        ("%%nan_trace --strategy bisect\nstep()", ["bisect", "trace"]),
        ("%nan_trace --steps 0 step()", ["max_steps", "0"]),
        ("%%nan_trace\nimport asyncio\nawait asyncio.sleep(0)", ["await"]),
        ("%explain nan/overflw", ["nan/overflw", "nan/overflow"]),
        ("%nbdebug on", ["'on'", "off"]),
        ("%guard of", ["'of' is not on, off, status or open. Did you mean off?"]),
        ("%first_aid not-lerning", ["Did you mean not-learning?"]),
        ("steps = [1]\n%mem steps", ["steps is of type list", "step()"]),
        ("steps = [1]\n%nan_trace steps", ["steps is of type list", "step()"]),
        ("steps = [1]\n%diagnose steps", ["steps is of type list", "step()"]),
        ("%diagnose trian", ["'trian'", "not defined"]),
    ],
)
def test_a_wrong_argument_is_quoted_beside_what_is_accepted(notebook: Notebook, cell: str, words: list[str]) -> None:
    done = notebook.run(cell)
    assert type(done.error).__name__ == "UsageError"
    assert all(word in str(done.error) for word in words), str(done.error)
    assert "Traceback" not in done.printed


def test_a_step_that_does_not_repeat_is_refused_in_words(notebook: Notebook) -> None:
    done = notebook.run("rows = iter([good, bad, good, bad])\n%nan_trace --strategy bisect step(next(rows))")
    assert type(done.error).__name__ == "UsageError" and "does not repeat" in str(done.error)


@pytest.mark.parametrize("line", ["%nan_trace step(", "%preflight model loader loss_fn"])
def test_what_is_no_python_is_told_in_a_line(notebook: Notebook, line: str) -> None:
    ran = notebook.run(line)
    assert isinstance(ran.error, UsageError) and "is no Python" in ran.printed and "Traceback" not in ran.printed


def test_an_error_of_a_loader_shows_no_frames_of_ours(notebook: Notebook) -> None:
    notebook.run(
        "import torch\n"
        "class Bad(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): raise KeyError('label')\n"
        "bad, criterion, net = torch.utils.data.DataLoader(Bad()), torch.nn.CrossEntropyLoss(), torch.nn.Linear(4, 2)"
    )
    ran = notebook.run("%preflight --model net --train-loader bad --loss-fn criterion")
    files = [frame.filename for frame in traceback.extract_tb(ran.error.__traceback__)]
    begins = next(n for n, file in enumerate(files) if "dataloader" in file)
    assert isinstance(ran.error, KeyError) and "training" not in " ".join(files[:begins])
    assert isinstance(notebook.run("%%nan_trace\nfor x in:\n    pass").error, SyntaxError)


# The other magics


def test_explain_shows_the_page(notebook: Notebook) -> None:
    done = notebook.run("%explain nan/overflow")
    assert done.result is None
    assert done.data[0]["text/markdown"] == nbdebug.registry.look_up("nan/overflow").page()
    assert notebook.run("%explain overflow").shown == done.shown


def test_catalogue_lists_every_code(notebook: Notebook) -> None:
    printed = notebook.run("%nbdebug catalogue").printed
    assert all(f"{rule.code}  " in printed for rule in nbdebug.registry.rules())
    words = " ".join(printed.split())
    assert all(rule.title.split()[-1] in words for rule in nbdebug.registry.rules())


def test_status_and_off(notebook: Notebook) -> None:
    status = notebook.run("%nbdebug").printed
    assert nbdebug.__version__ in status and "%nan_trace" in status and "Nothing is on" in status
    assert "off" in notebook.run("%nbdebug off").printed
    assert type(notebook.run("%nbdebug").error).__name__ == "UsageError"
    assert notebook.run("%load_ext nbdebug\n%nbdebug").error is None


def test_unload_takes_everything_away_and_load_brings_it_back(notebook: Notebook) -> None:
    manager, completer = notebook.shell.magics_manager, notebook.shell.Completer
    kinds = {"nan_trace", "guard", "explain", "nbdebug"}
    assert kinds <= {name for table in manager.magics.values() for name in table}
    notebook.run("%unload_ext nbdebug")
    assert not kinds & {name for table in manager.magics.values() for name in table}
    assert not completer.custom_matchers
    assert not [name for name, magics in manager.registry.items() if type(magics).__module__.startswith("nbdebug")]
    notebook.run("%load_ext nbdebug\n%reload_ext nbdebug")
    assert len(completer.custom_matchers) == 1
    assert notebook.run("%nan_trace step()").result.findings[0].code == LOG


def test_unload_leaves_a_magic_of_the_users_alone(notebook: Notebook) -> None:
    notebook.shell.register_magic_function(lambda line: "mine", magic_name="explain")
    notebook.run("%unload_ext nbdebug")
    assert notebook.run("%explain").result == "mine"


# Completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%nan_trace --mo", {"--model"}),
        ("%%nan_trace --st", {"--steps", "--strategy"}),
        ("rep = %nan_trace --r", {"--restore"}),
        ("%nan_trace --model ", {"net"}),
        ("%nan_trace --optimizer o", {"opt"}),
        ("%nan_trace --strategy t", {"trace"}),
        ("%nbdebug c", {"catalogue"}),
        ("%explain nan/overf", {"nan/overflow"}),
    ],
)
def test_options_complete_on_tab(notebook: Notebook, typed: str, offered: set[str]) -> None:
    assert set(completions(notebook, typed)) == offered


def test_two_dashes_offer_every_option_and_nothing_else(notebook: Notebook) -> None:
    offered = completions(notebook, "%nan_trace --")
    assert set(offered) == {"--full", "--help", "--model", "--optimizer", "--steps", "--strategy", "--restore"}


def test_the_expression_completes_as_python_does(notebook: Notebook) -> None:
    notebook.shell.Completer.use_jedi = False  # jedi completes no magic's line, neither %time's nor this one's
    assert "step" in completions(notebook, "ste") and "step" in completions(notebook, "%nan_trace ste")


# In a kernel


@pytest.mark.timeout(240)
def test_a_kernel_names_its_cells_too(tmp_path) -> None:
    cells = [
        "%load_ext nbdebug",
        SETUP.lstrip(),
        "%nan_trace step()",
        "%%nan_trace\nx = bad\n\nvalue = torch.log(x @ part.weight)\nvalue.mean().backward()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute(env=in_this_checkout())
    first, second = (book.cells[i].outputs[-1].data["text/plain"] for i in (2, 3))
    line = SETUP.lstrip().splitlines().index("        return torch.log(x)") + 1
    assert LOG in first and f"In [2], line {line}" in first
    assert LOG in second and "In [4], line 4" in second
