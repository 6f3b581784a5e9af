"""`grad_watch`: what a training does to gradients, weights and losses, step by step.

In reading order:

    grad_watch     the public function and GradWatch: hooks on backward, optimizers and GradScaler; errors stay inside
    steps          begin and end of a step, which measurements it gets, and how they are read without waiting; a
                   GradScaler's scale, skipped steps, and gradients clipped before they are unscaled
    probe          norms between backward and the update, and what the update changes; dead and saturated activations
    history        the measurements, thinned out, and their tables; from parameters to layers: levels, trend with depth,
                   the heatmap
    report         all of it in words and as a picture
"""

from __future__ import annotations
