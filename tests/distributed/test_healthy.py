"""Sixteen healthy programs on two real processes, as cells and as scripts: nbdebug stays silent."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest

from nbdebug.tools.distributed.engines import Engines
from nbdebug.tools.distributed.launch import run_script
from tests.distributed.programs import HEAD, PROGRAMS


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Beside a single GPU the second rank would take one that is not there."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        yield


@pytest.fixture(scope="module")
def engines(no_gpu: None) -> Iterator[Engines]:
    engines = Engines(2)
    yield engines
    engines.stop()


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_cell(engines: Engines, name: str) -> None:
    outcome = engines.run(HEAD + PROGRAMS[name], "In [1]", lambda rank, kind, value: None)
    assert outcome.report is None and not outcome.errors, f"{outcome.report}{outcome.errors}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_script(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}{PROGRAMS[name]}dist.destroy_process_group()\n")
    report = run_script(str(tmp_path / "train.py"), echo=False, limit=100)
    assert report.ok and not report.findings, str(report)
