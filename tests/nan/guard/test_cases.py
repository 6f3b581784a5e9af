"""The shared cases asked by the guard: tripped at the step that failed, named, weights as before it."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from tests.cases import __main__ as command
from tests.cases.__main__ import row
from tests.cases.running import find, run, run_one
from tests.test_cases_runner import LOG, needs_judge, write

CASES = pathlib.Path(__file__).resolve().parents[4] / "shared" / "cases"


@pytest.mark.timeout(600)
def test_a_case_trips_is_named_and_leaves_the_weights_intact() -> None:
    if not (CASES / "nan").is_dir():
        pytest.skip("no ../shared/cases/nan beside this checkout")
    cases = find([CASES / "nan"])
    results = list(run(cases if os.environ.get("NBDEBUG_ALL_TESTS") else cases[::16], by="guard"))
    assert results and all("intact" in r.right for r in results if r.twin == "broken" and r.ok is not None)
    wrong = [row(result) for result in results if not result.ok]
    assert not wrong, "\n" + "\n".join(wrong)


@needs_judge
def test_the_guard_is_asked_by_option(tmp_path, capsys) -> None:
    folder = write(tmp_path / "nan", log=LOG)
    assert command.main([str(folder), "--by", "guard", "--json"]) == 0
    broken, repaired = json.loads(capsys.readouterr().out)
    assert broken["right"]["intact"] is True and broken["got"]["changed"] == []
    assert repaired["right"] == {"silent": True}


@needs_judge
def test_weights_that_moved_are_told(tmp_path) -> None:
    """A program that spoils a buffer of its own in the bad step, where no guard can see it."""
    spoils = LOG.replace("loss.backward()", "loss.backward()\n            model.w.data.mul_(1 + float(loss.isinf()))")
    result = run_one(write(tmp_path / "nan", log=spoils) / "log.py", "broken", by="guard")
    assert result.right["intact"] is False and result.ok is False and result.got["changed"] == ["model.w"]


def test_an_unknown_way_of_asking_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main([str(tmp_path), "--by", "magic"])
    assert "guard" in capsys.readouterr().err
