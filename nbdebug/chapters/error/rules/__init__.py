"""The rules: from what the frames of an exception hold to the cause, said with the user's own names."""

from __future__ import annotations

DECLARED = ()
"""Where the rules stand: to import these modules is to declare them."""
