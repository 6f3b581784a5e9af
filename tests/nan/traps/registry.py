"""What a trap is: a small program written by hand, with the truth about it.

    @fault("log-of-nonpositive", op="log", module="head", rows=(1,))
    def name(): ...                      # gives model, optimizer and step; the line at fault ends in "# here"

    @silent()                            # nothing is wrong: an answer is a false alarm
    @silent(note="skipped")              # nothing is wrong, but the report should say so in a note
    @fault(..., raises=ValueError)       # the user's own exception passes through and carries the report

Any value of a list is right; a part that is left out is not judged.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from tests.nan.judge import Truth, judge

TRAPS: dict[str, Trap] = {}


@dataclasses.dataclass(frozen=True)
class Trap:
    name: str
    build: Callable[[], SimpleNamespace]
    truth: Truth | None
    raises: type[BaseException] | None = None
    note: str = ""
    steps: int = 3

    def lines(self) -> set[int]:
        """The numbers of the lines that end in "# here"."""
        text, first = inspect.getsourcelines(self.build)
        return {first + i for i, line in enumerate(text) if line.rstrip().endswith("# here")}

    def judge(self, answer: dict[str, Any]) -> dict[str, bool]:
        """{part: right}."""
        right = judge(self.truth, answer, "")
        marked = self.lines()
        if marked and self.truth and "phase" in right:
            right["line"] = answer["file"] == inspect.getsourcefile(self.build) and bool(
                marked & self.span(answer["line"])
            )
        return right

    def span(self, line: int | None) -> set[int]:
        """The lines of the statement that a line belongs to."""
        if line is None:
            return set()
        nodes = [
            n for n in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(self.build)))) if isinstance(n, ast.stmt)
        ]
        spans = [(n.lineno, _end(n)) for n in nodes if n.lineno <= line <= _end(n)]
        first, last = min(spans, key=lambda span: span[1] - span[0], default=(line, line))
        return set(range(first, last + 1))


def _end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return body[0].lineno - 1 if body else node.end_lineno


def _tuple(value: Any) -> tuple | None:
    if value is None:
        return None
    return tuple(value) if isinstance(value, (list, tuple, set)) else (value,)


def fault(
    codes: str | None,
    *,
    phase: Any = "forward",
    op: Any = None,
    module: Any = "",
    rows: Iterable[int] | None = None,
    step: Any = 0,
    raises: type[BaseException] | None = None,
    steps: int = 3,
    batch: int | None = None,
) -> Callable:
    """A trap with something wrong in it. codes: words, without the chapter."""
    told = Truth(
        tuple(f"nan/{c}" for c in codes.split()) if codes else None,
        _tuple(phase),
        _tuple(module),
        _tuple(op),
        None,
        _tuple(rows),
        _tuple(step),
        batch,
    )

    def keep(build: Callable) -> Callable:
        TRAPS[build.__name__] = Trap(build.__name__, build, told, raises, steps=steps)
        return build

    return keep


def silent(note: str = "", steps: int = 3, raises: type[BaseException] | None = None) -> Callable:
    """A trap with nothing wrong in it."""

    def keep(build: Callable) -> Callable:
        TRAPS[build.__name__] = Trap(build.__name__, build, None, raises, note, steps)
        return build

    return keep


def train(
    model: torch.nn.Module | None,
    loss_of: Callable[[int], torch.Tensor],
    parameters: Any = None,
    optimizer: Any = None,
    **more: Any,
) -> SimpleNamespace:
    """The plainest loop: `loss_of(i)` is the loss of step i."""
    parameters = list(model.parameters()) if parameters is None else parameters
    optimizer = optimizer or torch.optim.SGD(parameters, lr=1e-3)
    count = iter(range(100))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(next(count))
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, parameters=parameters, **more)
