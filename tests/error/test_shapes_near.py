"""Beside the shapes: what must not be named so, other wordings of the same messages, and what the look never does."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import nbdebug
from nbdebug.tools.errors.shapes.call import parse_message
from nbdebug.tools.errors.shapes.trials import output_shape

CODE = "error/shape-mismatch"
NONE = (None, None)


def caught(attempt):
    with pytest.raises(Exception) as held:
        attempt()
    return held.value


def unpack_a_list():
    first, second = [1, 2, 3]
    return first, second


def own_words():
    raise ValueError("Expected input batch_size (3) to match target batch_size (4).")


def own_assertion():
    assert torch.rand(2).shape == (3,), "The size of tensor a (2) must match the size of tensor b (3)"


def other_dtype():
    return nn.Linear(4, 2)(torch.rand(3, 4, dtype=torch.float64))


def outside_of_the_table():
    return nn.Embedding(5, 2)(torch.tensor([1, 7]))


def weights_of_another_model():
    nn.Linear(4, 2).load_state_dict(nn.Linear(5, 2).state_dict())


def samples_of_two_sizes():
    return next(iter(DataLoader([torch.rand(3), torch.rand(4)], batch_size=2)))


def empty_text():
    return int("")


@pytest.mark.parametrize(
    "attempt",
    [
        unpack_a_list,
        own_words,
        own_assertion,
        other_dtype,
        outside_of_the_table,
        weights_of_another_model,
        samples_of_two_sizes,
        empty_text,
    ],
)
def test_other_errors_are_not_named_so(attempt):
    assert CODE not in [finding.code for finding in nbdebug.explain(caught(attempt))]


@pytest.mark.parametrize(
    ("message", "kind", "numbers"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (4x800 and 512x64)", "product", (800, 512)),
        ("linear(): input and weight.T shapes cannot be multiplied (4x800 and 512x64)", "product", (800, 512)),
        ("a and b must have same reduction dim, but got [4, 800] X [512, 64].", "product", NONE),
        (
            "Given groups=1, weight of size [8, 3, 3, 3], expected input[2, 9, 9, 3] to have 3 "
            "channels, but got 9 channels "
            "instead",
            "features",
            (9, 3),
        ),
        ("Given normalized_shape=[8], expected input with shape [*, 8], but got input of size[2, 5]", "features", NONE),
        (
            "Given normalized_shape=[8], expected input with shape [8], but got input of size torch.Size([2, 5])",
            "features",
            NONE,
        ),
        ("input.size(-1) must be equal to input_size. Expected 4, got 5", "features", (5, 4)),
        (
            "Sizes of tensors must match except in dimension 1. Expected size 30 but got size 31 for "
            "tensor number 1 in the "
            "list.",
            "join",
            (31, 30),
        ),
        (
            "Sizes of tensors must match except in dimension 0. Expected 4 in dimension 1 but got 5 "
            "for tensor number 1 in "
            "the list",
            "join",
            (5, 4),
        ),
        (
            "The size of tensor a (5) must match the size of tensor b (4) at non-singleton dimension 1",
            "broadcast",
            (5, 4),
        ),
        (
            "Attempting to broadcast a dimension of length 5 at -1! Mismatching argument at index 1 "
            "had torch.Size([3, 5]); "
            "but expected shape should be broadcastable to [3, 4]",
            "broadcast",
            NONE,
        ),
        ("too many values to unpack (expected 2, got 3)", "unpack", (None, 2)),
        ("only length-1 arrays can be converted to Python scalars", "scalar", NONE),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", None, ()),
        ("Expected all tensors to be on the same device", None, ()),
        ("index 5 is out of bounds for dimension 0 with size 3", None, ()),
    ],
)
def test_wordings_of_other_versions_and_kernels(message, kind, numbers):
    parsed = parse_message(message)
    assert (parsed.kind if parsed else None) == kind
    if parsed is not None:
        assert (parsed.actual, parsed.expected) == numbers


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(3, 8, 3, 2, 1, dilation=2), (2, 3, 17, 20)),
        (nn.Conv2d(3, 8, 3, padding="same"), (2, 3, 9, 7)),
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (2, 3, 16, 19)),
        (nn.AvgPool1d(3, 2, ceil_mode=True), (2, 3, 8)),
        (nn.AdaptiveAvgPool2d((None, 3)), (2, 3, 7, 9)),
        (nn.ConvTranspose2d(3, 8, 3, 2, 1, 1), (2, 3, 7, 9)),
        (nn.Unflatten(1, (2, -1)), (2, 6, 4)),
        (nn.Upsample(scale_factor=2), (2, 3, 4, 5)),
        (nn.GLU(), (2, 8)),
        (nn.ZeroPad2d((1, 2, 3, 4)), (2, 3, 4, 5)),
        (nn.PixelShuffle(2), (2, 8, 4, 5)),
        (nn.Conv1d(3, 8, 5), (3, 20)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 5)),
            (2, 3, 9, 9),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_layers_formula_agrees_with_the_layer(module, shape):
    assert output_shape(module, shape) == tuple(module(torch.rand(shape)).shape)


class Talking(torch.Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Talking.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Secretive:
    password = "hunter2"

    def __repr__(self):
        raise AssertionError("the look asked for a repr")

    __len__ = __eq__ = __getattr__ = __repr__
    __hash__ = None


def test_nothing_of_the_users_runs_and_no_secret_is_told():
    def fit(token="sk-very-secret"):
        keeper, left, right = Secretive(), torch.rand(3, 4).as_subclass(Talking), torch.rand(3, 5)
        return left + right, keeper, token

    error = caught(fit)
    Talking.asked = 0
    report = nbdebug.explain(error)
    assert report.findings[0].code == CODE and "`left` [3, 4]" in report.findings[0].title
    assert Talking.asked == 0
    assert "sk-very-secret" not in str(report) and "hunter2" not in str(report)


def test_random_numbers_statistics_and_tensors_stay_as_they_were():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(10, 2))
    pictures = torch.rand(2, 3, 8, 8)
    error = caught(lambda: net(pictures))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    assert nbdebug.explain(error).findings[0].code == CODE
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    total, part = torch.zeros(3, 4), torch.ones(4, 3)
    nbdebug.explain(caught(lambda: total.add_(part)))
    assert not total.any()


def test_a_large_tensor_takes_no_longer():
    table, other = torch.zeros(3000, 4000), torch.zeros(3000, 4001)
    error = caught(lambda: table * other)
    start = time.perf_counter()
    report = nbdebug.explain(error)
    print(f"explained in {time.perf_counter() - start:.2f} s")
    assert "`table` [3000, 4000] and `other` [3000, 4001]" in report.findings[0].title


class Shifted(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        spectrum, offset = torch.rand(6), torch.rand(4)
        return spectrum - offset


@pytest.mark.skipif(sys.platform == "win32", reason="a worker is forked")
def test_in_a_worker_of_a_loader():
    error = caught(lambda: list(DataLoader(Shifted(), num_workers=1)))
    (finding,) = nbdebug.explain(error)
    assert finding.code == CODE and "`spectrum` and `offset`" in finding.title and "6 and 4" in finding.title
    assert finding.where.text == "return spectrum - offset"


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(5, 2)

    def forward(self, pulses):
        return self.weigh(pulses)


class TorchRuntimeError(RuntimeError):
    """As torch.compile raises it."""


def test_of_a_compiled_model_the_text_is_read():
    model = Compiled()
    line = Compiled.forward.__code__.co_firstlineno + 1

    def run(model=model):
        raise TorchRuntimeError(
            "Dynamo failed to run FX node with fake tensors: call_function <built-in function linear>(...): got "
            "RuntimeError('a and b must have same reduction dim, but got [3, 4] X [5, 2].')\n\nfrom user code:\n"
            f'   File "{__file__}", line {line}, in forward\n    return self.weigh(pulses)\n\nSet TORCH_LOGS="+dynamo"'
        )

    (finding,) = nbdebug.explain(caught(run))
    assert "`weigh` (Linear) expects 5 features but gets 4: `pulses` is [3, 4]" in finding.title


def test_chained_and_grouped():
    def inner():
        ink, paper = torch.rand(2, 3), torch.rand(2, 4)
        return torch.stack([ink, paper])

    def outer():
        try:
            inner()
        except RuntimeError as cause:
            raise KeyError("epoch") from cause

    (finding,) = nbdebug.explain(caught(outer))
    assert finding.code == CODE
    assert "`ink` [2, 3] and `paper` [2, 4] can't be joined by `stack`" in finding.title
    if sys.version_info >= (3, 11):
        both = ExceptionGroup("two", [ValueError("x"), caught(inner)])  # noqa: F821 (of Python 3.11 on)
        assert CODE in [found.code for found in nbdebug.explain(both)]


def test_what_a_library_has_flattened_has_the_users_name():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 9,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    config = transformers.BertConfig(**sizes, num_labels=3, problem_type="single_label_classification")
    model = transformers.BertForSequenceClassification(config)

    def run():
        batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2, 5, dtype=torch.long)}
        return model(**batch)

    (finding,) = nbdebug.explain(caught(run))
    assert finding.code == CODE and "`batch['labels'].reshape(10)` [10]" in finding.title
