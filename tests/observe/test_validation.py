"""What a public function takes for a model or an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbdebug.observe.validation import models_of, optimizers_of


class Both:
    """Two optimizers as one, as users write it."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts


def test_an_object_of_the_users_own_is_taken_for_the_optimizers_that_it_holds() -> None:
    table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
    both = Both(torch.optim.SparseAdam(table.parameters()), torch.optim.Adam(head.parameters()))
    assert optimizers_of(both, "guard(optimizer=)") == {f"optimizer.parts[{i}]": o for i, o in enumerate(both.parts)}
    assert list(optimizers_of([both], "guard(optimizer=)").values()) == list(both.parts)


def test_what_holds_none_is_refused() -> None:
    model = nn.Linear(2, 1)

    def closure() -> nn.Module:
        return model

    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    for thing in (Both(), closure, "model", 3, scheduler):
        with pytest.raises(TypeError, match="got"):
            models_of(thing, "guard(model=)")
        with pytest.raises(TypeError, match="got"):
            optimizers_of(thing, "guard(optimizer=)")
