"""The rules: from what the frames of an exception hold to the cause, said with the user's own names."""

from __future__ import annotations

from nbdebug.chapters.error.rules import collate, state_dict

DECLARED = (collate, state_dict)
"""Where the rules stand: to import these modules is to declare them."""
