"""What is known before training: one batch sent forward and backward while every call is recorded, some batches read.

probe            each probe in turn, on a copy of model and optimizer, with everything put back: `static_facts`
one_step         the recorded step: calls, what each depends on, gradients; the parameter table, and where the
                 graph is cut
outputs          the calls of loss functions: values, activations, shapes, floors; does one sample's output depend on
                 another sample?
signals          inputs, initial weights, training against validation
batches          the batches of both loaders, labels; settings around the model, how the loss scales with the batch,
                 what workers draw
fixes            the fix of each cause, tried on one batch; can the model overfit it at all?
"""

from __future__ import annotations
