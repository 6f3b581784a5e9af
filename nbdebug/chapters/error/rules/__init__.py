"""The rules: from what the frames of an exception hold to the cause, said with the user's own names."""

from __future__ import annotations

from nbdebug.chapters.error.rules import (
    autograd_in_place,
    autograd_path,
    autograd_twice,
    card,
    collate,
    cuda_asserts,
    cudnn,
    devices,
    dtypes,
    indices,
    modules,
    nccl,
    shapes,
    state_dict,
    workers,
)

DECLARED = (autograd_in_place, autograd_path, autograd_twice, card, cuda_asserts, devices, dtypes, cudnn, indices,
            collate, modules, nccl, state_dict, workers, shapes)
"""Where the rules stand: to import these modules is to declare them."""
