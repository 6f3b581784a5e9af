"""%stop_at: breakpoints on layers, set, listed and cleared by name; they come from `nbdebug.stop_at`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.arguments import Subject, discover
from nbdebug.magics._arguments import HELP, parsed_in_any_order, silenced, unquoted, visible

SETTING = ("when", "phase", "model")
_OFFERED = 500
"""Layer names that Tab offers at most."""


@magics_class
class StopMagics(Magics):
    """What stops at layers. mine: the stops that %stop_at has set, each with the user's name for its model."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.mine: list[tuple[Any, str]] = []

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "layer",
        nargs="?",
        metavar="LAYER",
        help='a glob over layer names, such as layers.3*, or a layer\'s type, such as Dropout; "" is the model itself',
    )
    @argument(
        "--when",
        metavar="EXPR",
        help='stop only where this holds, such as "not out.isfinite().all()". It '
        "sees inp, out, grad, module, name, step, the locals of the layer's forward, and your variables",
    )
    @argument(
        "--phase",
        choices=("forward", "backward"),
        help="forward (the default), or backward: when the gradient of the layer's output arrives",
    )
    @argument("--every", action="store_true", help="stop at each hit; left out: the first hit ends the stop")
    @argument("--model", metavar="NAME", help="the model; left out: the one among your variables that has such a layer")
    @argument("--list", action="store_true", help="say which stops wait, and how often they were hit")
    @argument(
        "--clear",
        nargs="?",
        const="",
        metavar="WHICH",
        help="take a stop away, by its number or its LAYER; left out: all of them",
    )
    @line_magic
    def stop_at(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Stop training inside a layer: a breakpoint by the layer's name, in ipdb or in the debugger that is attached.

        It stops at the first line of the layer's forward, or at its return where --when asks for more than the input;
        for a layer of torch's own in your line that calls it. At the prompt: c goes on, n runs a line, q leaves the
        training. Where nobody can type it records the tensors at hand and goes on. The result is the stop: s =
        %stop_at LAYER; s.records, s.clear(). In a script: nbdebug.stop_at(model, LAYER).
        """
        __tracebackhide__ = True
        args = parsed_in_any_order(self.stop_at, line.rstrip().rstrip(";"))
        if args is None:
            return None
        _check(args)
        if args.list:
            print("\n".join([*map(repr, _waiting()), *self._outdated()]) or "No stop waits. %stop_at LAYER sets one.")
            return None
        if args.clear is not None:
            _clear(unquoted(args.clear))
            self.mine = [(stop, name) for stop, name in self.mine if args.clear and stop.model is not None]
            return None
        stop, name = _set(args, visible(self.shell, local_ns))
        self.mine.append((stop, name))
        return None if silenced(line) else stop

    def offered(self, before: str) -> Iterable[str]:
        """The words that Tab offers: the layers of the models among the user's variables, and their types."""
        models = discover("model", self.shell.user_ns).values()
        names = [name for model in models for name, _ in model.named_modules() if name]
        types = [type(module).__name__ for model in models for module in model.modules()]
        return list(dict.fromkeys([*names, *types]))[:_OFFERED]

    def _outdated(self) -> list[str]:
        """What to say of stops that wait in vain: their model was made anew."""
        said = []
        for stop, name in self.mine:
            now = self.shell.user_ns.get(name)
            still = stop.model is not None and (
                name not in self.shell.user_ns or any(part is stop.model for part in getattr(now, "modules", list)())
            )
            if not still and not stop.cleared:
                said.append(
                    f"`{name}` was made anew or deleted since stop {stop.number} ({stop.pattern}) was set: it "
                    "sees nothing of what is there now. Type %stop_at again."
                )
        return said

    def active(self) -> list[str]:
        """A line for each stop that waits, for %nbdebug status."""
        return [f"Active: {stop!r}. %stop_at --clear {stop.number} takes it away." for stop in _waiting()] + (
            self._outdated()
        )

    def close(self) -> None:
        """Take all stops away."""
        for stop in [*_waiting(), *(stop for stop, _ in self.mine)]:
            stop.clear()
        self.mine.clear()

    close_all = close


def _waiting() -> list[Any]:
    handle = sys.modules.get("nbdebug.tools.breakpoints.stop_at")  # where it was never imported there is no stop
    return [] if handle is None else handle.active()


def _check(args: Any) -> None:
    """Raises UsageError for requests that go against each other, and where nothing was asked."""
    asked = [word for word, given in (("--list", args.list), ("--clear", args.clear is not None)) if given]
    setting = [f"--{name}" for name in SETTING if getattr(args, name) is not None] + ["--every"] * args.every
    if len(asked) > 1 or asked and (args.layer is not None or setting):
        other = asked[1] if len(asked) > 1 else setting[0] if setting else repr(args.layer)
        raise UsageError(f"%stop_at {asked[0]} takes no {other}")
    if not asked and args.layer is None:
        raise UsageError(
            "%stop_at takes a layer, such as %stop_at layers.3*, or a layer's type, such as %stop_at "
            "Dropout; %stop_at --list says which stops wait"
        )


def _clear(which: str) -> None:
    waiting = _waiting()
    chosen = [stop for stop in waiting if not which or which in (str(stop.number), stop.pattern)]
    if which and not chosen:
        there = ", ".join(f"{stop.number} ({stop.pattern})" for stop in waiting) or "none"
        raise UsageError(f"No stop that waits is called {which!r}. There is: {there}")
    for stop in chosen:
        stop.clear()
    count = f"{len(chosen)} stop{'s' * (len(chosen) != 1)}"
    print(
        f"{count} taken away: {', '.join(stop.pattern or 'the model' for stop in chosen)}."
        if chosen
        else "No stop waits."
    )


def _set(args: Any, names: dict[str, Any]) -> tuple[Any, str]:
    """The stop, and the user's name for its model."""
    from nbdebug.tools.breakpoints.stop_at import set_stop  # brings torch, which %load_ext does not wait for

    layer, when = unquoted(args.layer), None if args.when is None else unquoted(args.when)
    try:
        subject = Subject.chosen([args.model] if args.model else None, [], names)
        name, model = _one(subject, layer)
        said = f"model `{name}` ({type(model).__name__})" + ("" if subject.named else ", found among your variables")
        return set_stop(
            model, layer, when, args.phase or "forward", not args.every, variables=names, subject=said
        ), name
    except (ValueError, SyntaxError) as wrong:
        said = str(wrong.msg if isinstance(wrong, SyntaxError) else wrong)
        raise UsageError(said.replace('phase="backward"', "--phase backward")) from None


def _one(subject: Subject, layer: str) -> tuple[str, Any]:
    """The one model that has such a layer. Raises ValueError where there is none, or several."""
    from nbdebug.tools.breakpoints.stop_at import chosen

    if not subject.models:
        raise ValueError(
            "%stop_at needs a model, and none of your variables is one. Make it first, or name it: %stop_at LAYER "
            "--model NAME (NAME may be an expression, such as trainer.model)"
        )
    wrong: dict[str, ValueError] = {}
    for name, model in subject.models.items():
        try:
            chosen(model, layer)
        except ValueError as missing:
            wrong[name] = missing
    having = {name: model for name, model in subject.models.items() if name not in wrong}
    if not having:
        raise ValueError("\n".join(str(missing) for missing in wrong.values()))
    if len(having) > 1:
        raise ValueError(f"Several of your models have a layer {layer!r}: {', '.join(having)}. Say which: --model NAME")
    return next(iter(having.items()))
