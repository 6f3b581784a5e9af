"""Does a step do the same when it is called again? Two runs from the same state are compared, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbdebug.observe.rerun import Rerun

_ELSEWHERE = (
    "something else that it reads changed in between (a counter, a file, a generator of random numbers, a "
    "tensor that no named model or optimizer holds), or an operation is not deterministic on this device"
)


class StepDoesNotRepeat(RuntimeError):
    """Two runs of the step from the same state differ. `reasons` says in what, in plain words, the first one first."""

    def __init__(self, reasons: list[str]):
        self.reasons = tuple(reasons)
        super().__init__(
            f"This step does not repeat: {'; '.join(reasons)}. A search by replay needs a step that does the same each "
            "time it is called: take the batch outside of it, and draw random numbers with torch, numpy or random, "
            'whose state is restored for each replay. Or use strategy="trace", which runs the step once.'
        )


def differences(first: Rerun, second: Rerun, random_first: Any, random_second: Any) -> Iterator[str]:
    """What differs between two runs, in the order in which it would be the cause of the rest."""
    if second.error is not None:
        yield f"the second time it raised {_said(second.error)}"
    for n, (a, b) in enumerate(zip(first.inputs, second.inputs, strict=False)):
        if a != b:
            yield "the model was given another batch the second time" + (f" (in its call {n + 1})" if n else "")
            break
    if random_first != random_second and second.error is None:
        yield "the random numbers differ: it drew more of them, or fewer, or set a new seed"
    if second.error is None:
        yield from _other_calls(first, second) or _other_results(first, second)


def _said(error: Exception) -> str:
    if isinstance(error, StopIteration):
        return "StopIteration: the iterator that it takes its batches from had run out"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _other_calls(first: Rerun, second: Rerun) -> list[str]:
    if [c.module for c in first.calls] == [c.module for c in second.calls]:
        return []
    counts = f"{len(first.calls)} calls, then {len(second.calls)}"
    return [f"it called other modules the second time, or in another order ({counts})"]


def _other_results(first: Rerun, second: Rerun) -> list[str]:
    """The first result that differs; after another batch that is no news."""
    if first.inputs != second.inputs:
        return []
    if [e.what for e in first.events] != [e.what for e in second.events]:
        return ["backward was called another number of times"]
    for a, b in zip(first.events, second.events, strict=True):
        names = sorted(n for n in {**a.prints, **b.prints} if a.prints.get(n) != b.prints.get(n))
        if names:
            which = f"the {a.what}" + (f" of {', '.join(names[:3])}" if a.what == "gradients" else "")
            given = " although the model was given the same batch" if first.inputs else ""
            return [f"{which} came out differently{given}: {_ELSEWHERE}"]
    return []
