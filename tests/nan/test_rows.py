"""Rows of the batch, told apart by replay."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.nan.towers import BATCH, Case, Log, Plain, Tower, side_with


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict


class Unpacks(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.mix, self.act = nn.Linear(4, 4), act

    def forward(self, batch, *, ids=None):
        return {"out": (self.mix(batch.x) + self.act(batch.more["sides"][0])[:, None], ids)}


@pytest.mark.parametrize(
    ("act", "bad", "smallest"),
    [
        (torch.log, (1, 4), (1,)),  # each row fails alone
        (lambda side: torch.log(side.sum() - (BATCH - 1.5)) + side, (1, 4), (1, 4)),  # two rows fail only together
    ],
)
def test_rows_in_nested_arguments_alone_and_together(act, bad, smallest):
    batch = Batch(torch.randn(BATCH, 4), {"sides": [side_with(bad)], "name": "x"})
    case = Case(Unpacks(act), lambda m: m(batch, ids=torch.arange(BATCH))["out"][0].mean(), module="")
    report = case.search()
    assert report.findings[0].where.samples == bad and report.facts["rows"]["smallest"] == smallest
    said = "Row 1 alone is enough" if smallest == (1,) else "Rows 1 and 4 make the step fail together"
    assert any(said in note for note in report.notes)


def test_a_right_hint_saves_replays_and_a_wrong_one_is_corrected():
    counts = {}
    for hint in (None, (3,), (2,)):
        x, side = torch.randn(BATCH, 4), side_with({3})
        report = Case(Tower([Plain(), Log()]), lambda m: m(x, side).mean(), samples=hint).search()  # noqa: B023
        assert report.findings[0].where.samples == (3,)
        corrected = "The op tracer found the fault in row 2; replays find it in row 3."
        assert (corrected in report.notes) == (hint == (2,))
        counts[hint] = report.facts["replays"]["rows"]
    assert counts[(3,)] == 3 < counts[None] <= counts[(2,)]


def test_rows_that_replay_cannot_tell_apart_stay_as_the_tracer_says():
    y = torch.tensor([1.0, 0, 1])
    model = nn.Linear(2, 1)
    report = Case(model, lambda m: (m(torch.ones(3, 2))[:, 0] * torch.log(y)).mean(), samples=(1,), module="").search()
    assert report.findings[0].where.samples == (1,)  # labels do not come in through the model
    report = Case(model, lambda m: m(torch.full((1, 2), math.inf)).mean()).search()
    assert report.findings[0].where.samples is None and "not given a batch of several rows" in report.notes[1]


def test_a_batch_that_no_longer_fails_is_not_called_a_cause():
    """Something outside of model and optimizer was changed by the run under the tracer."""
    model, x, side = Tower([Plain(), Log()]), torch.randn(BATCH, 4), side_with({3})
    case = Case(model, lambda m: m(x, side).mean(), samples=(3,))
    found = case.trace
    case.trace = lambda: (found(), side.fill_(1))[0]
    report = case.search()
    assert report.findings[0].where.samples == (3,) and "did not fail again" in " ".join(report.notes)
