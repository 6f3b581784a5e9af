"""When to stop: an expression, or a function of the layer's values.

Both see `inp`, `out`, `grad`, `module`, `name` and `step`. An expression also sees the locals of the layer's forward,
and the variables of whoever set the stop. The names that it uses decide when it is evaluated: before the forward runs
where the input is enough, else when it returns.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nbdebug.observe.tensors import unobserved


class BreakpointHook:
    """A deepcopy or a pickle of the model has one that does nothing, and is loaded without nbdebug."""

    def __init__(self, call: Callable[..., None]):
        self.call = call

    def __call__(self, *args: Any) -> None:
        __tracebackhide__ = True
        if not torch.compiler.is_compiling():  # a compiler that reads this finds nothing to do
            self.call(*args)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_fake(*values: Any) -> bool:
    """Whether the model only runs on fake tensors, without numbers."""
    return any(isinstance(value, FakeTensor) for value in values) or any(
        isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()
    )


def only_value(values: Any) -> Any:
    """A tuple with one entry that is not None as that entry; all else as it is."""
    if type(values) is not tuple:
        return values
    there = [value for value in values if value is not None]
    return there[0] if len(there) == 1 else values


NAMES = ("inp", "out", "grad", "module", "name", "step")
_EARLY = frozenset({"inp", "module", "name", "step"})


class _ThreadState(threading.local):
    evaluating = False


_here = _ThreadState()


def evaluating() -> bool:
    """Whether this thread evaluates a condition: if that calls the model, it is no step."""
    return _here.evaluating


class Condition:
    """`when` as `stop_at` takes it. caller: the frame whose variables an expression sees; its local ones with
    their values of now, its global ones with those at the evaluation.

    Raises ValueError for what can't be a condition, SyntaxError for an expression that is none."""

    def __init__(
        self,
        when: str | Callable[..., Any] | None,
        phase: str,
        caller: FrameType | None,
        variables: dict[str, Any] | None = None,
    ):
        self.when, self.warned = when, False
        self._globals: Mapping[str, Any] = variables if variables is not None else caller.f_globals if caller else {}
        self._locals: dict[str, Any] = {}
        self._code: CodeType | None = None
        if isinstance(when, str):
            self._code = _compiled(when)
            self.wanted = _names_in(self._code)
            if caller is not None and caller.f_locals is not caller.f_globals:
                self._locals = {name: caller.f_locals[name] for name in self.wanted if name in caller.f_locals}
        else:
            self.wanted = frozenset() if when is None else _parameters_of(when, phase)
        if phase == "forward" and "grad" in self.wanted:
            raise ValueError(
                f'`grad` exists with phase="backward" only; in a forward, when may use inp, out, module, '
                f"name and step; got {self}"
            )
        self._late = any(not self._known_before(name) for name in self.wanted)

    def __str__(self) -> str:
        if isinstance(self.when, str):
            return repr(self.when)
        return "always" if self.when is None else f"the function {getattr(self.when, '__name__', 'given')}"

    def late(self, code: CodeType | None) -> bool:
        """Whether it needs what a forward makes. code: the forward's own, whose locals go before other variables."""
        if self._late or code is None or self._code is None:
            return self._late
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        return any(name in local and name not in NAMES for name in self.wanted)

    def _known_before(self, name: str) -> bool:
        return name in _EARLY or (
            name not in NAMES
            and self._code is not None
            and (name in self._locals or name in self._globals or hasattr(builtins, name))
        )

    def holds(self, values: Mapping[str, Any], frame: FrameType | None = None) -> bool:
        """Whether to stop. An error in it is printed once, and does not stop the training."""
        if self.when is None:
            return True
        _here.evaluating = True
        try:
            with unobserved():
                return bool(self._answer(values, frame))
        except Exception as wrong:  # the user's own expression may raise anything
            self._warn(wrong, values)
            return False
        finally:
            _here.evaluating = False

    def _answer(self, values: Mapping[str, Any], frame: FrameType | None) -> Any:
        if self._code is None:
            assert callable(self.when)
            return self.when(**{name: values.get(name) for name in self.wanted})
        of_forward = frame.f_locals if frame is not None and frame.f_locals is not frame.f_globals else {}
        scope: dict[str, Any] = {}
        for name in self.wanted:  # one flat namespace: a comprehension in an expression sees no other
            for names in (values, of_forward, self._locals, self._globals):
                if name in names:
                    scope[name] = names[name]
                    break
        return eval(self._code, {"__builtins__": builtins, **scope})

    def _warn(self, wrong: Exception, values: Mapping[str, Any]) -> None:
        """stderr, and no warning: a filter that turns warnings into errors would end the training."""
        if self.warned:
            return
        self.warned = True
        print(
            f"nbdebug: the condition {self} of a stop could not be evaluated at `{values.get('name', '')}` (step "
            f"{values.get('step')}): {type(wrong).__name__}: {wrong}. It does not stop there, and training continues. "
            "This message is shown once.",
            file=sys.stderr,
        )


def _compiled(text: str) -> CodeType:
    try:
        return compile(text.strip(), "<when>", "eval")
    except (SyntaxError, ValueError) as wrong:  # ValueError: a null byte
        message = wrong.msg if isinstance(wrong, SyntaxError) else wrong
        raise SyntaxError(
            f"when is a Python expression, such as 'not out.isfinite().all()'; got {text!r}: {message}"
        ) from None


def _names_in(code: CodeType) -> frozenset[str]:
    """Every name that the code looks up, functions in it included. Some are attributes, which does no harm."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _parameters_of(when: Any, phase: str) -> frozenset[str]:
    if not callable(when):
        raise ValueError(f"when is an expression or a function of {', '.join(NAMES)}; got {when!r}")
    parameters = inspect.signature(when).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(NAMES) - ({"grad"} if phase == "forward" else set())
    requested = [
        p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and (p.name in NAMES or p.default is p.empty)
    ]
    unknown = [name for name in requested if name not in NAMES]
    if unknown:
        raise ValueError(
            f"A function passed as when may have the parameters {', '.join(NAMES)}; "
            f"got one with {', '.join(map(repr, unknown))}"
        )
    return frozenset(requested)
