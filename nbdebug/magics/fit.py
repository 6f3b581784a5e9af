"""%fit: does a training step fit, and what would make it fit; the answer comes from `nbdebug.fit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.arguments import Subject, one_of
from nbdebug.magics._arguments import HELP, USUAL, parsed_in_any_order, refused, silenced, unquoted, visible
from nbdebug.report import Report

LOSSES, LOADERS = USUAL["loss_fn"], USUAL["train_loader"]
BATCHES = ("batch", "data")


@magics_class
class FitMagics(Magics):
    """What says beforehand whether memory will do."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "--optimizer",
        metavar="NAME",
        help="an optimizer, or a class or partial that makes one; left out: the "
        "one among your variables, if there is one",
    )
    @argument("--memory", metavar="SIZE", help="what there is, such as 24GiB; left out: what is free on the card")
    @argument("--device", choices=("cuda", "cpu"), help="what it shall run on; left out: where the model is, or a card")
    @argument(
        "--autocast",
        choices=("bfloat16", "float16"),
        help="where your loss is computed under autocast, and loss_fn does not do it itself",
    )
    @argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model, or a function that builds one; left out: the one among your variables",
    )
    @argument("batch", nargs="?", metavar="BATCH", help="a batch; left out: batch, or the first of train_loader")
    @argument(
        "loss_fn",
        nargs="?",
        metavar="LOSS_FN",
        help="loss_fn(model, batch), or a criterion of (outputs, "
        "targets); left out: the variable of that name, or criterion",
    )
    @line_magic
    def fit(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Predict what a training step takes, before anything is allocated: does it fit, and what would make it fit?

        %fit model batch loss_fn --optimizer opt --memory 24GiB. It says the peak with what it is made of, the largest
        batch that fits, and what each remedy would save and cost. Nothing is computed and nothing of yours is changed.
        The result is a report: shown when it comes last, assignable (rep = %fit), silenced by a semicolon. In a script:
        nbdebug.fit(model, batch, loss_fn).
        """
        __tracebackhide__ = True
        args = parsed_in_any_order(self.fit, line.rstrip().rstrip(";"))
        if args is None:
            return None
        from nbdebug.tools.memory.fit import fit  # brings torch, which %load_ext does not wait for

        given, subject = _given(args, visible(self.shell, local_ns))
        try:
            report = fit(**given)
        except (TypeError, ValueError) as wrong:
            if refused(wrong):
                raise UsageError(str(wrong)) from None
            raise
        report = dataclasses.replace(
            report, question=f"%fit {line.strip().rstrip(';')}".strip(), subject=f"{subject}; {report.subject}"
        )
        return None if silenced(line) else report


def _given(args: Any, names: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(arguments of fit, what was taken). Raises UsageError for what names nothing or is missing."""
    loss = args.loss_fn or next((n for n in LOSSES if names.get(n) is not None), "")
    taken = {
        "model": _one("model", args.model, names, names.get(loss)),
        "batch": _batch(args.batch, names),
        "loss_fn": _named(args.loss_fn, LOSSES, names, "a loss, loss_fn(model, batch) or a criterion", "loss_fn"),
        "optimizer": _one("optimizer", args.optimizer, names),
    }
    said = ", ".join(f"{kind} `{name}`" for kind, (name, _) in taken.items() if name)
    return {
        **{kind: value for kind, (_, value) in taken.items()},
        "device_memory": args.memory,
        "device": args.device,
        "autocast": args.autocast,
    }, said


def _one(kind: str, name: str | None, names: Mapping[str, Any], loss_fn: Any = None) -> tuple[str, Any]:
    """What was named, or the only model or optimizer among the user's variables."""
    if name is not None:
        return name, _value(name, names, kind)
    subject = Subject.chosen(None, None, dict(names))
    try:
        if kind == "model":
            return subject.one_model("%fit", loss_fn, "%fit MODEL BATCH LOSS_FN")
        return one_of(kind, subject.optimizers, "%fit", "--optimizer NAME") if subject.optimizers else ("", None)
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None


def _batch(name: str | None, names: Mapping[str, Any]) -> tuple[str, Any]:
    if name is not None:
        return name, _value(name, names, "batch")
    usual = next((n for n in BATCHES if names.get(n) is not None), None)
    if usual is not None:
        return usual, names[usual]
    loader = next((n for n in LOADERS if names.get(n) is not None), None)
    if loader is None or iter(names[loader]) is names[loader]:
        raise UsageError(
            "%fit needs a batch, and there is none among your variables under a usual name "
            f"({', '.join((*BATCHES, *LOADERS[:2]))}). Name it: %fit MODEL BATCH LOSS_FN"
        )
    return f"the first of {loader}", next(iter(names[loader]))


def _named(name: str | None, usual: tuple[str, ...], names: Mapping[str, Any], what: str, kind: str) -> tuple[str, Any]:
    if name is not None:
        return name, _value(name, names, kind)
    found = next((n for n in usual if names.get(n) is not None), None)
    if found is None:
        raise UsageError(
            f"%fit needs {what}, and there is none among your variables under a usual name "
            f"({', '.join(usual)}). Name it: %fit MODEL BATCH LOSS_FN"
        )
    return found, names[found]


def _value(name: str, names: Mapping[str, Any], kind: str) -> Any:
    try:
        return eval(unquoted(name), dict(names))
    except Exception as wrong:  # whatever it raises, it names nothing
        raise UsageError(f"{name!r}, given as {kind}, names nothing: {wrong}") from None
