"""The rules: from the facts of an exception to its cause and fixes, with the user's own names. Each module also defines
the facts that its detector in `kinds` fills in."""

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
    "rules.files",
    "rules.calls",
    "rules.state_dict",
    "shapes.rules",
)
"""The modules with rules, which the catalogue imports; an exception needs only the one for its kind."""
