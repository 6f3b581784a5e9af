"""What was measured of outputs, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Fix, Where


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One problem that was seen. code: as in the catalogue; title: a sentence with its numbers; samples: rows of what
    was given; values: the numbers that prove it; fix: a tried one, which comes before the rule's suggestion."""

    code: str
    title: str
    samples: tuple[int, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: Where = dataclasses.field(default_factory=Where)
    fix: Fix | None = None


@dataclasses.dataclass(frozen=True)
class QualityFacts:
    """All that was seen, most likely first."""

    problems: tuple[Evidence, ...] = ()

    def of(self, code: str) -> Evidence | None:
        return next((problem for problem in self.problems if problem.code == code), None)
