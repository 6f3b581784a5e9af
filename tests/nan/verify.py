"""Proves the truth of a program with plain torch, without nbdebug.

`verify` runs the steps and looks at losses, gradients and parameters: does it go bad as the truth says, when it says?
`prove` runs the program with two probes around the line at fault and looks at that line alone: finite in, non-finite
out, in the rows that the truth names.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch

from tests.nan import programs
from tests.nan.plan import Program


def finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    return value is None or math.isfinite(value)


def tensors(made: Any) -> list[torch.Tensor]:
    """The parameters and buffers of the model, or the plain tensors that are trained."""
    return [*made.model.parameters(), *made.model.buffers()] if made.model is not None else list(made.tensors)


def watch(made: Any, steps: int = 3) -> list[tuple[bool, bool, bool]]:
    """(loss, gradients, parameters finite) for each step, after the state before the first."""
    seen = [(True, True, all(finite(t) for t in tensors(made)))]
    for _ in range(steps):
        loss = made.step()
        seen.append((finite(loss), all(finite(t.grad) for t in tensors(made)), all(finite(t) for t in tensors(made))))
    return seen


def verify(program: Program) -> str:
    """ "" when the program behaves as its truth says, else what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        made = programs.load(program, folder)
        seen = watch(made, program.truth.step[0] + 1 if program.truth else made.steps)
    if program.truth is None:
        return "" if all(map(all, seen)) else f"a healthy program goes bad: {seen}"
    phase, step = program.truth.phase[0], program.truth.step[0]
    before, (loss, gradients, _) = seen[: step + 1], seen[step + 1]
    if phase == "parameter":
        return (
            "" if not seen[0][2] and not (loss and gradients) else f"the parameter is not bad, or does no harm: {seen}"
        )
    if not all(map(all, before)):
        return f"bad before step {step}: {seen}"
    claims = {"forward": not loss, "input": not loss, "backward": loss and not gradients}
    return "" if claims[phase] else f"not a fault in {phase} at step {step}: {seen}"


def not_finite(value: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(value)


class Probe:
    """What the planted line got and gave, each time that it ran: masks of the elements that are not finite."""

    def __init__(self, test: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.test = test

    def __call__(self, side: str, value: Any) -> None:
        if side == "in" or not self.calls or "out" in self.calls[-1]:
            self.calls.append({})
        call = self.calls[-1]
        call[side] = [self.test(v.detach()) for v in value] if isinstance(value, list) else self.test(value.detach())
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            value.register_hook(lambda grad: call.__setitem__(f"{side} gradient", not_finite(grad)))


def rows_of(mask: Any, how: str | None, time: int) -> tuple[int, ...] | None:
    """The rows of the batch in which a mask holds."""
    if how == "loop":
        return tuple(i for i, row in enumerate(mask) if row.any())
    if how == "folded":
        mask = mask.view(-1, time, *mask.shape[1:])
    if how == "1":
        mask = mask.transpose(0, 1)
    return (
        tuple(mask.flatten(1).any(1).nonzero().flatten().tolist())
        if mask.dim() > 1
        else tuple(mask.nonzero().flatten().tolist())
    )


def prove(seed: int) -> str:
    """ "" when the planted line of a faulty program makes what the truth says, in the rows that it says."""
    program = programs.make(seed, probe=True)
    if program.fault is None:
        return ""
    fault = program.fault
    probe = Probe(not_finite if fault.operand else torch.isnan)  # without an operand: -inf is meant there, NaN is not
    with tempfile.TemporaryDirectory() as folder:
        made = programs.load(program, folder, PROBE=probe)
        for _ in range(program.truth.step[0] + 1):
            made.step()
    derived = fault.phase == "backward" and "class" not in fault.top
    good, bad = ("out gradient", "in gradient") if derived else ("in", "out")
    for call in probe.calls:
        if bad not in call or (good in call and _any(call[good])) or not _any(call[bad]):
            continue
        if program.truth.rows is None or rows_of(call[bad], fault.rows, program.setup.time) == program.truth.rows:
            return ""
    return f"the line {fault.mark!r} does not go bad in rows {program.truth.rows}"


def _any(mask: Any) -> bool:
    return any(m.any() for m in mask) if isinstance(mask, list) else bool(mask.any())
