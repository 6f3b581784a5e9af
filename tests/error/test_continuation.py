"""Fixes as edits of the user's own line: what is called tried comes through the program behind the line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from nbdebug.report import Fix


def fixes_of(call) -> tuple[Fix, ...]:
    try:
        call()
    except Exception as error:
        return nbdebug.explain(error, names={}).findings[0].fixes
    raise AssertionError("it did not fail")


def picture_as_rows():
    height = torch.rand(12, 16)
    return F.interpolate(height.unsqueeze(1), size=(24, 32), mode="bilinear")


def doubles():
    net, rows = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(5, 4, dtype=torch.float64)
    scores = net(rows)
    return F.cross_entropy(scores, torch.tensor([0, 1, 1, 0, 0]))


def weight_in_place():
    layer = nn.Linear(3, 2)
    layer.weight[0] = 1.0


def made_for_another_size():
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(7, 3))
    return net(torch.rand(2, 6))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (picture_as_rows, "height[None, None]"),
        (doubles, "net(rows.float())"),
        (weight_in_place, "with torch.no_grad():\n    layer.weight[0] = 1.0"),
        (made_for_another_size, "nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)"),
    ],
)
def test_the_first_fix_is_the_users_line_rewritten_and_tried(call, text) -> None:
    first = fixes_of(call)[0]
    assert first.verified and first.edit is not None and text in first.edit.code, first
    assert all(fix.edit is not None for fix in fixes_of(call) if fix.verified)


def test_a_view_that_breaks_the_next_layer_is_not_offered() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 2)

    def call():
        hidden = first(torch.rand(6, 4))
        return second(hidden[:, :4])

    assert not [fix for fix in fixes_of(call) if fix.verified and ".T" in fix.code]


def test_a_parameter_is_not_replaced_by_a_plain_tensor() -> None:
    assert not [fix for fix in fixes_of(weight_in_place) if ".clone()" in fix.code]


TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in <module>
    out = net(x)
  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1568 and 1800x10)"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (TRACEBACK, "error/shape-mismatch"),
        ("RuntimeError: No available kernel. Aborting execution.", "error/attention-kernel-missing"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "error/cudnn-not-initialized"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "error/out-of-memory"),
        ("TypeError: linear(): argument 'input' (position 1) must be Tensor, not tuple", "error/not-a-tensor"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/a.csv'", "error/file-not-found"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "error/loader-worker-died"),
        (
            "RuntimeError: Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU",
            "error/device-mismatch",
        ),
        ("RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'", "error/dtype-mismatch"),
        ("RuntimeError: size mismatch, m1: [32 x 400], m2: [120 x 84]", "error/shape-mismatch"),
        ("RuntimeError: a Tensor with 32 elements cannot be converted to Scalar", "error/shape-mismatch"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "error/out-of-memory"),
        ("_pickle.UnpicklingError: invalid load key, '<'.", "checkpoint/not-weights"),
        ("AttributeError: module 'numpy' has no attribute 'float'.", "environment/version-mismatch"),
        ("ValueError: sampler option is mutually exclusive with shuffle", "error/wrong-argument"),
    ],
)
def test_copied_text_is_explained_by_its_words(text, code) -> None:
    report = nbdebug.explain(text)
    assert [finding.code for finding in report] == [code]
    assert not any(fix.verified for fix in report.findings[0].fixes)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RuntimeError: Function 'PowBackward0' returned nan values in its 0th output.", "`%nan_trace step()`"),
        ("ValueError: Attempting to unscale FP16 gradients.", "`model.float()`"),
        ("TypeError: '<=' not supported between instances of 'float' and 'str'", "`float(...)`"),
        ("TypeError: params argument given to the optimizer should be an iterable of Tensors or dicts", "`[weight]`"),
    ],
)
def test_what_a_message_leaves_unsaid_is_told(text: str, hint: str) -> None:
    assert any(hint in note for note in nbdebug.explain(text).notes)


def test_text_of_no_known_kind_gets_no_guess() -> None:
    report = nbdebug.explain("ValueError: it is raining in the data center")
    assert not report.findings and "No cause is known for this ValueError" in str(report)
