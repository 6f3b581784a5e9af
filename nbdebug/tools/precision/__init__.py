"""Half precision: which modules must stay in float32, why, and the proof.

    copies   a copy of the model that runs in a dtype, by casting or under autocast, with some modules kept in float32
    trial    one training step on such a copy: loss, gradients, what was not finite, time and memory
    own_step a loss_fn that makes the whole step itself, let run up to the optimizer's step
    measure  the same step in float32, and beside it each module's own step in half precision on the same inputs
    exact    the step in float64, where it fits: how far off float32 is itself
    order    is the loss scale taken out before gradients are clipped? Two runs with two scales tell
    search   the smallest set of modules that has to be kept, by few trials; knows no torch
    keep     the answer as something to use: `keep_fp32` on the user's own model

The user's model is never changed by looking. `facts` hold what was seen, `rules` name the cause.
"""

from __future__ import annotations
