"""nbdebug on real failures: every shared case of a covered kind is named, every repaired twin is silent."""

from __future__ import annotations

import pathlib

import pytest

from tests.cases.__main__ import row
from tests.cases.asking import ASKERS
from tests.cases.running import run

CASES = pathlib.Path(__file__).resolve().parents[2] / "shared" / "cases"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sorted(ASKERS))
def test_every_case_is_named_and_every_twin_silent(kind: str) -> None:
    if not (CASES / kind).is_dir():
        pytest.skip(f"no ../shared/cases/{kind} beside this checkout")
    results = list(run([CASES / kind]))
    assert results, f"../shared/cases/{kind} holds no case"
    wrong = [row(result) for result in results if not result.ok]
    assert not wrong, "\n" + "\n".join(wrong)
