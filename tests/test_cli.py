"""`python -m nbdebug`: the same functions from a shell."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import nbformat
import pytest
import torch

import nbdebug
from nbdebug import __main__ as shell
from nbdebug import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_version_comes_from_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nbdebug", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"nbdebug {nbdebug.__version__}"


def test_explain_prints_the_page(capsys) -> None:
    assert shell.main(["explain", "nan/overflow"]) == 0
    page = capsys.readouterr().out
    assert page.strip() == registry.look_up("nan/overflow").text().strip()
    assert "**" not in page and page.startswith("nan/overflow: ")
    assert "\033" not in page, "colour for a terminal alone"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_page_is_as_wide_as_the_terminal(capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shell.main(["explain", "overflow"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "https://" not in line]
    assert min(columns, 100) - 15 < max(map(len, lines)) <= min(columns, 100)


def test_an_unknown_code_gets_the_nearest_ones(capsys) -> None:
    assert shell.main(["explain", "nan/overflw"]) == 2
    said = capsys.readouterr()
    assert not said.out and "'nan/overflw'" in said.err and "nan/overflow" in said.err


def test_catalogue_lists_every_code_with_its_title(capsys) -> None:
    assert shell.main(["catalogue"]) == 0
    printed = capsys.readouterr().out
    codes = [line.split("  ")[0] for line in printed.splitlines() if not line.startswith(" ")]
    assert codes == [rule.code for rule in registry.rules()] and len(codes) > 10
    words = " ".join(printed.split())
    assert all(rule.title.split()[0] in words for rule in registry.rules())


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_the_columns_of_the_catalogue_do_not_collide(columns) -> None:
    lines = registry.listing(columns).splitlines()
    assert max(map(len, lines)) <= columns
    code = max((rule.code for rule in registry.rules()), key=len)
    (line,) = [line for line in lines if line.startswith(code)]
    assert line == code or line[len(code) :].startswith("  ")


@pytest.fixture
def record(tmp_path):
    """Of a run of four steps, the third of them with a logarithm of zero."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.rand(4, 5, 3) + 0.5
    batches[2, 1] = 0
    with nbdebug.guard(model, optimizer, on_trip="record", record=tmp_path / "run.nbdebug"):
        for x in batches:
            optimizer.zero_grad()
            (model(x) * x.sum(1, keepdim=True).log()).mean().backward()
            optimizer.step()
    return tmp_path / "run.nbdebug"


def test_open_prints_the_report_of_a_record(record, capsys) -> None:
    assert shell.main(["open", str(record)]) == 0
    said = capsys.readouterr().out
    assert said.strip() == str(nbdebug.open_record(record)) and "nan/log-of-nonpositive" in said and "4 steps" in said


def test_open_saves_it_as_a_page(record, tmp_path, capsys) -> None:
    page = tmp_path / "run.html"
    assert shell.main(["open", str(record), "--save", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page) and "nan/log-of-nonpositive" in page.read_text("utf-8")
    assert shell.main(["open", str(record), "--save", str(tmp_path / "run.pdf")]) == 2
    assert "run.pdf" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("steps")])
def test_what_is_no_record_is_refused_with_the_reason(tmp_path, capsys, make) -> None:
    path = tmp_path / "night.nbdebug"
    make(path)
    assert shell.main(["open", str(path)]) == 2
    said = capsys.readouterr()
    assert not said.out and "night.nbdebug" in said.err and "Traceback" not in said.err


def test_without_a_command_the_commands_are_told(capsys) -> None:
    assert shell.main([]) == 2
    said = capsys.readouterr().out
    assert all(word in said for word in ("demo", "explain", "catalogue", "open"))


def notebook(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


STEP = """import torch, nbdebug
w = torch.zeros(3, requires_grad=True)
def step():
    loss = torch.log(w).sum()
    loss.backward()
    return loss
"""


@pytest.mark.timeout(240)
def test_the_demo_prints_one_verdict_for_each_report(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook(STEP, "nbdebug.nan_trace(step)", "print(nbdebug.nan_trace(step))", "1 + 1"), path)
    monkeypatch.setattr(shell, "find_notebook", lambda: path)
    assert shell.main(["demo"]) == 0
    said = capsys.readouterr().out
    assert said.count("nan/log-of-nonpositive") == 2 and "2 causes named" in said
    assert "In [1], line 4" in said and "torch.log(w).sum()" in said
    assert "How it came about" not in said, "the verdict, not the whole report"
    assert nbformat.read(path, 4).cells[1].outputs == [], "the notebook itself stays as it is"


@pytest.mark.timeout(240)
def test_a_demo_that_breaks_says_where_and_fails(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "broken.ipynb"
    nbformat.write(notebook("1 / 0"), path)
    monkeypatch.setattr(shell, "find_notebook", lambda: path)
    assert shell.main(["demo"]) == 1
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err and "0 causes named" in said.out


def test_the_demos_notebook_is_in_the_checkout() -> None:
    found = shell.find_notebook()
    assert found == ROOT / "notebooks" / "01_nan.ipynb"


def test_a_missing_notebook_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setattr(shell, "DEMO", "no_such.ipynb")
    assert shell.main(["demo"]) == 2
    assert "no_such.ipynb" in capsys.readouterr().err
