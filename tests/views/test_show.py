"""Showing a report at once: displayed in a running notebook, on stderr elsewhere."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest

from nbdebug.report import Report
from tests.shell import Notebook, started
from tests.views import reports


def test_in_a_script_the_text_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    report = reports.forward_log()
    assert report.show() is None
    printed = capsys.readouterr()
    assert printed.err == f"{report}\n" and not printed.out


def test_it_does_not_import_the_notebook() -> None:
    code = "import sys, nbdebug; nbdebug.Report('asked()').show(); print('IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "False\n" and done.stderr == "Nothing was found.\n\nasked()\n"


@pytest.mark.parametrize("cell", ["for _ in range(2): report.show()", "def f(): report.show()\nf(); f();"])
def test_in_a_notebook_it_is_displayed_wherever_it_is_called(cell: str) -> None:
    with started("pass") as notebook:
        shown = _shown(notebook, cell)
    assert [set(data) for data in shown] == [{"text/plain", "text/html"}] * 2
    assert shown[0]["text/plain"] == str(reports.forward_log())


def test_a_process_that_the_notebook_started_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the notebook")
    with started("pass") as notebook:
        notebook.shell.user_ns["report"] = Report("asked()")
        done = notebook.run("report.show()")
    assert not done.data and "Nothing was found." in done.printed


def _shown(notebook: Notebook, cell: str) -> list[dict[str, str]]:
    notebook.shell.user_ns["report"] = reports.forward_log()
    done = notebook.run(cell)
    assert done.error is None and done.result is None and not done.printed
    return done.data
