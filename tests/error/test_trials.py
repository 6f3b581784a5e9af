"""Fixes of errors of the graph, of batches and of a missing group: edits of the program, found and tried by reading it
again. That they cure when they are pasted is shown by `python -m tests.benchmarks.cure`."""

import importlib.util
import pathlib

import pytest
import torch
from torch import nn

import nbdebug

HERE = pathlib.Path(__file__).parent
PATIENTS = HERE.parent / "patients" / "error"


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"trial_{path.stem.replace('-', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        ("not-probabilities--spread", "scale=torch.nn.functional.softplus(spread) + 1e-6"),
        ("unusable-name", "self.register_buffer('past', None)"),
        ("call-order--resumed", 'group.setdefault("initial_lr", group["lr"])'),
        ("incomplete-module--nested", "    def forward(self, rows):"),
    ],
)
def test_fix_is_an_edit_that_was_tried(slug, new):
    fix = first_fix(loaded(PATIENTS / f"{slug}.py").sick().trigger)

    assert fix.verified
    assert new in fix.edit.new


@pytest.mark.parametrize(
    ("program", "new"),
    [
        ("labels_from_one", "loss_fct(clf(batch.signal), (batch.label - 1)).backward()"),
        ("prompt_grows_too_long", "idx = idx[:, -16:]\n        _b, t = idx.size()"),
        ("counts_with_weights", "self.hist = self.hist.float()"),
        ("weights_of_the_classes", "criterion.to(device)"),
        ("mask_not_moved", "m = m.to(hidden.device)"),
        ("state_in_a_dict", 'hiddens = res["hiddens"]\n        hiddens = tuple('),
        ("features_in_inference_mode", "with torch.no_grad()"),
        ("generator_after_discriminator", "else fake.detach())"),
    ],
)
def test_fix_of_a_further_error_is_an_edit_that_was_tried(program, new):
    fix = first_fix(loaded(HERE / "further" / f"{program}.py").build().trigger)

    assert fix.verified
    assert new in fix.edit.new


@pytest.mark.parametrize("program", ["norm_of_another_width", "positions_of_smaller_pictures"])
def test_size_that_other_layers_share_and_weights_that_nobody_trains_are_no_tried_fix(program):
    assert not first_fix(loaded(HERE / "further" / f"{program}.py").build().trigger).verified


def test_kernel_of_a_card_that_the_processor_runs_shows_no_cure():
    assert not first_fix(loaded(HERE / "further" / "frames_with_gaps.py").build().trigger).verified


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
