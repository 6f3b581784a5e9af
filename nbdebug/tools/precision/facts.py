"""All that the rules of this tool know: numbers, names and places; no tensors.

PrecisionFacts
├── float32, half, mixed: HalfStep    the step in float32, in half precision, and with the kept modules in float32
├── culprits: Culprit                 the modules that have to be kept, each with what goes wrong in it
├── modules: ModulePrecision          every module: the sizes of its values against the dtype's range, its own error
├── tries: Tried                      what was tried, in order
├── scaling: LossScaling              gradients that half precision turns to zero, and what a loss scale does to them
├── exact: Exact                      the step in float64: how far off float32 itself is
└── order: UnscaleOrder               a step whose gradients are changed before the loss scale is taken out of them
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from nbdebug.report import Where

NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class HalfStep:
    """One step. loss: of the first batch that is furthest off; off: relative distance from the float32 loss, inf where
    something is not finite; bad: parameters whose gradient is not finite; seconds; memory: peak bytes above what was
    held, on an accelerator, else None; error: what the step raised, or ""."""

    loss: float
    off: float
    bad: tuple[str, ...] = ()
    seconds: float = 0.0
    memory: int | None = None
    error: str = ""

    @property
    def finite(self) -> bool:
        return not self.error and not self.bad and math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class HalfEvent:
    """What an op did in half precision. what: "overflow" (finite operands gave a value beyond the dtype), "guard" (a
    small constant that protects a division became zero), "underflow" (values became zero); op: ATen base name; size:
    its value in float32 (the largest, the constant, or the largest that was lost); share: of its elements; phase."""

    what: str
    op: str
    size: float
    share: float = 0.0
    phase: str = "forward"
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A module that has to be kept. off: how far off the loss is with this one in half and the others kept; events:
    what its ops did, first to last; rounded: whether it stays wrong in float32 when only its inputs and buffers are
    rounded to the dtype (None: not tried); error: of its output by itself; where: the line of its forward, or of its
    call where that is torch's; raised: what the step raises with this one in half, or ""."""

    module: str
    kind: str
    off: float
    events: tuple[HalfEvent, ...] = ()
    rounded: bool | None = None
    error: float = 0.0
    largest: float = 0.0
    bad: tuple[str, ...] = ()
    where: Where = NOWHERE
    raised: str = ""


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """A module's values in the float32 step. largest, smallest: magnitudes of its output, zeros left out; tiny: share
    of them below the dtype's smallest normal number; error: of its output in half on the same inputs; gradient: the
    largest that reached its output; float32_error: of its output in float32 against float64, None where unknown."""

    name: str
    kind: str
    largest: float
    smallest: float
    tiny: float
    error: float
    broken: bool = False
    gradient: float = 0.0
    gradient_tiny: float = 0.0
    calls: int = 1
    leaf: bool = True
    float32_error: float | None = None


@dataclasses.dataclass(frozen=True)
class Tried:
    """One trial: what was kept, and how far off the loss was (inf: not finite, or an error)."""

    kept: tuple[str, ...]
    worked: bool
    off: float


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """lost: parameters whose gradient is zero in half and not in float32; off: how far the norm of all gradients is
    from float32's, relative, without a scale; scale: a loss scale that was tried; off_scaled: the same with it."""

    lost: tuple[str, ...]
    off: float
    scale: float
    off_scaled: float


@dataclasses.dataclass(frozen=True)
class Exact:
    """The step in float64. off, norm_off: how far float32's loss, and its norm of all gradients, are from float64's,
    relative; seconds; errors: of each module's output in float32, on the same inputs."""

    off: float
    norm_off: float
    seconds: float = 0.0
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class UnscaleOrder:
    """What an optimizer gets depends on the loss scale. left, written, got: norms of all gradients after backward,
    when the scale was taken out, and when the optimizer stepped, with `scale`; got_smaller: the last with a scale 16
    times smaller; mended: the last with the scale taken out right after backward; never: it is never taken out; where:
    the line that changes gradients while they carry the scale."""

    scale: float
    left: float
    written: float
    got: float
    got_smaller: float
    mended: float
    never: bool
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class PrecisionFacts:
    """See the top of the file. largest, tiny: the dtype's largest and smallest normal number; minimal: the tries show
    that nothing can be taken out; stopped: why the search ended early, or ""."""

    dtype: str
    mode: str
    tolerance: float
    largest: float
    tiny: float
    float32: HalfStep
    half: HalfStep
    mixed: HalfStep | None = None
    kept: tuple[str, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    modules: tuple[ModulePrecision, ...] = ()
    tries: tuple[Tried, ...] = ()
    minimal: bool = True
    stopped: str = ""
    scaling: LossScaling | None = None
    epsilon: tuple[float, str, str] | None = None
    order: UnscaleOrder | None = None
    exact: Exact | None = None
    unchecked: tuple[str, ...] = ()
