"""`grad_watch`: what a training does to gradients, weights and losses, step by step.

`watch` hangs hooks on backward and the optimizers, `rounds` makes steps of them, `gradients` and `updates` measure,
`late` reads without waiting, `history` keeps. `units` looks at activations, `losses` judges the loss, `depth` the
layers; `account` and `named` put it into words.
"""

from __future__ import annotations
