"""Small programs written by hand on what a generator does not reach; `TRAPS` has them all by name."""

from tests.nan.traps import backward, beyond, decoys, losses, loops, modules, numbers
from tests.nan.traps.registry import TRAPS, Trap

__all__ = ["TRAPS", "Trap", "backward", "beyond", "decoys", "loops", "losses", "modules", "numbers"]
