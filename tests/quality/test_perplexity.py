"""perplexity(): equal to a reference in float64; the mistake that gives a reported number, for each of eleven."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from tests.quality.language import PAD, language


def reference(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Token by token, in float64."""
    losses = [
        -torch.log_softmax(scores.double(), 0)[token].item()
        for row, ids in zip(logits, tokens)
        for scores, token in zip(row, ids[1:])
        if token != PAD
    ]
    return math.exp(math.fsum(losses) / len(losses))


@pytest.mark.parametrize(("rows", "wide", "vocabulary"), [(14, 18, 40), (3, 12, 5000), (1, 90, 256)])
def test_it_equals_a_reference_in_float64(rows: int, wide: int, vocabulary: int) -> None:
    logits, tokens = language(rows, wide, vocabulary)
    right = reference(logits, tokens)
    report = nbdebug.perplexity(logits, tokens, pad_id=PAD)
    low, high = report.facts["interval"]
    assert report.facts["value"] == pytest.approx(right, rel=1e-12) and low < right < high
    assert report.facts["uniform"] == vocabulary and report.facts["tokens"] == int((tokens[:, 1:] != PAD).sum())
    assert not report.findings


def mean(logits: torch.Tensor, tokens: torch.Tensor, **more: int) -> float:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), **more).item()


def planted(logits: torch.Tensor, tokens: torch.Tensor) -> Iterable[tuple[str, float]]:
    """(code, number) of twelve mistakes of batches of 4."""
    inner, ahead, real = logits[:, :-1], tokens[:, 1:], {"ignore_index": PAD}
    right = mean(inner, ahead, **real)
    batches = [mean(inner[i : i + 4], ahead[i : i + 4], **real) for i in range(0, len(tokens), 4)]
    rows = [mean(a[None], b[None], **real) for a, b in zip(inner, ahead)]
    summed = F.cross_entropy(inner.flatten(0, 1), ahead.flatten(), reduction="sum", **real).item()
    yield "padding-counted", math.exp(mean(inner, ahead))
    yield "padding-counted", math.exp(summed / ahead.numel())
    yield "wrong-token-count", math.exp(summed / int((tokens != PAD).sum()))
    each = F.cross_entropy(inner.transpose(1, 2), ahead, reduction="none")[tokens[:, :-1] != PAD]
    yield "padding-counted", math.exp(each.mean().item())
    yield "mean-of-perplexities", sum(map(math.exp, batches)) / len(batches)
    yield "mean-of-perplexities", sum(map(math.exp, rows)) / len(rows)
    yield "mean-of-batches", math.exp(sum(batches) / len(batches))
    yield "wrong-base", 2**right
    yield "wrong-base", math.exp(right / math.log(2))
    yield "labels-not-shifted", math.exp(mean(logits, tokens, **real))
    yield "labels-not-shifted", math.exp(mean(logits[:, :-2], tokens[:, 2:], **real))
    yield "labels-not-shifted", math.exp(mean(logits[:, 1:], tokens[:, :-1], **real))


def test_the_mistake_is_named_in_each_of_twelve() -> None:
    logits, tokens = language(seed=11)
    for code, number in planted(logits, tokens):
        report = nbdebug.perplexity(logits, tokens, pad_id=PAD, batch_size=4, reported=number)
        assert [finding.code for finding in report] == [f"quality/{code}"], number
    both = math.exp(mean(logits, tokens))
    report = nbdebug.perplexity(logits, tokens, pad_id=PAD, reported=both)
    assert {finding.code for finding in report} == {"quality/labels-not-shifted", "quality/padding-counted"}
    odd = nbdebug.perplexity(logits, tokens, pad_id=PAD, reported=3 * reference(logits, tokens))
    assert not odd.findings and odd.symptoms and odd.verdict == "not well, no cause known"


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 40)
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.drop(self.table(input_ids))


def test_a_model_is_left_as_it_was_and_its_batches_may_be_dicts_of_several_widths() -> None:
    torch.manual_seed(0)
    model, (_, tokens) = Bigram(), language()
    batches = [{"input_ids": t, "attention_mask": (t != PAD).long()} for t in (tokens[:5], tokens[5:, :12])]
    before, state = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    report = nbdebug.perplexity(model, batches, baseline=lambda **inputs: torch.zeros(*inputs["input_ids"].shape, 40))
    assert model.training and torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    table = model.table.weight.detach()
    sums = [F.cross_entropy(table[b["input_ids"][:, :-1]].double().flatten(0, 1), b["input_ids"][:, 1:].flatten(),
                            ignore_index=PAD, reduction="sum").item() for b in batches]  # fmt: skip
    count = sum(int((b["input_ids"][:, 1:] != PAD).sum()) for b in batches)
    assert report.facts["value"] == pytest.approx(math.exp(sum(sums) / count), rel=1e-9)
    assert report.frame().set_index("what")["value"]["baseline"] == pytest.approx(40)
    assert any("baseline" in note for note in report.notes)


def test_what_does_not_fit_is_refused() -> None:
    logits, tokens = language()
    with pytest.raises(ValueError, match="logits are"):
        nbdebug.perplexity(logits[0], tokens)
    with pytest.raises(ValueError, match="no real target"):
        nbdebug.perplexity(logits, tokens * 0, pad_id=PAD)
    with pytest.raises(ValueError, match="vocabulary of 40: 99"):
        nbdebug.perplexity(logits, tokens.clamp(max=0) + 99)
    with pytest.raises(TypeError, match="reported takes"):
        nbdebug.perplexity(logits, tokens, pad_id=PAD, reported="low")
