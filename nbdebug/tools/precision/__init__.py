"""Half precision: which modules must stay in float32, why, and the proof.

    precision      the whole: `precision(model, batch, loss_fn)`, and its report
    casting        a copy of the model that runs in a dtype, by casting or under autocast, with some modules kept in
                   float32; and the answer as something to use: `keep_fp32` on the user's own model
    trial          one training step on such a copy: loss, gradients, what was not finite, time and memory; also of a
                   loss_fn that makes the whole step itself, up to the optimizer's step
    compare        the same step in float32, and beside it each module's own step in half precision on the same inputs;
                   and in float64, where it fits: how far off float32 is itself
    search         the smallest set of modules that has to stay in float32, by few trials; no torch
    causes         what fails in each of these modules, op by op
    unscale_order  whether gradients are unscaled before they are clipped, by two runs with two scales
    rules          the numbers, and the causes that they show

The user's model is never changed.
"""

from __future__ import annotations
