"""What an error about dtypes needs: which tensor has which dtype, what it met, and where its dtype was made."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised
from nbdebug.chapters.error.facts_parts import Cure, Origin, Part


@dataclasses.dataclass(frozen=True)
class DtypeFacts:
    """kind: what the op could not do:

        mixed        two dtypes met             index        an index is no whole number
        classes      class numbers wanted       probable     a float target wanted
        whole        it wants floats            mask         it wants a mask, or no mask
        half         no kernel for half         complex      no kernel for complex numbers
        in-place     the result does not fit    gradient     whole numbers have no gradient
        integers     it wants whole numbers, or masks
        array        an array that is no tensor of numbers, or a tensor that NumPy has no dtype for
        autocast     unsafe under autocast      overflow     a constant beyond the dtype

    odd: the tensor to change; met: what it met (a weight, the other operand); wanted: the dtype that would do; op:
    the module ("net.0") or function that failed, "" where not known; said: the dtype that the message names, for an
    array that of its entries ("object_"); model: whose weight odd or met is; default: the dtype that most parameters of
    the user's models have.
    entry: for an array the type of the first entry that is no number, and where it stands.
    """

    raised: Raised
    kind: str
    odd: Part | None = None
    met: Part | None = None
    wanted: str = ""
    op: str = ""
    said: str = ""
    model: str = ""
    default: str = "float32"
    origin: Origin | None = None
    cure: Cure | None = None
    entry: str = ""
