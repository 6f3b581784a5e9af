"""The rules: from the facts of an exception to its cause and fixes, with the user's own names. Each module also defines
the facts that its detector in `kinds` fills in; those that all share stand here:

    Raised      the exception: type, message, the user's line, the module that ran, the tensors of the frames
    <Kind>      the further facts of one kind of error; each has `raised`

Of the user's values they contain only tensor facts: a string, a token or a password in a local variable can't reach a
report.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Edit, Fix, Link, Where

DECLARED = (
    "autograd.rules rules.backends rules.tensor_attributes rules.indices rules.dataloader rules.files rules.calls "
    "shapes.rules"
).split()
"""The modules with rules, which the catalogue imports; an exception needs only the one for its kind."""

NOWHERE = Where()


def word_pairs(text: str) -> dict[str, str]:
    """A table of words: "cv2:opencv-python PIL:Pillow"."""
    return dict(pair.rsplit(":", 1) for pair in text.split())


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


@dataclasses.dataclass(frozen=True)
class ArgumentFact:
    """A tensor argument of an op. role: its name in torch's function ("input", "target"), "" of an operand of the
    user's line. owner: the module whose weight it is. known: the tensor's name is one that the user can write."""

    fact: TensorFact
    role: str = ""
    owner: str | None = None
    known: bool = True

    @property
    def name(self) -> str:
        return self.fact.name

    @property
    def phrase(self) -> str:
        """The name in a sentence: `x`, or "the input of `net.2`"."""
        return f"`{self.name}`" if self.known else self.name


@dataclasses.dataclass(frozen=True)
class ValueOrigin:
    """The binding where a tensor got its wrong property. name: the bound name; code: the text of its value; call: the
    last name of the call that created it ("from_numpy"), "" without a call; way: from there to the failing line.
    stated: the dtype or device argument of the call ("torch.uint8")."""

    name: str
    code: str
    call: str
    where: Where = NOWHERE
    way: tuple[Link, ...] = ()
    stated: str = ""


@dataclasses.dataclass(frozen=True)
class TriedFix:
    """code: what was tried, as the user would write it. worked: None where it could not be tried. edit: the same as a
    change of the user's line."""

    code: str
    worked: bool | None = None
    after: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    edit: Edit | None = None

    def fix(self, title: str, code: str = "") -> Fix:
        """As it is offered. code: how it is written, where that is not what was tried."""
        if self.edit is not None:
            return Fix.of(title, self.edit, self.worked, self.after)
        return Fix(title, code or self.code, self.worked, self.after)


def as_code(path: str) -> str:
    """A module's dotted name as Python: "net.stages.3.1" → "net.stages[3][1]"."""
    return re.sub(r"\.(\d+)(?=\.|\[|$)", r"[\1]", path)


def is_plain(name: str) -> bool:
    """Whether a value can be assigned to it: `x`, `self.table`, `batch["image"]`; not to `encode(x)`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*|\[[^\[\]()]+\])*", name) is not None


def bracketed(expression: str) -> str:
    """An expression to which a method can be applied: `(a > b)`, but `encode(x)` as it is."""
    outside = re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", re.sub(r"\([^()]*\)", "", expression))
    return f"({expression})" if re.search(r"\s|^[-~]", outside) else expression


def assigned(name: str, value: str) -> str:
    """A line that assigns a new value: `x = …`, `self.x = …`; for an attribute of another object, which may not be
    settable, a new variable: `label = batch.label - 1`."""
    if re.fullmatch(r"\w+|self(\.\w+)+", name) or name.endswith("]") and is_plain(name):
        return f"{name} = {value}"
    if is_plain(name):
        last = name.rpartition(".")[2]
        return f"{last} = {value}   # and use {last} in this line"
    return value
