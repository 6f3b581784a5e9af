"""diagnose has nothing to say of healthy trainings, whatever their kind."""

from __future__ import annotations

import pytest
import torch

import nbdebug
from tests.training.healthy import KINDS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_there_are_many_kinds():
    assert len(KINDS) >= 25


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_in_a_healthy_training(kind):
    training = KINDS[kind]()

    report = nbdebug.diagnose(
        training.train,
        model=training.model,
        optimizer=training.optimizer,
        loss_fn=training.loss_fn,
        train_loader=training.train_loader,
        val_loader=training.val_loader,
        scheduler=training.scheduler,
        progress=False,
    )

    assert report.ok, [f"{f.code}: {f.title}" for f in report]
    assert report.steps > 0
    assert report.ruled_out
    assert not [u for u in report.unchecked if "fixed training" in u or "Error" in u], report.unchecked
