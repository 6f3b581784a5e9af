"""nbdebug on real failures: shared cases of each covered kind are named, their repaired twins are silent.

One case of 15 is run (of 24, where each starts processes or trains), all where
NBDEBUG_ALL_TESTS is set; `python -m tests.cases ../shared/cases` runs all, too."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.cases.__main__ import row
from tests.cases.asking import ASKERS
from tests.cases.running import find, run

CASES = pathlib.Path(__file__).resolve().parents[2] / "shared" / "cases"
SLOW = ("distributed", "speed", "training")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sorted(ASKERS))
def test_a_case_is_named_and_its_twin_silent(kind: str) -> None:
    if not (CASES / kind).is_dir():
        pytest.skip(f"no ../shared/cases/{kind} beside this checkout")
    cases = find([CASES / kind])
    among = 1 if os.environ.get("NBDEBUG_ALL_TESTS") else 24 if kind in SLOW else 15
    results = list(run(cases[::among]))
    assert results, f"../shared/cases/{kind} holds no case"
    wrong = [row(result) for result in results if not result.ok]
    assert not wrong, "\n" + "\n".join(wrong)
