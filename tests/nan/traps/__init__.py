"""Small programs written by hand on what a generator does not reach; `TRAPS` has them all by name."""

from tests.nan.traps import (  # noqa: F401  each adds its own to TRAPS
    backward,
    beyond,
    decoys,
    exceptions,
    loops,
    losses,
    modules,
    numbers,
    recomputed,
    wrapped,
)
from tests.nan.traps.registry import TRAPS, Trap

__all__ = ["TRAPS", "Trap"]
