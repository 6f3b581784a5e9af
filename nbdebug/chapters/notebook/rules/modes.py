"""Causes of other chapters as a notebook brings them about: a mode that a cell switched and left. Declared there."""

from __future__ import annotations

from nbdebug.chapters.notebook.facts import ModeLeft, NotebookFacts
from nbdebug.chapters.notebook.rules.words import cell, finding
from nbdebug.finding import Finding, Fix, Link


def modes(facts: NotebookFacts) -> list[Finding]:
    """A finding for each mode that was left."""
    return [_FINDINGS[one.kind](one) for one in facts.modes]


def _eval(one: ModeLeft) -> Finding:
    title = (
        f"`{one.name}` trains in eval mode since {cell(one.where)}: it switched to eval(), and {cell(one.after)} "
        "trained on without train()"
    )
    return finding(
        "training/eval-mode-in-training",
        title,
        one.where,
        [one.name],
        [Fix("Switch back before you train, best at the top of the loop.", f"{one.name}.train()")],
        [Link(f"{cell(one.after)} trains it again", one.after)],
    )


def _grad(one: ModeLeft) -> Finding:
    title = (
        f"Gradients are off for the whole session since {cell(one.where)} called `{one.name}`, so what was "
        "computed since has no path for a backward"
    )
    return finding(
        "error/no-grad-path",
        title,
        one.where,
        [one.name],
        [
            Fix("Switch them on again.", "torch.set_grad_enabled(True)"),
            Fix("Where they are not needed, switch them off for a block alone.", "with torch.no_grad():\n    ..."),
        ],
        [Link(f"the last cell failed by it: {one.said}")],
    )


def _dtype(one: ModeLeft) -> Finding:
    title = (
        f"New tensors have another dtype since {cell(one.where)} called `{one.name}`: what was made before it and "
        "what was made after it do not go together"
    )
    return finding(
        "error/dtype-mismatch",
        title,
        one.where,
        [one.name],
        [
            Fix(
                "Set it back, or set it in the first cell, before anything is made.",
                "torch.set_default_dtype(torch.float32)",
            )
        ],
        [Link(f"the last cell failed by it: {one.said}")],
    )


_FINDINGS = {"eval": _eval, "grad": _grad, "dtype": _dtype}
