"""Errors of autograd: they show in `backward()`, when the frames of the forward are gone.

What is left are the sources of the functions that took part, and the graph from the loss backwards (`functions`).
`no_grad` follows a result back to where its gradient ended, `backward_twice` finds the variable that holds a freed
graph, `in_place` the statement that overwrote a saved value. `trials` reads the training again with a fix, and with
gradients. `rules` holds the facts and the rules.
"""

from __future__ import annotations
