"""What the probe saw, as plain numbers and names. The rules read nothing else.

NanFacts                     one traced run that went bad
├── target                   what went bad first that mattered: a loss, a gradient, a parameter
├── origins: OriginFact …    each place where a non-finite value came into being on the way there, oldest first
│   └── operands: Operand …  what the op was given, and where that came from
├── history                  losses, growth of parameters and inputs, step by step
└── state                    which parameters and buffers were bad before, and whether they had been trained
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Where


@dataclasses.dataclass(frozen=True)
class Operand:
    """One tensor that an op was given, counted where it matters: at the elements that the bad results came from.

    role: "parameter", "buffer", "input" (given to the model), "target" (any other tensor from outside, such as labels),
    "constant" (made from numbers in the step), "activation" or "gradient". reached_by: which of "parameter", "input",
    "target" it was computed from. source: the op that made it, None where it came from outside.
    The counts are of the operand as a whole; `zeros_at_fault`, `low_at_fault` and `high_at_fault` are taken only where
    the results are bad (None where that cannot be told).
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    low: float | None = None
    high: float | None = None
    low_at_fault: float | None = None
    high_at_fault: float | None = None
    zeros_at_fault: int | None = None
    elements: int = 0
    zeros: int = 0
    negatives: int = 0
    nans: int = 0
    infs: int = 0
    neg_infs: int = 0
    two_valued: bool = False
    constant: bool = False
    reached_by: frozenset[str] = frozenset()
    source: Where | None = None
    source_op: str | None = None

    @property
    def bad(self) -> int:
        return self.nans + self.infs + self.neg_infs


@dataclasses.dataclass(frozen=True)
class OriginFact:
    """An op with finite operands (or an infinite one) and a result that is inf or NaN.

    made: "nan", "inf", "-inf" or "mixed". external: "parameter", "buffer", "input" or "target" for a tensor
    that was bad when the step got it; then `op` is "". during: "forward", "backward" or "optimizer". scalars: the op's
    number arguments by name (exponent, value, ignore_index …). parents: indices into `NanFacts.origins`. intended: a
    -inf that a mask put there on purpose. absorbed_by: ops that dropped it in the forward (where, masked_fill, index).
    custom: the op ran in the user's own backward. whole: all of the tensor is bad. earlier_step: it happened in an
    earlier step, and a buffer has held it since. name: the parameter's or buffer's name, for an external one. factors:
    (low, high) of what it was multiplied by where no parameter flowed in (a target, a weight). after_model: the model
    had returned by then. reader: the first op that used an external one for what went bad; argument: as what;
    numbers: which elements are bad, of an external one with a single dimension.
    """

    index: int
    op: str
    made: str
    during: str
    where: Where
    operands: tuple[Operand, ...] = ()
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parents: tuple[int, ...] = ()
    intended: bool = False
    external: str | None = None
    name: str = ""
    whole: bool = False
    custom: bool = False
    after_model: bool = False
    earlier_step: bool = False
    step: int = 0
    absorbed_by: tuple[str, ...] = ()
    bad_elements: int = 0
    elements: int = 0
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    factors: tuple[tuple[float, float], ...] = ()
    reader: str = ""
    argument: str = ""
    numbers: tuple[int, ...] = ()

    def operand(self, *names: str) -> Operand | None:
        """The operand with one of these argument names, or None."""
        return next((o for o in self.operands if o.name in names), None)


@dataclasses.dataclass(frozen=True)
class Target:
    """What went bad, and mattered. kind: "loss", "gradient", "parameter", "buffer", "returned" or "exception"."""

    kind: str
    where: Where
    name: str = ""
    made: str = "nan"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """How the run went, one entry a step. losses: the roots of backward. parameter_growth: largest parameter now over
    the largest at the first step (per parameter, the worst). input_growth: the same for what the model was given.
    first_step: the number of the step with which these two begin. own_losses: how many of the losses are the bad step's
    own. nonfinite_settings: hyperparameters of the optimizer, other than its learning rate, that are inf or NaN."""

    losses: tuple[float, ...] = ()
    parameter_growth: tuple[float, ...] = ()
    input_growth: tuple[float, ...] = ()
    optimizer: str = ""
    learning_rate: float | None = None
    optimizer_line: Where | None = None
    first_step: int = 0
    own_losses: int = 0
    nonfinite_settings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def earlier_losses(self) -> tuple[float, ...]:
        """Those of the steps before the bad one."""
        return self.losses[: len(self.losses) - self.own_losses]


@dataclasses.dataclass(frozen=True)
class StateFacts:
    """Parameters and buffers as the run found them. bad: the names of those that were not finite, masks left out;
    tensors: how many there are; trained: what shows that steps were made before the run, "" where nothing does;
    finite_steps: steps of the run before the bad one whose loss was finite."""

    bad: tuple[str, ...] = ()
    tensors: int = 0
    trained: str = ""
    finite_steps: int = 0

    @property
    def spoiled(self) -> bool:
        """Whether an earlier step (perhaps of the run that saved the weights) has made them bad. A parameter that was
        never initialized is bad beside sound ones, in one module, before any step."""
        modules = {name.rpartition(".")[0] for name in self.bad}
        alone = len(self.bad) == 1 or (len(modules) == 1 and len(self.bad) < self.tensors)
        return bool(self.bad) and (bool(self.trained or self.finite_steps) or not alone)


@dataclasses.dataclass(frozen=True)
class NanFacts:
    """One fault: its target, the origins that lead there (oldest first), and the run before it.

    culprit: index of the origin that is to blame. step: the first bad step, 0-based.
    """

    step: int
    target: Target
    origins: tuple[OriginFact, ...]
    culprit: int
    history: RunFacts = RunFacts()
    state: StateFacts = StateFacts()

    @property
    def origin(self) -> OriginFact:
        """The one that is to blame."""
        return self.origins[self.culprit]

    @property
    def descendants(self) -> tuple[OriginFact, ...]:
        """Origins whose values were made of the culprit's, oldest first."""
        family = {self.culprit}
        for origin in self.origins:
            if family & set(origin.parents):
                family.add(origin.index)
        return tuple(o for o in self.origins if o.index in family and o.index != self.culprit)


@dataclasses.dataclass(frozen=True)
class CompiledFacts:
    """A compiled module gave bad output on a batch for which it is finite in eager."""

    step: int
    module: str
    module_type: str
    bad: int
    elements: int
    where: Where = dataclasses.field(default_factory=Where)


@dataclasses.dataclass(frozen=True)
class UnlocatedStep:
    """A step that a guard stopped and that has no known place. sentence: what was not finite; reason: why there is no
    place; losses, norms: of the steps before it. locate_call: the call that searches for the place, where nobody has
    yet."""

    step: int
    sentence: str
    reason: str
    losses: tuple[float | None, ...] = ()
    norms: tuple[float | None, ...] = ()
    locate_call: str = ""

    @classmethod
    def of_trip(cls, trip: Any, reason: str, locate_call: str = "") -> UnlocatedStep:
        """trip: a guard's, or one read from a record; the last of its lines is the step itself."""
        before = [line for line in trip.lines[:-1] if line.outcome == "ok"]
        losses, norms = tuple(line.loss for line in before), tuple(line.norm for line in before)
        return cls(trip.step, trip.sentence(), reason, losses, norms, locate_call)
