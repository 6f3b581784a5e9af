"""Random programs and hand-written traps under the guard: stopped, named as by `nan_trace`, or passed in silence.

A sample of the programs; `python -m tests.nan.guard.programs --seeds 0:1000` runs more (and `--healthy`).
"""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr

import pytest
import torch

import nbdebug
from nbdebug.tools.nan.nan_trace import StepArguments
from tests.nan.guard import programs
from tests.nan.guard.kinds import changed, kept
from tests.nan.judge import answer_of
from tests.nan.leftovers import assert_nothing_is_left
from tests.nan.traps import TRAPS, Trap

CHUNK = 10


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert_nothing_is_left()


def failures(first: int, healthy: bool) -> str:
    results = [programs.examine(seed, healthy) for seed in range(first, first + CHUNK)]
    return "\n".join(str(result) for result in results if not result.ok)


@pytest.mark.parametrize("first", range(0, 40, CHUNK))
def test_a_planted_fault_is_stopped_and_named(first: int) -> None:
    wrong = failures(first, healthy=False)
    assert not wrong, wrong


@pytest.mark.parametrize("first", range(0, 20, CHUNK))
def test_healthy_programs_are_passed_over_in_silence(first: int) -> None:
    wrong = failures(first, healthy=True)
    assert not wrong, wrong


BEYOND = {
    "the_users_tensor_hook": "a hook on a tensor is no op",
    "memory_never_written": "what lay in memory can't be had again",
    "into_a_given_tensor": "it writes before the model is called to what is not the step's own",
    "a_step_too_far": "the update itself overflows in float32, where no copy is kept: seen when the next step begins",
}
"""Where the guard stops the run and says less than `nan_trace` does, and why."""


def watch(trap: Trap) -> tuple[nbdebug.Report | None, list[str], str]:
    """(the report of a trip, what the bad step changed, a fault of the guard's own)."""
    made = trap.build()
    models = {"model": made.model} if isinstance(made.model, torch.nn.Module) else made.model or {}
    optimizers = made.optimizer or StepArguments.of(made.step, models, None).optimizers
    if not optimizers:
        pytest.skip("it has no optimizer, or makes it in the step")
    stepping = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers.values())
    held = list(models.values()) if len(stepping) == 1 else []  # else another optimizer may have stepped well before
    with redirect_stderr(io.StringIO()), nbdebug.guard(models, optimizers) as guard:
        for _ in range(trap.steps):
            before = kept(held, stepping[-1:])
            try:
                made.step()
            except nbdebug.NonFiniteStep as error:
                return error.report, changed(before, kept(held, stepping[-1:])), guard.fault
            except StopIteration:
                break
    return None, [], guard.fault


@pytest.mark.parametrize("name", [n for n, trap in TRAPS.items() if trap.raises is None])
def test_trap(name: str) -> None:
    trap = TRAPS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report, moved, fault = watch(trap)
    assert not fault and not moved
    answer = {"findings": 0} if report is None else answer_of(report)
    if name in BEYOND:
        assert answer["findings"] == 1
        return
    right = trap.judge(answer)
    assert all(right.values()), f"{right}\nexpected {trap.truth} in lines {sorted(trap.lines())}\ngot {answer}"


@pytest.mark.parametrize("name", [n for n, trap in TRAPS.items() if trap.raises is not None])
def test_a_trap_with_an_exception_of_the_users_own(name: str) -> None:
    trap = TRAPS[name]
    with pytest.raises(trap.raises) as caught:
        watch(trap)
    assert not isinstance(caught.value, nbdebug.NonFiniteStep)
