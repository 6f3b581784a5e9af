"""fit for a card on a machine without one, against what an H200 really took; and the model of its allocator."""

from __future__ import annotations

import functools
import resource
import sys

import pytest
import torch

from nbdebug.tools.memory.predict.allocator import MIB, Allocator, replay
from nbdebug.tools.memory.predict.job import FitRequest
from nbdebug.tools.memory.predict.predict import largest_batch, predict
from tests.benchmarks.fit_models import GPT, Case, adamw, cases, next_token

MEASURED = {
    "MLP fp32 512 AdamW": (866.9, 946),
    "MLP fp32 8192 SGD": (1422.5, 1674),
    "CNN fp32 32 SGD": (874.9, 1376),
    "CNN bf16 64 SGD": (964.0, 1460),
    "GPT-2 fp32 4 AdamW": (6196.9, 6824),
    "GPT-2 bf16 8 SGD": (7820.9, 9748),
    "GPT-2 bf16 checkpointed 16 AdamW": (10070.8, 14264),
    "GPT-2 bf16 dropout 8 AdamW": (8450.6, 9956),
}
"""MiB: max_memory_allocated and max_memory_reserved after two steps on an H200 (torch 2.11, CUDA 13, cuDNN 9.19)."""

without_a_card = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/cuda asks the card that is there")


def job(case: Case) -> FitRequest:
    def loss_fn(model, batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=case.half):
            return case.loss(model, batch)

    with torch.device("meta"):
        batch = case.batch()
    return FitRequest(case.build, batch, loss_fn, case.optimizer, torch.device("cuda"))


@without_a_card
@pytest.mark.parametrize("name", MEASURED)
def test_a_card_that_is_not_here_is_foretold(name):
    case = next(c for c in cases() if c.name == name)
    peak, reserved = (count * MIB for count in MEASURED[name])
    said = predict(job(case))
    assert said.peak == pytest.approx(peak, rel=case.within)
    assert said.reserved == pytest.approx(reserved, rel=0.1)


@without_a_card
def test_the_largest_batch_is_that_of_the_card():
    case = next(c for c in cases() if c.name == "CNN fp32 32 SGD")
    found = largest_batch(job(case), 6 << 30, {})
    assert found.most == pytest.approx(272, rel=0.05)  # found by trying on a card limited to 6 GiB
    assert found.needs <= 6 << 30


@without_a_card
def test_what_is_steered_is_as_before_afterwards():
    model, batch = GPT(layers=1, width=16, heads=2, vocabulary=20, length=8), torch.randint(20, (2, 9))
    before = torch.autocast.__init__

    def half(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model, batch).dtype, torch.randn(4).exp().dtype, model.norm(torch.randn(2, 16)).dtype

    dtypes, plain = half(model, batch), next_token(model, batch)
    predict(FitRequest(model, batch, lambda m, b: next_token(m.cuda(), b.to("cuda")), adamw, torch.device("cuda")))
    assert half(model, batch) == dtypes and torch.equal(next_token(model, batch), plain)
    assert torch.autocast.__init__ is before


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_a_model_that_fits_nowhere_takes_no_memory():
    build = functools.partial(GPT, layers=2, width=16384, heads=64, vocabulary=32000, length=512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = predict(
        FitRequest(build, torch.empty(4, 513, dtype=torch.long, device="meta"), next_token, adamw, torch.device("cpu"))
    )
    assert said.parameters > 24 << 30 and said.peak > 96 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_the_allocator_cuts_and_joins_as_torch_does():
    allocator = Allocator()
    small = allocator.allocate(100)
    assert (small.size, allocator.reserved) == (512, 2 * MIB)
    middle = allocator.allocate(3 * MIB)
    assert (middle.size, allocator.reserved) == (3 * MIB, 22 * MIB)
    rest = allocator.allocate(16 * MIB + 1)  # 17 MiB are left over; less than 1 MiB of them would remain
    assert (rest.size, allocator.reserved) == (17 * MIB, 22 * MIB)
    large = allocator.allocate(11 * MIB + 1)
    assert (large.size, allocator.reserved) == (12 * MIB, 34 * MIB)
    for piece in (middle, rest, small, large):
        allocator.free(piece)
    assert allocator.allocated == 0 and [size for size, _ in allocator.pools[False]] == [12 * MIB, 20 * MIB]
    assert allocator.allocate(19 * MIB + 1).size == 20 * MIB and allocator.reserved == 34 * MIB


def test_near_its_limit_the_allocator_gives_free_segments_back():
    sizes = [12 * MIB, 14 * MIB, 20 * MIB]
    events = [0, 1, ~0, 2]
    assert replay(events, sizes).reserved == 46 * MIB
    held = replay(events, sizes, 40 * MIB)
    assert (held.failed, held.returned, held.reserved) == (None, 12 * MIB, 34 * MIB)
    assert replay(events, sizes, 30 * MIB).failed == 3
