"""%check and %check_notebook in a real shell: what happened before nbdebug was loaded is found, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nbdebug
from tests.notebook.books import HOOK, MODEL, OPT, SETUP, TRAIN
from tests.shell import Notebook, completions, started


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def test_it_names_the_cell(notebook: Notebook) -> None:
    for cell in (MODEL, HOOK, "net[0].register_forward_hook(note);", "net[0].register_forward_hook(note);"):
        notebook.run(cell)
    done = notebook.run("%check_notebook")
    assert done.error is None
    assert [f.code for f in done.result] == ["notebook/hooks-registered-twice"]
    assert done.result.findings[0].where.place == "In [6], line 1" and "In [5]" in done.shown
    assert done.result.question == "%check_notebook" and "text/html" in done.result._repr_mimebundle_()
    notebook.run("%free hooks")
    assert notebook.run("%check_notebook").result.ok


def test_it_is_found_although_nbdebug_was_loaded_after_it(notebook: Notebook) -> None:
    notebook.run("%unload_ext nbdebug")
    for cell in (MODEL, OPT, TRAIN, MODEL, TRAIN):
        notebook.run(cell)
    notebook.run("%load_ext nbdebug")
    report = notebook.run("rep = %check_notebook\nrep").result
    assert [f.code for f in report] == ["training/parameters-not-in-optimizer"]
    assert report.findings[0].where.cell == "In [7]"
    assert notebook.run("import nbdebug\nnbdebug.check_notebook()").result.findings[0].code == report.findings[0].code
    assert notebook.shell.user_ns["rep"].to_dict()["findings"][0]["where"]["cell"] == "In [7]"


def test_a_clean_notebook_says_so_help_and_a_semicolon(notebook: Notebook) -> None:
    done = notebook.run("%check_notebook")
    assert done.result.ok and "No problem was found that comes from the order in which the cells ran" in done.shown
    assert notebook.run("%check_notebook;").shown.strip() == ""
    assert "the cell that caused it" in " ".join(notebook.run("%check_notebook -h").printed.split())
    assert "UsageError" in notebook.run("%check_notebook everything").printed
    assert any("%check_notebook" in match for match in completions(notebook, "%check_n"))


def test_within_a_function_its_variables_are_looked_at_as_well(notebook: Notebook) -> None:
    notebook.run(
        "def look():\n    from IPython import get_ipython\n    inner = nn.Linear(2, 1)\n"
        "    for _ in range(2):\n        inner.register_forward_hook(note)\n"
        "    return get_ipython().run_line_magic('check_notebook', '')"
    )
    notebook.run(HOOK)
    report = notebook.run("look()").result
    assert [f.code for f in report] == ["notebook/hooks-registered-twice"] and isinstance(report, nbdebug.Report)


def test_check_asks_the_function_that_knows_the_thing(notebook: Notebook, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.run(
        "import argparse, pathlib, torch\npath = pathlib.Path('run.yaml'); path.write_text('lr: 1e-4\\nepochs: 3\\n')\n"
        "args = argparse.Namespace(dropout=1.5)\nnet = torch.nn.Linear(2, 1); torch.save(net.state_dict(), 'net.pt')\n"
        "rows = [(torch.ones(2), 0)] * 8\nloader = torch.utils.data.DataLoader(rows, 4)\nbad = ValueError('no')"
    )
    for line, code in (("run.yaml", "wrong-type"), ("path", "wrong-type"), ("args", "out-of-range")):
        assert [f.code for f in notebook.run(f"%check {line}").result] == [f"config/{code}"], line
    assert notebook.run("%check net.pt").result.ok and notebook.run("%check .").result.ok
    assert "by check_loader" in notebook.run("%check loader").result.question
    assert "by explain" in notebook.run("%check bad").result.question
    for line in ("net", "nothing.pt", "nothing"):
        assert "UsageError" in notebook.run(f"%check {line}").printed, line
    report = notebook.run("%check").result
    assert {f.code for f in report if f.chapter == "config"} == {"config/wrong-type", "config/out-of-range"}
    assert {"the notebook", "`net`"} <= {one.what for one in report.ruled_out} and "`loader`" in str(report.unchecked)
    notebook.run("net.weight.data[0, 0] = float('nan'); del args, path")
    report = notebook.run("%check").result
    assert not report.findings and report.verdict == "not well, no cause known" and "net.weight" in str(report)
