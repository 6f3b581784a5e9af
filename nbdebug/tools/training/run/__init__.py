"""One run of the user's own loop, watched; then the same start again, with one thing changed at a time."""

from __future__ import annotations
