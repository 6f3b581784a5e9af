"""Memory: where it is, what holds what should be gone, and what would fit before anything is allocated.

    holding/   every live tensor, once for each storage, with its owner by name
    stepping/  one step, or a cell, followed allocation by allocation: its peak, what it is made of, what it left behind
    fitting/   the peak of a training step foretold with tensors that have no data, and what each remedy would save
    leaving/   what the notebook itself keeps, and letting go of what the user chooses

All give `facts`, from which `rules` name the cause.
"""

from __future__ import annotations
