"""What cuDNN (or cuBLAS) would not compute: the op, its operands with their layout, and whether it goes another way."""

from __future__ import annotations

import contextlib
import re

import torch

from nbdebug.chapters.error.asked import Names, asked, failing_module, raised, raised_by_user, within
from nbdebug.chapters.error.facts_cuda import CudnnFacts, Layout
from nbdebug.chapters.error.facts_parts import Cure, Part
from nbdebug.chapters.error.looks.card import card
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.trying import SMALL, rerun

ENGINE = r"unable to find an engine|Unable to find a valid cuDNN algorithm|No valid execution plans built"
STATUS = r"(CUDNN_STATUS_\w+|CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE))"
WORDS = re.compile(
    rf"{STATUS}|{ENGINE}|cuDNN error|(?:input|hx|weight) is not contiguous|input must be contiguous|"
    r"cudnn RNN backward can only be called|passed in a non-contiguous input"
)


def look(scene: Scene) -> CudnnFacts | None:
    """The facts of what the library would not do; None of any other error."""
    message = scene.message
    if not WORDS.search(message) or raised_by_user(scene):
        return None
    found = re.search(STATUS, message)
    status = (
        found[1]
        if found
        else "no engine"
        if re.search(ENGINE, message)
        else "not contiguous"
        if ("contiguous" in message)
        else "error"
    )
    parts = [p for p in asked(scene) if p.value.ndim and p.value.layout is torch.strided]
    layouts = tuple(
        Layout(
            Part(p.fact(), p.role, p.owner, p.known),
            tuple(p.value.stride()),
            p.value.is_contiguous(),
            dense(p.value),
            p.value.numel(),
        )
        for p in parts[:8]
    )
    module = failing_module(scene)
    op = (
        Names(scene).module(module)
        if module is not None
        else next((frame.site.function for frame in within(scene)), "")
    )
    loose: dict[int | str, torch.Tensor] = {
        id(p.value): p.value.detach().contiguous()
        for p in parts
        if not p.value.is_contiguous() and p.value.numel() < SMALL
    }
    return CudnnFacts(
        raised(scene),
        "cuBLAS" if "CUBLAS" in status else "cuDNN",
        status,
        op,
        layouts,
        card(),
        _tried(scene, {}, True),
        _tried(scene, loose, False) if loose else None,
    )


def dense(value: torch.Tensor) -> bool:
    """Whether the elements lie without gaps or overlaps, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _tried(scene: Scene, swap: dict[int | str, torch.Tensor], other: bool) -> Cure | None:
    off = (lambda: torch.backends.cudnn.flags(enabled=False)) if other else contextlib.nullcontext
    trial = rerun(scene, swap, off)
    return None if trial is None else Cure("", trial.worked, trial.after)
