"""Training that runs and does not learn: why the loss stays, falls to zero, jumps, or only falls on the training data.

preflight      before training: one step and some batches are examined, on a copy
one_step       the recorded step: calls, what each depends on, gradients; the parameter table, cuts of the graph
outputs        the calls of loss functions: values, activations, shapes, floors
rows           what becomes of a batch's rows: do samples depend on one another, or on their place? are they mixed?
signals        inputs, initial weights, activations and gradients; training against validation
batches        the batches of both loaders, labels; settings around the model, what workers draw
fixes          the fix of each cause, tried on one batch; can the model overfit it at all?

diagnose       one run of the user's own loop is watched; then its start is repeated with one thing changed at a time
probe          the whole of that: run, measure what it left, repeat the start, try what the signs call for
loop           the loop under watch: losses, batches, rates, modes of the modules, gradients and steps
loop_frames    the loss of a batch by the loop's own lines; where a loop begins to train, and what
evaluate       reading batches without using up random numbers; the loss on fixed batches; which classes are found
retrain        the start of the run, trained on again with one change
experiments    which changes a run calls for
interventions  those for a run that is not well and of which no rule has named a cause
regularizers   what makes it generalize better, on demand; EarlyStop, for a loop of one's own

edits          the fix of a cause as an edit of the user's own lines
facts          the numbers that both give
rules/         from the facts to the causes, and to their catalogue pages
report         findings, causes ruled out, notes, curves
"""

from __future__ import annotations
