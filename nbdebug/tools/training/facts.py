"""All that the rules of this tool know: plain numbers, names and places; no tensors.

TrainingFacts
├── static: StaticFacts     before training: one batch sent forward and backward (parameters, losses, shapes),
│                           some batches read; one batch memorized, as it is and with the fix of each cause
└── run: TrainingRunFacts   one run of the user's own loop: its course, the calls that it made, the order of its data,
                            layers; and the same start again, with one thing changed at a time

`static` is empty and `run` is None where that was not examined.
"""

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
    batch's tensor that holds the targets; guess: the loss of an answer that knows nothing; moving: targets depend on
    parameters, or samples are weighted; weights: of each class (of `pos_weight`: 1 and itself). bounded: whatever the
    model's weights, the output stays in a range (measured; reach is then measured too, for quantities). target_sum: of
    a sample's targets, where its outputs sum to 1 and they do not. smoothing: the share of a label that goes to all
    classes alike; entropy: of labels so smoothed, below which their mean loss can't fall; value: the loss itself, where
    it is one number. noise: the target is drawn at random, and the output has nothing of these numbers; given: it is,
    and the share of the samples in which the model is given just these. ignore_index: of a loss of labels. across: the
    shape (N, classes, …) of scores that are taken for rows of classes as they lie, and where."""

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
    where the outputs are the targets, the opposite of the targets, and ten times the targets."""

    low: float
    high: float
    losses: tuple[float, float, float]
    where: Where


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
    the batch, "neither", or "" (not known); attempts: by the cause; silent_end, drawn, reread, padding: see `Batches`;
    never_frozen: trained parameters of which a line without effect says that they are not, and where."""

    loss_form: str = "loss_fn(model, batch)"
    loss: float | None = None
    finite: bool = True
    bad_gradients: tuple[str, ...] = ()
    has_optimizer: bool = False
    optimizer: str = ""
    parameters: tuple[Parameter, ...] = ()
    placed: str = ""
    detached: tuple[DetachedAt, ...] = ()
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


@dataclasses.dataclass(frozen=True)
class StaleGradients:
    """Gradients that were still there when the next backward began. share: of the optimizer's steps; names: of the
    parameters; functions: the user's functions that call backward, innermost first; empty_steps: those that found all
    gradients None or zero though backward had just filled them."""

    share: float = 0.0
    steps: int = 0
    empty_steps: int = 0
    names: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ScalerFact:
    """GradScaler's steps, those clipped before unscaling, typical norms around it; carried: scaled ones without it."""

    steps: int = 0
    clipped: int = 0
    norm_before: float = 0.0
    norm_after: float = 0.0
    scale: float = 1.0
    carried: int = 0


@dataclasses.dataclass(frozen=True)
class ModuleMode:
    """How a module that behaves differently in eval mode (dropout, batch normalization) ran.

    train_steps, eval_steps: steps in which it ran with gradients (frozen: or without) in train mode, and with only in
    eval mode. switched_at: first step of the second kind after one of the first; from_start: the first step was of the
    second kind (frozen: or most, without). no_grad_train: calls in train mode without gradients while validation
    batches were read (or, where that is not known, now and then); no_grad_eval: the same in eval mode. frozen: none of
    its parameters, nor of its parent's, is trained. momentum: of running statistics."""

    module: str
    kind: str
    train_steps: int = 0
    eval_steps: int = 0
    switched_at: int | None = None
    from_start: bool = False
    no_grad_train: int = 0
    no_grad_eval: int = 0
    frozen: bool = False
    momentum: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerFact:
    """A module with parameters of its own, in the order of the forward pass. gradient: root mean square of its weights'
    gradient over the measured steps (median); first_gradient: in the first of them; weight: root mean square of the
    weights; update: median of the update's norm over the weights' norm; first_update: the largest of the first three;
    calls: in one forward pass."""

    name: str
    kind: str
    gradient: float
    first_gradient: float
    weight: float
    update: float
    calls: int = 1
    first_update: float = 0.0


@dataclasses.dataclass(frozen=True)
class LayerSignal:
    """One call of a layer, at the start of the run: root mean square of its output, norm of the gradient there."""

    module: str
    output_rms: float
    gradient: float


@dataclasses.dataclass(frozen=True)
class TimeGradient:
    """The gradient through a recurrent module, back in time: its norm at the first and at the last time step."""

    module: str
    steps: int
    first: float
    last: float


@dataclasses.dataclass(frozen=True)
class BatchEvaluation:
    """Losses on fixed batches in eval mode, after `step` steps. val_error: standard error of the validation loss."""

    step: int
    train: float
    val: float | None
    val_error: float = 0.0


@dataclasses.dataclass(frozen=True)
class TargetOrder:
    """The order of the targets. spread: variance between the means of batches over what a fair shuffle would give (1 is
    fair); classes: median number of classes in a batch; all_classes: number in the whole; batches: how many were read;
    sequential: the loader gives the samples in the order of the dataset."""

    spread: float = 1.0
    classes: float | None = None
    all_classes: int | None = None
    batches: int = 0
    sequential: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate scheduler. calls: how often it was stepped; before_first: the rate had changed before the first
    step of the optimizer; planned: the number of steps that it was built for; peak: the largest rate that it was built
    to give; mode, metrics: of ReduceLROnPlateau, and the values that it received; foreign: its optimizer is not one of
    those that step."""

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


@dataclasses.dataclass(frozen=True)
class ClassWeighting:
    """Classes that are found once all weigh alike (or, where labels belong to positions, once the commonest is
    left_out; or, inverse, where the user's weights are replaced by one over them). counts: in the fixed batches;
    weights: of all classes, as a person would write them; steps: of the training; before, after: mean F1 of the classes
    other than `common`, or how often they are told apart."""

    counts: Mapping[str, int]
    common: str
    left_out: bool
    weights: tuple[str, ...]
    steps: int
    before: float
    after: float
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class IgnoredClass:
    """A label that the loss leaves out by its ignore_index, though its samples are no padding. share: of all labels;
    found: share of its samples that the model finds, as it is; score, others: F1 of it, and of the others as they are
    and then, where it is counted."""

    label: int
    share: float
    found: float
    score: float
    others: tuple[float, float]
    steps: int


@dataclasses.dataclass(frozen=True)
class UndecidedPair:
    """Two labels that the trained model does not tell apart, though it knows the others. samples: of the two in the
    fixed batches; apart: how often a sample of the second scores higher for it than one of the first (0.5 is chance),
    val_apart: in validation (None: too few); others: mean share found of the other labels."""

    labels: tuple[str, str]
    samples: int
    apart: float
    val_apart: float | None
    others: float


@dataclasses.dataclass(frozen=True)
class SmallFactor:
    """A constant by which the model multiplies what trained parameters make. parameters: their names."""

    factor: float
    parameters: tuple[str, ...]
    where: Where


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What models that are trained on half of the training samples show of the other half. what: "noise" (a share of
    the targets is suspect), "unrelated" (the targets might be those of other samples) or "unlike" (the model holds for
    unseen training samples, and not for those of validation). samples: of one pass; steps: of each training; own,
    unseen, val: mean losses; dealt: of unseen samples with the targets of others; confusions: (label, prediction,
    count), the commonest of those that differ."""

    what: str
    samples: int
    steps: int
    own: float
    unseen: float
    val: float
    dealt: float
    share: float = 0.0
    confusions: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class PairedAnew:
    """Inputs with the targets of other samples. again: how often one came again; same: share of these with the target
    that it had before, other: the share that any order gives; where: the user's line that deals rows anew, if found.
    With an order, in which they belong: samples; shares of the targets' variance that inputs tell as paired and so."""

    again: int
    same: float
    other: float
    where: Where = NOWHERE
    order: str = ""


@dataclasses.dataclass(frozen=True)
class TeacherAnswers:
    """A teacher's answers (the likeliest class) for samples that have a label. agrees: how often they are the label,
    by_chance: in any order; own: how often the model's own answer is. again: samples that came again; same: share of
    these with the teacher's answer that they had before, and same_by_chance."""

    samples: int
    agrees: float
    by_chance: float
    own: float
    again: int
    same: float
    same_by_chance: float


@dataclasses.dataclass(frozen=True)
class OverEnds:
    """Targets of a reward and what is expected after it, which go on where the batch marks an end. name: of the marks,
    where they have one; ends, rows: marked transitions and all that were looked at; mean: of what is added at ends."""

    name: str
    ends: int
    rows: int
    mean: float
    where: Where


@dataclasses.dataclass(frozen=True)
class RegularizerTrial:
    """The run, trained once more with one regularizer ("" for none): losses at its end on fixed batches, without label
    smoothing and in eval mode. change: of the validation loss, batch by batch, against the run as it is; error: its
    standard error, None where there are too few batches; code: what is pasted."""

    what: str
    train: float
    val: float
    change: float
    error: float | None
    code: str = ""


@dataclasses.dataclass(frozen=True)
class TrainingRunFacts:
    """What one run of the loop showed. Fields that could not be measured keep their defaults; `unchecked` says why.
    step_numbers: what the callback was given, loss by loss; others_step: an optimizer of another model steps; moved:
    the loop has changed the model's parameters (True, too, where an optimizer steps); unused: see UpdateWatch; idle,
    starved: optimizers that never step, or never find a gradient; loss_from: the expression of the loop that is taken
    for the loss, and its line; reward: of a policy gradient, whose loss is no measure, the variable with what a step
    brought ("": none) and its course; reward_slope: the correlation of rewards with what the loss multiplies
    log-probabilities by (0: these are all alike); trains_critic: see loop_frames.py; follows: a model that gives
    targets and follows this one: the evaluations are then the start and the end against its end; unheld: other models
    that get gradients, have initial values, and are in no optimizer that steps, with their elements; adversaries:
    several optimizers, given or not, step after backward passes of their own; places: the user's lines, by what they
    do; mode_losses: the validation loss in train mode and in eval mode; regularization: the largest weight decay and
    dropout, clip; spike, held_out, factor: see experiments.py; recalls: class → (samples or pixels of it in the fixed
    batches, how many of them the model finds at the end); repeats: a plain loop comes to the same losses; severed:
    where a term of the loss is cut off from all parameters that are trained by it; outweighs: the share of the term
    that the experiment "weaker term" has weakened; one_label: see LoopRun; edits: by the cause, an edit of the user's
    lines that was run. stopped_at: batches of the last pass, where the loop left it early; bad_end: a loss at the end
    that is not finite, and where, in a sentence; linear: the model as a whole is a linear function of its input.
    set_back, drawn_anew: see SetBack. still: a copy of the model that gives targets and never changes: its name, and
    the loss at the end with it as it is, and with the values of the model's end. statistics: the name of a model ("":
    the watched one) and of what it averages, the momentum of its batch normalization, its loss at the end, and with
    statistics that are those of the data. lost_level: see `outputs.lost_level`. renumbered: see `interventions`.
    accumulation: see `outputs.FirstLosses`. floor, at_floor: see `StaticFacts.floor`. validations: the steps after
    which the loop read val_loader; None where that is not known."""

    losses: tuple[float, ...] = ()
    step_numbers: tuple[int, ...] = ()
    optimizer_steps: int = 0
    backwards: int = 0
    others_step: bool = False
    moved: bool = True
    unused: int = 0
    idle: tuple[str, ...] = ()
    starved: tuple[str, ...] = ()
    passes: int = 0
    seconds: float = 0.0
    optimizer: str = ""
    loss_from: str = ""
    reward: tuple[str, tuple[float, ...]] | None = None
    reward_slope: float | None = None
    trains_critic: bool = False
    still: tuple[str, float, float] | None = None
    follows: str = ""
    unheld: Mapping[str, int] = dataclasses.field(default_factory=dict)
    optimizers: int = 1
    adversaries: bool = False
    rates: tuple[float, ...] = ()
    schedule: Schedule | None = None
    stale: StaleGradients = StaleGradients()
    scaler: ScalerFact | None = None
    modes: tuple[ModuleMode, ...] = ()
    functions: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Where] = dataclasses.field(default_factory=dict)
    layers: tuple[LayerFact, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    weight_norm: float = 0.0
    start_gradient: float = 0.0
    start_units: tuple[UnitsFact, ...] = ()
    end_units: tuple[UnitsFact, ...] = ()
    evaluations: tuple[BatchEvaluation, ...] = ()
    mode_losses: tuple[float, float] | None = None
    order: TargetOrder = TargetOrder()
    frozen: tuple[Parameter, ...] = ()
    trained_elements: int = 0
    samples: int | None = None
    root_evaluated: bool = False
    layer_calls: tuple[LayerSignal, ...] = ()
    time_gradients: tuple[TimeGradient, ...] = ()
    reference: Mapping[str, float] | None = None
    penalty: float = 0.0
    penalty_end: float = 0.0
    spike: Mapping[str, Any] | None = None
    held_out: HeldOut | None = None
    factor: SmallFactor | None = None
    regularization: Mapping[str, float] = dataclasses.field(default_factory=dict)
    experiments: Mapping[str, Experiment] = dataclasses.field(default_factory=dict)
    repeats: bool = False
    unchecked: tuple[str, ...] = ()
    batches_per_pass: int | None = None
    recalls: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    severed: DetachedAt | None = None
    weighting: ClassWeighting | None = None
    ignored: IgnoredClass | None = None
    set_back: tuple[int, ...] = ()
    drawn_anew: tuple[int, ...] = ()
    undecided: UndecidedPair | None = None
    renumbered: tuple[Mapping[int, int], float, float] | None = None
    outweighs: float = 0.0
    one_label: float | None = None
    edits: Mapping[str, TriedEdit] = dataclasses.field(default_factory=dict)
    stopped_at: int | None = None
    bad_end: str = ""
    linear: bool = False
    floor: float = 0.0
    at_floor: float = 0.0
    paired_anew: PairedAnew | None = None
    over_ends: OverEnds | None = None
    statistics: tuple[str, str, float | None, float, float] | None = None
    teacher: TeacherAnswers | None = None
    lost_level: float = 0.0
    accumulation: tuple[int, float, int] | None = None
    validations: tuple[int, ...] | None = None
    regularizers: tuple[RegularizerTrial, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingFacts:
    """See the top of the file."""

    static: StaticFacts = dataclasses.field(default_factory=StaticFacts)
    run: TrainingRunFacts | None = None

    def experiment(self, name: str) -> Experiment | None:
        return None if self.run is None else self.run.experiments.get(name)
