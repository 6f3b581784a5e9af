"""%step_through: a training step layer by layer, while the notebook stays alive; from `nbdebug.step_through`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.arguments import Subject
from nbdebug.magics._arguments import HELP, USUAL, found, parsed_in_any_order, refused, silenced, unquoted, visible

BATCH = ("batch", "data", "inputs")
"""Names by which a batch is found among the user's variables where no option names it, in this order."""


@magics_class
class StepMagics(Magics):
    """What walks through a step."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--model", action="append", metavar="NAME", help="the model; left out: the one among your variables")
    @argument(
        "--batch",
        metavar="EXPR",
        help="a batch; left out: the variable batch, or the first batch of the training loader",
    )
    @argument(
        "--loss-fn",
        metavar="NAME",
        help="loss_fn(model, batch), or a criterion of (outputs, targets); left "
        "out: the variable of that name, or criterion; without any the model is called with the batch",
    )
    @argument("--forward", action="store_true", help="no backward")
    @argument(
        "--keep",
        action="store_true",
        help="leave the model as the step leaves it, with its gradients; a step that is abandoned is taken back anyway",
    )
    @argument("--abandon", action="store_true", help="end the step that waits, and put everything back")
    @line_magic
    def step_through(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Run one training step that waits at its layers; go on by the buttons below the cell.

        It shows what goes into the layer it stands at and what comes out, goes to the next layer, into it or out of it,
        to a layer by name, or to the first value that is not finite. Your notebook stays alive: look at variables in
        other cells meanwhile. At the end the model is as before. The result can be assigned and walked without buttons
        (step = %step_through; step.next(), step.into(), step.inputs). In a script: nbdebug.step_through(model, batch).
        """
        __tracebackhide__ = True
        args = parsed_in_any_order(self.step_through, line.rstrip().rstrip(";"))
        if args is None:
            return None
        if args.abandon:
            print(
                "The step is abandoned; everything is as it was before it."
                if self._abandon()
                else "No step waits. %step_through starts one."
            )
            return None
        from nbdebug.tools.stepper.step_through import step_through  # brings torch, which %load_ext does not wait for

        model, batch, loss_fn, said = _given(args, visible(self.shell, local_ns))
        try:
            stepper = step_through(model, batch, loss_fn, backward=not args.forward, restore=not args.keep)
        except (TypeError, ValueError) as wrong:
            if refused(wrong):
                raise UsageError(str(wrong)) from None
            raise
        stepper.asked = f"%step_through {line.strip().rstrip(';')}".strip(), said
        return None if silenced(line) else stepper

    def active(self) -> list[str]:
        """A line for %nbdebug while a step waits."""
        stepper = _waiting()
        if stepper is None:
            return []
        return [f"Active: a step that is walked through, {stepper.at or 'running'}. %step_through --abandon ends it."]

    def close(self) -> None:
        """Abandon the step that waits, whoever has started it."""
        self._abandon()

    close_all = close

    def _abandon(self) -> bool:
        stepper = _waiting()
        if stepper is not None:
            stepper.abandon()
        return stepper is not None


def _waiting() -> Any:
    module = sys.modules.get("nbdebug.tools.stepper.step_through")  # never imported: there is none
    return module.waiting() if module is not None else None


def _given(args: Any, names: dict[str, Any]) -> tuple[Any, Any, Any, str]:
    """(model, batch, loss, what was taken). Raises UsageError where one is missing, or not clear."""
    loss_name, loss_fn = found("loss_fn", args.loss_fn, names)
    try:
        name, model = Subject.chosen(args.model, [], names).one_model("%step_through", loss_fn)
    except ValueError as wrong:
        raise UsageError(str(wrong)) from None
    batch, batch_name = _batch(args.batch, names)
    said = f"model `{name}` ({type(model).__name__}), batch `{batch_name}`, " + (
        f"loss `{loss_name}`" if loss_name else "no loss: the model is called with the batch"
    )
    return model, batch, loss_fn, said


def _batch(given: str | None, names: Mapping[str, Any]) -> tuple[Any, str]:
    if given is not None:
        try:
            return eval(unquoted(given), dict(names)), given
        except Exception as wrong:  # whatever it raises, it names nothing
            raise UsageError(f"--batch {given!r} names nothing: {wrong}") from None
    for name in BATCH:
        if names.get(name) is not None:
            return names[name], name
    for name in USUAL["train_loader"]:
        if names.get(name) is not None:
            return next(iter(names[name])), f"next(iter({name}))"
    raise UsageError(
        "%step_through needs a batch, and there is neither a variable `batch` nor a training loader under "
        "a usual name. Give it: --batch EXPR"
    )
