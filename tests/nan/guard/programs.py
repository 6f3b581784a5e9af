"""The random programs of `tests.nan.programs`, run under the guard: `python -m tests.nan.guard.programs --seeds 0:200`.

The answer is what a guarded run gives: the report of its NonFiniteStep, or the guard's own. It is judged as
`nan_trace`'s is, and further: "intact", the bad step changed nothing; "sound", the guard had no fault of its own.
`--healthy` takes programs without a fault; there silence is right, and the same bits as in a bare run ("same").
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.nan.judge import Truth, answer_of, judge
from tests.nan.plan import Program
from tests.nan.programs import Result, load, make, score


def examine(seed: int, healthy: bool = False, on_trip: str = "trace") -> Result:
    """Run the program of a seed under the guard."""
    program = make(seed, healthy)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            answer, more = guarded(load(program, folder), on_trip)
            if healthy:
                more["same"] = not changed(bare(load(program, folder)), more.pop("after"))
        except Exception:
            answer, more = {"findings": 0, "error": traceback.format_exc(limit=-4)}, {"sound": False}
    more.pop("after", None)
    truth = beyond_replay(program) or program.truth
    return Result(seed, judge(truth, answer, program.source) | more, truth, answer)


def beyond_replay(program: Program) -> Truth | None:
    """A backward of the user's own outside of any module is not among the ops that the guard remembers: it can't be run
    again, and the right answer is to say so."""
    outside = program.about.split(";")[1].strip() in ("loss", "none")
    if program.fault is None or program.truth is None or not outside or not program.fault.name.startswith("own "):
        return None
    return Truth(("nan/not-located",), (None,), step=program.truth.step)


def bare(made: SimpleNamespace) -> dict[str, Any]:
    for _ in range(made.steps):
        made.step()
    return state(made)


def state(made: SimpleNamespace) -> dict[str, Any]:
    """All that must be as before."""
    with _disable_current_modes():
        found = kept([made.model] if made.model is not None else [], [made.optimizer])
        return found | {
            f"tensor {i}": t.detach().clone().numpy().tobytes() for i, t in enumerate(getattr(made, "tensors", []))
        }


def guarded(made: SimpleNamespace, on_trip: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the answer, further parts): its steps, or fewer where the guard stops one."""
    models = {} if made.model is None else made.model
    with nbdebug.guard(models, made.optimizer, on_trip=on_trip) as guard:
        for _ in range(made.steps):
            before = state(made)
            try:
                made.step()
            except nbdebug.NonFiniteStep as error:
                report = error.report or error.trip.locate()
                return answer_of(report), {"intact": not changed(before, state(made)), "sound": not guard.fault}
    return answer_of(guard.report()), {"sound": not guard.fault, "after": state(made)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nan.guard.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:200", help="first:end, or numbers with commas")
    parser.add_argument("--healthy", action="store_true", help="programs without a fault")
    parser.add_argument("--quiet", action="store_true", help="the score and the seeds only")
    given = parser.parse_args(arguments)
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end)) if end else [int(s) for s in given.seeds.split(",")]
    began, results = time.perf_counter(), []
    for seed in seeds:
        results.append(examine(seed, given.healthy))
        if not results[-1].ok and not given.quiet:
            print(f"[{make(seed, given.healthy).about}]", results[-1], flush=True)
    failed = [r for r in results if not r.ok]
    print(score(results))
    print(f"{time.perf_counter() - began:.0f} s; failing seeds: {','.join(str(r.seed) for r in failed) or 'none'}")
    kinds = Counter(make(r.seed, given.healthy).about.split(";")[0] for r in failed)
    print("by kind:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none")
    return bool(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
