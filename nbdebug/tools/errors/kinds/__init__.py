"""The detectors, one module for each kind of error: each gives the facts of an exception, or None where the exception
is of another kind. `dispatch.KINDS` lists them with their rules; `dtype_origins` and `sequences` are parts of `dtypes`
and `indices`."""

from __future__ import annotations
