"""The detectors, one module for each kind of error: each gives the facts of an exception, or None where the exception
is of another kind. `dispatch.KINDS` lists them with their rules."""

from __future__ import annotations
