"""Non-finite values: where an inf or a NaN that mattered was born, and why.

What goes wrong: an op is asked for something that has no finite answer (the log of zero, a root's slope at zero,
softmax of nothing), a value outgrows its dtype, or something bad came in from outside. One op later everything is
NaN, and the loss tells nothing of where it began.

How it is found: `record` (in observe/) sees every op of a step; `flow` keeps books of bad values, from their births
to the loss, a gradient or a parameter (`sightings`); `verdict` follows the books back to the birth that nobody
intended and gives `facts`; `rules` name the cause; `trial` and `remedies` replay the recorded step with the fix in
it. Where looking while the step runs would make an accelerator wait, `relive` looks at a replay afterwards.
"""

from __future__ import annotations
