"""What an exception and the frames of its traceback show, as plain numbers and names.

    Raised      the exception: type, message, the user's line, the module that ran, the tensors of the frames
    <Kind>      what one kind of error needs beyond that (a look fills it in, a rule reads it); each has `raised`

No value of the user's other than tensor facts stands here: a string, a token or a password in a local variable can't
reach a report.
"""

from __future__ import annotations

import dataclasses

from nbdebug.finding import Link, Where

NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class TensorFact:
    """A tensor (or NumPy array) of a frame. name: as the user would write it ("batch['image']", "self.table").

    device: "cpu", "cuda:0", "meta", "numpy". low, high: the least and largest finite value, None where not read.
    nonfinite: how many entries are NaN or infinite, None where not read. made_by: the op of its grad_fn ("relu").
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: str = "tensor"
    requires_grad: bool = False
    made_by: str | None = None
    low: float | None = None
    high: float | None = None
    nonfinite: int | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} on {self.device}"


@dataclasses.dataclass(frozen=True)
class Raised:
    """One exception. where: the user's innermost line, with the module whose method ran and the phase. reached: the
    user's lines that led there, outermost first. led_to: exceptions that followed it (`raise … from`, a group), the
    first of them nearest. tensors: of the user's frames, innermost first."""

    type: str
    message: str
    where: Where = NOWHERE
    reached: tuple[Link, ...] = ()
    led_to: tuple[str, ...] = ()
    tensors: tuple[TensorFact, ...] = ()
