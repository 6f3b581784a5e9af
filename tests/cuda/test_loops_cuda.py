"""The loops that people have, on a GPU: `python -m tests.loops --cuda` has the whole table."""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests import loops
from tests.test_loops import SAMPLE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("tool", "failure"), SAMPLE)
def test_the_answer_is_that_of_a_plain_loop(tool: str, failure: str, tmp_path: pathlib.Path) -> None:
    loops.quiet()
    others = [loop for loop in loops.LOOPS if loop != "plain" and loops.available(loop)]
    for (_, _, loop), (same, difference) in loops.table([tool], others, tmp_path, [failure], card=True).items():
        assert same, (loop, difference)
