"""%stop_at: breakpoints on layers, set, listed and cleared by name. They are `nbdebug.stop_at`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.arguments import Subject, discover, one_of
from nbdebug.magics._arguments import HELP, ends_in_semicolon, parse, subject_of, unquote, variables
from nbdebug.text import count, listed

NO_STOP = "No stop waits. %stop_at LAYER sets one."
MOST_COMPLETIONS = 500
"""Layer names that Tab offers at most."""


@magics_class
class StopMagics(Magics):
    """%stop_at. stops: those that %stop_at has set, each with the user's name for its model."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.stops: list[tuple[Any, str]] = []

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "layer",
        nargs="?",
        metavar="LAYER",
        help='a pattern for names of layers, such as layers.3*, or a type, such as Dropout; "" is the model itself',
    )
    @argument(
        "--when",
        metavar="EXPR",
        help='stop only where this is true, such as "not out.isfinite().all()"; it may use inp, out, grad, module, '
        "name, step, the locals of the layer's forward, and your variables",
    )
    @argument(
        "--phase",
        choices=("forward", "backward"),
        help="forward (the default)\nbackward: when the gradient of the layer's output arrives",
    )
    @argument("--every", action="store_true", help="stop every time (default: the first stop is the only one)")
    @argument("--model", metavar="NAME", help="the model (default: the one of yours that has such a layer)")
    @argument("--list", action="store_true", help="show the stops that wait, and how often each was hit")
    @argument("--clear", nargs="?", const="", metavar="STOP", help="remove a stop, by number or LAYER (default: all)")
    @line_magic
    def stop_at(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Stop training inside a layer: a breakpoint by the layer's name, in ipdb or in the attached debugger.

            %stop_at "layers.3*" --when "not out.isfinite().all()"
            %stop_at --clear

        It stops at the first line of the layer's forward, or at its return if --when needs more than the input; for a
        layer of torch at your line that calls it. At the prompt, c continues, n runs one line, q ends the training.
        Where nobody can type, it records the tensors and continues. The result is the stop: stop.records,
        stop.clear(). In a script: nbdebug.stop_at(model, LAYER).
        """
        __tracebackhide__ = True
        if (args := parse(self.stop_at, line)) is None:
            return None
        _check(args)
        if args.list:
            print("\n".join([*map(repr, _waiting()), *self._outdated()]) or NO_STOP)
            return None
        if args.clear is not None:
            _clear(unquote(args.clear))
            self.stops = [(stop, name) for stop, name in self.stops if args.clear and stop.model is not None]
            return None
        stop, name = _set(args, variables(self.shell, local_ns))
        self.stops.append((stop, name))
        return None if ends_in_semicolon(line) else stop

    def stop_at_words(self) -> Iterable[str]:
        """The words that Tab offers: the layers of the models among the user's variables, and their types."""
        models = discover("model", self.shell.user_ns).values()
        names = [name for model in models for name, _ in model.named_modules() if name]
        types = [type(module).__name__ for model in models for module in model.modules()]
        return list(dict.fromkeys([*names, *types]))[:MOST_COMPLETIONS]

    def _outdated(self) -> list[str]:
        """A warning for each stop that waits in a model which the user's name no longer stands for."""
        warnings = []
        for stop, name in self.stops:
            now = self.shell.user_ns.get(name)
            valid = stop.model is not None and (
                name not in self.shell.user_ns or any(part is stop.model for part in getattr(now, "modules", list)())
            )
            if not valid and not stop.cleared:
                warnings.append(
                    f"`{name}` was replaced or deleted after stop {stop.number} ({stop.pattern}) was set: the stop "
                    "waits in the old model. Type %stop_at again."
                )
        return warnings

    def active(self) -> list[str]:
        """A line for each stop that waits, for %nbdebug status."""
        stops = [f"Active: {stop!r}. %stop_at --clear {stop.number} removes it." for stop in _waiting()]
        return stops + self._outdated()

    def close(self) -> None:
        """Remove all stops."""
        for stop in [*_waiting(), *(stop for stop, _ in self.stops)]:
            stop.clear()
        self.stops.clear()

    close_all = close


def _waiting() -> list[Any]:
    module = sys.modules.get("nbdebug.tools.breakpoints.stop_at")  # not imported: there is no stop
    return [] if module is None else module.active()


def _check(args: Any) -> None:
    """Raises UsageError for requests that go against each other, and where there is none."""
    requests = [word for word, typed in (("--list", args.list), ("--clear", args.clear is not None)) if typed]
    settings = [f"--{name}" for name in ("when", "phase", "model") if getattr(args, name) is not None]
    settings += ["--every"] * args.every
    if len(requests) > 1 or requests and (args.layer is not None or settings):
        other = requests[1] if len(requests) > 1 else settings[0] if settings else repr(args.layer)
        raise UsageError(f"%stop_at {requests[0]} takes no {other}.")
    if not requests and args.layer is None:
        raise UsageError(
            "%stop_at takes a layer, such as %stop_at layers.3*, or a type of layer, such as %stop_at Dropout. "
            "%stop_at --list shows the stops that wait."
        )


def _clear(which: str) -> None:
    waiting = _waiting()
    stops = [stop for stop in waiting if not which or which in (str(stop.number), stop.pattern)]
    if which and not stops:
        known = ", ".join(f"{stop.number} ({stop.pattern})" for stop in waiting) or "none"
        raise UsageError(f"No stop that waits has the number or layer {which!r}. Stops that wait: {known}.")
    for stop in stops:
        stop.clear()
    patterns = ", ".join(stop.pattern or "the model" for stop in stops)
    print(f"{count(len(stops), 'stop')} removed: {patterns}." if stops else NO_STOP)


def _set(args: Any, names: dict[str, Any]) -> tuple[Any, str]:
    """The stop, and the user's name for its model."""
    from nbdebug.tools.breakpoints.stop_at import set_stop  # imports torch: %load_ext must stay quick

    layer, when = unquote(args.layer), None if args.when is None else unquote(args.when)
    subject = subject_of([args.model] if args.model else None, [], names)
    try:
        name, model = _model_with(layer, subject)
        taken = f"model `{name}` ({type(model).__name__})" + ("" if subject.named else ", found among your variables")
        phase = args.phase or "forward"
        return set_stop(model, layer, when, phase, not args.every, variables=names, subject=taken), name
    except (ValueError, SyntaxError) as error:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
        raise UsageError(message.replace('phase="backward"', "--phase backward")) from None


def _model_with(layer: str, subject: Subject) -> tuple[str, Any]:
    """The one model that has such a layer. Raises ValueError where there is none, or several."""
    from nbdebug.tools.breakpoints.stop_at import matching_layers

    if not subject.models:
        one_of("model", {}, "%stop_at", "%stop_at LAYER --model NAME")
    errors: dict[str, ValueError] = {}
    for name, model in subject.models.items():
        try:
            matching_layers(model, layer)
        except ValueError as error:
            errors[name] = error
    models = {name: model for name, model in subject.models.items() if name not in errors}
    if not models:
        raise ValueError("\n".join(str(error) for error in errors.values()))
    if len(models) > 1:
        raise ValueError(
            f"{listed(models, most=9)} each have a layer {layer!r}. Say which: %stop_at {layer} --model NAME"
        )
    return next(iter(models.items()))
