"""Shapes that do not fit: each is named with the user's own tensors and sizes, and the fix that is offered runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import nbdebug

CODE = "error/shape-mismatch"


class Reader(nn.Module):
    """Two convolutions and a Linear, by hand: as in the first tutorial that everybody reads."""

    def __init__(self, flatten):
        super().__init__()
        self.first, self.second, self.flatten = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3), flatten
        self.grades = nn.Linear(150, 7)

    def forward(self, page):
        drawn = F.max_pool2d(self.second(F.relu(self.first(page))), 2)
        flat = torch.flatten(drawn, 1) if self.flatten else drawn.view(-1, 150)
        return self.grades(flat)


class Listed(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.steps = kept([nn.Linear(4, 9), nn.Linear(5, 2)])

    def forward(self, signal):
        for step in self.steps:
            signal = step(signal)
        return signal


class Halving(nn.Module):
    def __init__(self, taken, given):
        super().__init__()
        self.narrow = nn.Conv2d(taken, given, 3, stride=2, padding=1)

    def forward(self, plane):
        return F.relu(self.narrow(plane))


def flattened_by_hand():
    reader, pages = Reader(True), torch.rand(2, 1, 30, 30)
    return reader(pages)


def rows_folded():
    reader, pages, marks = Reader(False), torch.rand(5, 1, 24, 24), torch.zeros(5, dtype=torch.long)
    outputs = reader(pages)
    return F.cross_entropy(outputs, marks)


def never_flattened():
    body, planes = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Linear(48, 4)), torch.rand(2, 2, 6, 6)
    return body(planes)


def block_inside_a_sequential():
    tower, photos = nn.Sequential(Halving(3, 8), Halving(12, 16)), torch.rand(2, 3, 20, 20)
    return tower(photos)


def channels_on_the_last_axis():
    stem, frames = nn.Conv2d(3, 5, 3), torch.from_numpy(np.zeros((2, 10, 12, 3), dtype="float32"))
    return stem(frames)


def many_large_pictures():
    stem, frames = nn.Conv2d(3, 5, 3), torch.zeros(40, 256, 256, 3)
    return stem(frames)


def no_channel_axis():
    stem, scans = nn.Conv2d(1, 5, 3), torch.rand(6, 9, 9)
    return stem(scans)


def smaller_than_the_kernel():
    tower = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(1, 2, 5))
    stamp = torch.rand(1, 1, 12, 12)
    return tower(stamp)


def norm_behind_a_sequence():
    norm, steps = nn.BatchNorm1d(6), torch.rand(2, 9, 6)
    return norm(steps)


def norm_for_pictures():
    norm, volume = nn.BatchNorm2d(4), torch.rand(2, 4, 3, 5, 5)
    return norm(volume)


def queries_and_keys():
    def scores(asked, offered):
        return asked @ offered

    return scores(torch.rand(2, 5, 8), torch.rand(2, 7, 8))


def in_a_lambda():
    return (lambda rows, weight: rows.mm(weight))(torch.rand(4, 3), torch.rand(6, 3))


def in_a_comprehension():
    basis = torch.rand(4, 2)
    return [basis @ point for point in torch.rand(3, 5, 6)]


def by_einsum():
    left, right = torch.rand(2, 3, 4), torch.rand(2, 5, 6)
    return torch.einsum("bij,bjk->bik", left, right)


def scores_and_lengths():
    totals, lengths = torch.rand(6, 4), torch.rand(6)
    return totals / lengths


def of_a_dict():
    batch = {"signal": torch.rand(2, 8), "noise": torch.rand(2, 9)}
    return batch["signal"] + batch["noise"]


def of_arrays():
    table, means = np.ones((7, 3)), np.ones(7)
    return table - means


def skip_of_another_size():
    coarse, fine = torch.rand(1, 4, 14, 14), torch.rand(1, 4, 15, 15)
    return torch.cat([coarse, fine], 1)


def joined_after_a_mean():
    words, topic = torch.rand(3, 4), torch.rand(3, 5, 4)
    return torch.cat((words, topic.mean(1).mean(1)), dim=1)


def rows_taken_for_granted():
    hidden = torch.rand(5, 2, 6)
    return hidden.view(8, 12)


def axis_that_is_not_there():
    curve = torch.rand(9)
    return curve.mean(dim=1)


def permuted_without_the_batch():
    clip = torch.rand(2, 8, 9, 3)
    return clip.permute(2, 0, 1)


def labels_in_a_column():
    net, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    inputs, labels = torch.rand(5, 4), torch.zeros(5, 1, dtype=torch.long)
    return criterion(net(inputs), labels)


def tokens_before_classes():
    logits, tokens = torch.rand(2, 6, 11), torch.zeros(2, 6, dtype=torch.long)
    return F.cross_entropy(logits, tokens)


def column_and_row():
    chance, truth = torch.rand(6, 1), torch.zeros(6)
    return nn.BCELoss()(chance, truth)


def last_batch_is_smaller():
    memory, state = nn.GRU(3, 4, batch_first=True), torch.zeros(1, 4, 4)
    return [memory(window, state) for window in torch.rand(6, 2, 3).split(4)]


def series_without_features():
    memory, prices = nn.LSTM(1, 4, batch_first=True), torch.rand(5, 12)
    return memory(prices)


def padding_the_wrong_way_round():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder, sentences = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.rand(7, 3, 8)
    ignored = torch.zeros(7, 3, dtype=torch.bool)
    return encoder(sentences, src_key_padding_mask=ignored)


def mask_of_another_length():
    attention, notes = nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(3, 6, 8)
    future = torch.zeros(5, 5, dtype=torch.bool)
    return attention(notes, notes, notes, attn_mask=future)


def lengths_of_another_batch():
    padded, counts = torch.rand(3, 5, 2), torch.tensor([5, 2], device="cpu")
    return pack_padded_sequence(padded, counts, batch_first=True)


def index_without_its_axis():
    table, chosen = torch.rand(4, 6), torch.zeros(4, dtype=torch.long)
    return table.gather(1, chosen)


def assigned():
    canvas, patch = torch.zeros(6, 6), torch.rand(2, 3)
    canvas[:2, :2] = patch
    return canvas


def unpacked():
    photo = torch.rand(3, 8, 8)
    batch, channels, height, width = photo.shape
    return batch, channels, height, width


def a_number_of_many():
    errors = torch.rand(4)
    return errors.item()


def a_condition_of_many():
    errors = torch.rand(4)
    if errors > 0.5 and len(errors) == 4:
        return errors
    return None


CASES = [  # (what fails, what the title says, the code of the first fix)
    (flattened_by_hand, ("`grades` (Linear) expects 150 features", "gets 1014", "`flat`"), "nn.AdaptiveAvgPool2d(5)"),
    (rows_folded, ("`outputs` [20, 7]", "`marks` [5]", "`view`"), "x.flatten(1)"),
    (never_flattened, ("`body.2` (Linear)", "`planes` [2, 2, 6, 6]", "[2, 3, 4, 4]"), ".flatten(1)"),
    (block_inside_a_sequential, ("`tower.1.narrow` (Conv2d) expects 12 channels", "gets 8", "`plane`"), "nn.Conv2d(8,"),
    (channels_on_the_last_axis, ("`stem`", "3 channels", "`frames`"), "frames.permute(0, 3, 1, 2)"),
    (many_large_pictures, ("`stem`", "3 channels", "`frames`"), "frames.permute(0, 3, 1, 2)"),
    (no_channel_axis, ("`stem`", "`scans` is [6, 9, 9]"), "scans.unsqueeze(1)"),
    (smaller_than_the_kernel, ("`tower.1` (Conv2d)", "`stamp` [1, 1, 12, 12]"), "F.interpolate(stamp, size=(20, 20))"),
    (norm_behind_a_sequence, ("`norm` (BatchNorm1d) expects 6", "`steps`"), "steps.transpose(-2, -1)"),
    (norm_for_pictures, ("`norm` (BatchNorm2d) expects 4 axes", "gets 5", "`volume`"), "nn.BatchNorm3d(4)"),
    (queries_and_keys, ("`asked` [2, 5, 8]", "`offered` [2, 7, 8]"), "offered.transpose(-2, -1)"),
    (in_a_lambda, ("`rows` [4, 3]", "`weight` [6, 3]"), "weight.T"),
    (in_a_comprehension, ("`basis` [4, 2]", "`point` [5, 6]"), None),
    (by_einsum, ("`left` [2, 3, 4]", "`right` [2, 5, 6]"), None),
    (scores_and_lengths, ("`totals` [6, 4]", "`lengths` [6]"), "lengths.unsqueeze(1)"),
    (of_a_dict, ("`batch['signal']` [2, 8]", "`batch['noise']` [2, 9]"), None),
    (of_arrays, ("`table` [7, 3]", "`means` [7]"), "np.expand_dims(means, 1)"),
    (skip_of_another_size, ("`coarse`", "`fine`", "14 and 15"), "F.interpolate(fine, size=coarse.shape[2:])"),
    (joined_after_a_mean, ("`words` [3, 4]", "`topic.mean(1).mean(1)` [3]"), "topic.mean(1).mean(1).unsqueeze(1)"),
    (rows_taken_for_granted, ("`hidden` [5, 2, 6] has 60 elements", "96"), "hidden.view(-1, 12)"),
    (axis_that_is_not_there, ("`curve` [9] has 1 axis", "asks for axis 1"), "curve.mean(dim=-1)"),
    (permuted_without_the_batch, ("`clip` [2, 8, 9, 3] has 4 axes", "gets 3"), "clip.permute(0, 3, 1, 2)"),
    (labels_in_a_column, ("`labels` [5, 1] has one axis too many",), "labels.squeeze(1)"),
    (tokens_before_classes, ("`logits` [2, 6, 11] has its classes on the last axis",), "logits.transpose(1, 2)"),
    (column_and_row, ("`chance` [6, 1]", "`truth` [6]"), "chance.squeeze(1)"),
    (last_batch_is_smaller, ("`state` [1, 4, 4]", "`window` [2, 2, 3]", "must be [1, 2, 4]"), "memory(window)"),
    (series_without_features, ("`memory` (LSTM) expects 1 feature", "`prices`"), "prices.unsqueeze(2)"),
    (padding_the_wrong_way_round, ("`ignored` [7, 3]", "layers.0.self_attn"), "ignored.T"),
    (mask_of_another_length, ("`future` [5, 5]", "`notes` [3, 6, 8]", "must be [6, 6]"), None),
    (lengths_of_another_batch, ("`counts` [2] has 2 lengths", "3 sequences of `padded`"), None),
    (index_without_its_axis, ("`chosen` [4] has 1 axis", "`table` [4, 6]"), "chosen.unsqueeze(1)"),
    (assigned, ("`patch` [2, 3]", "`canvas[:2, :2]` [2, 2]"), None),
    (unpacked, ("`photo.shape` is [3, 8, 8]", "unpacks 4"), None),
    (a_number_of_many, ("`errors` [4] has several elements", "`item`"), "errors.mean().item()"),
    (a_condition_of_many, ("`errors > 0.5` [4]",), "if (errors > 0.5).any()"),
]


def raised(attempt):
    with pytest.raises(Exception) as caught:
        attempt()
    return caught.value


@pytest.mark.parametrize(("attempt", "says", "fix"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_title_has_the_users_names_and_the_first_fix_runs(attempt, says, fix):
    (finding,) = nbdebug.explain(raised(attempt))
    assert finding.code == CODE
    assert all(words in finding.title for words in says), finding.title
    assert finding.where.text and finding.where.file == __file__
    if fix is not None:
        given = next((one for one in finding.fixes if fix in one.code), None)
        assert given is not None, finding.fixes
        assert given.verified is (True if given.edit is not None else None)
        assert not given.verified or finding.fixes[0].verified, "what was tried goes first"


@pytest.mark.parametrize(("kept", "name"), [(nn.ModuleList, "steps.1"), (list, "listed.steps[1]")])
def test_a_layer_of_a_list_has_its_place_for_a_name(kept, name):
    listed, wave = Listed(kept), torch.rand(2, 4)
    (finding,) = nbdebug.explain(raised(lambda: listed(wave)))
    assert f"`{name}` (Linear) expects 5 features but gets 9: `signal` is [2, 9]" in finding.title


def test_the_history_of_the_size_layer_by_layer():
    (finding,) = nbdebug.explain(raised(flattened_by_hand))
    steps = [link.what for link in finding.chain]
    assert steps[-4:] == [
        "after second (Conv2d) it is [2, 6, 26, 26]",
        "after max_pool2d it is [2, 6, 13, 13]",
        "after view it is [2, 1014]",
        "`grades` (Linear) expects 150 but gets 1014",
    ]
    assert any("`pages` [2, 1, 30, 30] goes in" in step for step in steps) and len(steps) <= 6
    assert finding.evidence["expected"] == 150 and finding.evidence["got"] == 1014


@pytest.mark.parametrize(
    "attempt",
    [
        queries_and_keys,
        labels_in_a_column,
        skip_of_another_size,
        of_arrays,
        unpacked,
        rows_taken_for_granted,
        channels_on_the_last_axis,
        axis_that_is_not_there,
    ],
)
def test_it_is_found_without_the_columns_of_newer_pythons(attempt, monkeypatch):
    monkeypatch.setattr("nbdebug.observe.frames.span_of", lambda code, instruction: None)
    says, fix = next((says, fix) for known, says, fix in CASES if known is attempt)
    (finding,) = nbdebug.explain(raised(attempt))
    assert finding.code == CODE and all(words in finding.title for words in says), finding.title
    assert fix is None or fix in finding.fixes[0].code
