"""compare(): paired, a verdict beyond noise only, and the ways in which a comparison is unfair."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbdebug


def by_output(output: Any, _: Any) -> Any:
    return output


def verdict(a: Any, b: Any, **more: Any) -> str:
    return nbdebug.compare(list(a), list(b), range(len(a)), by_output, **more).headline


def test_noise_is_called_a_difference_in_one_of_twenty() -> None:
    rng = np.random.default_rng(0)
    pairs = [(x, x + rng.normal(size=12)) for x in (rng.normal(size=12) for _ in range(150))]
    assert sum("better" in verdict(a, b) for a, b in pairs) <= 15
    shifted = [(x, x + 1 + rng.normal(size=12)) for x in (rng.normal(size=12) for _ in range(20))]
    found = [verdict(a, b) for a, b in shifted]
    assert sum(text.startswith("b is better") for text in found) >= 12
    assert verdict([2.0, 3, 4], [1.0, 2, 3.1], better="lower").startswith("b is better")
    assert verdict([1.0], [2.0]).startswith("No difference")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_models_are_left_as_they_were_and_eval_mode_is_tried() -> None:
    torch.manual_seed(1)
    a = Net()
    b = copy.deepcopy(a)
    nn.init.normal_(b.head.weight)
    a.eval()
    batches = [torch.randn(6, 4) for _ in range(5)]
    state, random = copy.deepcopy(b.state_dict()), torch.random.get_rng_state()
    report = nbdebug.compare(a, b, batches, lambda out, x: out[:, 0] - x[:, 0], seeds=(0, 1))
    assert report.facts["inputs"] == 30 and report.findings[0].fixes[0].verified
    assert all(torch.equal(state[name], value) for name, value in b.state_dict().items())
    assert b.training and not a.training and torch.equal(random, torch.random.get_rng_state())
    right = nbdebug.compare(a, b.eval(), batches, lambda out, x: out[:, 0] - x[:, 0])
    assert not right.findings
    assert report.findings[0].fixes[0].after["difference"] == pytest.approx(right.facts["difference"])


def test_what_makes_it_unfair_is_named() -> None:
    def generate(model: Any, x: Any, max_new_tokens: int = 20, name: str = "") -> Any:
        return model(x)

    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    inputs = [torch.randn(2) for _ in range(8)]
    ask = functools.partial(nbdebug.compare, inputs=inputs, metric=by_output)
    report = ask(functools.partial(generate, a), functools.partial(generate, b, max_new_tokens=50))
    assert report.findings[0].evidence["max_new_tokens"] == (20, 50)
    assert not ask(functools.partial(generate, a, name="a"), functools.partial(generate, b, name="b")).findings
    one = ask(functools.partial(generate, a), functools.partial(generate, a, max_new_tokens=50))
    assert not one.findings, "one model: the setting is what is compared"
    report = ask(a, b, settings=({"data": "test v1"}, {"data": "test v2"}))
    assert "data: 'test v1' for `a`" in report.findings[0].title
    assert ask(lambda x: a(x)[:50], lambda x: b(x)[:100]).findings
    with pytest.raises(ValueError, match="other data"):
        ask([1.0, 2.0], b)
    with pytest.raises(ValueError, match="give a number"):
        nbdebug.compare(a, b, inputs, lambda out, x: "good")
