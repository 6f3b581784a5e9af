"""Memory: who holds it now, what a step needs and leaves behind, what would fit, and how to free it.

Read `facts` first: plain numbers, from which `rules/` name the cause. Then one folder a question:

    mem.py, owners/    every live tensor, counted once a storage, with its owner by name
    mem.py, step/      one step, traced allocation by allocation: its peak, its parts, what grows from step to step
    fit.py, predict/   the peak of a training step, predicted with tensors that have no data, and what each remedy saves
    oom.py             a failed allocation: what was requested, who held what, what would help
    free.py            what the notebook itself keeps, and freeing what the user chooses

`reachability.py` says what memory an object leads to, for free, oom and step.
"""

from __future__ import annotations
