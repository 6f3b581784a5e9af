"""The rules: from what the frames of an exception hold to the cause, said with the user's own names."""

from __future__ import annotations

DECLARED = (
    "autograd_in_place",
    "autograd_path",
    "autograd_twice",
    "card",
    "cuda_asserts",
    "devices",
    "dtypes",
    "cudnn",
    "indices",
    "collate",
    "modules",
    "nccl",
    "state_dict",
    "workers",
    "shapes",
)
"""The modules where the rules stand, which the catalogue imports. One exception needs only the one that knows it."""
