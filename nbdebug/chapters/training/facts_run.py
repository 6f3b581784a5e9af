"""What one watched run of the user's own loop showed, as plain names and numbers.

    RunFacts
    ├── losses, numbers          the course, and the callback's own step numbers
    ├── rates                    learning rate at each step, and who changed it
    ├── stale, scaler, modes     order of calls: gradients not cleared, clipped too early, train/eval flags
    ├── layers, units            gradients and updates by depth; dead and saturated units
    ├── checkups                 loss on fixed training and validation batches, in eval mode, along the run
    ├── order, samples           how the loader deals its samples out
    └── trials                   what became of the run when one thing was changed

A trial is the heart of it: the run's start is put back, one thing is changed, and the same batches are used again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.finding import Where


@dataclasses.dataclass(frozen=True)
class Stale:
    """Gradients that were still there when the next backward began. share: of the optimizer's steps; names: parameters
    concerned; functions: the user's functions that call backward, innermost first; emptied: steps that found all
    gradients None or zero though backward had just filled them."""

    share: float = 0.0
    steps: int = 0
    emptied: int = 0
    names: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Scaling:
    """GradScaler: in how many of its steps the gradients were made smaller before they were unscaled, and the typical
    norm before and after."""

    steps: int = 0
    clipped: int = 0
    before: float = 0.0
    after: float = 0.0
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a module that behaves otherwise in eval mode (dropout, batch normalisation) ran.

    trained, evaluated: steps in which it ran with gradients in train mode, and in which it ran so only in eval mode.
    switched: first step of the second kind after one of the first; from_start: the first step was of the second kind.
    unlearnt_train: calls in train mode without gradients while validation batches were read (or, where that is not
    known, now and then); unlearnt_eval: the same in eval mode. frozen: none of its parameters, nor of its parent's,
    is trained.
    """

    module: str
    kind: str
    trained: int = 0
    evaluated: int = 0
    switched: int | None = None
    from_start: bool = False
    unlearnt_train: int = 0
    unlearnt_eval: int = 0
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module with parameters of its own, in the order of the forward pass. gradient: root mean square of its weights'
    gradient over the measured steps (median); first: the same in the first steps; weight: that of the weights;
    update: median of the update's norm over the weights' norm; leap: the largest of the first three; calls: those in
    one forward pass."""

    name: str
    kind: str
    gradient: float
    first: float
    weight: float
    update: float
    calls: int = 1
    leap: float = 0.0


@dataclasses.dataclass(frozen=True)
class Units:
    """The activations at one place. feeds: the layer before it. dead: share of units that are zero for every sample of
    several batches (None where the function has no flat side); saturated: share of values at which the slope is below a
    hundredth of its largest (None likewise). hidden: a layer with parameters follows."""

    module: str
    op: str
    feeds: str
    hidden: bool
    units: int
    dead: float | None
    saturated: float | None


@dataclasses.dataclass(frozen=True)
class Point:
    """One call of a layer, at the start of the run: root mean square of its output, norm of the gradient there."""

    module: str
    size: float
    gradient: float


@dataclasses.dataclass(frozen=True)
class Through:
    """A sequence's way through a recurrent module: norm of the gradient at its first and at its last moment."""

    module: str
    moments: int
    first: float
    last: float


@dataclasses.dataclass(frozen=True)
class Checkup:
    """Losses on fixed batches in eval mode, after `step` steps. spread: standard error of the validation loss."""

    step: int
    train: float
    val: float | None
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class Order:
    """How targets are dealt out. spread: variance between the means of batches over what a fair shuffle would give (1
    is fair); classes: median number of classes in a batch; all_classes: number in the whole; batches: how many were
    seen; sequential: the loader gives the samples in the order of the dataset."""

    spread: float = 1.0
    classes: float | None = None
    all_classes: int | None = None
    batches: int = 0
    sequential: bool = False


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A parameter that is not trained though the forward uses it. zero: it holds nothing but zeros; held: an optimizer
    has it; normal: it belongs to a normalisation layer; fresh: its values are still those of an initialisation."""

    name: str
    zero: bool
    held: bool
    matrix: bool
    elements: int
    normal: bool = False
    fresh: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate's course and its scheduler. calls: how often it was stepped; before_first: the rate had changed
    before the first step of the optimizer; planned: the number of steps that it was built for; peak: the largest rate
    that it was built to give; mode, metrics: of ReduceLROnPlateau, and what it was given; foreign: its optimizer is
    another one than those that step."""

    kind: str = ""
    calls: int = 0
    before_first: bool = False
    planned: int | None = None
    peak: float = 0.0
    foreign: bool = False
    mode: str | None = None
    metrics: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trial:
    """One change tried on the start of the run. as_is, changed: losses step by step. end_as_is, end_changed: mean loss
    afterwards on fixed training batches in eval mode; val_*: on validation batches, where there are any."""

    what: str
    as_is: tuple[float, ...]
    changed: tuple[float, ...]
    end_as_is: float
    end_changed: float
    val_as_is: float | None = None
    val_changed: float | None = None
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Everything that the run showed. Fields that could not be looked at keep their defaults; `unchecked` says why.

    recalls: class → (samples or pixels of it in the fixed batches, how many of them the model finds at the end).
    """

    losses: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    optimizer_steps: int = 0
    passes: int = 0
    seconds: float = 0.0
    optimizer: str = ""
    optimizers: int = 1
    rates: tuple[float, ...] = ()
    schedule: Schedule | None = None
    stale: Stale = Stale()
    scaler: Scaling | None = None
    modes: tuple[Mode, ...] = ()
    functions: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Where] = dataclasses.field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    weight_norm: float = 0.0
    start_gradient: float = 0.0
    start_units: tuple[Units, ...] = ()
    end_units: tuple[Units, ...] = ()
    checkups: tuple[Checkup, ...] = ()
    modes_on_val: tuple[float, float] | None = None
    modes_on_train: tuple[float, float] | None = None
    order: Order = Order()
    frozen: tuple[Frozen, ...] = ()
    trained_elements: int = 0
    samples: int | None = None
    root_evaluated: bool = False
    flow: tuple[Point, ...] = ()
    through: tuple[Through, ...] = ()
    reference: Mapping[str, float] | None = None
    penalty: float = 0.0
    penalty_end: float = 0.0
    spike: Mapping[str, Any] | None = None
    doubts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decay: Mapping[str, float] = dataclasses.field(default_factory=dict)
    trials: Mapping[str, Trial] = dataclasses.field(default_factory=dict)
    repeats: bool = False
    unchecked: tuple[str, ...] = ()
    batches_in_pass: int | None = None
    recalls: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
