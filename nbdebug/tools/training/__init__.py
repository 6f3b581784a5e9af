"""Training that runs and does not learn: why the loss stays, falls to zero, jumps, or only falls on the training data.

preflight      before training: `static/` examines one step and some batches
diagnose       one run of the user's own loop: `run/` watches it, then repeats its start with one thing changed
facts          the numbers that both give
rules/         from the facts to the causes, and to their catalogue pages
report         findings, causes ruled out, notes, curves
early_stop     EarlyStop, for a loop of one's own
"""

from __future__ import annotations
