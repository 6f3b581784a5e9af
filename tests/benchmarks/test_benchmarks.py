"""The benchmark runs, at its smallest, and asks every tool; what it measures is not judged."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nbdebug
from tests.benchmarks import nan
from tests.benchmarks.tools import TOOLS
from tests.benchmarks.training import SIZES, Training

OURS = [tool for tool in TOOLS if tool.name.startswith("nbdebug")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("benchmark") / "numbers.json"
    try:
        nan.main(["--device", "cpu", "--size", "smallest", "--repeats", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    yield {row["tool"]: row for row in json.loads(path.read_text())["rows"]}


def test_every_tool_has_a_row_with_numbers_or_a_reason(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == [tool.name for tool in TOOLS]
    for row in rows.values():
        assert row["skipped"] or len(row["ratios"]) == 1, row


def test_only_what_is_not_installed_is_skipped(rows: dict[str, dict[str, Any]]) -> None:
    assert not [row["skipped"] for row in rows.values() if row["skipped"] and "not installed" not in row["skipped"]]


@pytest.mark.parametrize("tool", OURS, ids=lambda tool: tool.name)
def test_nbdebug_names_the_planted_fault(rows: dict[str, dict[str, Any]], tool: Any) -> None:
    training = Training(SIZES["smallest"], "cpu")
    answers = rows[tool.name]["named"]
    assert set(answers) == ({tool.fault} if tool.fault else {"forward", "backward"})
    for fault, answer in answers.items():
        planted = training.plant(fault)
        assert answer.startswith(f"{planted.code}, {planted.module}, "), answer
        assert f"row {', '.join(map(str, planted.samples))}, fix tried: works" in answer


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_planted_line_is_the_one_that_is_named(fault: str) -> None:
    training = Training(SIZES["smallest"], "cpu")
    planted = training.plant(fault)
    where = nbdebug.nan_trace(training.step, model=training.model, optimizer=training.optimizer).findings[0].where
    assert pathlib.Path(where.file).name == "training.py"
    assert where.text.startswith(planted.text)


def test_a_rewound_training_repeats_its_step() -> None:
    training = Training(SIZES["smallest"], "cpu")
    first = training.step()
    training.plant("backward")
    training.step()
    training.plant(None)
    training.rewind()
    assert torch.equal(training.step(), first)
