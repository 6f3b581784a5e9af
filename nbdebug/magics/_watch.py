"""One watch for a shell: what %guard and %grad_watch share.

`%guard on` takes models and optimizers among the user's variables and watches them until `%guard off`; a second `on`
replaces the first. Where no variable is a model yet, it begins at the first call of one that a loop trains. The subject
remembers the variables by name: when a name stands for another object later (the cell that makes the model ran again),
the watch follows at the first step of the new optimizer; where it can't, it says so there, and in every report.
A watch that the user's own code has started is listed, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics
from IPython.core.magic_arguments import argument

from nbdebug.arguments import Subject, discover, evaluated, one_of, trains, unwrapped
from nbdebug.magics._arguments import parse
from nbdebug.report import Report
from nbdebug.text import listed, sentence

if TYPE_CHECKING:
    from nbdebug.tools.training.loop_frames import LoopSubject

NO_OPTIMIZER = " and no optimizer"
WAITS = "There is no optimizer{} yet: each one that trains {} is taken at its first step."
REQUESTS = ("on", "off", "status")


def request_argument(*more: str, also: str = "") -> Any:
    """The argument on, off or status, and what else the magic takes."""
    return argument(
        "request",
        nargs="?",
        choices=(*REQUESTS, *more),
        help="on: start to watch\noff: stop, and give the last report\nstatus (the default): give the report so far"
        + also,
    )


@dataclasses.dataclass(frozen=True)
class WatchSubject:
    """Models, optimizers and at most one gradient scaler. variables: those of them that the user's variables hold."""

    subject: Subject
    scalers: dict[str, Any]
    variables: dict[str, Any]

    @classmethod
    def chosen(cls, args: Any, names: dict[str, Any], variables: dict[str, Any], magic: str) -> WatchSubject:
        """Those that `args` names, or else all among `names`. Raises ValueError where there is no model, or several
        scalers."""
        subject = Subject.chosen(args.model, args.optimizer, names)
        if not subject.models:
            raise ValueError(
                "There is no model among your variables, and none of them holds one. Create it first, or name it: "
                f"{magic} --model NAME (an expression will do, such as trainer.model)."
            )
        scalers = _scalers(getattr(args, "scaler", None), names) if hasattr(args, "scaler") else {}
        things = {**subject.models, **subject.optimizers, **scalers}
        lasting = {n: thing for n, thing in things.items() if "(" not in n}  # a call would create another one
        return cls(subject, scalers, {n: thing for n, thing in lasting.items() if _value(n, variables) is thing})

    @property
    def scaler(self) -> Any:
        return next(iter(self.scalers.values()), None)

    @property
    def things(self) -> str:
        """ "model `net` and optimizer `opt`, with the GradScaler `scaler`"."""
        scalers = "".join(f", with the GradScaler `{name}`" for name in self.scalers)
        taken = f"{dataclasses.replace(self.subject, named=True)}"
        return f"{taken}{scalers}" if self.subject.optimizers else f"{taken.removesuffix(NO_OPTIMIZER)}{scalers}"

    @property
    def waits(self) -> str:
        """A sentence on the models whose optimizers are taken at their first step, as they have none yet; "" where
        there are none. A variable may be a model that is never trained."""
        models, optimizers = self.subject.models, self.subject.optimizers.values()
        trained = {name: m for name, m in models.items() if any(True for _ in m.parameters())}
        idle = [name for name, model in trained.items() if not any(trains(o, model) for o in optimizers)]
        names = [name for name in idle if not optimizers or "." in name]
        whose = f" of {listed(names, most=4)}" if optimizers else ""
        return WAITS.format(whose, "it" if len(names) == 1 else "them") if names else ""

    def __str__(self) -> str:
        return self.things + ("" if self.subject.named else " (found among your variables)")

    def replaced(self, variables: dict[str, Any]) -> list[str]:
        """The names that stand for other objects now than those that are watched."""
        names = []
        for name, thing in self.variables.items():
            now = _value(name, variables)
            renamed = now is None and any(value is thing for value in variables.values())
            if now is not thing and not renamed and not _wraps(now, thing):
                names.append(name)
        return names


def _value(name: str, variables: dict[str, Any]) -> Any:
    """What the user's expression stands for; None where it stands for nothing."""
    try:
        return unwrapped(eval(name, variables))
    except Exception:  # whatever it raises, it is not the object that is looked for
        return None


def _wraps(new: Any, old: Any) -> bool:
    """`net = torch.compile(net)` and `opt = accelerator.prepare(opt)` still train what is watched."""
    parts = [*new.modules()] if callable(getattr(new, "modules", None)) else []
    return any(part is old for part in [*parts, *getattr(new, "__dict__", {}).values()])


def _scalers(expression: str | None, names: dict[str, Any]) -> dict[str, Any]:
    """The scaler that is named, or the enabled one among the variables: one that is not enabled does nothing."""
    if expression:
        return evaluated("scaler", [expression], names)
    enabled = {name: scaler for name, scaler in discover("scaler", names).items() if scaler.is_enabled()}
    return dict([one_of("scaler", enabled, "%guard", f"--scaler {next(iter(enabled))}")]) if enabled else {}


class WatchMagics(Magics):
    """A magic that turns one watch on and off. running: the watch that is on, None while there is none; subject: what
    it watches."""

    magic = ""  # its name, such as "guard"
    noun = ""  # "guard"
    home = ""  # where the class of the watch is, such as "nbdebug.tools.guard.guard"
    kind = ""  # the class, such as "Guard"
    options: tuple[str, ...] = ()
    running: Any = None
    subject: WatchSubject
    _typed: Any = None  # what was typed after %guard on
    _steps: Any = None  # the hook that is called before each optimizer's step
    _waiting: contextlib.ExitStack | None = None  # of a watch that waits for a model
    _following = False
    _looked: frozenset[tuple[int, int]] = frozenset()  # (cell, optimizer) where the variables were compared

    # -- what a magic adds ---------------------------------------------------------------------------------------------

    def _new(self, subject: WatchSubject, args: Any) -> Any:
        """A watch of this subject, with the options that were typed."""
        raise NotImplementedError

    def _counts(self, watch: Any) -> list[str]:
        """What the watch has counted, such as "3 steps watched"."""
        raise NotImplementedError

    def _started(self, args: Any) -> str:
        """What is printed when a watch was turned on."""
        raise NotImplementedError

    # -- on and off ----------------------------------------------------------------------------------------------------

    def turn_on(self, args: Any, names: dict[str, Any]) -> str:
        """Turn a watch on, in place of the one that is; the message. Raises UsageError for wrong arguments: the watch
        that was on stays on, unless it had to end first. Where there is no model yet, it waits for one."""
        if not (args.model or args.optimizer or Subject.chosen(None, None, names).models):
            return self._wait(args)
        name = f"The {self.noun} of {self.subject.things} ({self._summary(self.running)})" if self.running else ""
        try:
            subject = WatchSubject.chosen(args, names, self.shell.user_ns, f"%{self.magic} on")
            self._make_room()
            watch = self._new(subject, args)
        except (TypeError, ValueError, OSError) as error:
            ended = f" {name} is closed." if name and self.running is None else ""
            raise UsageError(f"{sentence(error)}{ended}") from None
        self.close()
        self.running, self.subject, self._typed = watch, subject, args
        self._watch_steps()
        waits = f"\n{subject.waits}" if subject.waits else ""
        return self._started(args) + waits + (f"\n{name} is closed: this one replaces it." if name else "")

    def _wait(self, args: Any) -> str:
        """Watch the first model that a loop calls and trains; the message."""
        from nbdebug.tools.training.loop_frames import LoopStart  # here, so that %load_ext nbdebug stays quick

        if args is not self._typed:
            self.close()
        self._stop_waiting()
        self._typed, self._waiting = args, contextlib.ExitStack()
        self._waiting.enter_context(LoopStart().waiting(self._begin))
        return f"There is no model among your variables yet: the {self.noun} begins where a loop first calls one."

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()

    def _begin(self, found: LoopSubject) -> None:
        """A loop calls what it trains for the first time."""
        if self.running is not None:
            self._waiting = None
            if all(
                any(m is known for known in self.subject.subject.models.values()) for m in found.subject.models.values()
            ):
                return
            self.close()
        scalers = _scalers(None, found.names) if hasattr(self._typed, "scaler") else {}
        self.subject, self._waiting = WatchSubject(found.subject, scalers, {}), None
        try:
            self.running = self._new(self.subject, self._typed)
            self._watch_steps()
            self.shell.events.register("pre_run_cell", self._wait_again)
            print(self._started(self._typed))
        except Exception as fault:  # the border: the loop goes on, unwatched
            print(f"The {self.noun} could not be turned on: {sentence(fault)}")

    def _wait_again(self, *_: Any) -> None:
        """A cell begins: a loop that makes its own model makes another one."""
        if self.running is not None and self._waiting is None:
            self._wait(self._typed)

    def _watch_steps(self) -> None:
        if self._steps is None:
            from nbdebug.observe.step_hooks import StepHook  # here, so that %load_ext nbdebug stays quick

            self._steps = StepHook(self._before_step)

    def _make_room(self) -> None:
        """Called before another watch is made."""

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer steps. Where the user's names stand for others now than those that are watched, follow them."""
        here = self.shell.execution_count, id(optimizer)
        if self._following or here in self._looked or self.running is None:
            return
        self._looked = frozenset([here, *(seen for seen in self._looked if seen[0] == here[0])])
        own = any(optimizer is known for known in self.running.optimizers.values())
        if not (
            own or self.subject.variables or any(trains(optimizer, m) for m in self.subject.subject.models.values())
        ):
            print(f"Another model is trained: the {self.noun} follows it from its next call on.")
            self._wait(self._typed)
            return
        if not (outdated := self._outdated()):
            return
        self._following = True
        try:
            if own:
                print(outdated[0])
            else:
                print(f"Your names stand for new objects: {self.turn_on(self._typed, self.shell.user_ns)}")
        except Exception as fault:  # the border: the step goes on, unwatched
            print(f"{outdated[0]} ({sentence(fault)})")
        finally:
            self._following = False

    @property
    def on(self) -> bool:
        """Whether a watch is on, or waits for a model."""
        return self.running is not None or self._waiting is not None

    def switch(self, on: bool) -> str:
        """On with the default settings, or off; the message."""
        if on:
            return self.turn_on(parse(getattr(self, self.magic), "on"), self.shell.user_ns)
        self.close()
        return f"The {self.noun} is off."

    def close(self) -> None:
        """End the watch that the magic has turned on, if any."""
        running, self.running = self.running, None
        self._stop_waiting()
        if self._wait_again in self.shell.events.callbacks["pre_run_cell"]:
            self.shell.events.unregister("pre_run_cell", self._wait_again)
        if self._steps is not None and not self._following:
            self._steps.remove()
            self._steps = None
        if running is not None:
            running.close()

    def close_all(self) -> None:
        """The same, and the watches among the user's variables."""
        self.close()
        for watch in self.own().values():
            watch.close()

    def own(self) -> dict[str, Any]:
        """The active watches that the user's own code has made, by the user's names."""
        module = sys.modules.get(self.home)  # not imported: there is none
        return {
            name: value
            for name, value in list(self.shell.user_ns.items())  # a click's thread reads while a cell writes
            if module is not None and issubclass(type(value), getattr(module, self.kind))
            if value.active and not name.startswith("_")
        }

    # -- what it says --------------------------------------------------------------------------------------------------

    def report(self, request: str) -> Report | None:
        """The report of the watch that is on; it ends first where the request is "off". None, and a message, while
        there is none."""
        __tracebackhide__ = True
        if self._waiting is not None and self.running is None:
            print(f"The {self.noun} waits: no loop has called a model yet.")
            if request == "off":
                self.close()
            return None
        if self.running is None:
            own = [f" (`{name}` is one of your own: {name}.report() shows its report.)" for name in self.own()]
            print(f"No {self.noun} is on. %{self.magic} on starts one.{''.join(own)}")
            return None
        running, outdated, subject = self.running, self._outdated(), self._subject(self.running)
        if request == "off":
            self.close()
        report: Report = running.report()
        notes = (*outdated, *report.notes) if request == "status" else report.notes
        question = f"%{self.magic} {request}"
        return dataclasses.replace(report, question=question, subject=subject, notes=notes)

    def _subject(self, watch: Any) -> str:
        """What is watched, with the optimizers that were taken since."""
        own = self.subject.subject.optimizers.values()
        new = [name for name, optimizer in watch.optimizers.items() if not any(optimizer is known for known in own)]
        if not new and own:
            return str(self.subject)
        return f"{self.subject}, optimizers taken at their first step: {', '.join(new) or 'none yet'}"

    def active(self) -> list[str]:
        """A line for each watch that is on, for %nbdebug status."""
        lines = [f"Active: the {self.noun} waits for a model. %{self.magic} off ends it."]
        lines *= self._waiting is not None and self.running is None
        if self.running is not None:
            lines.append(
                f"Active: the {self.noun} of {self.subject.things} ({self._summary(self.running)}). %{self.magic} "
                f"shows its report, %{self.magic} off ends it."
            )
            lines += self._outdated()
        return lines + [
            f"Active: the {self.noun} `{name}` ({self._summary(watch)}). {name}.close() ends it."
            for name, watch in self.own().items()
        ]

    def _summary(self, watch: Any) -> str:
        return f"it stopped watching: {watch.fault}" if watch.fault else ", ".join(self._counts(watch))

    def _outdated(self) -> list[str]:
        """A warning where the user's names stand for other objects than those that are watched."""
        names = self.subject.replaced(self.shell.user_ns)
        if not names:
            return []
        verb, old, new = ("was", "object", "one is") if len(names) == 1 else ("were", "objects", "ones are")
        return [
            f"{listed(names, most=9)} {verb} replaced or deleted after %{self.magic} on. The {self.noun} still watches "
            f"the old {old}: the new {new} not watched. Type %{self.magic} on again."
        ]

    # -- what was typed ------------------------------------------------------------------------------------------------

    def typed_options(self, args: Any) -> dict[str, Any]:
        """The options that were typed, by name; the others keep the function's own defaults."""
        values = {name: getattr(args, name) for name in self.options}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def check_options(self, args: Any, request: str) -> None:
        """Raises UsageError where options come with a request that takes none."""
        names = [f"--{name.replace('_', '-')}" for name in self.typed_options(args)]
        if names and request != "on":
            raise UsageError(
                f"%{self.magic} {request} takes no options: type {' and '.join(names)} after %{self.magic} on."
            )
