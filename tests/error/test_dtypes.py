"""Dtypes that do not go together: the tensor by the user's name, what made it so, and a cast that was tried."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nbdebug
from nbdebug.tools.errors.kinds.dtypes import dtypes_in, kind_of

CODE = "error/dtype-mismatch"
net = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3))
table = np.random.default_rng(0).normal(size=(12, 4))
features = torch.from_numpy(table)


class Rows(Dataset):
    def __init__(self):
        self.rows = table
        self.head = nn.Linear(4, 2)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"row": torch.from_numpy(self.rows[index]), "index": index}


class Projected(Rows):
    def __getitem__(self, index):
        return self.head(torch.from_numpy(self.rows[index]))


class TwoHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x.double()))


two_halves = TwoHalves()


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names=globals())
    return report, " ".join(str(report.full()).split())


def from_a_loader():
    for step, (x, _) in enumerate(DataLoader(TensorDataset(features, torch.zeros(12)), batch_size=4)):
        net(x * (step + 1))


def from_a_dict():
    for batch in DataLoader(Rows(), batch_size=3):
        net(batch["row"])


def from_a_function():
    def read():
        return torch.tensor(table)

    def encode(values):
        return net(values)

    everything = read()
    encode(everything[:2])


def from_a_worker():
    for _ in DataLoader(Projected(), num_workers=1):
        pass


def half_model():
    small = nn.Sequential(nn.Linear(4, 4)).half()
    inputs = torch.randn(2, 4)
    small(inputs)


def through_a_lambda():
    small, ready = nn.Linear(8, 2).bfloat16(), False
    frames = torch.randn(4, 8)

    def apply(batch):
        if ready:
            batch = batch.bfloat16()
        return small(batch)

    return (lambda: apply(frames))()


def pictures_in_bytes():
    pictures = torch.zeros(2, 3, 5, 5, dtype=torch.uint8)
    nn.Conv2d(3, 4, 1)(pictures)


def two_dtypes_in_one_model():
    two_halves(torch.randn(2, 4))


def behind_autocast():
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = net[1](x)
    return net[2](hidden)


def float_classes():
    target = torch.tensor([1.0, 2.0, 0.0])
    F.cross_entropy(net(torch.randn(3, 4)), target)


def small_integers():
    target = torch.from_numpy(np.array([0, 1, 2], dtype=np.int32))
    nn.CrossEntropyLoss()(net(torch.randn(3, 4)), target)


def one_hot_classes():
    wanted = F.one_hot(torch.tensor([1, 2, 0]), 3)
    F.cross_entropy(net(torch.randn(3, 4)), wanted)


def whole_numbers_for_bce():
    seen = torch.tensor([[0, 1, 1]])
    F.binary_cross_entropy_with_logits(net(torch.randn(1, 4)), seen)


def mask_for_bce():
    seen = torch.rand(1, 3) > 0.5
    nn.BCEWithLogitsLoss()(net(torch.randn(1, 4)), seen)


def double_class_weights():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(np.ones(3)))
    criterion(net(torch.randn(3, 4)), torch.tensor([1, 2, 0]))


def float_ids():
    ids = torch.tensor([[1.0, 2.0]])
    nn.Embedding(5, 4)(ids)


def float_index():
    order = torch.zeros(2)
    return features[order]


def mean_of_counts():
    hits = (features > 0).long()
    return hits.mean()


def difference_of_masks():
    before, after = features > 0, features > 1
    return after - before


def mask_of_numbers():
    padding, scores = torch.tensor([0, 1, 1]), torch.randn(3)
    return scores.masked_fill(padding, 0.0)


def into_whole_numbers():
    counts = torch.zeros(3, dtype=torch.long)
    counts += torch.rand(3)


def half_on_the_host():
    covariance = torch.eye(3).half()
    torch.linalg.cholesky(covariance)


def spectrum():
    waves = torch.fft.fft(torch.randn(2, 4))
    return net[1](waves)


def double_into_float():
    kept, new = torch.zeros(3, 4), features[:1]
    kept[torch.tensor([0])] = new


def series():
    sequence = torch.from_numpy(np.ones((2, 5, 4)))
    nn.LSTM(4, 3, batch_first=True)(sequence)


def objects():
    rows = pd.DataFrame({"age": [3, 4], "name": ["a", "b"]}).to_numpy()
    return torch.from_numpy(rows)


def numpy_in_a_layer():
    return net[2](np.ones((2, 6)))


def list_with_a_gap():
    ages = [31, 42, None]
    return torch.tensor(ages)


def gradients_of_counts():
    start = torch.arange(3)
    start.requires_grad_()


def through_vmap():
    rows = features.reshape(3, 4, 4)
    torch.vmap(net[2])(torch.vmap(net[1])(rows))


def mask_of_floats():
    keep, values = torch.tensor([1.0, 0.0, 1.0]), torch.randn(3)
    return values[keep]


def parameter_from_numpy():
    weight, x = nn.Parameter(torch.from_numpy(np.ones((4, 2)))), torch.randn(3, 4)
    return x @ weight


def half_model_without_a_kernel():
    lean, pictures = nn.Sequential(nn.Conv2d(3, 4, 1)), torch.ones(1, 3, 4, 4).half()
    lean = lean.half()
    space = {}
    exec("def conv2d(*given):\n    raise RuntimeError('\"slow_conv2d_cpu\" not implemented for \\'Half\\'')", space)
    with mock.patch.object(F, "conv2d", space["conv2d"]):
        lean(pictures)


def raised_again():
    try:
        net(features)
    except RuntimeError as error:
        raise ValueError("batch 7 is bad") from error


SITUATIONS = [
    (through_a_lambda, ["`batch` is `frames`", "`frames` is `torch.randn(4, 8)`", "small", "batch.bfloat16()"]),
    (from_a_loader, ["`x * (step + 1)` is float64", "net.1.0", "features", "from_numpy"]),
    (from_a_dict, ["batch['row']", "net.1.0", "from_numpy(self.rows[index])"]),
    (from_a_function, ["`values` is float64", "torch.tensor(table)", "everything"]),
    (from_a_worker, ["torch.from_numpy(self.rows[index])", "self.head", "worker"]),
    (half_model, ["`inputs` is float32", "`small.0` computes in float16", "`.half()`", "inputs = inputs.half()"]),
    (pictures_in_bytes, ["`pictures` is uint8", "float32", "/ 255"]),
    (two_dtypes_in_one_model, ["two_halves.head", "two_halves.body` computes in float64"]),
    (behind_autocast, ["`hidden` is bfloat16", "net.2", "autocast", "ended"]),
    (float_classes, ["`target` is float32", "class numbers", "target = target.long()"]),
    (small_integers, ["`target` is int32", "target = target.long()", "from_numpy"]),
    (one_hot_classes, ["`wanted` is int64", "probabilities", "wanted = wanted.float()", "argmax"]),
    (whole_numbers_for_bce, ["`seen` is int64", "seen = seen.float()"]),
    (mask_for_bce, ["`seen` is bool", "comparison", "seen = seen.float()"]),
    (double_class_weights, ["`criterion.weight` is float64", "criterion.weight.float()"]),
    (float_ids, ["`ids` is float32", "must be int64", "ids = ids.long()"]),
    (float_index, ["`order` is float32", "order = order.long()"]),
    (mean_of_counts, ["`hits` is int64", "`mean`", "hits = hits.float()"]),
    (difference_of_masks, ["`after` is bool", "after.float() - before.float()"]),
    (mask_of_numbers, ["`padding` is int64", "padding = padding.bool()"]),
    (into_whole_numbers, ["`counts` is int64", "dtype=torch.float32"]),
    (half_on_the_host, ["`covariance` is float16", "cholesky", "covariance.float()"]),
    (spectrum, ["`waves` is complex64", "fft", "waves.abs()"]),
    (double_into_float, ["`new` is float64", "`kept` is float32"]),
    (series, ["`sequence` is float64", "LSTM", "sequence = sequence.float()"]),
    (objects, ["`rows` is object", "a str at [0][1]"]),
    (numpy_in_a_layer, ["float64 in NumPy", "torch.as_tensor"]),
    (list_with_a_gap, ["`ages` is a list", "a NoneType at [2]"]),
    (gradients_of_counts, ["`start` is int64", "arange", "start = start.float()"]),
    (through_vmap, ["`rows` is float64", "net.1.0"]),
    (mask_of_floats, ["`keep` is float32", "a mask must be bool", "keep = keep.bool()"]),
    (parameter_from_numpy, ["`weight` is float64", "`x` is float32", "weight.float()"]),
    (half_model_without_a_kernel, ["`lean.0.weight` is float16", "`.half()`", "lean.float()"]),
    (raised_again, ["`features` is float64", "ValueError"]),
]
TRIED = {
    half_model,
    float_classes,
    one_hot_classes,
    mask_for_bce,
    float_ids,
    mean_of_counts,
    difference_of_masks,
    series,
    half_on_the_host,
    spectrum,
    into_whole_numbers,
}


@pytest.mark.parametrize(("call", "words"), SITUATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_tensor_is_named_with_what_made_it_so(call, words) -> None:
    report, said = explained(call)
    (finding,) = report.findings
    assert finding.code == CODE
    assert not [word for word in words if (word.partition(" = ")[2] or word) not in said], said
    assert finding.fixes
    assert call not in TRIED or finding.fixes[0].verified or finding.fixes[0].edit is None
    assert all(fix.verified is not False for fix in finding.fixes)


def test_a_cast_that_is_offered_does_run() -> None:
    """The oracle: the user's line, with the fix, in plain torch."""
    net(features.float())
    F.cross_entropy(net(torch.randn(3, 4)), torch.tensor([1.0, 2.0, 0.0]).long())
    two = nn.Sequential(nn.Linear(4, 4)).half()
    assert two(torch.randn(2, 4).half()).dtype is torch.float16


def their_own_check():
    if features.dtype != torch.float32:
        raise ValueError("all inputs must have the same dtype")


def wrong_width():
    net(torch.randn(3, 5))


def no_number():
    float("twelve")


@pytest.mark.parametrize("call", [their_own_check, wrong_width, no_number])
def test_other_errors_are_not_named_so(call) -> None:
    report, _ = explained(call)
    assert CODE not in [finding.code for finding in report]


@pytest.mark.parametrize(
    ("message", "kind", "dtypes"),
    [
        ("mat1 and mat2 must have the same dtype, but got Double and Float", "mixed", ["float64", "float32"]),
        ("expected m1 and m2 to have the same dtype, but got: double != float", "mixed", ["float64", "float32"]),
        ("expected scalar type Half but found Float", "mixed", ["float16", "float32"]),
        (
            "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
            "mixed",
            ["float16", "float32"],
        ),
        ("Input type (float) and bias type (c10::Half) should be the same", "mixed", ["float32", "float16"]),
        ("Found dtype Double but expected Float", "mixed", ["float64", "float32"]),
        ("expected scalar type Long but found Int", "classes", ["int64", "int32"]),
        ("\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'", "classes", ["int32"]),
        ("\"addmm_impl_cpu_\" not implemented for 'Half'", "half", ["float16"]),
        ("tensors used as indices must be long, byte or bool tensors", "index", None),
        ("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.", "autocast", []),
        ("The size of tensor a (5) must match the size of tensor b (4) at non-singleton dimension 1", None, []),
        ("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!", None, None),
    ],
)
def test_the_words_of_all_versions(message, kind, dtypes) -> None:
    assert kind_of(message) == kind
    assert dtypes is None or dtypes_in(message) == dtypes
