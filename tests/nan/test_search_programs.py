"""On random programs, made to repeat, strategy "bisect" gives the answer of "trace", and both are right."""

from __future__ import annotations

import math

import pytest
import torch

import nbdebug
from tests.nan.judge import answer_of, judge
from tests.nan.programs import load, make

SEEDS = range(30)


class Batches:
    """The programs' iterator over batches, which can be set back."""

    made: list[Batches] = []

    def __init__(self, batches):
        self.batches, self.next = list(batches), 0
        Batches.made.append(self)

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return self.batches[self.next - 1]


def repeating(program, folder):
    """The program at the step that fails, and that step as one that takes the same batch each time."""
    Batches.made = []
    made = load(program, folder, iter=Batches)
    for _ in range(program.truth.step[0]):
        made.step()
    places = [(batches, batches.next) for batches in Batches.made]

    def step():
        for batches, place in places:
            batches.next = place
        return made.step()

    return made, step


@pytest.mark.filterwarnings("ignore")  # the programs do odd things on purpose
@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_that_of_the_trace(seed, tmp_path):
    torch.set_num_threads(1)
    program = make(seed)
    answers = {}
    for strategy in ("trace", "bisect"):
        made, step = repeating(program, tmp_path)
        report = nbdebug.nan_trace(step, model=made.model, optimizer=made.optimizer, strategy=strategy)
        answers[strategy] = {**answer_of(report), "step": None, "title": None}
    assert answers["bisect"] == answers["trace"]
    right = judge(program.truth, {**answers["bisect"], "step": program.truth.step[0]}, program.source)
    assert all(right.values()), right
    assert not [note for note in report.notes if "op tracer" in note and "under the op tracer" not in note]
    modules = len(list(made.model.modules())) if isinstance(made.model, torch.nn.Module) else None
    if modules:
        replays = report.facts["replays"]
        assert replays["repeat"] + replays["modules"] <= math.ceil(math.log2(modules)) + 3
