"""What can be known before training, as plain names and numbers.

    Before
    ├── parameters, cuts, strangers     who is trained, who gets a gradient, who is in an optimizer
    ├── losses, broadcasts, start       what the loss is given, and what it says of the untrained model
    ├── mixing                          does one sample's output hang on another sample?
    ├── entries, shift, overlap         the inputs: scale, training against validation, rows in both
    ├── labels, workers                 the targets: counts, order; what the loader's workers draw
    ├── weights, units                  the initial weights and what they make of the signal
    ├── heart                           can one batch be learnt by heart?
    └── attempts                        by the cause that was named: can it be learnt with the fix?

A field that could not be looked at keeps its default; `unchecked` says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nbdebug.chapters.training.facts_attempt import Attempt
from nbdebug.chapters.training.facts_run import Units
from nbdebug.finding import Where

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
class Cut:
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
class Entry:
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
class Workers:
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
class Heart:
    """One batch, again and again, on a copy. losses: (optimizer, learning rate, first loss, last loss, steps) of each
    try; learnt: the last one succeeded."""

    tries: tuple[tuple[str, float, float, float, int], ...]
    learnt: bool
    verdict: str
    next_step: str


@dataclasses.dataclass(frozen=True)
class Before:
    """Everything that was seen before training. optimizer: the one that was given, as a person would write it."""

    form: str = "loss_fn(model, batch)"
    loss: float | None = None
    finite: bool = True
    bad_gradients: tuple[str, ...] = ()
    has_optimizer: bool = False
    optimizer: str = ""
    parameters: tuple[Parameter, ...] = ()
    cuts: tuple[Cut, ...] = ()
    strangers: Strangers | None = None
    losses: tuple[LossCall, ...] = ()
    broadcasts: tuple[Broadcast, ...] = ()
    mixing: Mixing | None = None
    mixing_checked: bool = False
    ignores_input: bool | None = None
    entries: tuple[Entry, ...] = ()
    shift: Shift | None = None
    overlap: Overlap | None = None
    labels: Labels | None = None
    workers: Workers | None = None
    weights: tuple[Weight, ...] = ()
    norms: bool = False
    units: tuple[Units, ...] = ()
    heart: Heart | None = None
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
