"""bottleneck names nothing in healthy trainings, whatever their kind, on a machine that is busy with other things."""

from __future__ import annotations

import os

import pytest

import nbdebug
from tests.training.healthy import KINDS


@pytest.mark.skipif(
    "NBDEBUG_ALL_TESTS" not in os.environ, reason="three minutes: some seconds for each of 32 trainings"
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_slow_is_found_in_a_healthy_training(kind: str) -> None:
    training = KINDS[kind]()
    report = nbdebug.bottleneck(
        lambda: training.train(lambda step, loss: None), model=training.model, optimizer=training.optimizer
    )
    assert report.ok and report.steps >= 5, str(report)
