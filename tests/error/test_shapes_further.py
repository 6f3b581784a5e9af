"""Shapes, further on: what the report leaves out, names for what hides in other objects, and fixs that hold beyond
the op."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug

CODE = "error/shape-mismatch"


class Answer(NamedTuple):
    scores: torch.Tensor


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.memory, self.say = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, phrase):
        heard, _ = self.memory(self.words(phrase))
        return Answer(self.say(heard))


class Criterion:
    smoothing = 0.1

    def __call__(self, answer, wanted):
        scores = answer.scores
        return F.cross_entropy(scores, wanted, label_smoothing=self.smoothing)


class Viewer(nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.judge = nn.Conv2d(1, 3, 3), nn.Linear(3 * 6 * 6, 5)

    def forward(self, slide):
        seen = F.relu(self.look(slide))
        seen = seen.view(len(slide), 3 * 6 * 6)
        return self.judge(seen)


class Pupil:
    """No module: the model lies in a plain object."""

    def __init__(self):
        self.brain = nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2))

    def learn(self, lesson):
        return self.brain(lesson)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.meet, self.places = nn.MultiheadAttention(8, 2, batch_first=True), nn.Parameter(torch.zeros(1, 4, 8))

    def forward(self, own, foreign):
        return self.meet(own, foreign, foreign, need_weights=False)[0]


def explained(attempt):
    with pytest.raises(Exception) as caught:
        attempt()
    (finding,) = nbdebug.explain(caught.value)
    assert finding.code == CODE and "``" not in str(finding)
    assert len(finding.chain) <= 6 and not any("<" in link.what for link in finding.chain)
    return finding


def classes_last():
    speaker, criterion, phrase = Speaker(), Criterion(), torch.zeros(2, 5, dtype=torch.long)
    return (lambda answer, phrase: criterion(answer, phrase))(speaker(phrase), phrase)


def test_classes_on_the_last_axis_are_moved_and_the_way_names_layers_only():
    finding = explained(classes_last)
    assert "`scores` [2, 5, 11] has its classes on the last axis" in finding.title
    assert "scores.transpose(1, 2)" in finding.fixes[0].code and finding.fixes[0].verified
    assert [link.what for link in finding.chain][-1] == "after say (Linear) it is [2, 5, 11]"


def test_a_recurrent_layer_is_one_step_of_the_way():
    speaker, phrase = Speaker(), torch.zeros(2, 5, dtype=torch.long)

    def told(scores):
        return nn.Linear(12, 2)(scores)

    finding = explained(lambda: told(speaker(phrase).scores))
    assert [link.what for link in finding.chain if link.what.startswith("after")] == [
        "after words (Embedding) it is [2, 5, 6]",
        "after say (Linear) it is [2, 5, 11]",
    ]


def cut_predictions():
    speaker, text = Speaker(), torch.zeros(3, 6, dtype=torch.long)
    scores = speaker(text).scores[:, :-1].reshape(-1, 11)
    goal = text.view(-1)
    return F.cross_entropy(scores, goal)


def cut_targets():
    speaker, text = Speaker(), torch.zeros(3, 6, dtype=torch.long)
    scores, goal = speaker(text).scores, text[:, 1:]
    return F.cross_entropy(scores.view(-1, 11), goal.reshape(-1))


@pytest.mark.parametrize(
    ("attempt", "name", "fix"),
    [
        (cut_predictions, "text", "goal = text[:, 1:].reshape(-1)"),
        (cut_targets, "scores", "scores[:, :-1].reshape(-1, 11)"),
    ],
)
def test_of_a_next_token_loss_the_side_that_was_not_cut_is_named(attempt, name, fix):
    finding = explained(attempt)
    assert "were cut by one" in finding.title and f"`{name}` [3, 6" in finding.title
    given = next(one for one in finding.fixes if fix in one.code)
    assert given.verified is (True if given.edit is not None else None)


def test_rows_of_two_batches_are_no_next_token_loss():
    def lost(scores, goal):
        return F.cross_entropy(scores, goal)

    finding = explained(lambda: lost(torch.rand(18, 4), torch.zeros(4, 5, dtype=torch.long).flatten()))
    assert "cut by one" not in finding.title


def test_a_view_that_runs_is_no_fix_where_the_next_layer_fails():
    viewer, slides = Viewer(), torch.rand(2, 1, 11, 11)
    finding = explained(lambda: viewer(slides))
    assert "`judge` (Linear) expects 108" in finding.title and "243 in each row" in finding.title
    pooled, anew = finding.fixes
    assert "F.adaptive_avg_pool2d(seen, 6).flatten(1)" in pooled.code and pooled.after["output shape"] == "[2, 5]"
    assert "nn.Linear(243, 5)   # judge" in anew.code


def test_heads_that_do_not_divide():
    heads, width = 4, 10

    def parted(rows):
        return rows.view(2, 3, heads, width // heads)

    finding = explained(lambda: parted(torch.rand(2, 3, 10)))
    assert "10 is not a multiple of `heads`, 4" in finding.title and not finding.fixes[0].verified


def test_keys_of_other_features():
    beside, own, foreign = Beside(), torch.rand(2, 3, 8), torch.rand(2, 5, 12)
    finding = explained(lambda: beside(own, foreign))
    assert "`meet` (MultiheadAttention) expects keys with 8 features (kdim) but gets 12: `foreign`" in finding.title
    assert "kdim=12, vdim=12" in finding.fixes[0].code


def test_a_table_of_places_that_is_too_short():
    beside, row = Beside(), torch.rand(2, 7, 8)

    def placed(row):
        return row + beside.places

    finding = explained(lambda: placed(row))
    assert finding.fixes[0].code == "beside.places = nn.Parameter(torch.zeros(1, 7, 8))"


def test_a_model_in_a_plain_object_is_called_by_its_attribute():
    pupil, lesson = Pupil(), torch.rand(2, 5)
    finding = explained(lambda: pupil.learn(lesson))
    assert "`self.brain.1` (Linear)" in finding.title and finding.where.module == "self.brain.1"


def test_the_name_in_the_line_that_failed_is_taken():
    def compare(pair):
        first, second = pair
        return F.binary_cross_entropy(first, second)

    finding = explained(lambda: compare((torch.rand(4, 1), torch.zeros(4))))
    assert "`first` [4, 1] and `second` [4]" in finding.title


def test_einsum_names_the_letter():
    def scores(asked, kept):
        return torch.einsum("nad,nbd->nab", asked, kept)

    finding = explained(lambda: scores(torch.rand(2, 3, 4), torch.rand(2, 3, 5)))
    assert "`d` is 5 in `kept` [2, 3, 5] and 4 in `asked` [2, 3, 4]" in finding.title


def test_an_axis_of_a_line_that_can_not_be_read():
    space = {"torch": torch}
    finding = explained(lambda: exec("torch.rand(2, 3).sum(4)", space))
    assert "axis 4" in finding.title and "2 axes" in finding.title


def test_a_padding_mask_that_is_turned():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, phrases = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.rand(3, 7, 8)
    ignored = torch.zeros(7, 3, dtype=torch.bool)
    finding = explained(lambda: encoder(phrases, src_key_padding_mask=ignored))
    assert "`ignored` [7, 3]" in finding.title
    assert "ignored.T" in finding.fixes[0].code and finding.fixes[0].verified


def test_a_compiled_sequential_has_its_sizes():
    net = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(9, 2)), backend="eager")
    signal = torch.rand(3, 4)
    finding = explained(lambda: net(signal))
    assert "expects 9 features but gets 8: `signal` [3, 4] reaches it as [3, 8]" in finding.title


def test_an_input_that_is_made_in_the_call_is_followed_by_layers_too():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    finding = explained(lambda: net(torch.zeros(4, 3, 32, 32)))
    assert [link.what for link in finding.chain][1:3] == [
        "after net.0 (Conv2d) it is [4, 8, 30, 30]",
        "after net.2 (Flatten) it is [4, 7200]",
    ]
