"""The check of a step before its update, as numbers on the device: is anything not finite, too large, to be clipped?

`Policy` is what the user asked for, `StepCheck` computes the numbers and the decision on the device, `CheckResult` is
the numbers once they are read. Nothing here is read, except by `read_check`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from nbdebug.observe.tensors import exact_norm, gradients_of, largest, total_norm
from nbdebug.tools.guard.distributed import OtherGuardFailed, Ranks

ON_TRIP = ("trace", "raise", "skip", "record")
SHARED = 7
"""How many numbers of a check come before those of the ranks: for each, whether its loss is not finite, whether it is
so by itself, and whether its guard has left."""
BY_SCALE = 2.0**100
"""A scale from which on it may be the scale that makes a loss in float32 infinite (the largest is 2^128): GradScaler
doubles it for as long as no gradient is."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """on_trip: one of ON_TRIP. max_grad_norm: gradients are clipped to this 2-norm. skip_above: a step whose norm is
    above this before clipping is dropped. keep: how many steps' numbers are kept in memory."""

    on_trip: str = "trace"
    max_grad_norm: float | None = None
    skip_above: float | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        if self.on_trip not in ON_TRIP:
            raise ValueError(f"on_trip must be one of {', '.join(ON_TRIP)}; got {self.on_trip!r}.")
        for name in ("max_grad_norm", "skip_above"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            ):
                raise ValueError(f"{name} must be a norm, a number above 0; got {value!r}.")
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1; got {self.keep!r}.")

    def clips(self, norm: float | None) -> bool:
        """Whether gradients of this norm are clipped."""
        return self.max_grad_norm is not None and norm is not None and norm > self.max_grad_norm

    def drops(self, norm: float) -> bool:
        """Whether a step with this norm is dropped. After clipping no norm would be above a larger bound."""
        return self.skip_above is not None and norm > self.skip_above

    @property
    def changes(self) -> bool:
        """Whether an update may be changed, or dropped while training goes on."""
        return self.max_grad_norm is not None or self.skip_above is not None or self.on_trip in ("skip", "record")

    @property
    def stops(self) -> bool:
        """Whether a bad step ends the run, or has to be located before it goes on."""
        return self.on_trip != "skip"


class CheckResult:
    """The numbers of a check, read."""

    def __init__(self, values: list[float], ranks: Ranks | None, scaling: bool):
        self.norm, found_inf, self.buffers, self.loss, bad, itself, used_up = values[:SHARED]
        self.scaler_skips, self.scale_used_up = bool(found_inf), bool(used_up)
        self.loss_bad = bool(itself if scaling else bad)
        rows = (len(values) - SHARED) // 3
        members = ranks.members_of(rows) if ranks is not None else ()
        losses, themselves, left = (values[SHARED + i * rows : SHARED + (i + 1) * rows] for i in range(3))
        self.bad_ranks = tuple(r for r, flag in zip(members, themselves if scaling else losses, strict=True) if flag)
        self.left = tuple(r for r, flag in zip(members, left, strict=True) if flag)

    def raise_if_left(self) -> None:
        """Raises OtherGuardFailed where another process's guard has left: nothing is decided any more."""
        if self.left:
            raise OtherGuardFailed(f"the guard of process {self.left[0]} has stopped; see what that process reports")

    def reason(self) -> str:
        """What is not finite; "" where all is well."""
        if self.loss_bad:
            return "loss"
        if self.scaler_skips:
            return "gradient" if self.scale_used_up else ""
        return "" if math.isfinite(self.norm) else "gradient"


class StepCheck:
    """What one optimizer's step is judged by. losses: the roots of backward; written: buffers that this step has
    written; scale: GradScaler's, by which the losses were multiplied."""

    def __init__(
        self,
        optimizer: Any,
        losses: list[torch.Tensor],
        ranks: Ranks | None,
        written: list[torch.Tensor],
        scale: torch.Tensor | None,
    ):
        self.optimizer, self.ranks = optimizer, ranks
        self.gradients = gradients_of(optimizer) if optimizer is not None else []
        home = torch.device("cpu") if ranks is None else ranks.device
        self.device = next((t.device for t in (*self.gradients, *losses)), home)
        self.norm = (
            total_norm(self.gradients, self.device)
            if ranks is None
            else ranks.own_norm(optimizer, self.gradients, self.device)
        )
        self._factor = getattr(optimizer, "grad_scale", None)  # GradScaler leaves the division to a fused optimizer
        if self._factor is not None:
            self._factor = self._factor.to(self.device).reshape(())
            self.norm = self.norm / self._factor
        self._half = any(x.dtype is torch.float16 for x in losses)  # up to 65,504: the scale alone may be too much
        self.losses = [x.to(self.device, torch.float32, non_blocking=True) for x in losses]
        self.scale = None if scale is None else scale.to(self.device).reshape(())
        if self.scale is not None:
            self.losses = [x / self.scale for x in self.losses]
        self.buffers = [x.to(self.device, non_blocking=True) for x in largest(written)] if written else []
        self.found_inf: Any = getattr(optimizer, "found_inf", None)

    @classmethod
    def of_scaler_skip(cls, losses: list[torch.Tensor], ranks: Ranks | None, scale: torch.Tensor | None) -> StepCheck:
        """GradScaler has kept the optimizer from stepping: the check of the losses."""
        check = cls(None, losses, ranks, [], scale)
        check.found_inf = torch.ones((), device="cpu")
        return check

    def numbers(self) -> torch.Tensor:
        """norm, the scaler's found_inf, largest buffer, sum of losses, whether a loss is bad, whether one is so by
        itself and not by the scale, whether the scaler's scale is used up; then the ranks'."""
        zero = torch.zeros((), device=self.device)
        losses = torch.stack(self.losses) if self.losses else zero.reshape(1)
        bad = (~torch.isfinite(losses)).any().float()
        buffers = torch.stack(self.buffers).sum() if self.buffers else zero
        found_inf = zero if self.found_inf is None else self.found_inf.to(self.device).reshape(()).float()
        used_up = zero if self.scale is None else found_inf * (self.scale <= 1)
        itself = torch.isnan(losses).any().float()
        if self.scale is not None and not self._half:
            itself = torch.maximum(itself, bad * (self.scale < BY_SCALE))
        numbers = torch.stack([self.norm, found_inf, buffers, losses.sum(), bad, itself, used_up])
        return numbers if self.ranks is None else self.ranks.combine(numbers)

    def decide(
        self, numbers: torch.Tensor, policy: Policy, scaling: bool, ignore_buffers: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(not finite?, above the policy's bound?, skipped by the scaler?): as `CheckResult` decides, on the device."""
        norm, scaler = numbers[0], numbers[1] > 0
        bad = (numbers[5] + numbers[6] if scaling else numbers[4]) > 0
        if self._factor is None:  # else GradScaler has looked at each element; the norm of scaled ones may overflow
            bad = bad | (~torch.isfinite(norm) & ~scaler)
        if self.ranks is not None or not ignore_buffers:
            bad = bad | ~torch.isfinite(numbers[2])
        if self.ranks is not None:
            bad = bad & self._all_here(numbers)
        if policy.skip_above is None:
            return bad, torch.zeros_like(bad), scaler
        above = norm > policy.skip_above
        return bad, above if self.ranks is None else above & self._all_here(numbers), scaler

    def _all_here(self, numbers: torch.Tensor) -> torch.Tensor:
        """Whether no process's guard has left: once one has, none decides or clips, or they would differ."""
        return numbers[SHARED:].reshape(3, -1)[2].sum() == 0

    def norm_to_clip(self, numbers: torch.Tensor) -> torch.Tensor:
        """The norm that the gradients are clipped by, on the device; 0 where they are to stay as they are."""
        return numbers[0] if self.ranks is None else torch.where(self._all_here(numbers), numbers[0], 0.0)

    def exact_norm(self) -> float:
        """The norm in 64 bits, read."""
        if self.ranks is None:
            return exact_norm(self.gradients)
        return self.ranks.exact_norm(self.optimizer, self.gradients, self.device)

    def clip(self, most: float, norm: torch.Tensor) -> None:
        """Clip the gradients to the 2-norm `most`; `norm` is what it is now."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.ranks is not None and self.ranks.sharded:  # torch multiplies no DTensor by a number of one device
            parameters = [_holder_of(g) for g in self.gradients]
        # Torch multiplies by most / norm: gradients that are still scaled are clipped alike.
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)


def read_check(check: StepCheck, scaling: bool) -> CheckResult:
    """Read a check, in one go. A norm beyond 32 bits is measured again in 64."""
    result = CheckResult(check.numbers().tolist(), check.ranks, scaling)
    result.raise_if_left()
    if not math.isfinite(result.norm) and not result.loss_bad and not result.scaler_skips:
        result.norm = check.exact_norm()
    return result


def skips_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernels can leave a step out: fused ones can, which GradScaler uses too."""
    return device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _holder_of(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor with this gradient: what torch asks for to clip it."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder
