"""An assert on the card, told too late: the kernel failed earlier than the line that shows it, and nothing on the card
can be read any more.

What is on the host can be read: the sizes of the embeddings, the number of classes, the batch before it was moved, the
data set behind the loader. The ops that check their indices on a card are looked up in the sources, and each is held
against the copy of its index on the host.
"""

from __future__ import annotations

import dataclasses
import os
import re

from nbdebug.chapters.error.asked import raised_by_user
from nbdebug.chapters.error.facts_cuda import AssertFacts
from nbdebug.chapters.error.facts_indices import IndexFacts
from nbdebug.chapters.error.facts_parts import Part
from nbdebug.chapters.error.looks.cuda_uses import Sources
from nbdebug.chapters.error.scene import Scene, fact

WORDED: tuple[tuple[str, str], ...] = (
    ("assert", r"device-side assert|cudaErrorAssert|hipErrorAssert"),
    ("memory access", r"illegal memory access|misaligned address|unspecified launch failure"),
    (
        "library",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|"
        r"CUDNN_STATUS_MAPPING_ERROR",
    ),
)


def look(scene: Scene) -> AssertFacts | None:
    """The ops that can have failed; None of any other error."""
    kind = next((kind for kind, pattern in WORDED if re.search(pattern, scene.message)), None)
    if kind is None or raised_by_user(scene):
        return None
    uses = sorted(Sources(scene).uses(), key=lambda use: (use.found is None, use.checked))
    return AssertFacts(scene.raised(), kind, tuple(uses), os.environ.get("CUDA_LAUNCH_BLOCKING") == "1")


def look_proven(scene: Scene) -> IndexFacts | None:
    """The one op whose index is out of range by its copy on the host; None where that is not shown."""
    facts = look(scene)
    proven = [use for use in facts.uses if use.found is not None] if facts is not None else []
    if facts is None or not proven:
        return None
    use = proven[0]
    copy = Sources(scene).copies.get(use.copy)
    if copy is None:
        return None
    where = dataclasses.replace(
        facts.raised.where,
        file=use.where.file,
        line=use.where.line,
        text=use.where.text,
        cell=use.where.cell,
        module=use.what.partition(".")[2] or use.what,
    )
    return IndexFacts(
        dataclasses.replace(facts.raised, where=where),
        use.kind,
        table=use.what,
        size=use.size,
        module=use.what if use.kind == "embedding" else "",
        head=use.what if use.kind == "target" else "",
        index=Part(fact(*copy)),
        beyond=use.found,
        late=facts.raised.where,
    )
