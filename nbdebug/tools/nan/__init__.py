"""Non-finite values: where an inf or a NaN that mattered comes from, and why.

What goes wrong: an op gets operands for which it has no finite result (the log of zero, the derivative of a root at
zero, softmax of a fully masked row), a value outgrows its dtype, or something bad comes in from outside. One op later
everything is NaN, and the loss does not tell where it began.

How it is found, and where to read: `nan_trace.py` runs the step under a `probe.py`, which checks losses, gradients and
parameters. `taint.py` is the heart: it follows each bad value from its origin (`origins.py`, with the op's operands)
to what went bad. `report.py` makes `facts.py` of that, `rules/` name the cause, `fixes.py` rewrites
the user's line and tries it (`trials.py`), `reproducer.py` saves the op alone.

On an accelerator, where each look would make the host wait, the step is only recorded: `locate.py` finds the origin in
a replay afterwards, with few reads (`suspects.py`). `bisect.py` is another strategy, which knows nothing of taint: it
runs the step itself again.
"""

from __future__ import annotations
