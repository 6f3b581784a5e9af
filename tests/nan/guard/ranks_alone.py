"""Scenes after which two processes can't go on together."""

from __future__ import annotations

import time

import nbdebug
from tests.nan.guard.processes import Stage, scene
from tests.nan.guard.ranks_ddp import Training


@scene
def an_error_in_one_process(stage: Stage) -> str | float:
    """The loop of rank 1 fails in its third step; returned is how long its guard held it, and how rank 0 ended."""
    training = Training(stage)
    began = time.monotonic()
    try:
        with nbdebug.guard(training.model, training.optimizer):
            for i in range(5):
                if i == 2 and stage.rank == 1:
                    began = time.monotonic()
                    raise ValueError("a bug of the user's")
                training.step(i)
    except ValueError:
        return time.monotonic() - began
    except RuntimeError:
        return "stopped by gloo"
    return "ended"
