"""What can be seen before training: one batch sent forward and backward under observation, some batches read.

`look` asks each probe in turn and gives a `Before`. Everything happens on a copy of model and optimizer; where they
can't be copied, they are put back afterwards. Random numbers, the loader's included, are as before.
"""

from __future__ import annotations

from nbdebug.tools.training.static.probe import SECONDS, look

__all__ = ["SECONDS", "look"]
