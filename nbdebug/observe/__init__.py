"""What a training step does: lines, modules, ops, tensors and state. Nothing here knows causes of faults, and whatever
is attached is detached again.

    locations, frames            the user's line of an op; the frames of a traceback
    variables, sources           the user's variables and attributes, read without running their code, and what else the
                                 shell keeps; source as syntax, edits of it, and the program run as edited
    tensors, ops                 identity, finiteness, bits and norms of tensors; schemas of ops
    modules, backward            hooks around calls of modules, around autograd's engine and around optimizer steps
    recorder, tape, replay       each op of a step; a step as a tape of ops; that tape run again
    step_log, step_hooks         a step recorded at almost no cost; hooks of optimizers, and a step in numbers by layer
    items                        which items of a data set the rows of a batch are
    rerun, snapshot              the user's own step run again; the state it changes, and what the step itself starts
                                 from, its iterators included, saved and restored bit for bit
    duplicate_hooks, validation  hooks that are registered twice; checks of the arguments of public functions
"""

from __future__ import annotations
