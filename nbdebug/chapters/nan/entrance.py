"""Tensors that come into a step from outside, under their roles: parameters, buffers, what the model is given."""

from __future__ import annotations

import torch

from nbdebug.chapters.nan.flow import Flow
from nbdebug.observe.modules import ModuleNames
from nbdebug.observe.record import Recorder
from nbdebug.observe.sites import Site
from nbdebug.observe.tensors import INPUT, PARAMETER, Memory, dense, key


def register(names: ModuleNames, recorder: Recorder) -> None:
    """Parameters and buffers, under their names; new ones are looked at."""
    for tensor, (role, name, module) in names.all_tensors():
        values = dense(tensor)
        if values is None or tensor.device.type == "meta":
            continue
        reach = PARAMETER if role == "parameter" else 0
        known = recorder.memories.get(key(values))
        if known is not None:  # made under our eyes, or seen before the model was known
            known.role, known.name, known.module, known.reach = role, name, module, known.reach | reach
            continue
        memory = recorder.memories[key(values)] = Memory(values.untyped_storage(), None, reach, role, name, module)
        recorder.on_external(tensor, memory)


def mark_input(recorder: Recorder, flow: Flow, tensor: torch.Tensor, site: Site | None) -> None:
    """A tensor that can be read is given to the model at `site`."""
    values = dense(tensor)
    assert values is not None, "it can be read"
    known = recorder.memories.get(key(values))
    if known is None:
        known = recorder.memories[key(values)] = Memory(values.untyped_storage(), None, INPUT, "input")
        known.entered = site
        recorder.memory(tensor)
    if known.maker is None and known.role in ("target", "input"):
        known.role, known.entered = "input", known.entered or site
    if not known.reach & PARAMETER:
        known.reach |= INPUT
    for birth, mask in flow.masks(values).items():
        memory = flow.births[birth].memory
        if memory is not None and memory.role in ("target", "input"):  # rows of the batch, not of the data set
            memory.role, memory.entered = "input", memory.entered or site
            flow.births.enters(birth, mask)
