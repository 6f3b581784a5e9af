"""What was seen of a training's time: plain numbers and places, no tensors. All times are seconds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from nbdebug.report import Where

NOWHERE = Where()
FREE = 4
"""Steps in a row that a GPU runs without a wait of ours."""
PHASES = (
    "waiting for data",
    "copy",
    "forward",
    "backward",
    "optimizer",
    "synchronisation",
    "communication",
    "saving",
    "validating",
    "rest",
)
"""The parts of a step. forward: from the batch to backward, with the loss (without a backward, all); rest: what comes
after backward and is none of the others."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One step, with the wait for its batch. phases: seconds by the names of PHASES; samples: rows of its batch;
    compiled: whether torch.compile worked in it; synced: whether the GPU was waited for at each border."""

    phases: Mapping[str, float]
    samples: int = 0
    compiled: bool = False
    synced: bool = False

    @property
    def total(self) -> float:
        return sum(self.phases.values())


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the user's, and the share of the steps' time that ends there."""

    where: Where
    share: float


@dataclasses.dataclass(frozen=True)
class Reads:
    """Values that the host reads at one line. per_step: how many; graph_free: how many of them without gradients;
    calls: of models without gradients in a step."""

    where: Where
    per_step: float
    graph_free: float = 0.0
    calls: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recompiles:
    """Compilations after the first of the same function. reasons: torch's own words; steps: in which they were."""

    where: Where
    reasons: tuple[str, ...]
    steps: int
    value: str = ""


@dataclasses.dataclass(frozen=True)
class LongerInput:
    """A model that is called again and again with an input that keeps all of the last one. first, last: seconds of the
    first and the last call; lengths: of the input there."""

    where: Where
    calls: int
    first: float
    last: float
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A Python loop whose iterations do not need one another. ops: a step; share: of the forward's ops; of_time: of
    their time; gain: how many times faster its ops are in one batch, measured; elements: the median size of results."""

    where: Where
    iterations: int
    ops: int
    share: float
    gain: float
    elements: int
    of_time: float = 0.0


@dataclasses.dataclass(frozen=True)
class WorkShare:
    """A part of the time at a place. share: of the step's op time; of_forward: of what is neither backward nor
    optimizer; what: in words."""

    where: Where
    share: float
    what: str = ""
    of_forward: float = 0.0


@dataclasses.dataclass(frozen=True)
class Slower:
    """Steps that grow. ratio: of the last third of the steps to the first; what grew, from which number to which."""

    where: Where
    ratio: float
    what: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class SpeedCure:
    """A change that was tried, or foretold. predicted, measured: how many times faster, None where not known; losses:
    of the same step without and with it; why_not: why it was not tried."""

    name: str
    predicted: float | None = None
    measured: float | None = None
    losses: tuple[float, float] | None = None
    why_not: str = ""


@dataclasses.dataclass
class SpeedFacts:
    """steps: those that count (the first warms up), of `ran`. cards: GPUs that could be used; on_cpu: models without a
    weight on one; kernels: of a step, their number and seconds on a GPU, None where not known. lines: where the time
    ends, the dearest first; loading, copying, saving, validating: the user's line of each. slower: steps that grow;
    double: work in float64; repeated: work that was done before."""

    steps: tuple[StepTimes, ...] = ()
    ran: int = 0
    device: str = "cpu"
    cards: int = 0
    on_cpu: tuple[str, ...] = ()
    kernels: tuple[float, float] | None = None
    lines: tuple[Line, ...] = ()
    loading: Where = NOWHERE
    workers: int = 0
    copying: Where = NOWHERE
    saving: Where = NOWHERE
    saves: int = 0
    validating: Where = NOWHERE
    validations: int = 0
    eval_batches: int = 0
    backwards: int = 0
    reads: tuple[Reads, ...] = ()
    recompiles: Recompiles | None = None
    growth: LongerInput | None = None
    loop: Loop | None = None
    double: WorkShare | None = None
    repeated: WorkShare | None = None
    slower: Slower | None = None
    attention: WorkShare | None = None
    cures: list[SpeedCure] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)

    @property
    def parted(self) -> tuple[StepTimes, ...]:
        """The steps that tell the phases: on a GPU those that were synchronised."""
        return tuple(step for step in self.steps if step.synced) or self.steps

    @property
    def busy(self) -> float | None:
        """The share of a step in which the GPU works, None where not known."""
        return min(self.kernels[1] / self.seconds(), 1.0) if self.kernels is not None and self.steps else None

    def seconds(self, phase: str | None = None) -> float:
        """The median of a step, or of a phase of it. The host runs ahead of a GPU: there rows of steps count."""
        free = [step.total for step in self.steps if not step.synced]
        if phase is not None:
            values = [step.phases.get(phase, 0.0) for step in self.parted]
        elif len(free) < len(self.steps) and free:
            values = [statistics.fmean(free[i : i + FREE]) for i in range(0, max(len(free) - FREE, 0) + 1, FREE)]
        else:
            values = [step.total for step in self.steps]
        return statistics.median(values) if values else 0.0

    def share(self, phase: str) -> float:
        """Of the time of all steps together: what happens every few steps counts as often as it happens."""
        whole = sum(step.total for step in self.parted)
        return sum(step.phases.get(phase, 0.0) for step in self.parted) / whole if whole else 0.0

    def faster(self, phase: str, part: float) -> float:
        """How many times faster a step is without this part of a phase. A GPU works as long without the host's."""
        whole = statistics.fmean(step.total for step in self.parted)
        least = self.kernels[1] if self.kernels is not None and phase in ("waiting for data", "copy", "saving") else 0.0
        left = max(whole * (1 - part * self.share(phase)), least)
        return max(self.seconds() / left, 1.0) if left else 1.0

    def cure(self, name: str) -> SpeedCure | None:
        return next((cure for cure in self.cures if cure.name == name), None)
