"""What is known before training: one batch sent forward and backward, some batches read, one batch memorized."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Edit, Where
from nbdebug.verdict import floor_of

NOWHERE, ORDER = Where(), "order"
MEANS, ROUGHLY = 3.0, 0.05
"""A loss of more times that of guessing may be a sum over the batch; what random numbers change of a loss."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the parameter table.

    held: an optimizer has it (None: no optimizer was given); idle: that optimizer holds nothing that this loss reaches;
    rate: its learning rate. used: some op of the forward takes it; reached: autograd leads from the loss to it;
    gradient: root mean square (None: no gradient). zero: it holds nothing but zeros; normal: it belongs to a
    normalization; registered: `model.parameters()` gives it; last: it makes the output; fresh: its values are initial
    ones; outside: it belongs to the loss function, not to the model; plain: it is no nn.Parameter."""

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
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class DetachedAt:
    """Where the graph ends between trained parameters and the loss. how: "detach", "no_grad", "checkpoint" (a reentrant
    one), "no gradient" (the op has none), "no graph" (a gradient without its graph), "flat" (its derivative is zero),
    "left torch", "mask" (it hides inputs), "dropped" (its number is no part of the loss), "number" (of a variable: only
    its numbers are), "cancels" (a constant), "drawn" (by sample()) or "backward" (a Function's own gives zeros)."""

    op: str
    how: str
    parameters: tuple[str, ...]
    where: Where


@dataclasses.dataclass(frozen=True)
class ForeignTensors:
    """Tensors in the optimizer that do not belong to the model. alike: for so many of them the model has a parameter of
    the same shape that is in no optimizer."""

    count: int
    alike: int


@dataclasses.dataclass(frozen=True)
class LossCall:
    """A loss function's call.

    low, high: range of its input; log_sum: what the input's exponentials sum to along the classes, as a log (0 for
    log-probabilities); probabilities: they are not negative and sum to 1. activation: the op that made the input, where
    only views lie between; softmax_size: of the dimension that a softmax runs over; softmax_dim: that dimension, where
    it is not the one of the classes. floor: the lowest loss that this activation can ever reach with these targets;
    reach: the activation's range; unreachable: mean squared distance of the targets from it, over their variance.
    outside: targets beyond the classes; ignored: share of targets that count for nothing; target: position of the
    batch's tensor that holds the targets; computed: from it by the model's own parameters; guess: the loss of an answer
    that knows nothing; moving: targets depend on parameters, or samples are weighted; weights: of each class (of
    `pos_weight`: 1 and itself). bounded: whatever the model's weights, the output stays in a range (measured; reach is
    then measured too, for quantities). target_sum: of a sample's targets, where its outputs sum to 1 and they do not.
    smoothing: the share of a label that goes to all classes alike; entropy: of labels so smoothed, below which their
    mean loss can't fall; value: the loss itself, where it is one number. noise: the target is drawn at random, and the
    output has nothing of these numbers; given: it is, and the share of the samples in which the model is given just
    these. ignore_index: of a loss of labels. across: the shape (N, classes, …) of scores that are taken for rows of
    classes as they lie, and where."""

    op: str
    where: Where
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    low: float
    high: float
    log_sum: float | None = None
    probabilities: bool = False
    activation: str | None = None
    activation_where: Where = NOWHERE
    softmax_size: int | None = None
    softmax_dim: int | None = None
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
    weights: tuple[float, ...] = ()
    target: int | None = None
    computed: bool = False
    guess: float | None = None
    moving: bool = False
    bounded: bool = False
    target_sum: float | None = None
    smoothing: float = 0.0
    entropy: float = 0.0
    value: float | None = None
    noise: bool = False
    given: float = 0.0
    ignore_index: int | None = None
    across: tuple[tuple[int, ...], Where] | None = None

    @property
    def from_one(self) -> bool:
        """The labels seem to count from 1."""
        return (self.target_low or 0.0) >= 1 and self.target_high == self.classes


SAME_LOSS = 1e-3
"""Relative difference of the loss of a batch and of the one call in it, below which there is nothing else in it."""


@dataclasses.dataclass(frozen=True)
class WrongCall:
    """A call that can't be meant, of one of the kinds of `outputs.wrong_calls`; sizes: its numbers."""

    kind: str
    op: str
    where: Where
    sizes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Outputs and targets whose shapes differ so that each output is compared with all targets. variance: of the
    targets, which is the lowest loss that is left."""

    op: str
    where: Where
    output: tuple[int, ...]
    target: tuple[int, ...]
    result: tuple[int, ...]
    variance: float


@dataclasses.dataclass(frozen=True)
class ScoresForShares:
    """A loss of overlaps (Dice, IoU) that expects outputs of 0 to 1, and gets others. low, high: their range; losses:
    where the outputs are the targets, the opposite of the targets, and ten times the targets. reversed: it is the
    overlap itself; the last of the losses is then that of a constant."""

    low: float
    high: float
    losses: tuple[float, float, float]
    where: Where
    reversed: bool = False


@dataclasses.dataclass(frozen=True)
class BatchMixing:
    """Replacing sample `sample` changes the outputs of `others` other samples. op, where: the first op that mixes.
    rows: where instead the loss compares outputs with targets of other samples, the sample's first rows in either.
    layer, kind: the layer of torch's around that op that takes the batch as its second dimension, and its class.
    placed: no other sample matters, but the row does: with all rows moved on by one, so many outputs change; kind is
    ORDER where these are the same outputs in another order."""

    sample: int
    others: int
    batch: int
    module: str
    op: str
    where: Where
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    layer: str = ""
    kind: str = ""
    placed: bool = False


@dataclasses.dataclass(frozen=True)
class MixedSamples:
    """Rows that are mixed of two samples before the model, as mixup and cutmix do. draws: so many mixtures were looked
    at; wrong: those in which the row that has most of a sample does not have most of its target; shares: of the first
    of them, that row's share of the sample and of its target."""

    draws: int
    wrong: int = 0
    shares: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class SeesAhead:
    """Outputs that predict the token at this time step, or earlier ones, change with it. where: the first op in which
    this is seen. itself: the targets are not the next tokens but the inputs' own, and the model reads forwards
    only; twice: they are two places on."""

    at: int
    where: Where
    itself: bool = False
    twice: bool = False


@dataclasses.dataclass(frozen=True)
class Twins:
    """Of `batch` samples that are told from each other, so many (`samples`) have their own key in other columns, too.
    floor: the loss that this leaves at best."""

    samples: int
    batch: int
    floor: float
    where: Where


@dataclasses.dataclass(frozen=True)
class FirstLayer:
    """The first layer that an input meets. rms: root mean square of its largest feature (or channel), low and high over
    all; out: root mean square of the layer's output; feature: which; features: how many. normalized: a normalization
    follows at once."""

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
    normalized: bool
    trained: bool


@dataclasses.dataclass(frozen=True)
class InputShift:
    """Training inputs against validation inputs, by channel or feature (medians over those). train, val: mean and
    deviation; shift: difference of means over the training deviation; ratio: validation deviation over training's;
    errors: the difference in standard errors; swapped: validation's channels match training's in reverse order. drift:
    from the start to the end of the training set, in deviations. apart: both have mean 0 and deviation 1, exactly."""

    features: int
    samples: tuple[int, int]
    train: tuple[float, float]
    val: tuple[float, float]
    shift: float
    ratio: float
    errors: float
    swapped: bool = False
    apart: bool = False
    drift: float = 0.0


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Rows of the validation set that are in the training set too, to the last bit. rows, train: how many of validation
    and of training were compared; duplicates: share of training rows that have a twin in the training set; conflicts:
    share of training rows whose twin has another label. distinctive: the rows are numbers of so many different values
    that no two are equal by chance. near: share of validation rows that are near copies of training rows, and
    near_by_chance: of training rows."""

    rows: int
    shared: int
    train: int
    duplicates: float
    conflicts: float
    same_dataset: bool = False
    distinctive: bool = False
    near: float = 0.0
    near_by_chance: float = 0.0


@dataclasses.dataclass(frozen=True)
class TellingFeature:
    """One feature that tells the label of samples that it was not found on. kind: "column", "token" (that occurs or
    not) or "number" of the flattened input; which; share of each label's samples; others: the share that all the others
    together tell, where it is a leak (the share is that of validation samples then), and not only a question."""

    kind: str
    which: int
    share: float
    others: float | None = None


@dataclasses.dataclass(frozen=True)
class AnswersAmongInputs:
    """How: columns of the inputs are the "label" in other numbers, tell it "nearly", are the "target" (a quantity), or
    "copied" to it; → the share that they leave open. "one": there are no such columns, only `feature`."""

    how: str
    columns: Mapping[int, float]
    feature: TellingFeature | None = None


@dataclasses.dataclass(frozen=True)
class SharedGroups:
    """Samples of one subject (patient, speaker, recording) in training and in validation. name: of the key; column: of
    the inputs, where it is one of these; groups: in training; seen: share of validation samples whose group training
    has too; alike: how often the nearest training sample is of the same group, and by_chance."""

    name: str
    column: int | None
    groups: int
    seen: float
    alike: float
    by_chance: float


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels in the order in which the loader gives them. counts: label → how often; runs: stretches of the same
    label, expected: how many a shuffled order would have; per_batch: median number of classes in a batch; complete: the
    whole pass was read; sequential: the loader gives the samples in the order of the dataset. unseen: label → how often
    in validation, of those that training surely leaves out."""

    counts: Mapping[str, int]
    total: int
    runs: int
    expected: float
    per_batch: float
    batches: int
    complete: bool
    sequential: bool
    unseen: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def one_label(self, least: int) -> str:
        """The one label of a whole pass of at least so many; "" where there are others."""
        return next(iter(self.counts)) if len(self.counts) == 1 and self.complete and self.total >= least else ""


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
class InitialWeight:
    """A weight matrix and the signal through it, in the order of the forward. std: of its values; he_std: what He's
    scheme gives, sqrt(2 / fan_in); input_rms, output_rms: root mean square of the layer's input and output; gradient:
    that of its gradient; symmetric: all units have the same weights and the same gradients; constant: one value
    throughout; hidden: a layer follows."""

    name: str
    module: str
    op: str
    std: float
    he_std: float
    input_rms: float
    output_rms: float
    gradient: float | None
    symmetric: bool
    constant: bool
    hidden: bool
    trained: bool


@dataclasses.dataclass(frozen=True)
class UnitsFact:
    """The activations at one place. layer: the one before it. dead: share of units that are zero for every sample of
    several batches (None where the function has no flat side); saturated: share of values at which the slope is below a
    hundredth of its largest (None likewise). hidden: a layer with parameters follows."""

    module: str
    op: str
    layer: str
    hidden: bool
    units: int
    dead: float | None
    saturated: float | None


@dataclasses.dataclass(frozen=True)
class OverfitResult:
    """One batch trained on again and again, on a copy. tries: (optimizer, learning rate, first loss, last loss, steps);
    memorized: the last one succeeded; verdict, next_step: both in sentences."""

    tries: tuple[tuple[str, float, float, float, int], ...]
    memorized: bool
    verdict: str
    next_step: str


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A fix that was tried: one batch trained on as it is and with the fix, from the same start, with the same
    optimizer. how: the change; optimizer: with its rate; as_is, fixed: losses before the first step and after each
    (empty: none could be computed); verified: True (it helps), False (it does not), None (not tried, or undecided);
    why: the reason for None. edit: of the user's own lines, where that text is what was run. others: how many other
    samples change with one sample, with the fix."""

    how: str = ""
    optimizer: str = ""
    as_is: tuple[float, ...] = ()
    fixed: tuple[float, ...] = ()
    verified: bool | None = None
    why: str = ""
    edit: Edit | None = None
    others: int | None = None


@dataclasses.dataclass(frozen=True)
class TriedEdit:
    """An edit of the user's own lines that was run: the only thing from which a fix is called tried. verified: it helps
    (None: undecided); span: what it was tried on; numbers: what was seen."""

    edit: Edit
    verified: bool | None
    span: str
    numbers: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class StaticFacts:
    """What is known before training. loss_form: how loss_fn is called; optimizer: as a person would write it; placed:
    types and devices of the parameters; normalized: the model has normalization layers; reduction: "mean" or "sum" over
    the batch, "neither", or "" (not known); attempts: by the cause; silent_end, drawn, reread, wraps, padding: see
    `Batches`; never_frozen: trained parameters of which a line without effect says that they are not, and where."""

    loss_form: str = "loss_fn(model, batch)"
    loss: float | None = None
    finite: bool = True
    bad_gradients: tuple[str, ...] = ()
    has_optimizer: bool = False
    optimizer: str = ""
    parameters: tuple[Parameter, ...] = ()
    placed: str = ""
    detached: tuple[DetachedAt, ...] = ()
    at_bound: Where | None = None
    foreign: ForeignTensors | None = None
    never_frozen: tuple[tuple[str, ...], Where] | None = None
    loss_calls: tuple[LossCall, ...] = ()
    broadcasts: tuple[Broadcast, ...] = ()
    wrong_calls: tuple[WrongCall, ...] = ()
    mixing: BatchMixing | None = None
    mixing_checked: bool = False
    mixed: MixedSamples | None = None
    scores_for_shares: ScoresForShares | None = None
    ahead: SeesAhead | None = None
    twins: Twins | None = None
    silent_end: tuple[int, int] | None = None
    ignores_input: bool | None = None
    first_layers: tuple[FirstLayer, ...] = ()
    input_shift: InputShift | None = None
    overlap: Overlap | None = None
    labels: Labels | None = None
    answers: AnswersAmongInputs | None = None
    groups: SharedGroups | None = None
    workers: WorkerDraws | None = None
    drawn: tuple[int, int] | None = None
    reread: str = ""
    padding: float = 0.0
    wraps: tuple[float, float, float] | None = None
    weights: tuple[InitialWeight, ...] = ()
    normalized: bool = False
    units: tuple[UnitsFact, ...] = ()
    overfit: OverfitResult | None = None
    attempts: Mapping[str, Attempt] = dataclasses.field(default_factory=dict)
    samples: int | None = None
    batch_size: int | None = None
    reduction: str = ""
    scheduler: str = ""
    eval_mode: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trained)

    @property
    def floor(self) -> tuple[float, float]:
        """(The lowest loss that smoothed labels leave, the loss below which a run has come down to it); (0, 0) where
        there are none, or the loss is more than the one call."""
        call = self.only_call
        return (0.0, 0.0) if call is None or not call.entropy else floor_of(call.entropy, call.guess or call.entropy)

    @property
    def only_call(self) -> LossCall | None:
        """The loss's call, where it is nothing else."""
        call = self.loss_calls[0] if len(self.loss_calls) == 1 else None
        if call is None or call.value is None or self.loss is None:
            return None
        return call if abs(call.value - self.loss) <= SAME_LOSS * abs(self.loss) else None

    @property
    def guess(self) -> float | None:
        """The loss of an answer that knows nothing, where the loss is a mean over the batch, or adds up several calls,
        or is their mean."""
        guesses = [call.guess for call in self.loss_calls if call.guess]
        values = [call.value for call in self.loss_calls if call.value is not None]
        if not guesses or len(guesses) != len(self.loss_calls):
            return None
        if len(guesses) == 1:
            return guesses[0] if self.reduction == "mean" else None
        if len(values) != len(guesses) or self.loss is None or any(v > MEANS * g for v, g in zip(values, guesses)):
            return None
        shares = (s for s in (1.0, 1 / len(values)) if abs(s * sum(values) - self.loss) < ROUGHLY * abs(self.loss))
        return next((share * sum(guesses) for share in shares), None)
