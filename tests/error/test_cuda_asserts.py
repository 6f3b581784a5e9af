"""A device-side assert, told lines too late: the guilty op by the copy of its index on the host, else the candidates.

A stand-in says the card's words; tests/cuda/test_explain_cuda.py has the card say them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nbdebug

WORDS = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other "
    "API call, so the stacktrace below might be incorrect."
)


def saying(message):
    space = {"message": message}
    exec("def wait(*given):\n    raise RuntimeError(message)", space)
    return space["wait"]


wait = saying(WORDS)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 5)

    def forward(self, tokens):
        return self.head(self.words.weight[:1].expand(len(tokens), 4))  # the lookup itself would fail on the host

    def looked_up(self, tokens):
        return self.words(tokens)


class Kept(Dataset):
    def __init__(self, labels):
        self.rows, self.labels = torch.zeros(len(labels), 3, dtype=torch.long), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.rows[index], self.labels[index]


def not_computed(scores, kinds):
    return scores.sum()


def data(bad_token=None, bad_label=None):
    tokens, labels = torch.arange(24).reshape(8, 3) % 10, torch.arange(8) % 5
    if bad_token is not None:
        tokens[3, 1] = bad_token
    if bad_label is not None:
        labels[6] = bad_label
    return TensorDataset(tokens, labels)


def train(given):
    reader, criterion = Reader(), nn.CrossEntropyLoss()
    criterion.forward = not_computed
    loader = DataLoader(given, batch_size=4)
    for tokens, kinds in loader:
        tokens, kinds = tokens.clone(), kinds.clone()  # on a card: .cuda()
        scores = reader(tokens)
        loss = criterion(scores, kinds)
        wait(loss)


def explained(call, *given):
    with pytest.raises(RuntimeError) as caught:
        call(*given)
    report = nbdebug.explain(caught.value, names={})
    return report, " ".join(str(report).split())


@pytest.mark.parametrize(
    ("given", "line", "words"),
    [
        (data(bad_label=5), "criterion(scores, kinds)", ["tensors[1][6]` is 5", "`reader.head` gives 5 classes"]),
        (data(bad_token=12), "self.words(tokens)", ["tensors[0][3, 1]` is 12", "`reader.words` has 10 rows"]),
        (Kept([0, 1, 9, 2]), "criterion(scores, kinds)", ["`kinds[2]` is 9", "5 classes"]),
    ],
)
def test_the_real_line_and_the_entry_are_named(given, line, words) -> None:
    report, said = explained(train, given)
    (finding,) = report.findings
    assert finding.code == "error/index-out-of-range"
    assert line in finding.where.text
    assert not [word for word in words if word not in said], said
    assert "wait(loss)" in said


def test_a_label_that_is_left_out_is_no_fault() -> None:
    report, _ = explained(train, data(bad_label=-100))
    assert [f.code for f in report] == ["error/device-assert"]


def test_without_proof_the_candidates_are_told_and_how_to_find_the_line() -> None:
    def step(reader, tokens):
        wait(reader.looked_up(tokens))

    report, said = explained(step, Reader(), torch.zeros(2, 3, dtype=torch.long))
    assert [f.code for f in report] == ["error/device-assert"]
    assert "CUDA_LAUNCH_BLOCKING" in said and "reader.words" in said and "in range" in said


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_other_words_for_a_late_failure(message) -> None:
    report, _ = explained(saying(message))
    assert [f.code for f in report] == ["error/device-assert"]


def test_other_errors_are_not_named_so() -> None:
    report, _ = explained(lambda: Reader().words(torch.tensor([1.0])))
    assert "error/device-assert" not in [f.code for f in report]
