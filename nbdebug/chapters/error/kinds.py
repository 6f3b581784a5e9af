"""Every kind of error: how it is recognised, and the rule that names it. The first that knows an exception names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdebug.chapters.error.looks import collate as collate_looks
from nbdebug.chapters.error.looks import state_dict as state_looks
from nbdebug.chapters.error.rules import collate, state_dict
from nbdebug.chapters.error.scene import Scene
from nbdebug.finding import Finding

KINDS: tuple[tuple[Callable[[Scene], Any], Callable[[Any], Finding | None]], ...] = (
    (collate_looks.look, collate.collate_mismatch),
    (state_looks.look_model, state_dict.state_dict_mismatch),
    (state_looks.look_optimizer, state_dict.state_dict_mismatch),
)
"""(look, rule's check), the narrow before the wide."""
