"""The rules: from what the frames of an exception hold to the cause, said with the user"s own names."""

from __future__ import annotations

DECLARED = (
    "autograd.rules",
    "rules.cuda",
    "rules.devices",
    "rules.dtypes",
    "rules.indices",
    "rules.dataloader",
    "rules.imports",
    "rules.distributed",
    "rules.state_dict",
    "shapes.rules",
)
"""The modules where the rules stand, which the catalogue imports. One exception needs only the one that knows it."""
