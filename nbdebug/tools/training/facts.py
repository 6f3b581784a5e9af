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
import math
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Where
from nbdebug.tools.training.static_facts import NOWHERE, DetachedAt, Parameter, StaticFacts, TriedEdit, UnitsFact


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
class Agreement:
    """How far outputs agree with the targets that the loss compares them with, from -1 to 1, where 0 is an answer that
    does not look at the input: at the start (known only where the end is low) and at the end of the run, and on
    validation batches. samples: of training and of validation; turned: with the loss's sign turned."""

    start: float
    end: float
    val: float
    samples: tuple[int, int]
    turned: float = math.nan


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
    trainer: the package whose trainer runs the loop ("transformers", "lightning"; "": the user does).
    step_numbers: what the callback was given, loss by loss; others_step: an optimizer of another model steps; moved:
    the loop has changed the model's parameters (True, too, where an optimizer steps); unused: see UpdateWatch; idle,
    starved: optimizers that never step, or never find a gradient; first_alone: rows of the first batch, where each step
    begins a pass and reads that, the same each time; unclipped: the limit and the line of clipping that finds no
    gradient in its first calls; loss_from: the expression of the loop that is taken for the loss, and its line; reward:
    of a policy gradient, whose loss is no measure, the variable with what a step brought ("": none) and its course;
    reward_slope: the correlation of rewards with what the loss multiplies log-probabilities by (0: these are all
    alike); trains_critic: see loop_frames.py; follows: a model that gives targets and follows this one: the evaluations
    are then the start and the end against its end; unheld: other models that get gradients, have initial values, and
    are in no optimizer that steps, with their elements; adversaries: several optimizers, given or not, step after
    backward passes of their own; places: the user's lines, by what they do; mode_losses: the validation loss in train
    mode and in eval mode; regularization: the largest weight decay and dropout, clip; spike, held_out, factor: see
    experiments.py; recalls: class → (samples or pixels of it in the fixed batches, how many of them the model finds at
    the end); repeats: a plain loop comes to the same losses; severed: where a term of the loss is cut off from all
    parameters that are trained by it; outweighs: the share of the term that the experiment "weaker term" has weakened;
    one_label: see LoopRun; edits: by the cause, an edit of the user's lines that was run. stopped_at: batches of the
    last pass, where the loop left it early; bad_end: a loss at the end that is not finite, and where, in a sentence;
    linear: the model as a whole is a linear function of its input. set_back, drawn_anew: see SetBack. still: a copy of
    the model that gives targets and never changes: its name, and the loss at the end with it as it is, and with the
    values of the model's end. statistics: the name of a model ("": the watched one) and of what it averages, the
    momentum of its batch normalization, its loss at the end, and with statistics that are those of the data.
    lost_level: see `outputs.lost_level`. renumbered: see `interventions`. accumulation: see `outputs.FirstLosses`.
    floor, at_floor: see `StaticFacts.floor`. validations: the steps after which the loop read val_loader; None where
    that is not known. renewed: the class of optimizers that were made anew, how often, and in how many steps."""

    losses: tuple[float, ...] = ()
    trainer: str = ""
    step_numbers: tuple[int, ...] = ()
    optimizer_steps: int = 0
    backwards: int = 0
    others_step: bool = False
    moved: bool = True
    unused: int = 0
    idle: tuple[str, ...] = ()
    starved: tuple[str, ...] = ()
    unclipped: tuple[float, Where] | None = None
    passes: int = 0
    first_alone: int = 0
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
    renewed: tuple[str, int, int] = ("", 0, 0)
    agreement: Agreement | None = None


@dataclasses.dataclass(frozen=True)
class TrainingFacts:
    """See the top of the file."""

    static: StaticFacts = dataclasses.field(default_factory=StaticFacts)
    run: TrainingRunFacts | None = None

    def experiment(self, name: str) -> Experiment | None:
        return None if self.run is None else self.run.experiments.get(name)
