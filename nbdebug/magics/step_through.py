"""%step_through: a training step, layer by layer, while the notebook stays usable. It is `nbdebug.step_through`."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.magics._arguments import (
    BATCH,
    HELP,
    LOSS_FN,
    MODEL,
    batch_of,
    ends_in_semicolon,
    one_model,
    option_or_usual,
    parse,
    usage_errors,
    variables,
)


@magics_class
class StepMagics(Magics):
    """%step_through."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @MODEL
    @BATCH
    @LOSS_FN
    @argument("--forward", action="store_true", help="only the forward, no backward")
    @argument(
        "--keep",
        action="store_true",
        help="leave the model as the step leaves it, with its gradients (default: it is put back)",
    )
    @argument("--abandon", action="store_true", help="end the step that waits, and put everything back")
    @line_magic
    def step_through(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Run one training step that waits at each layer; the buttons below the cell move it on.

            %step_through
            step = %step_through --model net --batch "next(iter(loader))"

        It shows the inputs and outputs of a layer, and goes to the next layer, into it, out of it, to a layer by name,
        or to the first value that is not finite. The notebook stays usable: look at variables in other cells. Without a
        loss the model is called with the batch. At the end the model is as before. Without buttons: step.next(),
        step.into(), step.inputs. In a script: nbdebug.step_through(model, batch).
        """
        __tracebackhide__ = True
        if (args := parse(self.step_through, line)) is None:
            return None
        if args.abandon:
            abandoned = self._abandon()
            print("The step is ended; everything is as it was before it." if abandoned else NO_STEP)
            return None
        from nbdebug.tools.stepper.step_through import step_through  # imports torch: %load_ext must stay quick

        names = variables(self.shell, local_ns)
        _, criterion = option_or_usual("loss_fn", args.loss_fn, names)
        subject = one_model(args.model, [], names, "%step_through", criterion)
        loss_name, loss_fn = option_or_usual("loss_fn", args.loss_fn, names, subject.model)
        batch_name, batch = batch_of(args.batch, names, "%step_through", model=subject.model)
        with usage_errors():
            stepper = step_through(subject.model, batch, loss_fn, backward=not args.forward, restore=not args.keep)
        model_name = next(iter(subject.models))
        loss = f"loss `{loss_name}`" if loss_name else "no loss: the model is called with the batch"
        stepper.asked = (
            f"%step_through {line.strip().rstrip(';')}".strip(),
            f"model `{model_name}` ({type(subject.model).__name__}), batch `{batch_name}`, {loss}",
        )
        return None if ends_in_semicolon(line) else stepper

    def active(self) -> list[str]:
        """A line for %nbdebug while a step waits."""
        if (stepper := _waiting()) is None:
            return []
        return [f"Active: %step_through, {stepper.at or 'running'}. %step_through --abandon ends it."]

    def close(self) -> None:
        """End the step that waits, whoever has started it."""
        self._abandon()

    close_all = close

    def _abandon(self) -> bool:
        if (stepper := _waiting()) is not None:
            stepper.abandon()
        return stepper is not None


NO_STEP = "No step waits. %step_through starts one."


def _waiting() -> Any:
    module = sys.modules.get("nbdebug.tools.stepper.step_through")  # not imported: no step waits
    return module.active_stepper() if module is not None else None
