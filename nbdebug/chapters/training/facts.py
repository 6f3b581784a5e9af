"""All that the rules of this chapter know: what was seen before training, and what one run of the loop showed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdebug.chapters.training.facts_before import Before
    from nbdebug.chapters.training.facts_run import RunFacts


@dataclasses.dataclass(frozen=True)
class TrainingFacts:
    """before: what preflight saw (a `Before`); run: what the watched run showed. Either may be None: not looked at."""

    before: Before | None = None
    run: RunFacts | None = None
