"""What a failure between processes shows: which promise of the collective library was not kept, and by what."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised


@dataclasses.dataclass(frozen=True)
class Collective:
    """what: one of looks.nccl.KINDS. found: what the message itself says (rank, port, operation, seconds, …).

    present, missing: the environment variables that a launcher sets; backend: of the process group, "" where there is
    none; rank, world: as they were set. cards: how many GPUs this process sees. version: NCCL's. unused: parameters of
    the wrapped model that got no gradient; model: its name. tensors: those of the user's line, each "name on device".
    """

    raised: Raised
    what: str
    found: tuple[tuple[str, str], ...] = ()
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    backend: str = ""
    rank: str = ""
    world: str = ""
    cards: int = 0
    version: str = ""
    unused: tuple[str, ...] = ()
    model: str = ""
    tensors: tuple[str, ...] = ()

    def told(self, key: str) -> str:
        return dict(self.found).get(key, "")
