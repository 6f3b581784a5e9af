"""Modes that watch ops: what they see of a batch's rows, and what they leave behind."""

from __future__ import annotations

import signal
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbdebug.observe.ops import RowsByNumber, schema_of
from nbdebug.tools.nan.taint import results_of

ROWS = 8
NUMBERS = torch.tensor([1, 5, 3])
BY_NUMBER = {
    "an index": lambda x, table: x[NUMBERS],
    "an index of folded rows": lambda x, table: x.repeat(3, 1)[NUMBERS],
    "index_select": lambda x, table: x.index_select(0, NUMBERS),
    "index_add": lambda x, table: torch.zeros_like(x).index_add(0, NUMBERS, x[:3]),
    "gather": lambda x, table: x.gather(0, NUMBERS[:, None].expand(3, 5)),
    "a part that is written": lambda x, table: torch.index_put(x, (NUMBERS,), x[:3]),
    "the model's own table": lambda x, table: table(NUMBERS % 4),
    "its weight by numbers": lambda x, table: table.weight[NUMBERS % 4],
    "a column": lambda x, table: x[:, NUMBERS % 5],
    "a mask": lambda x, table: x[x[:, 0] > 0],
    "a slice": lambda x, table: x[2:5],
}
SAFE = ("the model's own table", "its weight by numbers", "a column", "a mask", "a slice")


@pytest.mark.parametrize("name", BY_NUMBER)
def test_rows_that_are_read_by_their_numbers_are_seen(name: str) -> None:
    table = nn.Embedding(ROWS, 5)
    with RowsByNumber(table, ROWS) as watch:
        BY_NUMBER[name](torch.randn(ROWS, 5), table)
    assert watch.seen == (name not in SAFE)


def test_ctc_is_as_it_was_behind_the_last_mode() -> None:
    own = torch.ctc_loss
    scores = torch.randn(6, 2, 5).log_softmax(-1)
    told = torch.randint(1, 5, (2, 3)), torch.full((2,), 6), torch.full((2,), 3)
    model = nn.Linear(1, 1)
    with RowsByNumber(model, 2), RowsByNumber(model, 2):
        assert torch.ctc_loss is not own
        loss = nn.functional.ctc_loss(scores, *told)
    assert torch.ctc_loss is own and torch.equal(loss, nn.functional.ctc_loss(scores, *told))


def test_ctrl_c_as_a_mode_begins_leaves_no_mode() -> None:
    own, depth = torch.ctc_loss, torch._C._len_torch_dispatch_stack()
    plain = TorchDispatchMode.__enter__

    def interrupted(mode: TorchDispatchMode) -> TorchDispatchMode:
        signal.raise_signal(signal.SIGINT)
        return plain(mode)

    with mock.patch.object(TorchDispatchMode, "__enter__", interrupted), pytest.raises(KeyboardInterrupt):
        RowsByNumber(nn.Linear(1, 1), 2).__enter__()
    assert torch.ctc_loss is own and torch._C._len_torch_dispatch_stack() == depth


def test_what_attention_notes_for_its_backward_is_no_result() -> None:
    """On a GPU its second result is filled up with infinities."""
    out, sums = torch.randn(1, 2, 5, 8), torch.full((1, 2, 32), float("inf"))
    forward = schema_of(torch.ops.aten._scaled_dot_product_efficient_attention.default)
    assert [t for _, t in results_of(forward, (out, out, out), {}, (out, sums))] == [out]
    backward = schema_of(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default)
    assert len(results_of(backward, (out, out, out, out), {}, (out, out, out))) == 3
