"""Watching a training step: lines, modules, ops, tensors and state. Everything that attaches here also detaches."""

from __future__ import annotations
