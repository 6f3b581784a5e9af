"""`python -m nbdebug`: the same functions from a shell."""

from __future__ import annotations

import io
import json
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


def test_an_unknown_command_gets_the_nearest_one(capsys) -> None:
    with pytest.raises(SystemExit):
        shell.main(["explian", "overflow"])
    assert "'explian' is not check, " in (said := capsys.readouterr().err) and "Did you mean explain?" in said


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


def test_the_demos_notebook_is_in_the_checkout_and_in_the_wheel() -> None:
    found = shell.find_notebook()
    assert found == ROOT / "notebooks" / "00_first_aid.ipynb"
    assert f'"notebooks/{shell.DEMO}" = "nbdebug/notebooks/{shell.DEMO}"' in (ROOT / "pyproject.toml").read_text(
        "utf-8"
    )


def test_a_missing_notebook_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setattr(shell, "DEMO", "no_such.ipynb")
    assert shell.main(["demo"]) == 2
    assert "no_such.ipynb" in capsys.readouterr().err


TRAIN = """
import sys, torch
from torch import nn

def main(fault, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(12):
        x = torch.rand(8, 3) + 0.1
        if fault == "nan" and i == 7:
            x[3] = 0
        loss = (model(x.T if fault == "shape" and i == 5 else x.log()) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    if fault == "exit":
        sys.exit(7)

if __name__ == "__main__":
    assert sys.modules["__main__"].main is main
    main(*sys.argv[1:2])
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_run_leaves_a_healthy_script_as_it_is_and_writes_a_record(train, capsys) -> None:
    space: dict = {"__name__": "plain"}
    exec(TRAIN, space)
    space["main"]("none")
    plain = capsys.readouterr().out
    call = torch.nn.Module.__call__
    assert shell.main(["run", "train.py", "none", "--lr", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == plain, "the same bits"
    assert "12 steps watched" in said.err and "train.nbdebug" in said.err and len(said.err.splitlines()) == 2
    assert torch.nn.Module.__call__ is call and "train" not in sys.argv[0]
    assert shell.main(["run", "train.py", "exit"]) == 7, "and it takes the script's own status"
    assert (train.parent / "train-2.nbdebug").is_dir()
    assert nbdebug.open_record("train.nbdebug").report().steps == 12


def test_run_stops_the_step_that_is_not_finite_and_names_its_cause(train, capsys) -> None:
    assert shell.main(["run", "--save", "night.json", "train.py", "nan"]) == 1
    said = capsys.readouterr().err
    assert "Cause: nan/log-of-nonpositive" in said and "train.py, line 12" in said and "8 steps watched" in said
    assert "nbdebug/tools" not in said.partition("Traceback")[2], "the script's own frames alone"
    assert "nan/log-of-nonpositive" in (train.parent / "night.json").read_text()
    assert shell.main(["run", "--no-record", "--on-trip", "skip", "train.py", "nan"]) == 0, "it goes on"
    assert "12 steps watched, 1 of them not finite" in capsys.readouterr().err


def test_run_explains_an_exception_below_its_traceback(train, capsys) -> None:
    assert shell.main(["run", "train.py", "shape"]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: mat1 and mat2" in said and "Cause: error/shape-mismatch" in said
    assert said.index("Traceback") < said.index("Cause:") and "__main__.py" not in said
    (train.parent / "idle.py").write_text("print(sum(range(4)))")
    assert shell.main(["run", "--no-record", "idle.py"]) == 0
    assert "no model was trained" in capsys.readouterr().err
    assert shell.main(["run", "none.py"]) == 2 and "no such script" in capsys.readouterr().err


def test_every_check_has_a_text_json_and_a_status(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text('{"lr": 0.001}')
    (tmp_path / "bad.json").write_text('{"lr": 0.001,}')
    torch.save({"w": torch.ones(2)}, tmp_path / "step_1.pt")
    for command in ("check", "check-config"):
        assert shell.main([command, "good.json"]) == 0 and shell.main([command, "bad.json"]) == 1
        assert "config/" in capsys.readouterr().out
        assert shell.main([command, "--json", "good.json", "bad.json"]) == 1
        first, second = json.loads(capsys.readouterr().out)
        assert first["ok"] and second["findings"][0]["code"].startswith("config/")
        assert shell.main([command, "none.json"]) == 2
    for words in (["check", "step_1.pt"], ["check-checkpoint", "step_1.pt"]):
        capsys.readouterr()
        status = shell.main([*words, "--json"])
        assert json.loads(capsys.readouterr().out)["ok"] == (status == 0)


def test_a_reader_that_has_enough_ends_it_without_a_traceback() -> None:
    command = f"{sys.executable} -m nbdebug catalogue | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_nothing_to_check_is_not_well(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "train.py").write_text("print()")
    monkeypatch.setattr("sys.stdin", io.StringIO("nothing"))
    for arguments in (["check-data", str(tmp_path / "none")], ["check", str(tmp_path / "train.py")], ["explain", "-"]):
        (tmp_path / "none").mkdir(exist_ok=True)
        assert shell.main(arguments) == 2 and not capsys.readouterr().out


def test_a_traceback_from_stdin_is_explained(capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x15 and 18x2)")
    )
    assert shell.main(["explain", "-"]) == 1 and "error/shape-mismatch" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert shell.main(["explain", "-"]) == 2


def test_the_help_lists_every_command_and_fits_a_wide_terminal(capsys) -> None:
    parser = shell._parser()
    commands = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    text = parser.format_help()
    assert all(f"\n  {name}" in text for name in commands) and max(map(len, text.splitlines())) <= 120
    for one in commands.values():
        assert one.description in one.format_help()
