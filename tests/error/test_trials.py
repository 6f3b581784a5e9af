"""Fixes of errors of the graph, of batches and of a missing group: edits of the program, found and tried by reading it
again. That they cure when they are pasted is shown by `python -m tests.benchmarks.cure`."""

import importlib.util
import pathlib

import pytest
import torch
from torch import nn

import nbdebug

PATIENTS = pathlib.Path(__file__).parents[1] / "patients" / "error"


def first_fix(trigger):
    with pytest.raises(Exception) as raised:
        trigger()
    return nbdebug.explain(raised.value, names={}).findings[0].fixes[0]


@pytest.mark.parametrize(
    ("slug", "new"),
    [
        ("no-grad-path", "return penalty"),
        ("backward-twice", "average = average.detach()"),
        ("inplace-modified", "gate = gate.pow(2)"),
        ("collate-mismatch", "collate_fn=collate"),
        ("nccl", "HashStore()"),
        ("module-not-found", "sys.modules['nets_of_last_year'] = nets_of_this_year"),
    ],
)
def test_fix_is_an_edit_that_was_tried(slug, new):
    spec = importlib.util.spec_from_file_location(f"trial_{slug.replace('-', '_')}", PATIENTS / f"{slug}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    fix = first_fix(module.sick().trigger)

    assert fix.verified
    assert new in fix.edit.new


def test_weights_and_random_numbers_are_left_as_they_are():
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    x = torch.rand(5, 3)

    def train():
        features = torch.tanh(encoder(x))
        for _ in range(3):
            loss = nn.functional.dropout(head(features)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with pytest.raises(RuntimeError) as raised:
        train()
    before = [p.clone() for p in encoder.parameters()], torch.get_rng_state()

    fix = nbdebug.explain(raised.value, names={}).findings[0].fixes[0]

    assert fix.verified
    assert all(torch.equal(p, was) for p, was in zip(encoder.parameters(), before[0]))
    assert torch.equal(torch.get_rng_state(), before[1])


def test_fix_that_does_not_help_is_not_called_tried():
    """The loss is cut off twice: with one of the cuts mended it still has no gradient."""
    net, x = nn.Linear(3, 2), torch.rand(5, 3)

    def train():
        scores = net(x).detach()
        with torch.no_grad():
            loss = scores.pow(2).mean()
        loss.backward()

    fix = first_fix(train)

    assert not fix.verified
