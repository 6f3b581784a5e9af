"""The runner of cases: what counts as a case, what a wrong answer, a crash, a timeout and an uncovered kind become."""

from __future__ import annotations

import json
import pathlib
import textwrap
import types

import pytest

from nbdebug import Finding, Report, Where
from tests.cases import __main__ as command
from tests.cases import asking, running

JUDGE = pathlib.Path(__file__).resolve().parents[2] / "shared" / "cases" / "judge.py"
needs_judge = pytest.mark.skipif(not JUDGE.is_file(), reason="no ../shared/cases/judge.py beside this checkout")

LOG = '''
    """log of zero in the second of three steps."""
    from types import SimpleNamespace
    import torch

    EXPECT = {"code": "nan/log-of-nonpositive", "phase": "forward", "module": "", "op": "log",
              "line": "torch.log(p)", "step": 1, "samples": [2]}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            p = x * self.w
            return torch.log(p)

    def build(fixed: bool = False) -> SimpleNamespace:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.rand(3, 4, 3) + 0.5
        x[1, 2, 0] = 0.5 if fixed else 0.0
        batches = iter(x)

        def step():
            optimizer.zero_grad()
            loss = model(next(batches)).mean()
            loss.backward()
            optimizer.step()
            return loss

        return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)
'''
SLEEPS = LOG.replace("torch.manual_seed(0)", "import time; time.sleep(300)")
EXITS = LOG.replace("torch.manual_seed(0)", "import os; os._exit(7)")
RAISES = LOG.replace("torch.manual_seed(0)", "raise RuntimeError('no such <file>')")


def write(folder: pathlib.Path, **cases: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    if JUDGE.is_file() and not (folder.parent / "judge.py").exists():
        (folder.parent / "judge.py").symlink_to(JUDGE)
    for name, text in cases.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@needs_judge
def test_a_right_answer_scores_and_exits_zero(tmp_path, capsys) -> None:
    folder = write(tmp_path / "nan", log=LOG)
    status = command.main([str(folder)])
    printed = capsys.readouterr().out
    assert "broken: 1 of 1 named" in printed and "repaired: 1 of 1 silent" in printed, printed
    assert status == 0


@needs_judge
def test_json_tells_each_part(tmp_path, capsys) -> None:
    write(tmp_path / "nan", log=LOG.replace('"step": 1', '"step": 2'))
    status = command.main([str(tmp_path), "--json"])
    broken, repaired = json.loads(capsys.readouterr().out)
    assert set(broken) == {"case", "kind", "twin", "ok", "expected", "got", "right"}
    assert (broken["case"], broken["kind"], broken["twin"], broken["ok"]) == ("nan/log", "nan", "broken", False)
    assert {part for part, right in broken["right"].items() if not right} == {"step"}
    assert repaired["twin"] == "repaired" and repaired["ok"] is True and repaired["right"] == {"silent": True}
    assert status == 1


@pytest.mark.parametrize(
    ("text", "limit", "message"),
    [
        (SLEEPS, 2.0, "no answer within 2 s"),
        (EXITS, 60.0, "ended with status 7"),
        (RAISES, 60.0, "RuntimeError: no such <file>"),
    ],
)
def test_a_timeout_or_crash_is_a_wrong_answer_with_its_message(tmp_path, text, limit, message) -> None:
    path = write(tmp_path / "nan", bad=text) / "bad.py"
    for twin in running.TWINS:
        result = running.run_one(path, twin, limit)
        assert result.ok is False and message in result.got["error"]
        assert result.right and not any(result.right.values())


def test_an_uncovered_kind_is_skipped_with_that_reason_and_is_no_success(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(running, "ASKERS", {})
    folder = write(tmp_path / "speed", log=LOG)
    status = command.main([str(folder)])
    printed = capsys.readouterr().out
    assert "skipped" in printed and "nbdebug does not cover speed yet" in printed
    assert status == 1, "a run in which nothing was judged is no success"


def test_files_that_are_no_cases_are_left_out(tmp_path) -> None:
    folder = write(tmp_path / "nan", log=LOG, judge="def judge(): ...", half="EXPECT = {}")
    assert [p.name for p in running.find([folder, folder / "log.py"])] == ["log.py"]
    with pytest.raises(FileNotFoundError, match="no such folder"):
        running.find([tmp_path / "nowhere"])


def test_expect_may_be_computed(tmp_path) -> None:
    text = "N = 2\nEXPECT = {'items': {i: 'x' for i in range(N)}}\ndef build(fixed=False): ..."
    path = write(tmp_path / "data", rows=text)
    assert running.read_expect(path / "rows.py") == {"items": {0: "x", 1: "x"}}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("model optimizer step steps", "nan"),
        ("model step steps seen", "memory"),
        ("model optimizer loader step", "speed"),
        ("cells", "notebook"),
        ("trigger", "error"),
        ("model batch loss_fn dtype", "precision"),
        ("answer", "unknown"),
    ],
)
def test_the_kind_is_told_by_the_namespace_where_the_folder_does_not(names: str, kind: str) -> None:
    ns = types.SimpleNamespace(**dict.fromkeys(names.split()))
    assert asking.kind_of(pathlib.Path("elsewhere") / "case.py", ns) == kind
    assert asking.kind_of(pathlib.Path("nan") / "case.py", ns) == "nan"


def test_a_line_in_another_file_is_no_line_of_the_case(tmp_path) -> None:
    path = tmp_path / "case.py"
    here, elsewhere = (
        Report("q", (Finding("nan/overflow", "Too large", Where(file=file, line=3, samples=(1,))),))
        for file in (str(path), "other.py")
    )
    assert asking.answer_of(here, path)["line"] == 3 and asking.answer_of(here, path)["samples"] == [1]
    assert asking.answer_of(elsewhere, path)["line"] is None
    assert asking.answer_of(Report("q"), path)["findings"] == 0


def test_a_report_that_hangs_on_the_users_exception_is_taken(monkeypatch) -> None:
    report = Report("q")

    def raises(*args, **kwargs):
        error = ValueError("the step's own")
        error.report = report
        raise error

    monkeypatch.setattr(asking.nbdebug, "nan_trace", raises, raising=False)
    ns = types.SimpleNamespace(step=None, model=None, optimizer=None, steps=1)
    assert asking.ask_nan(ns) is report
