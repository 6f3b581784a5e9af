"""All that the rules of this chapter know: what was seen before training, and what one run of the loop showed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbdebug.report import Where

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True)
class TrainingFacts:
    """before: what preflight saw (a `Before`); run: what the watched run showed. Either may be None: not looked at."""

    before: StaticFacts | None = None
    run: TrainingRunFacts | None = None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A fix that was tried: one batch learnt by heart as it is and with the fix, from the same start, with the same
    optimizer. how: what was done; optimizer: with its rate; as_is, fixed: losses before the first step and behind each
    (empty: none could be computed); verified: True (it helps), False (it does not), None (not tried, or undecided);
    why: the reason for None."""

    how: str = ""
    optimizer: str = ""
    as_is: tuple[float, ...] = ()
    fixed: tuple[float, ...] = ()
    verified: bool | None = None
    why: str = ""


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
class ScalerFact:
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
class LayerFact:
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
class UnitsFact:
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
class BatchEvaluation:
    """Losses on fixed batches in eval mode, after `step` steps. spread: standard error of the validation loss."""

    step: int
    train: float
    val: float | None
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class TargetOrder:
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
class Experiment:
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
class TrainingRunFacts:
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
    scaler: ScalerFact | None = None
    modes: tuple[Mode, ...] = ()
    functions: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Where] = dataclasses.field(default_factory=dict)
    layers: tuple[LayerFact, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    weight_norm: float = 0.0
    start_gradient: float = 0.0
    start_units: tuple[UnitsFact, ...] = ()
    end_units: tuple[UnitsFact, ...] = ()
    checkups: tuple[BatchEvaluation, ...] = ()
    modes_on_val: tuple[float, float] | None = None
    modes_on_train: tuple[float, float] | None = None
    order: TargetOrder = TargetOrder()
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
    trials: Mapping[str, Experiment] = dataclasses.field(default_factory=dict)
    repeats: bool = False
    unchecked: tuple[str, ...] = ()
    batches_in_pass: int | None = None
    recalls: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One line of the ledger.

    held: an optimizer has it (None: no optimizer was given); idle: that optimizer holds nothing that this loss reaches;
    rate: its learning rate. used: some op of the forward was given it; reached: autograd leads from the loss to it;
    gradient: root mean square (None: no gradient). zero: it holds nothing but zeros; normal: it belongs to a
    normalisation; registered: `model.parameters()` gives it; last: it makes the output; fresh: its values are those
    of an initialisation; outside: it is none of the model's, but the loss function brings it along.
    """

    name: str
    module: str
    elements: int
    dims: int
    trained: bool
    held: bool | None
    used: bool
    reached: bool
    gradient: float | None
    rate: float | None = None
    idle: bool = False
    zero: bool = False
    normal: bool = False
    registered: bool = True
    last: bool = False
    fresh: bool = False
    outside: bool = False


@dataclasses.dataclass(frozen=True)
class DetachedAt:
    """Where the graph ends between trained parameters and the loss: by detach, no_grad, or an op without a gradient."""

    op: str
    how: str
    parameters: tuple[str, ...]
    where: Where


@dataclasses.dataclass(frozen=True)
class Strangers:
    """Tensors in the optimizer that are none of the model's. alike: as many of the model's own have the same shape and
    are in no optimizer."""

    count: int
    alike: int


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss function's call.

    low, high: range of what it is given; above: what its exponentials sum to along the classes, as a log (0 for
    log-probabilities); probabilities: they are not negative and sum to 1. activation: the op that made it, where only
    views lie between; over: size of the dimension that a softmax runs over; across: that dimension, where it is not
    the one of the classes. floor: the lowest loss that this activation can ever reach with these targets; unreachable:
    mean squared distance of the targets from what the activation can give, over their variance. outside: targets
    beyond the classes; ignored: share of targets that count for nothing; target: position of the batch's tensor that
    holds the targets; guess: the loss of an answer that knows nothing.
    """

    op: str
    where: Where
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    low: float
    high: float
    above: float | None = None
    probabilities: bool = False
    activation: str | None = None
    activation_where: Where = NOWHERE
    over: int | None = None
    across: int | None = None
    floor: float | None = None
    unreachable: float = 0.0
    reach: tuple[float, float] | None = None
    target_low: float | None = None
    target_high: float | None = None
    variance: float | None = None
    classes: int | None = None
    outside: int = 0
    ignored: float = 0.0
    weighted: bool = False
    target: int | None = None
    guess: float | None = None


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Predictions and targets whose shapes differ so that each is compared with all of the other. variance: of the
    targets, which is the lowest loss that is left."""

    op: str
    where: Where
    output: tuple[int, ...]
    target: tuple[int, ...]
    result: tuple[int, ...]
    variance: float


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Replacing sample `sample` changes the outputs of `others` other samples. op, where: the first op that mixes.
    rows: where instead the loss compares outputs with targets of other samples, the sample's first rows in either."""

    sample: int
    others: int
    batch: int
    module: str
    op: str
    where: Where
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class FirstLayer:
    """The first layer that an input meets. rms: root mean square of its largest feature (or channel), low and high over
    all; out: root mean square of what the layer makes of it; feature: which; features: how many. normalised: a
    normalisation follows at once."""

    module: str
    op: str
    feature: int
    features: int
    rms: float
    mean: float
    std: float
    low: float
    high: float
    out: float
    normalised: bool
    trained: bool


@dataclasses.dataclass(frozen=True)
class Shift:
    """Training inputs against validation inputs, by channel or feature (medians over those). shift: difference of means
    over the training deviation; ratio: validation deviation over training's; sure: the difference in standard errors;
    swapped: validation's channels match training's in reverse order. drift: from the start to
    the end of the training set, in deviations."""

    features: int
    samples: tuple[int, int]
    train: tuple[float, float]
    val: tuple[float, float]
    shift: float
    ratio: float
    sure: float
    swapped: bool = False
    drift: float = 0.0


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Rows of the validation set that stand in the training set too, to the last bit. within: share of training rows
    that have a twin in the training set; clashing: share of training rows whose twin has another label. unlikely: the
    rows are numbers of so many different values that no two meet by chance."""

    seen: int
    shared: int
    train: int
    within: float
    clashing: float
    same_dataset: bool = False
    unlikely: bool = False


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels in the order in which the loader gives them. counts: label → how often; runs: stretches of the same
    label, expected: how many a shuffled order would have; per_batch: median number of classes in a batch; complete:
    the whole pass was read; sequential: the loader gives the samples in the order of the dataset."""

    counts: Mapping[str, int]
    total: int
    runs: int
    expected: float
    per_batch: float
    batches: int
    complete: bool
    sequential: bool
    whole: bool = True


@dataclasses.dataclass(frozen=True)
class WorkerDraws:
    """What the loader's workers draw for one and the same item. random: two draws in a worker differ; alike: all
    workers draw the same; repeats: a second pass draws the same as the first. holder: where the generator is kept."""

    workers: int
    random: bool
    alike: bool
    repeats: bool
    holder: str = ""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight matrix and the signal through it, in the order of the forward. std: of its values; scheme: what He's
    scheme gives, sqrt(2 / fan_in); came, made: root mean square before and behind; gradient: that of its gradient;
    symmetric: all units have the same weights and the same gradients; constant: one value throughout; hidden: a layer
    follows."""

    name: str
    module: str
    op: str
    std: float
    scheme: float
    came: float
    made: float
    gradient: float | None
    symmetric: bool
    constant: bool
    hidden: bool
    trained: bool


@dataclasses.dataclass(frozen=True)
class OverfitResult:
    """One batch, again and again, on a copy. losses: (optimizer, learning rate, first loss, last loss, steps) of each
    try; learnt: the last one succeeded."""

    tries: tuple[tuple[str, float, float, float, int], ...]
    learnt: bool
    verdict: str
    next_step: str


@dataclasses.dataclass(frozen=True)
class StaticFacts:
    """Everything that was seen before training. optimizer: the one that was given, as a person would write it."""

    form: str = "loss_fn(model, batch)"
    loss: float | None = None
    finite: bool = True
    bad_gradients: tuple[str, ...] = ()
    has_optimizer: bool = False
    optimizer: str = ""
    parameters: tuple[Parameter, ...] = ()
    cuts: tuple[DetachedAt, ...] = ()
    strangers: Strangers | None = None
    losses: tuple[LossCall, ...] = ()
    broadcasts: tuple[Broadcast, ...] = ()
    mixing: Mixing | None = None
    mixing_checked: bool = False
    ignores_input: bool | None = None
    entries: tuple[FirstLayer, ...] = ()
    shift: Shift | None = None
    overlap: Overlap | None = None
    labels: Labels | None = None
    workers: WorkerDraws | None = None
    weights: tuple[Weight, ...] = ()
    norms: bool = False
    units: tuple[UnitsFact, ...] = ()
    heart: OverfitResult | None = None
    attempts: Mapping[str, Attempt] = dataclasses.field(default_factory=dict)
    samples: int | None = None
    batch_size: int | None = None
    accumulates: str = ""
    scheduler: str = ""
    eval_mode: bool = False
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trained)
