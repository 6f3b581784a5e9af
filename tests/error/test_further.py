"""Further errors, as people meet them: in nested functions, trainer classes, torch's own frames, workers and chains.

Each program in further/ is broken in one way; the explanation must have its code and its names, and its repaired twin
runs through. A program has the form of a case: EXPECT holds `code` (in `also` what would be right too) and `names`,
words that must stand in the explanation; build() and build(fixed=True) give a namespace with trigger().
"""

from __future__ import annotations

import gc
import os
import pathlib
import re
import sys
import tempfile
from unittest import mock

import pytest
import torch

import nbdebug
from tests.cases.asking import load

pytestmark = [
    pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]
HERE = pathlib.Path(__file__).parent / "further"
PROGRAMS = sorted(HERE.glob("*.py"))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch, tmp_path):
    """What a program changes of the process is put back; a loader that failed waits not long for its workers."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    # torch's answer to a worker's end is an error in whatever line runs just then, be it one of the test's
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_error_if_any_worker_fails", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # programs write the files that they import there
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads, modules = torch.get_num_threads(), set(sys.modules)
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def stands_in(name: str, text: str) -> bool:
    """Whether the name is a word of its own in the text, or the end of a dotted name."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_error_is_named(path):
    program = load(path)
    try:
        program.build().trigger()
    except Exception as raised:
        report = nbdebug.explain(raised, names={})
    else:
        pytest.fail("the broken program ran through")
    if "num_workers" in path.read_text(encoding="utf-8"):
        gc.collect()  # else the loader's workers are looked after later, in another test
    assert not report.ok, str(report)
    assert report.findings[0].code in (program.EXPECT["code"], *program.EXPECT.get("also", ()))
    assert [name for name in program.EXPECT["names"] if not stands_in(name, str(report))] == [], str(report)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_its_twin_runs_through(path):
    load(path).build(fixed=True).trigger()


def test_each_kind_has_three():
    kinds = [load(path).EXPECT["code"] for path in PROGRAMS]
    assert {kind: kinds.count(kind) for kind in kinds if kinds.count(kind) < 3} == {}
    assert len(set(kinds)) == 15
