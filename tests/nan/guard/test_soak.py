"""A long run under the guard grows nothing and ends in the same bits. 3,000 steps here; the long form is a command:

python -m tests.nan.guard.soak --steps 20000            (add --trace to count bytes, --record FOLDER to write one)
"""

from __future__ import annotations

import pytest
import torch

from tests.nan.guard.soak import soak
from tests.nan.leftovers import assert_nothing_is_left


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert_nothing_is_left()


def test_nothing_grows_and_the_bits_are_the_same() -> None:
    told = soak(3_000, max_grad_norm=1e3, skip_above=1e9)
    print(told)
    assert not told.wrong(), told.wrong()


def test_nothing_grows_while_it_writes_a_record(tmp_path) -> None:
    told = soak(1_000, record=tmp_path / "run.nbdebug")
    assert not told.wrong(), told.wrong()
