"""Errors: torch's messages say what an op could not do, but seldom which variable is wrong, and where its size, device
or missing gradient comes from.

The frames of the traceback still hold that: the arguments of the failing op, the modules around it, the user's
variables. A detector recognizes one kind of error and reads the frames, a rule names the cause with the user's names,
and a fix is tried on the operands where that runs none of the user's code.

    dispatch          the kinds of errors, the causes of one exception; the report on an error of no known kind
    context           the traceback's frames and the values in them; chains, groups and errors of other processes
    operands          the failing op's tensors and where they come from
    sandbox           trials of a fix on copies; `training` goes on with gradients and loops
    kinds, rules      detectors and rules; shapes and autograd have folders of their own
"""

from __future__ import annotations
