"""The rules: from what cells left behind to causes, most likely first: what spoils results before what costs memory."""

from __future__ import annotations

from collections.abc import Iterator

from nbdebug.chapters.notebook.facts import NotebookFacts
from nbdebug.chapters.notebook.rules import hooks, imports, memory, modes, objects
from nbdebug.chapters.notebook.rules.words import cell, listed
from nbdebug.finding import Finding

DECLARED = (imports, objects, hooks)
"""Where the rules stand: to import these modules is to declare them."""
CHECKS = (
    imports.stale_import,
    objects.class_redefined,
    objects.not_in_optimizer,
    hooks.hooks_registered_twice,
    objects.stale_reference,
    objects.out_of_order,
)


def name_all(facts: NotebookFacts) -> list[Finding]:
    """The findings, most likely first; a cause that an exception has shown stands before all others."""
    found = [*modes.modes(facts), *(f for check in CHECKS if (f := check(facts)) is not None)]
    shown = any(one.seen == "exception" for one in facts.classes)
    found.sort(key=lambda f: not (shown and f.code == "notebook/class-redefined"))
    return [*found, *memory.held(facts)]


def notes_of(facts: NotebookFacts) -> Iterator[str]:
    """What is worth knowing and no fault."""
    yield from (objects.renewal_note(one) for one in facts.left if not one.used)
    for one in facts.classes:
        if not objects.matters(one) and one.changed and one.used:
            are = "are" if len(one.instances) > 1 else "is"
            yield (
                f"{listed(one.instances)} {are} of an earlier `{one.name}` than {cell(one.where)} defines: "
                f"{listed(one.changed)} differ."
            )
    yield from facts.notes
