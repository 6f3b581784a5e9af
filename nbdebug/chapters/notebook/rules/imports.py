"""Rules for what was imported: a module that is loaded in another version than its file has."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.notebook.facts import NotebookFacts, StaleModule
from nbdebug.chapters.notebook.rules.words import cell, finding, listed
from nbdebug.finding import Finding, Fix, Link

AUTORELOAD = Fix(
    "Or let IPython load edited files by itself, from the next cell on.", "%load_ext autoreload\n%autoreload 2"
)


@rule(
    code="error/stale-import",
    title="A file was edited after it was imported, and the notebook still runs the old version.",
    symptom="A mistake in a .py file is corrected, the import cell is run again, and the call gives the same wrong "
    "result or the same error as before. The traceback shows the new lines, which are not those that ran.",
    cause="Python loads a module once in a process. A further `import` looks it up and reads no file; `from m import "
    "f` binds the function object of that time, and a reload of `m` does not change what is bound.",
    confirm="`import inspect; inspect.getsource(m.f)` shows the file as it is now; `m.f.__code__.co_consts` what is "
    "loaded.",
    fix="`importlib.reload(m)`, then every `from m import f` again, then make the objects of its classes again. Or "
    "`%load_ext autoreload` and `%autoreload 2` in the first cell.",
    reference="https://ipython.readthedocs.io/en/stable/config/extensions/autoreload.html",
)
def stale_import(facts: NotebookFacts) -> Finding | None:
    if not facts.stale:
        return None
    one = min(facts.stale, key=lambda stale: not stale.where.cell)
    others = [stale for stale in facts.stale if stale is not one]
    title = _names(one) if one.names else _module(one)
    chain = (
        [Link(f"{one.file} was loaded by {cell(one.first, 'an import')}", one.first)]
        if one.first.cell and (one.first != one.where)
        else []
    )
    chain += (
        [Link(f"{cell(one.edited)} wrote {one.file} anew", one.edited)]
        if one.edited.cell and (one.edited.cell != one.where.cell)
        else []
    )
    chain += [Link(f"{other.file} has changed as well: {listed(other.changed)}", other.where) for other in others]
    fixes = [Fix("Load the file again, and what you took from it.", one.imported), AUTORELOAD]
    return finding(
        "error/stale-import",
        title,
        one.where,
        [one.module, *one.names, *one.changed],
        fixes,
        chain,
        module=one.module,
        changed=list(one.changed[:20]),
        old_in_the_notebook=list(one.names[:20]),
    )


def _module(one: StaleModule) -> str:
    how = (
        f"{cell(one.where)} imported it again, which reads no file: it takes reload"
        if one.again
        else "the notebook has not loaded it since"
    )
    return f"{listed(one.changed)} of `{one.module}` is not what {one.file} says now: the file was edited, and {how}"


def _names(one: StaleModule) -> str:
    are = "are" if len(one.names) > 1 else "is"
    return (
        f"{listed(one.names)} in your notebook {are} of the version of `{one.module}` before "
        f"{cell(one.where, 'its reload')} loaded it again: a reload leaves what `from {one.module} import …` has "
        "bound as it was"
    )
