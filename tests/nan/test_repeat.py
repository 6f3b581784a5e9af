"""A step that does not repeat is refused, with the reason, and everything is as it was."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.tools.nan.bisect import StepDoesNotRepeat
from tests.nan.towers import BATCH, Case, Log, MaskedSoftmax, Plain, Tower, Unused, no_hooks, side_with


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def unseeded(x, model, side):
    noise, counter, w = random.Random(), itertools.count(1), torch.ones(1, requires_grad=True)
    batches, shuffled = itertools.cycle([x, x + 1, x * 2]), iter([x])
    generator = np.random.default_rng(0)
    loss = lambda batch: model(batch, side).square().mean()
    return {
        "an iterator": (lambda: loss(next(batches)), "given another batch the second time"),
        "an iterator that ends": (lambda: loss(next(shuffled)), "iterator that it takes its batches from had run out"),
        "its own generator": (lambda: loss(x + noise.random()), "given another batch the second time"),
        "numpy's generator": (lambda: loss(x) * generator.random(), "although the model was given the same batch"),
        "a counter": (lambda: loss(x) / next(counter), "loss came out differently although .* (a counter"),
        "other calls": (lambda: sum(loss(x) for _ in range(next(counter))), "called other modules .*8 calls, then 16"),
        "a new seed": (lambda: loss(x) + 0 * torch.seed(), "random numbers differ"),
        "an error": (lambda: loss(x) if next(counter) == 1 else 1 / 0, "second time it raised ZeroDivisionError"),
        "a second backward": (lambda: [w.sum().backward() for _ in range(next(counter))] and loss(x), "another number"),
    }


@pytest.mark.parametrize("kind", unseeded(torch.zeros(1), nn.Linear(1, 1), None))
def test_a_step_that_does_not_repeat_is_refused_with_the_reason(kind):
    model, x = Tower([Plain(), Tower([MaskedSoftmax(), Log()]), Plain(), Unused(), Plain()]), torch.randn(BATCH, 4)
    loss, reason = unseeded(x, model, torch.ones(BATCH))[kind]
    case = Case(model, lambda m: loss(), optimizer=torch.optim.Adam)
    before = Snapshot.take(model, case.optimizer)
    with pytest.raises(StepDoesNotRepeat, match=reason.replace("(", r"\(")) as caught:
        case.search()
    assert 'strategy="trace"' in str(caught.value) and caught.value.reasons
    assert before.differences() in ([], ["Python's random numbers"]) and no_hooks(model)


def test_global_random_numbers_repeat_since_their_state_is_restored():
    model, x, side = Tower([Plain(), Log()]), torch.randn(BATCH, 4), side_with({1})
    draw = lambda: random.random() + np.random.rand() + torch.rand(1)
    assert Case(model, lambda m: m(x + draw(), side).mean()).search().findings
