"""Every kind of error: how it is recognised, and the rule that names it. The first that knows an exception names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdebug.chapters.error.scene import Scene
from nbdebug.finding import Finding

KINDS: tuple[tuple[Callable[[Scene], Any], Callable[[Any], Finding | None]], ...] = ()
"""(look, rule's check), the narrow before the wide."""
