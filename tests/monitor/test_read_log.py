"""read_log on logs of many forms: each planted trouble is named with its line, and healthy runs are silent."""

from __future__ import annotations

import pathlib
import re

import pytest

import nbdebug
from tests.monitor import logs


def words(report: nbdebug.Report) -> str:
    return " ".join([*(f"{f.code} {f.title} {f.where.place}" for f in report), *(s.what for s in report.symptoms)])


@pytest.mark.parametrize("form", logs.FORMATS)
def test_each_trouble_is_named_with_its_line_and_a_healthy_run_is_silent(form: str, tmp_path: pathlib.Path) -> None:
    write = logs.FORMATS[form]
    report = nbdebug.read_log(write(_folder(tmp_path, "healthy"), logs.healthy(1)))
    assert report.ok and report.steps >= 30, words(report)
    for trouble, make in logs.TROUBLES.items():
        if trouble in logs.SILENT.get(form, ()):
            continue
        run = make(3)
        report = nbdebug.read_log(write(_folder(tmp_path, trouble), run))
        said = words(report) if trouble != "back" else " ".join(report.notes)
        assert report.ok == (trouble == "back"), (trouble, said)
        assert all(re.search(word, said) for word in run.expect) and re.search(r"line [\d,]+", said), (trouble, said)


def _folder(tmp_path: pathlib.Path, name: str) -> pathlib.Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder
