"""The benchmark of preflight runs, at its smallest; what it measures is not judged, but what is found is."""

from __future__ import annotations

import json
import pathlib

import torch

from tests.benchmarks import preflight


def test_every_look_has_a_row(tmp_path: pathlib.Path) -> None:
    threads, path = torch.get_num_threads(), tmp_path / "numbers.json"
    try:
        preflight.main(["--device", "cpu", "--model", "perceptron", "--repeats", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    well, sick = json.loads(path.read_text())["rows"]
    assert len(well["seconds"]) == 1 and well["losses"] > 0
    assert well["found"] == [] and well["unlooked"] == []
    assert sick["found"] == ["training/double-softmax"] and sick["fix"] == "fix works"
