"""What errors of the card's own libraries need: what was asked of them, what the card and this torch are."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import NOWHERE, Raised
from nbdebug.chapters.error.facts_indices import Beyond
from nbdebug.chapters.error.facts_parts import Cure, Part
from nbdebug.finding import Where


@dataclasses.dataclass(frozen=True)
class Card:
    """torch: its version; built: the CUDA that it was built for, "" without; available: whether it finds a card;
    count: how many; name, capability ("sm_90"): of the first; kernels: the architectures that this torch holds; free,
    total: bytes of its memory, None where not known."""

    torch: str = ""
    built: str = ""
    available: bool = False
    count: int = 0
    name: str = ""
    capability: str = ""
    kernels: tuple[str, ...] = ()
    free: int | None = None
    total: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory. dense: without gaps, in any order of its dimensions."""

    part: Part
    strides: tuple[int, ...]
    contiguous: bool
    dense: bool
    elements: int


@dataclasses.dataclass(frozen=True)
class CudnnFacts:
    """status: what the library said ("CUDNN_STATUS_NOT_SUPPORTED"), "no engine" where it found no way to compute it.
    op: the module or function; operands: what it was given; without: the same without cuDNN, tried; dense: the same on
    contiguous copies, tried."""

    raised: Raised
    library: str
    status: str
    op: str = ""
    operands: tuple[Layout, ...] = ()
    card: Card = dataclasses.field(default_factory=Card)
    without: Cure | None = None
    dense: Cure | None = None


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """No card to work with. kind: "not built", "no driver", "old driver", "no kernel", "not there" (fewer cards),
    "load" (a file saved from a card), "none". wanted: the expression that asked for it; asked: the card's number."""

    raised: Raised
    kind: str
    card: Card = dataclasses.field(default_factory=Card)
    wanted: str = ""
    asked: int | None = None
    visible: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """An op of the user's that fails with an assert on a card when an index is out of range. kind: "embedding" or
    "target"; what: the module or function; size: how many rows or classes; argument: the index as it is written there;
    found: where a copy on the host shows that it is beyond, with that copy's name; spared: a label left out."""

    kind: str
    what: str
    size: int
    argument: str
    where: Where = NOWHERE
    spared: int | None = None
    copy: str = ""
    found: Beyond | None = None
    checked: bool = False


@dataclasses.dataclass(frozen=True)
class AssertFacts:
    """kind: "assert", "memory access", "library" (cuBLAS or cuDNN failed after it). uses: the ops that can have failed,
    those that are proven guilty first."""

    raised: Raised
    kind: str
    uses: tuple[Use, ...] = ()
    blocking: bool = False
