"""The memory notebook on a card: its cells run as they stand, with the functions in place of the magics.

The machine with the card may have no Jupyter, so the cells are executed as plain code; what fails there fails as in a
notebook, and its traceback is kept as a notebook keeps it.
"""

from __future__ import annotations

import gc
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nbdebug
from nbdebug.tools.memory.oom import out_of_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "03_memory.ipynb"


def ask(line: str, space: dict[str, Any]) -> Any:
    """What a magic on a line of its own answers."""
    magic, *words = line.split()
    if magic == "%explain":
        return out_of_memory(sys.last_value, space)
    if magic == "%free":
        return nbdebug.free(*words, names=space)
    return nbdebug.mem(names=space) if magic == "%mem" else None


def run(source: str, name: str, space: dict[str, Any]) -> Any:
    """The answer of a magic; else the value of the last line, where that is an expression."""
    if source.startswith("%%mem"):
        code = compile(source.partition("\n")[2], name, "exec")
        return nbdebug.mem(lambda: exec(code, space), steps=1, names=space)
    if source.startswith("%"):
        return [ask(line, space) for line in source.splitlines()][-1]
    *body, last = source.rstrip().splitlines()
    try:
        code = compile(last, name, "eval")
    except SyntaxError:
        exec(compile(source, name, "exec"), space)
        return None
    exec(compile("\n".join(body), name, "exec"), space)
    return eval(code, space)


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    """The notebook takes a small part of the card for itself; afterwards all of it is there again."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_its_cells_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    space = vars(module)
    said: list[str] = []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        try:
            space["_"] = run(source, f"cell {number}", space)
        except torch.OutOfMemoryError as error:
            assert "raises-exception" in cell["metadata"].get("tags", ()), f"{source}\n{error}"
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            continue
        assert "raises-exception" not in cell["metadata"].get("tags", ()), f"it should have failed: {source}"
        said += [finding.code for finding in getattr(space["_"], "findings", ())]
    assert said[:2] == ["error/out-of-memory"] * 2
    assert {"memory/activations-dominate", "memory/eval-without-no-grad", "memory/hook-held"} <= set(said)
