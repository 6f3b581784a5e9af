"""One run of the user's own loop, watched; then the same start again, with one thing changed at a time.

probe          the whole: run, measure what it left, repeat the start, try what the signs call for: `run_facts`
loop           the loop under watch: losses, batches, learning rates, evaluations on fixed batches, modes of the
               modules, what backward leaves in the gradients, and what the optimizer does with it
loop_start     where a loop begins to train, and what, where that was not told
loop_loss      the loss of a batch by the loop's own lines, where no loss_fn was given
layers         activations, and gradients through depth and time
evaluate       reading batches without using up random numbers; the loss on fixed batches, in
               either mode; which classes are found
retrain        the start of the run, trained on again with one change
experiments    which changes a run calls for
regularizers   what makes it generalize better, on demand
interventions  those for a run that is not well and of which no rule has named a cause
"""

from __future__ import annotations
