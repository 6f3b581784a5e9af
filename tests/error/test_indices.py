"""Indices beyond what they point into: which table, which entry, in which row; and what was meant."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import nbdebug

CODE = "error/index-out-of-range"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(10, 4), nn.Embedding(6, 4), nn.Linear(4, 5)

    def forward(self, ids):
        steps = torch.arange(ids.shape[1])
        return self.head(self.words(ids) + self.places(steps))


class Pictures(Dataset):
    def __init__(self):
        self.files, self.count = ["a", "b", "c"], 5

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return len(self.files[index])


class Windows(Dataset):
    def __init__(self):
        self.series, self.ahead = torch.arange(20.0), 4

    def __len__(self):
        return self.series.numel()

    def __getitem__(self, i):
        return self.series[i], self.series[i + self.ahead]


class Right(Dataset):
    def __init__(self):
        self.files = ["a", "b"]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return self.files[i]


reader = Reader()
ear, fresh = (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
vocabulary = {chr(97 + i): i for i in range(12)}
conv = nn.Conv2d(3, 4, 1)


def scores(rows):
    return reader(torch.zeros(rows, 1, dtype=torch.long))[:, 0]


def token():
    ids = torch.tensor([[1, 2, 3], [4, 11, 2]])
    reader(ids)


def position():
    reader(torch.zeros(2, 9, dtype=torch.long))


def sized_before():
    table, ids = nn.Embedding(6, 4), torch.zeros(2, 9, dtype=torch.long)
    _, length = ids.shape
    steps = torch.arange(0, length)
    table(steps)


def padding_of_minus_one():
    nn.Sequential(nn.Embedding(5, 4))(torch.tensor([[1, -1]]))


def bag():
    bags, chosen = nn.EmbeddingBag(5, 4), torch.tensor([[1, 7]])
    bags(chosen)


def class_too_many():
    kinds = torch.tensor([0, 1, 7])
    F.cross_entropy(scores(3), kinds)


def classes_from_one():
    kinds = torch.tensor([1, 5, 3])
    nn.CrossEntropyLoss()(scores(3), kinds)


def border_of_a_mask():
    mask = torch.zeros(2, 4, 4, dtype=torch.long)
    mask[1, 2, 3] = 255
    F.cross_entropy(conv(torch.randn(2, 3, 4, 4)), mask)


def minus_one_means_none():
    kinds = torch.tensor([0, -1])
    F.nll_loss(scores(2).log_softmax(1), kinds)


def classes_shifted_twice():
    kinds = torch.arange(10) % 5
    kinds = kinds - 1  # of a cell that ran twice
    F.cross_entropy(scores(10), kinds)


def few_of_many_are_labelled():
    kinds = torch.where(torch.arange(20) % 3 == 0, torch.arange(20) % 4, -1)
    F.cross_entropy(scores(20), kinds)


def gathered():
    table, picks = torch.randn(3, 4), torch.tensor([[0], [4], [1]])
    return table.gather(1, picks)


def rows_selected():
    table, rows = torch.randn(3, 4), torch.tensor([0, 9])
    return table.index_select(0, rows)


def loop_too_long():
    samples = torch.randn(5, 2)
    for place in range(6):
        samples[place]


def column_by_tensor():
    samples, order = torch.randn(5, 2), torch.tensor([[0, 2]])
    return samples[:, order]


def hot():
    labels = torch.tensor([0, 3])
    return F.one_hot(labels, 3)


def counted():
    labels = torch.tensor([0, -3])
    return torch.bincount(labels)


def names_of_classes():
    names, best = ["cat", "dog"], 2
    return names[best]


def in_a_comprehension():
    names = ["cat", "dog"]
    return [names[number] for number in range(3)]


def data_set_longer_than_its_list():
    for _ in DataLoader(Pictures()):
        pass


def last_window_past_the_end():
    windows = Windows()
    list(DataLoader(windows, batch_size=4))


def windows_in_any_order():
    list(DataLoader(Windows(), batch_size=4, shuffle=True))


def length_that_is_right():
    return Right()[9]


def the_model_that_was_called():
    def heard(network):
        return F.cross_entropy(network(torch.zeros(3, 2)), kinds)

    kinds = torch.tensor([0, 6, 1])
    return heard(ear)


def scores_from_another_line():
    def heard(network):
        found = network(torch.zeros(3, 2))
        found = found * 2
        return F.cross_entropy(found, torch.tensor([0, 6, 1]))

    return heard(ear)


def scores_of_no_model():
    return F.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 6, 1]))


def the_same_in_a_worker():
    for _ in DataLoader(Pictures(), num_workers=1):
        pass


def numpy_column():
    grid, column = np.zeros((3, 4)), 7
    return grid[0, column]


def layer_that_is_not_there():
    stack = nn.Sequential(nn.ReLU(), nn.ReLU())
    return stack[2]


def row_of_a_frame():
    frame, row = pd.DataFrame({"a": [1]}), 5
    return frame.iloc[row]


def crop_of_a_small_picture():
    picture = torch.randn(3, 8, 8)
    return torch.randint(0, picture.shape[1] - 8, (1,))


def row_that_a_filter_took_out():
    frame = pd.DataFrame({"size": [1.0, 2.0, 3.0], "kind": [0, 1, 1]})
    frame = frame[frame["size"] > 1]
    return [frame["kind"][row] for row in range(len(frame))]


SITUATIONS = [
    (token, ["`ids[1, 1]` is 11", "`reader.words` has 10 rows", "`vocabulary` has 12 entries", "nn.Embedding(12, 4)"]),
    (
        position,
        ["`steps` counts to 8", "torch.arange(ids.shape[1])", "`reader.places` has 6 rows", "ids = ids[:, -6:]"],
    ),
    (sized_before, ["`steps` counts to 8", "`table` has 6 rows", "ids = ids[:, -6:]"]),
    (padding_of_minus_one, ["is -1", "5 rows", "masked_fill"]),
    (bag, ["7", "`bags` has 5 rows"]),
    (class_too_many, ["`kinds[2]` is 7", "`reader.head` gives 5 classes", "in_features, 8)"]),
    (classes_from_one, ["`kinds[1]` is 5", "counted from 1", "kinds = kinds - 1"]),
    (border_of_a_mask, ["`mask[1, 2, 3]` is 255", "`conv` gives 4 classes", "ignore_index=255"]),
    (minus_one_means_none, ["`kinds[1]` is -1", "ignore_index=-1"]),
    (classes_shifted_twice, ["`kinds[0]` is -1", "from -1 to 3", "ran twice", "kinds = kinds + 1"]),
    (few_of_many_are_labelled, ['a label that means "none"', "ignore_index=-1"]),
    (gathered, ["`picks[1, 0]` is 4", "`table` has 4 entries along dimension 1"]),
    (rows_selected, ["`rows[1]` is 9", "`table` has 3 entries"]),
    (loop_too_long, ["`place` is 5", "`samples` has 5 entries"]),
    (column_by_tensor, ["`order[0, 1]` is 2", "`samples` has 2 entries along dimension 1"]),
    (hot, ["`labels[1]` is 3", "num_classes=4"]),
    (counted, ["`labels[1]` is -3", "no negative numbers"]),
    (names_of_classes, ["`best` is 2", "`names` has 2 entries"]),
    (in_a_comprehension, ["`number` is 2", "`names` has 2 entries"]),
    (data_set_longer_than_its_list, ["`index` is 3", "`self.files` has 3 entries", "self.count"]),
    (
        last_window_past_the_end,
        [
            "`i + self.ahead` is 20 (`i` is 16)",
            "length of `windows` is `self.series.numel()`",
            "gives 20 samples",
            "return len(self.series) - self.ahead",
        ],
    ),
    (windows_in_any_order, ["`i + self.ahead` is 2", "gives 20 samples", "len(self.series) - self.ahead"]),
    (length_that_is_right, ["`i` is 9", "`self.files` has 2 entries", "assert i < len(self.files)"]),
    (the_model_that_was_called, ["`kinds[1]` is 6", "`network.2` gives 4 classes", "network[2] = nn.Linear("]),
    (scores_from_another_line, ["`network.2` gives 4 classes"]),
    (scores_of_no_model, ["4 classes, 0 to 3", "has 4 classes"]),
    (the_same_in_a_worker, ["`index` is out of range for `self.files`", "3 entries", "self.count"]),
    (numpy_column, ["`column` is 7", "`grid` has 4 entries along dimension 1"]),
    (layer_that_is_not_there, ["is 2", "`stack` has 2 entries"]),
    (row_of_a_frame, ["`row` is 5", "frame", "1 entry"]),
    (row_that_a_filter_took_out, ["`row` is 0", "no label of `frame`", "from 1 to 2", "reset_index(drop=True)"]),
    (crop_of_a_small_picture, ["is empty", "from 0 up to but not including 0"]),
]
TRIED = {classes_from_one, classes_shifted_twice}


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names=globals())
    return report, " ".join(str(report).split())


@pytest.mark.parametrize(("call", "words"), SITUATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_entry_and_the_table_are_named(call, words) -> None:
    report, said = explained(call)
    (finding,) = report.findings
    assert finding.code == CODE
    assert not [word for word in words if (word.partition(" = ")[2] or word) not in said], said
    assert finding.fixes
    assert call not in TRIED or finding.fixes[0].verified


def test_no_string_of_a_list_is_shown() -> None:
    secret = ["hunter" + "2"]
    report, said = explained(lambda: secret[3])
    assert [f.code for f in report] == [CODE] and "hunter2" not in said


def their_own_check():
    raise IndexError("list index out of range")


def deeper_than_the_line():
    names = ["cat", "dog"]
    return max([names[0]], key=sorted({"a"}).pop().__getitem__)


def what_a_call_gave():
    return sorted({"a", "b"})[3]


def key_of_a_dict():
    return vocabulary["zz"]


def label_that_never_was():
    return pd.Series([1.0, 2.0], index=[4, 5])[9]


def mask_of_another_size():
    samples, mask = torch.randn(3, 4), torch.ones(4, dtype=torch.bool)
    return samples[mask]


OTHERS = [
    their_own_check,
    deeper_than_the_line,
    what_a_call_gave,
    key_of_a_dict,
    label_that_never_was,
    mask_of_another_size,
]


@pytest.mark.parametrize("call", OTHERS)
def test_other_errors_are_not_named_so(call) -> None:
    report, _ = explained(call)
    assert CODE not in [finding.code for finding in report]


def test_labels_that_were_moved_are_moved_back_and_ignored_only_if_they_stand_for_no_class() -> None:
    back, ignored = explained(classes_shifted_twice)[0].findings[0].fixes
    assert "kinds + 1" in back.code and "ignore_index=-1" in ignored.code and "stands for no class" in ignored.title


def test_a_table_is_made_large_enough_for_all_the_data_and_not_for_one_batch() -> None:
    class Rides(nn.Module):
        def __init__(self, stations):
            super().__init__()
            self.stations = nn.Embedding(stations, 3)

        def forward(self, station):
            return self.stations(station)

    table, model = pd.DataFrame({"station": [0, 1, 12, 15, 2, 3]}), Rides(8)

    def epoch():
        for first in range(0, len(table), 3):
            model(torch.tensor(table.iloc[first : first + 3]["station"].to_numpy()))

    assert "max(stations, 16)" in explained(epoch)[1]


def test_a_last_layer_gets_an_output_for_each_class_of_all_the_data() -> None:
    kinds, rows = torch.tensor([0, 1, 2, 0, 1, 3]), torch.rand(6, 5)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

    def epoch():
        for first in range(0, 6, 3):
            F.cross_entropy(model(rows[first : first + 3]), kinds[first : first + 3]).backward()

    assert "nn.Linear(8, 4)" in explained(epoch)[1]
