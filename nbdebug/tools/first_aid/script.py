"""`python -m nbdebug run train.py`: a script, unchanged, under the guard and the gradient watch.

The script runs as `__main__`, with its own arguments, folder and status. Nothing of it names a model: the watches begin
where a model with parameters to train is first called, for it and for the models beside it, and from then on nothing of
ours stands in its calls. All that nbdebug says goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import nbdebug
from nbdebug.arguments import discover
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.variables import frame_variables, named_parameters, user_variables
from nbdebug.report import Report
from nbdebug.text import count, figures, in_a_line


@dataclasses.dataclass
class ScriptRun:
    """What came of a script. status: its own exit status; guard, watch: None where no model was trained; error: what
    ended it; fault: why nothing could be watched, or ""."""

    status: int = 0
    guard: Any = None
    watch: Any = None
    error: BaseException | None = None
    explanation: Report | None = None
    fault: str = ""

    @property
    def reports(self) -> list[Report]:
        """Of what was seen, the most telling first."""
        known = [self.explanation] if self.explanation is not None else []
        return [*known, *(watch.report() for watch in (self.guard, self.watch) if watch is not None)]


def run_script(path: str, arguments: Sequence[str] = (), *, record: str = "", on_trip: str = "trace") -> ScriptRun:
    """Run a script as Python would, watched. record: the folder of the record ("": none). Its exceptions are written as
    Python writes them, with the explanation below. Raises FileNotFoundError where there is no such file."""
    script = pathlib.Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {path}")
    run = ScriptRun()
    with _as_main(script, arguments) as module, contextlib.ExitStack() as watches:
        begin = _beginning(run, watches, module, {"record": record or None, "on_trip": on_trip})
        watches.callback(_first_call(begin))
        try:
            exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
        except SystemExit as end:
            run.status = _status(end)
        except KeyboardInterrupt as end:
            run.status, run.error = 130, end
            _print_traceback(end)
        except BaseException as error:
            run.status, run.error = 1, error
            _print_traceback(error)
            if not getattr(error, "trip", None):  # the guard has shown its report
                run.explanation = nbdebug.explain(error, names=module.__dict__)
    return run


@contextlib.contextmanager
def _as_main(script: pathlib.Path, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """The script's own `__main__`, arguments and path of imports."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__, __cached__=None)
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"], sys.argv = module, [str(script), *arguments]
    sys.path[:] = [str(script.resolve().parent), *(p for p in sys.path if p != "")]
    try:
        yield module
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def _first_call(begin: Callable[[nn.Module], bool]) -> Callable[[], None]:
    """Call `begin` with each module that is called, until it is true; returns what ends that."""
    kind: Any = nn.Module
    original = kind.__call__

    def end() -> None:
        if kind.__call__ is called:
            kind.__call__ = original

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if kind.__call__ is called and begin(self):
            end()
        return original(self, *args, **kwargs)

    kind.__call__ = called
    return end


def _beginning(
    run: ScriptRun, watches: contextlib.ExitStack, module: types.ModuleType, options: dict[str, Any]
) -> Callable[[nn.Module], bool]:
    def begin(model: nn.Module) -> bool:
        """Watch this model and those beside it, where it is about to be trained; whether that is settled."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if not any(p.requires_grad for _, p in named_parameters(model)):
            return False
        try:
            names = {**module.__dict__, **_around(sys._getframe(2))}
            models = discover("model", user_variables(names))
            if not any(part is model for other in models.values() for part in other.modules()):
                models[type(model).__name__] = model
            trained = {n: m for n, m in models.items() if any(p.requires_grad for _, p in named_parameters(m))}
            optimizers = discover("optimizer", user_variables(names))
            run.guard = watches.enter_context(nbdebug.guard(trained, optimizers, **options))
            run.watch = watches.enter_context(nbdebug.grad_watch(trained, optimizers))
        except Exception as fault:  # the border: the script runs on, unwatched
            run.fault = in_a_line(fault)
        return True

    return begin


def _around(frame: Any) -> dict[str, Any]:
    """The variables of the user's functions that are running, the innermost last."""
    names: list[dict[str, Any]] = []
    while frame is not None:
        if kind_of(frame.f_code) == USER:
            names.append(frame_variables(frame))
        frame = frame.f_back
    return {name: value for own in reversed(names) for name, value in own.items()}


def _status(end: SystemExit) -> int:
    """As Python exits with it: a text is printed, and is 1."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """As Python prints it, without the frames of nbdebug: of a step that the guard has stopped, the script's alone."""
    told = traceback.TracebackException.from_exception(error)
    hidden = [os.path.dirname(nbdebug.__file__)]
    if getattr(error, "trip", None):
        hidden.append(os.path.dirname(torch.__file__))
    told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(tuple(hidden))]
    print("".join(told.format()), end="", file=sys.stderr)


def summary(run: ScriptRun, record: str) -> str:
    """A few lines on the whole run, below what it has printed itself; the reports of what is not well."""
    if run.fault:
        return f"nbdebug: the run was not watched ({run.fault})."
    if run.guard is None:
        return "nbdebug: no model was trained, so nothing was watched."
    losses = [line.loss for line in run.guard.lines if line.loss is not None]
    last = f", last loss {figures(losses[-1])}" if losses else ""
    bad = f", {run.guard.bad} of them not finite" if run.guard.bad else ""
    lines = [f"nbdebug: {count(run.guard.steps, 'step')} watched{bad}{last}."]
    if record:
        lines.append(f"The record: {record} (python -m nbdebug open {record})")
    for report in (run.guard.report(), run.watch.report()):
        if not report.ok and run.error is None:
            return "\n".join([*lines, "", str(report)])
    return "\n".join(lines)


def record_path(script: str) -> str:
    """Where the record of a script goes by itself: train.nbdebug, train-2.nbdebug, …; of several ranks the same."""
    stem = pathlib.Path(script).stem
    if "RANK" in os.environ:
        return f"{stem}.nbdebug"
    number = 1
    while os.path.exists(path := f"{stem}{'' if number == 1 else f'-{number}'}.nbdebug"):
        number += 1
    return path
