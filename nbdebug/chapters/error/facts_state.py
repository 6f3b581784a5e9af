"""What the failing load of a state shows: which keys and shapes do not meet, and what would make them meet."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised


@dataclasses.dataclass(frozen=True)
class Resized:
    """One key with two shapes. argument: of the layer's constructor that says this size ("out_features"), with its
    two values; kind: the layer's class. transposed: the same sizes in reverse."""

    key: str
    saved: tuple[int, ...]
    model: tuple[int, ...]
    kind: str | None = None
    argument: str | None = None
    saved_size: int | None = None
    model_size: int | None = None

    @property
    def transposed(self) -> bool:
        return len(self.saved) > 1 and self.saved == self.model[::-1]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A change of keys that was tried: see key_matching.Change."""

    old: str
    new: str
    anywhere: bool
    fits: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class StateMismatch:
    """model, given: as the user wrote them ("model", "checkpoint['model']"); kind: the model's class. made: the
    expression of what was given where that is no name: `given` is then "state".

    missing, unexpected: keys, as torch lists them. resized: keys with two shapes. saved, wanted: how many keys the
    saved state and the model have; both: keys in both, fitting: those with the same shape, too. inside: the entry of
    what was given in which the state lies. renamed: the change of keys that fits best. left: saved keys that still do
    not fit after it; lacking: keys of the model that get nothing then. argument: the model's own constructor argument
    that says the size, with the size of the saved state. whole_model: a module was given in place of its state;
    no_dict: the class of what was given, where that is neither a dict nor a module.
    """

    raised: Raised
    model: str
    kind: str
    given: str
    strict: bool = True
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    resized: tuple[Resized, ...] = ()
    saved: int | None = None
    wanted: int | None = None
    both: int = 0
    fitting: int = 0
    inside: str | None = None
    renamed: Renamed | None = None
    left: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    argument: tuple[str, int] | None = None
    whole_model: bool = False
    no_dict: str = ""
    made: str | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerMismatch:
    """The state of another optimizer. saved, wanted: how many parameters each group has; None: not a state at all, and
    keys are those that were there."""

    raised: Raised
    optimizer: str
    kind: str
    given: str
    saved: tuple[int, ...] | None = None
    wanted: tuple[int, ...] = ()
    inside: str | None = None
    keys: tuple[str, ...] = ()
    made: str | None = None
