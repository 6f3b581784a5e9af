"""The guard's benchmark runs, at its smallest; what it measures is not judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.benchmarks import guard
from tests.benchmarks.training import SIZES, Training


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("benchmark") / "numbers.json"
    try:
        guard.main(["--device", "cpu", "--size", "smallest", "--repeats", "2", "--trips", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    yield {row["optimizer"]: row for row in json.loads(path.read_text())["rows"]}


def test_every_optimizer_has_its_pairs(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == list(guard.OPTIMIZERS)
    assert all(len(row["ratios"]) == len(row["steps"]) == 2 for row in rows.values())


@pytest.mark.parametrize("optimizer", ["plain AdamW", "fused AdamW"])
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_report_names_the_planted_fault(rows: dict[str, dict[str, Any]], optimizer: str, fault: str) -> None:
    planted = Training(SIZES["smallest"], "cpu").plant(fault)
    seconds, said = rows[optimizer]["trips"][fault]
    assert len(seconds) == 1
    assert said.startswith(f"{planted.code}, {planted.module}, ") and said.endswith("row 3, fix tried: works"), said
