"""What cuDNN would not compute, and cards that are not there: said in torch's words by a stand-in."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.errors.kinds.backends import dense
from nbdebug.tools.errors.rules import ArgumentFact, Raised, TensorFact
from nbdebug.tools.errors.rules.backends import (
    CardFacts,
    CudaCard,
    CudnnFacts,
    Layout,
    cuda_unavailable,
    cudnn_not_supported,
)

filters = nn.Conv2d(3, 4, 3)
NOT_SUPPORTED = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous …"


def saying(message, kind=RuntimeError):
    space = {"message": message, "kind": kind}
    exec("def fail(*given, **named):\n    raise kind(message)", space)
    return space["fail"]


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names=globals())
    return report, " ".join(str(report).split())


def convolved(picture, message):
    with mock.patch.object(nn.functional, "conv2d", saying(message)):
        return filters(picture)


def every_second_row():
    picture = torch.rand(2, 3, 16, 16)[:, :, ::2]
    return convolved(picture, NOT_SUPPORTED)


def expanded():
    picture = torch.rand(1, 3, 8, 8).expand(4, 3, 8, 8)
    return convolved(picture, "CUDNN_STATUS_EXECUTION_FAILED")


def no_engine():
    picture = torch.rand(2, 3, 16, 16)
    return convolved(picture, "GET was unable to find an engine to execute this computation")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (every_second_row, ["`picture` has gaps in memory", "picture.contiguous()", "`filters`"]),
        (expanded, ["`picture` has gaps in memory", "[0, 64, 8, 1]", "picture.contiguous()"]),
        (no_engine, ["`filters`", "no engine", "float32 [2, 3, 16, 16]", "cudnn.flags(enabled=False)"]),
    ],
)
def test_what_the_library_was_given(call, words) -> None:
    report, said = explained(call)
    assert [f.code for f in report] == ["error/cudnn-not-supported"]
    assert not [word for word in words if word not in said], said


def test_dense_means_without_gaps_in_any_order() -> None:
    x = torch.rand(2, 3, 4, 5)
    assert dense(x) and dense(x.permute(0, 3, 1, 2)) and dense(x.to(memory_format=torch.channels_last))
    assert not dense(x[..., ::2]) and not dense(x[:, :1].expand(2, 3, 4, 5)) and not dense(x[:, 1:])


def facts(status, dtype="float32", elements=1000, **card):
    operand = ArgumentFact(TensorFact("x", (elements,), dtype, "cuda:0"))
    return CudnnFacts(
        Raised("RuntimeError", status),
        "cuDNN",
        status,
        "net.0",
        (Layout(operand, (1,), True, True, elements),),
        CudaCard(**card),
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (facts("CUDNN_STATUS_NOT_SUPPORTED", elements=2**31), "2,147,483,648 elements"),
        (
            facts("CUDNN_STATUS_EXECUTION_FAILED", "bfloat16", capability="sm_75"),
            "this GPU does not support bfloat16",
        ),
        (facts("no engine", free=100 * 2**20, total=80 * 2**30), "100 MiB of 80.0 GiB are free"),
        (facts("CUDNN_STATUS_BAD_PARAM", free=40 * 2**30, total=80 * 2**30), "no kernel for `x`"),
    ],
)
def test_the_reason_that_fits(given, words) -> None:
    finding = cudnn_not_supported(given)
    assert finding is not None and words in finding.title and finding.fixes


LOAD = "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (LOAD, ["map_location"]),
        ("Torch not compiled with CUDA enabled", ["uses CUDA", "is_available"]),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", ["uses CUDA"]),
        ("CUDA error: no kernel image is available for execution on the device", ["has kernels for"]),
        ("CUDA error: invalid device ordinal", ["visible here"]),
        ("The NVIDIA driver on your system is too old (found version 11040).", ["driver is older"]),
    ],
)
def test_no_card_that_fits(message, words) -> None:
    report, said = explained(lambda: saying(message)())
    assert [f.code for f in report] == ["error/cuda-unavailable"]
    assert not [word for word in words if word not in said], said


def test_cards_are_counted_and_kernels_listed() -> None:
    card = CudaCard("2.6.0", "12.4", True, 2, "K80", "sm_37", ("sm_50", "sm_90"))
    none = cuda_unavailable(CardFacts(Raised("RuntimeError", ""), "no kernel", card))
    further = cuda_unavailable(CardFacts(Raised("RuntimeError", ""), "not there", card, "x.to('cuda:3')", 3))
    assert none is not None and "sm_37" in none.title and "sm_50, sm_90" in none.title
    assert further is not None and "cuda:3" in further.title and "cuda:1" in further.title
    assert cuda_unavailable(CardFacts(Raised("RuntimeError", ""), "none", CudaCard("2.6.0", "12.4"))) is not None


def test_other_errors_are_not_named_so() -> None:
    report, _ = explained(lambda: filters(torch.rand(2, 5, 8, 8)))
    assert not {"error/cudnn-not-supported", "error/cuda-unavailable"} & {f.code for f in report}
