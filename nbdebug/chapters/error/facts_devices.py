"""What an error about devices needs: which tensor stayed behind, where the others are, and why it was not moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nbdebug.chapters.error.facts import NOWHERE, Raised
from nbdebug.chapters.error.facts_parts import Cure, Origin, Part
from nbdebug.finding import Where


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """kind: "two" (devices met), "numpy" (wants the host's memory), "generator", "no data" (the meta device),
    "parallel" (DataParallel's first device).

    why the odd one is where it is:

        attribute   a plain attribute of a module: `.to` moves parameters and buffers
        holder      an attribute of an object that is no module
        model       all of its module is there: never moved
        part        its module is a part that was made, or put in, after the model was moved
        list        its module lies in a plain list or dict, so it is no part of the model
        dropped     `x.to(device)` gives a new tensor, and the line does not keep it (dropped: that line)
        made        made in the code that runs, without a device
        batch       it comes out of a loader, and nothing moves it
        state       the optimizer's state, from before the parameters were moved
        variable    anything else

    source: the tensor on the same device from which odd was made; model: the one that odd belongs to.
    odd: the tensor to move; met: one that it met, on `home`; owner: the module that holds odd ("net.positions");
    holder: its class; target: how the user can write the home device ("device", "x.device"); counts: parameters of the
    odd one's model by device; also: further tensors there, which have to be moved with it where `together`; parameter:
    whose optimizer state it is.
    """

    raised: Raised
    kind: str
    why: str = "variable"
    odd: Part | None = None
    met: Part | None = None
    home: str = ""
    op: str = ""
    owner: str = ""
    holder: str = ""
    attribute: str = ""
    target: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    also: tuple[Part, ...] = ()
    together: bool = False
    source: str = ""
    model: str = ""
    dropped: Where = NOWHERE
    origin: Origin | None = None
    cure: Cure | None = None
    parameter: str = ""
