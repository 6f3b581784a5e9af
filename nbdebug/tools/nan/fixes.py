"""The fixes, as a replay can try them: for each cause, how the op at fault (or a tensor from outside) is mended."""

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
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.probe import Detection, Probe

Patch = Callable[..., Any]
Mended = tuple[dict[int, Patch], dict[int, Callable[[torch.Tensor], torch.Tensor]], float]
"""A fix as a replay takes it: ops replaced, by index; tensors from outside changed, by number; a factor on the loss."""


class FixTrial:
    """One failing step, ready to be replayed. `why_not` says why it can't be, else it is empty."""

    def __init__(self, probe: Probe, seen: Detection, guilty: Op | None):
        self.tape, self.seen, self.guilty, self.caught = probe.tape, seen, guilty, probe.caught
        self.alike = (
            []
            if guilty is None
            else [  # a fix to the line changes every run of it: loops, reused modules
                e.op
                for e in probe.tape.entries
                if isinstance(e, TapeEntry) and (e.op.site, e.op.name) == (guilty.site, guilty.name)
            ]
        )
        self.why_not = ""
        self.same: list[tuple[int, int]] = []  # a mended op's sound results: how many stayed as they were, of how many
        if probe.proven:
            return
        try:
            original = self.replay({}, forward_only=seen.target.kind == "loss")
        except CannotReplay as reason:
            self.why_not = f"the step can't be replayed: {reason}"
        except Exception as error:  # an op that is not to be run alone; nothing was changed
            self.why_not = f"the step can't be replayed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            if self.sound(original):
                self.why_not = "the step came out finite when it was replayed: it does not repeat"

    def replay(
        self,
        patches: Mapping[int, Patch],
        inputs: Mapping[int, Callable] | None = None,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> Replay:
        """Run the step again, up to what went bad."""
        return Replay(self.tape, patches, inputs, scale=scale, keep=self.seen.ref).run(self.seen.position, forward_only)

    def everywhere(self, patch: Patch) -> Mended:
        """The patch at every run of the line at fault."""
        return {op.index: self._compared(patch, self.caught.get(op.index)) for op in self.alike}, {}, 1.0

    def _compared(self, patch: Patch, caught: Any = None) -> Patch:
        """The patch, which also counts the sound results of the op that it leaves as they are. caught: a Reproduction
        of the op."""

        def compared(func: Any, args: Any, kwargs: Any) -> Any:
            if caught is not None:
                caught.take(args, kwargs)
            changes = bool(schema_of(func).writes)
            with torch.no_grad():
                before = None if changes else next(iter(tensors_in(func(*args, **kwargs))), None)
            out = patch(func, args, kwargs)
            now = next(iter(tensors_in(out)), None)
            if before is not None and now is not None and before.shape == now.shape and can_be_nonfinite(before):
                good = finite(before)
                same = torch.isclose(before[good], now.detach()[good], rtol=1e-5, atol=1e-6)
                self.same.append((int(same.sum()), int(good.sum())))
            return out

        return compared

    def sound(self, replay: Replay) -> bool:
        """Whether what went bad in the step is finite in a replay."""
        kind = self.seen.target.kind
        if kind == "loss":
            return not count_bad(replay.losses)
        if kind == "gradient":
            return not count_bad(replay.gradients.values())
        if kind == "parameter":
            return not count_bad(replay.leaves.values())
        return replay.value is not None and all_finite(replay.value)

    def everything_sound(self, replay: Replay) -> bool:
        tensors = [*replay.losses, *replay.gradients.values(), *([replay.value] if replay.value is not None else [])]
        tensors += replay.leaves.values() if self.seen.target.kind == "parameter" else []
        return not count_bad(tensors)


def count_bad(tensors: Iterable[torch.Tensor]) -> int:
    """How many of these are not finite; read in one go."""
    values = [v for t in tensors if (v := dense(t)) is not None and can_be_nonfinite(v)]
    return sum(not math.isfinite(size) for size in read_scalars(each_largest(values)))


def try_fixes(
    finding: Finding, facts: NanFacts, probe: Probe, seen: Detection, guilty: Op | None
) -> tuple[Finding, FixTrial]:
    """The finding with its first fix tried. The other fixes, and one that can't be tried, say why not."""
    trial = FixTrial(probe, seen, guilty)
    fixes = list(finding.fixes)
    if fixes and not fixes[0].after:
        fixes[0] = _tried(fixes[0], finding.code.split("/")[1], facts, trial)
    return dataclasses.replace(finding, fixes=tuple(fixes)), trial


def _tried(fix: Fix, code: str, facts: NanFacts, trial: FixTrial) -> Fix:
    if trial.why_not:
        return dataclasses.replace(fix, after={"why not": trial.why_not})
    mended = _MENDED.get(code)
    patches, inputs, scale = mended(facts, trial) if mended else ({}, {}, 1.0)
    if not patches and not inputs and scale == 1.0:
        return dataclasses.replace(fix, after={"why not": "it changes more than this step"})
    try:
        replay = trial.replay(patches, inputs, scale)
        return dataclasses.replace(fix, verified=trial.everything_sound(replay), after=_numbers(trial, replay))
    except Exception as error:
        said = str(error).splitlines()[0][:120]
        return dataclasses.replace(fix, after={"why not": f"{type(error).__name__}: {said}"})


def _numbers(trial: FixTrial, replay: Replay) -> dict[str, Any]:
    """What was seen when the fix was tried."""
    after: dict[str, Any] = {}
    finals = replay.losses or ([replay.value] if replay.value is not None else [])
    if finals and finals[-1].numel() == 1 and not finals[-1].is_complex():
        after["loss"] = float(finals[-1])
    gradients = [g for g in replay.gradients.values() if can_be_nonfinite(g)]
    if gradients:
        bad = count_bad(gradients)
        sound = f"all {len(gradients)} finite" if len(gradients) > 1 else "finite"
        after["gradients"] = f"{bad} of {len(gradients)} not finite" if bad else sound
    if trial.seen.target.kind == "parameter":
        after["parameters"] = "not finite" if count_bad(replay.leaves.values()) else "finite"
    if trial.same:
        kept, total = (sum(column) for column in zip(*trial.same, strict=True))
        after["sound values"] = f"{kept:,} of {total:,} unchanged"
    return after


def _operand(
    change: Callable[[torch.Tensor], torch.Tensor], position: int = 0
) -> Callable[[NanFacts, FixTrial], Mended]:
    """The op at fault with one of its operands changed first."""

    def mend(facts: NanFacts, trial: FixTrial) -> Mended:
        def patch(func: Any, args: Any, kwargs: Any) -> Any:
            if len(args) <= position or not isinstance(args[position], torch.Tensor):
                raise CannotReplay("the operand to be changed is a number in the code")
            given = list(args)
            if schema_of(func).names[position] in schema_of(func).writes:  # an in-place op changes it where it lies
                given[position].copy_(change(given[position]))
            else:
                given[position] = change(given[position])
            return func(*given, **kwargs)

        return trial.everywhere(patch)

    return mend


def _floor(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.clamp_min(max(value, torch.finfo(x.dtype).tiny * 4))


def _denominator(facts: NanFacts, trial: FixTrial) -> Mended:
    position = 0 if facts.birth.where.op in ("reciprocal", "rsqrt") else 1
    return _operand(
        lambda d: (
            d.clamp_min(1) if not d.is_floating_point() else torch.where(d.abs() < 1e-6, torch.full_like(d, 1e-6), d)
        ),
        position,
    )(facts, trial)


def _domain(facts: NanFacts, trial: FixTrial) -> Mended:
    domains = {"logit": (1e-6, 1 - 1e-6), "acosh": (1 + 1e-6, None)}
    low, high = domains.get(facts.birth.where.op or "", (-1 + 1e-6, 1 - 1e-6))
    return _operand(lambda x: x.clamp(low, high))(facts, trial)


def _bounded(facts: NanFacts, trial: FixTrial) -> Mended:
    if facts.birth.op in ("exp", "expm1", "exp2", "sinh", "cosh"):
        limit = 10.0 if facts.birth.dtype == "float16" else 30.0
        return _operand(lambda x: x.clamp(-limit, limit))(facts, trial)
    if facts.birth.op == "to":
        top = torch.finfo(getattr(torch, facts.birth.dtype)).max
        return _operand(lambda x: x.clamp(-top, top))(facts, trial)
    return _operand(lambda x: x.clamp(-1e4, 1e4))(facts, trial)


def _open_row(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x == -math.inf).all(-1, keepdim=True), torch.zeros_like(x), x)


def _part_values(x: torch.Tensor) -> torch.Tensor:
    return x + torch.diag_embed(1e-3 * torch.arange(x.size(-1), dtype=x.dtype, device=x.device))


def _finite_masks(facts: NanFacts, trial: FixTrial) -> Mended:
    """Every infinity that a mask writes, in the step or from outside, as a large finite number."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*[_large(a) for a in args], **{k: _large(v) for k, v in kwargs.items()})

    fills = [
        e.op
        for e in trial.tape.entries
        if isinstance(e, TapeEntry) and any(_large(a) is not a for a in (*e.args, *e.kwargs.values()))
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


def _large(value: Any) -> Any:
    return math.copysign(1e4, value) if isinstance(value, float) and math.isinf(value) else value


def _no_infinite_factor(facts: NanFacts, trial: FixTrial) -> Mended:
    """0 in place of an infinite factor; an infinity written as a number becomes a large finite one."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        return func(
            *[
                torch.where(torch.isinf(a), torch.zeros_like(a), a)
                if isinstance(a, torch.Tensor) and can_be_nonfinite(a)
                else _large(a)
                for a in args
            ],
            **kwargs,
        )

    return trial.everywhere(patch)


def _enough_elements(facts: NanFacts, trial: FixTrial) -> Mended:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        if "correction" in schema_of(func).names:
            return func(*args, **{**kwargs, "correction": 0})
        return torch.nan_to_num(args[0].sum()) if not args[0].numel() else func(*args, **kwargs)

    return trial.everywhere(patch)


def _no_loss(facts: NanFacts, trial: FixTrial) -> Mended:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        _, weight = func(*args, **kwargs)
        return args[0].sum() * 0.0, weight

    return trial.everywhere(patch)


def _zero_infinity(facts: NanFacts, trial: FixTrial) -> Mended:
    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(schema_of(func).names, args, strict=False)) | kwargs | {"zero_infinity": True}
        loss, *more = func(**given)
        return torch.where(torch.isinf(loss), torch.zeros_like(loss), loss), *more

    return trial.everywhere(patch)


def _safe_branch(facts: NanFacts, trial: FixTrial) -> Mended:
    """The operand replaced by an ordinary number where the op's result is bad:
    those are the elements that are dropped."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            bad = ~finite(func(*args, **kwargs))
        guilty = 1 if facts.birth.where.op == "div" and isinstance(args[-1], torch.Tensor) else 0
        given = list(args)
        mask = bad if bad.shape == given[guilty].shape else bad.sum_to_size(given[guilty].shape).bool()
        given[guilty] = torch.where(mask, torch.full_like(given[guilty], 0.5), given[guilty])
        return func(*given, **kwargs)

    return trial.everywhere(patch)


def _sound_outside(facts: NanFacts, trial: FixTrial) -> Mended:
    """Every tensor from outside with its bad elements replaced: 0, or 1 in a running variance."""
    fill = 1.0 if facts.birth.name.endswith("var") else 0.0
    bad = [
        n
        for n, held in trial.tape.externals.items()
        if held.tensor.layout is torch.strided
        and can_be_nonfinite(held.tensor)
        and held.grad_of is None
        and not all_finite(held.tensor)
    ]

    def mend(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(finite(tensor), tensor, torch.full_like(tensor, fill))

    return {}, dict.fromkeys(bad, mend), 1.0


def _zeros_for_empty(facts: NanFacts, trial: FixTrial) -> Mended:
    if trial.guilty is None:
        return _sound_outside(facts, trial)
    return trial.everywhere(lambda func, args, kwargs: func(*args, **kwargs).zero_())


def _bigger_eps(facts: NanFacts, trial: FixTrial) -> Mended:
    """Every `addcdiv` of the update with denominators of at least 1e-4."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        given = list(args)
        below = given[2]
        given[2] = [d.clamp_min(1e-4) for d in below] if isinstance(below, (list, tuple)) else below.clamp_min(1e-4)
        return func(*given, **kwargs)

    ops = [
        e.op
        for e in trial.tape.entries
        if isinstance(e, TapeEntry) and e.op.during == "optimizer" and e.op.name == "addcdiv"
    ]
    return {op.index: patch for op in ops}, {}, 1.0


_MENDED: dict[str, Callable[[NanFacts, FixTrial], Mended]] = {
    "log-of-nonpositive": _operand(_floor(1e-8)),
    "sqrt-of-negative": _operand(_floor(1e-12)),
    "sqrt-grad-at-zero": _operand(_floor(1e-12)),
    "pow-domain": _operand(_floor(1e-6)),
    "div-by-zero": _denominator,
    "domain-error": _domain,
    "overflow": _bounded,
    "fully-masked-softmax": _operand(_open_row),
    "degenerate-decomposition": _operand(_part_values),
    "inf-minus-inf": _finite_masks,
    "zero-times-inf": _no_infinite_factor,
    "empty-reduction": _enough_elements,
    "all-labels-ignored": _no_loss,
    "ctc-infeasible": _zero_infinity,
    "where-grad": _safe_branch,
    "input-nonfinite": _sound_outside,
    "parameter-nonfinite": _sound_outside,
    "running-stats-nonfinite": _sound_outside,
    "uninitialized-memory": _zeros_for_empty,
    "optimizer-eps-underflow": _bigger_eps,
    "grad-overflow": lambda facts, trial: ({}, {}, 1 / 1024),
}
