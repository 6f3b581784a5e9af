"""The benchmark of grad_watch runs, at its smallest; what it measures is not judged, but that the table is right is."""

from __future__ import annotations

import json
import pathlib

import torch

from tests.benchmarks import watch


def test_every_way_has_a_row(tmp_path: pathlib.Path) -> None:
    threads, path = torch.get_num_threads(), tmp_path / "numbers.json"
    try:
        watch.main(["--device", "cpu", "--size", "smallest", "--repeats", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == list(watch.WAYS) and all(len(row["ratios"]) == 1 for row in rows)
    assert rows[0]["worst"] < 1e-6
