"""What is known of an allocation that failed: what was asked for, where, and what was held at that moment.

Sizes in bytes; no tensors. The traceback's frames still hold what they held when the error was raised.
"""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.memory.facts import NOWHERE, Holding, Kept
from nbdebug.finding import Where


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the error says of itself. bytes: asked for; device: "cpu", "cuda:0", …; total: of the card; free: then;
    allowed: of the card to this process, where it was told to keep to less; allocated: in tensors; unused: reserved by
    torch, in no tensor; process: in use by this process, beyond torch too. None: it does not say."""

    device: str
    bytes: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    allocated: int | None = None
    unused: int | None = None
    process: int | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """What the failed call was doing, as far as its frames show. batch: rows of the outermost module's input, and
    batched: bytes of held activations that grow with them; activations: all held activations, and of these in float32;
    training: the module was in training mode; grad: autograd was recording; blocks: (name, count) of the module's
    repeated blocks; parameters, state: bytes; steps: that the optimizer has done before, None where it does not count;
    optimizer: its class; through: which share of the blocks the forward had come through."""

    batch: int | None = None
    batched: int = 0
    activations: int = 0
    activations32: int = 0
    training: bool | None = None
    grad: bool = False
    blocks: tuple[str, int] | None = None
    parameters: int = 0
    state: int = 0
    steps: int | None = None
    optimizer: str = ""
    through: float | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed allocation. error: the exception's class; where: the user's line, and the module that ran; asked_as:
    what it was for, in words, with its shape; held: by owner, largest first; kept: what the notebook keeps besides;
    course: live bytes after each earlier step, where a watch has counted; limit: all that there is for this device;
    free: what was still to be had, as far as it is known; left: bytes in use that no name was found for; gone: of
    these, what is in use no longer: something held it then, an earlier failure's frames, and has let it go; alike:
    of held activations that have the very shape that was asked for."""

    error: str
    asked: Asked
    where: Where = NOWHERE
    asked_as: str = ""
    held: tuple[Holding, ...] = ()
    kept: tuple[Kept, ...] = ()
    work: Work = Work()
    course: tuple[int, ...] = ()
    limit: int | None = None
    free: int | None = None
    left: int = 0
    gone: int = 0
    alike: int = 0
    unchecked: tuple[str, ...] = ()

    @property
    def short(self) -> int | None:
        """How much was missing; None where it is not known."""
        if self.asked.bytes is None or self.free is None:
            return None
        return max(0, self.asked.bytes - self.free)
