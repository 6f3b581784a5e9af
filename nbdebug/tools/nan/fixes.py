"""Try a fix on the recorded step: mend the op at fault (or a tensor from outside) as the fix says, and replay.

`try_fixes` takes the finding's first fix. `_CHANGES` says for each cause what a replay has to change; `FixTrial` is the
failing step, which must fail again when it is replayed unchanged, or the trial proves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nbdebug.observe.ops import schema_of
from nbdebug.observe.recorder import Op
from nbdebug.observe.replay import Replay
from nbdebug.observe.tape import CannotReplay, TapeEntry
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, each_largest, finite, read_scalars, tensors_in
from nbdebug.report import Finding, Fix
from nbdebug.text import clip
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.probe import Detection, Probe

Patch = Callable[..., Any]
TapeChange = tuple[dict[int, Patch], dict[int, Callable[[torch.Tensor], torch.Tensor]], float]
"""A fix as a replay takes it: ops replaced, by index; tensors from outside changed, by number; a factor on the loss."""
_UNCHANGED: TapeChange = ({}, {}, 1.0)


def try_fixes(
    finding: Finding, facts: NanFacts, probe: Probe, detection: Detection, op: Op | None
) -> tuple[Finding, FixTrial]:
    """The finding with its first fix tried. The other fixes, and one that can't be tried, say why not. op: the one at
    fault."""
    trial = FixTrial(probe, detection, op)
    fixes = list(finding.fixes)
    if fixes and not fixes[0].after:
        fixes[0] = _tried(fixes[0], finding.code.split("/")[1], facts, trial)
    return dataclasses.replace(finding, fixes=tuple(fixes)), trial


def _tried(fix: Fix, code: str, facts: NanFacts, trial: FixTrial) -> Fix:
    if trial.why_not:
        return dataclasses.replace(fix, after={"why not": trial.why_not})
    patches, inputs, scale = _CHANGES[code](facts, trial) if code in _CHANGES else _UNCHANGED
    if not patches and not inputs and scale == 1.0:
        return dataclasses.replace(fix, after={"why not": "it changes more than this step"})
    try:
        replay = trial.replay(patches, inputs, scale)
        return dataclasses.replace(fix, verified=trial.is_all_finite(replay), after=trial.numbers(replay))
    except Exception as error:
        return dataclasses.replace(fix, after={"why not": _text(error)})


def _text(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {clip(first, 120)}"


class FixTrial:
    """One failing step, ready to be replayed. `why_not` says why it can't be, else it is empty."""

    def __init__(self, probe: Probe, detection: Detection, op: Op | None):
        self.tape, self.detection, self.op, self.reproductions = probe.tape, detection, op, probe.reproductions
        self.same_line = (
            []
            if op is None
            else [  # a fix to the line changes every run of it: loops, reused modules
                e.op
                for e in probe.tape.entries
                if isinstance(e, TapeEntry) and (e.op.site, e.op.name) == (op.site, op.name)
            ]
        )
        self.why_not = ""
        self.unchanged: list[tuple[int, int]] = []  # a patched op's finite results: how many stayed, of how many
        if probe.reproduced:
            return
        try:
            original = self.replay({}, forward_only=detection.target.kind == "loss")
        except CannotReplay as reason:
            self.why_not = f"the step can't be replayed: {reason}"
        except Exception as error:  # an op that is not to be run alone; nothing was changed
            self.why_not = f"the step can't be replayed: {_text(error)}"
        else:
            if self._is_cured(original):
                self.why_not = "the step is finite when it is replayed: it does not repeat"

    def replay(
        self,
        patches: Mapping[int, Patch],
        inputs: Mapping[int, Callable] | None = None,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> Replay:
        """Run the step again, up to what went bad."""
        replay = Replay(self.tape, patches, inputs, scale=scale, keep=self.detection.ref)
        return replay.run(self.detection.position, forward_only)

    def patch_line(self, patch: Patch) -> TapeChange:
        """The patch at every run of the line at fault."""
        return {op.index: self._compared(patch, self.reproductions.get(op.index)) for op in self.same_line}, {}, 1.0

    def _compared(self, patch: Patch, reproduction: Any = None) -> Patch:
        """The patch, which also counts the finite results of the op that it leaves as they are."""

        def compared(func: Any, args: Any, kwargs: Any) -> Any:
            if reproduction is not None:
                reproduction.copy_arguments(args, kwargs)
            with torch.no_grad():
                before = None if schema_of(func).writes else next(iter(tensors_in(func(*args, **kwargs))), None)
            out = patch(func, args, kwargs)
            now = next(iter(tensors_in(out)), None)
            if before is not None and now is not None and before.shape == now.shape and can_be_nonfinite(before):
                good = finite(before)
                same = torch.isclose(before[good], now.detach()[good], rtol=1e-5, atol=1e-6)
                self.unchanged.append((int(same.sum()), int(good.sum())))
            return out

        return compared

    def _is_cured(self, replay: Replay) -> bool:
        """Whether what went bad in the step is finite in a replay."""
        kind = self.detection.target.kind
        if kind == "loss":
            return not count_bad(replay.losses)
        if kind == "gradient":
            return not count_bad(replay.gradients.values())
        if kind == "parameter":
            return not count_bad(replay.leaves.values())
        return replay.value is not None and all_finite(replay.value)

    def is_all_finite(self, replay: Replay) -> bool:
        """Whether losses, gradients, and what went bad in the step are finite in a replay."""
        tensors = [*replay.losses, *replay.gradients.values(), *([replay.value] if replay.value is not None else [])]
        tensors += replay.leaves.values() if self.detection.target.kind == "parameter" else []
        return not count_bad(tensors)

    def numbers(self, replay: Replay) -> dict[str, Any]:
        """What a replay with the fix shows."""
        numbers: dict[str, Any] = {}
        finals = replay.losses or ([replay.value] if replay.value is not None else [])
        if finals and finals[-1].numel() == 1 and not finals[-1].is_complex():
            numbers["loss"] = float(finals[-1])
        gradients = [g for g in replay.gradients.values() if can_be_nonfinite(g)]
        if gradients:
            bad = count_bad(gradients)
            sound = f"all {len(gradients)} finite" if len(gradients) > 1 else "finite"
            numbers["gradients"] = f"{bad} of {len(gradients)} not finite" if bad else sound
        if self.detection.target.kind == "parameter":
            numbers["parameters"] = "not finite" if count_bad(replay.leaves.values()) else "finite"
        if self.unchanged:
            same, total = (sum(column) for column in zip(*self.unchanged, strict=True))
            numbers["finite values"] = f"{same:,} of {total:,} unchanged"
        return numbers


def count_bad(tensors: Iterable[torch.Tensor]) -> int:
    """How many of these are not finite; read in one go."""
    values = [v for t in tensors if (v := dense(t)) is not None and can_be_nonfinite(v)]
    return sum(not math.isfinite(size) for size in read_scalars(each_largest(values)))


# -- what each fix changes on the tape ---------------------------------------------------------------------------------


def _operand(
    change: Callable[[torch.Tensor], torch.Tensor], position: int = 0
) -> Callable[[NanFacts, FixTrial], TapeChange]:
    """The op at fault with one of its operands changed first."""

    def patch_operand(facts: NanFacts, trial: FixTrial) -> TapeChange:
        def patch(func: Any, args: Any, kwargs: Any) -> Any:
            if len(args) <= position or not isinstance(args[position], torch.Tensor):
                raise CannotReplay("the operand to be changed is a number in the code")
            operands = list(args)
            if schema_of(func).names[position] in schema_of(func).writes:  # an in-place op writes into its operand
                operands[position].copy_(change(operands[position]))
            else:
                operands[position] = change(operands[position])
            return func(*operands, **kwargs)

        return trial.patch_line(patch)

    return patch_operand


def _floor(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.clamp_min(max(value, torch.finfo(x.dtype).tiny * 4))


def _denominator(facts: NanFacts, trial: FixTrial) -> TapeChange:
    position = 0 if facts.origin.where.op in ("reciprocal", "rsqrt") else 1
    return _operand(
        lambda d: (
            d.clamp_min(1) if not d.is_floating_point() else torch.where(d.abs() < 1e-6, torch.full_like(d, 1e-6), d)
        ),
        position,
    )(facts, trial)


def _domain(facts: NanFacts, trial: FixTrial) -> TapeChange:
    domains = {"logit": (1e-6, 1 - 1e-6), "acosh": (1 + 1e-6, None)}
    low, high = domains.get(facts.origin.where.op or "", (-1 + 1e-6, 1 - 1e-6))
    return _operand(lambda x: x.clamp(low, high))(facts, trial)


def _bounded(facts: NanFacts, trial: FixTrial) -> TapeChange:
    if facts.origin.op in ("exp", "expm1", "exp2", "sinh", "cosh"):
        limit = 10.0 if facts.origin.dtype == "float16" else 30.0
        return _operand(lambda x: x.clamp(-limit, limit))(facts, trial)
    if facts.origin.op == "to":
        top = torch.finfo(getattr(torch, facts.origin.dtype)).max
        return _operand(lambda x: x.clamp(-top, top))(facts, trial)
    return _operand(lambda x: x.clamp(-1e4, 1e4))(facts, trial)


def _open_row(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x == -math.inf).all(-1, keepdim=True), torch.zeros_like(x), x)


def _separate_values(x: torch.Tensor) -> torch.Tensor:
    return x + torch.diag_embed(1e-3 * torch.arange(x.size(-1), dtype=x.dtype, device=x.device))


def _finite_masks(facts: NanFacts, trial: FixTrial) -> TapeChange:
    """Every infinity that a mask writes, in the step or from outside, as a large finite number."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*[_finite_number(a) for a in args], **{k: _finite_number(v) for k, v in kwargs.items()})

    fills = [
        e.op
        for e in trial.tape.entries
        if isinstance(e, TapeEntry) and any(_finite_number(a) is not a for a in (*e.args, *e.kwargs.values()))
    ]
    masks = [
        n
        for n, held in trial.tape.externals.items()
        if not held.leaf
        and held.grad_of is None
        and can_be_nonfinite(held.tensor)
        and bool(torch.isinf(held.tensor).any())
    ]
    return {op.index: patch for op in fills}, dict.fromkeys(masks, lambda t: t.clamp(-1e4, 1e4)), 1.0


def _finite_number(value: Any) -> Any:
    return math.copysign(1e4, value) if isinstance(value, float) and math.isinf(value) else value


def _no_infinite_factor(facts: NanFacts, trial: FixTrial) -> TapeChange:
    """0 in place of an infinite factor; an infinity written as a number becomes a large finite one."""

    def without_inf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and can_be_nonfinite(value):
            return torch.where(torch.isinf(value), torch.zeros_like(value), value)
        return _finite_number(value)

    return trial.patch_line(lambda func, args, kwargs: func(*map(without_inf, args), **kwargs))


def _enough_elements(facts: NanFacts, trial: FixTrial) -> TapeChange:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        if "correction" in schema_of(func).names:
            return func(*args, **{**kwargs, "correction": 0})
        return torch.nan_to_num(args[0].sum()) if not args[0].numel() else func(*args, **kwargs)

    return trial.patch_line(patch)


def _zero_loss(facts: NanFacts, trial: FixTrial) -> TapeChange:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        _, weight = func(*args, **kwargs)
        return args[0].sum() * 0.0, weight

    return trial.patch_line(patch)


def _zero_infinity(facts: NanFacts, trial: FixTrial) -> TapeChange:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        named = dict(zip(schema_of(func).names, args, strict=False)) | kwargs | {"zero_infinity": True}
        loss, *more = func(**named)
        return torch.where(torch.isinf(loss), torch.zeros_like(loss), loss), *more

    return trial.patch_line(patch)


def _safe_branch(facts: NanFacts, trial: FixTrial) -> TapeChange:
    """The operand replaced by an ordinary number where the op's result is bad:
    those are the elements that are dropped."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            bad = ~finite(func(*args, **kwargs))
        position = 1 if facts.origin.where.op == "div" and isinstance(args[-1], torch.Tensor) else 0
        operands = list(args)
        operand = operands[position]
        mask = bad if bad.shape == operand.shape else bad.sum_to_size(operand.shape).bool()
        operands[position] = torch.where(mask, torch.full_like(operand, 0.5), operand)
        return func(*operands, **kwargs)

    return trial.patch_line(patch)


def _fill_external(facts: NanFacts, trial: FixTrial) -> TapeChange:
    """Every tensor from outside with its bad elements replaced: 0, or 1 in a running variance."""
    fill = 1.0 if facts.origin.name.endswith("var") else 0.0
    bad = [
        n
        for n, held in trial.tape.externals.items()
        if held.tensor.layout is torch.strided
        and can_be_nonfinite(held.tensor)
        and held.grad_of is None
        and not all_finite(held.tensor)
    ]
    return {}, dict.fromkeys(bad, lambda t: torch.where(finite(t), t, torch.full_like(t, fill))), 1.0


def _zeros_for_empty(facts: NanFacts, trial: FixTrial) -> TapeChange:
    if trial.op is None:
        return _fill_external(facts, trial)
    return trial.patch_line(lambda func, args, kwargs: func(*args, **kwargs).zero_())


def _bigger_eps(facts: NanFacts, trial: FixTrial) -> TapeChange:
    """Every `addcdiv` of the update with denominators of at least 1e-4."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        value, numerator, below, *rest = args
        below = [d.clamp_min(1e-4) for d in below] if isinstance(below, (list, tuple)) else below.clamp_min(1e-4)
        return func(value, numerator, below, *rest, **kwargs)

    ops = [
        e.op
        for e in trial.tape.entries
        if isinstance(e, TapeEntry) and e.op.during == "optimizer" and e.op.name == "addcdiv"
    ]
    return {op.index: patch for op in ops}, {}, 1.0


_CHANGES: dict[str, Callable[[NanFacts, FixTrial], TapeChange]] = {
    "log-of-nonpositive": _operand(_floor(1e-8)),
    "sqrt-of-negative": _operand(_floor(1e-12)),
    "sqrt-grad-at-zero": _operand(_floor(1e-12)),
    "pow-domain": _operand(_floor(1e-6)),
    "div-by-zero": _denominator,
    "domain-error": _domain,
    "overflow": _bounded,
    "fully-masked-softmax": _operand(_open_row),
    "degenerate-decomposition": _operand(_separate_values),
    "inf-minus-inf": _finite_masks,
    "zero-times-inf": _no_infinite_factor,
    "empty-reduction": _enough_elements,
    "all-labels-ignored": _zero_loss,
    "ctc-infeasible": _zero_infinity,
    "where-grad": _safe_branch,
    "input-nonfinite": _fill_external,
    "parameter-nonfinite": _fill_external,
    "running-stats-nonfinite": _fill_external,
    "uninitialized-memory": _zeros_for_empty,
    "optimizer-eps-underflow": _bigger_eps,
    "grad-overflow": lambda facts, trial: ({}, {}, 1 / 1024),
}
