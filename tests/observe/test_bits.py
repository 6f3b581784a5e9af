"""Tensors as bits."""

from __future__ import annotations

import pytest
import torch

from nbdebug.observe.tensors import fingerprint
from tests.observe.photograph import raw


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32, torch.bool, torch.complex64], ids=str)
def test_a_fingerprint_changes_nothing(dtype):
    x = torch.tensor([0, 2, 6]).to(dtype)
    before = raw(x)
    assert fingerprint(x) == fingerprint(x) and raw(x) == before


def test_fingerprints_tell_bits_and_places_apart():
    x = torch.tensor([1.0, 2.0, float("nan"), 0.0])
    assert fingerprint(x) == fingerprint(x.clone())
    negative = torch.tensor([1.0, 2.0, float("nan"), -0.0])
    others = [x.flip(0), x[[1, 0, 2, 3]], x.double(), x.reshape(2, 2), negative, x[:3]]
    assert len({fingerprint(x), *map(fingerprint, others)}) == 7
    assert fingerprint(x.t().contiguous()) == fingerprint(x)
    assert fingerprint(torch.tensor([1 + 2j]).conj()) != fingerprint(torch.tensor([1 + 2j]))
    assert fingerprint(x.to_sparse()) == fingerprint(x.to_sparse()) != fingerprint(x.flip(0).to_sparse())
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0))
