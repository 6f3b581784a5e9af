"""Training that runs and does not learn: why the loss does not fall, falls to zero, jumps, or only falls on what was
trained on.

How it is found: `before/` asks everything that can be known before training; `watch/` follows gradients, weights and
losses while it runs; `run/` follows one run of the user's own loop. All give `facts`, from which `rules` name the
cause.
"""

from __future__ import annotations
