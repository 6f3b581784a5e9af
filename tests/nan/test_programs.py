"""500 random programs with one planted fault, named in every part; 500 healthy ones, passed over in silence."""

from __future__ import annotations

import pytest
import torch

from tests.nan import programs, verify

CHUNK = 25
FIRST_SEEDS = range(0, 500, CHUNK)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failures(first: int, healthy: bool) -> str:
    results = [programs.examine(seed, healthy) for seed in range(first, first + CHUNK)]
    return "\n".join(str(result) for result in results if not result.ok)


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_every_part_of_a_planted_fault_is_named(first: int):
    wrong = failures(first, healthy=False)
    assert not wrong, wrong


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_healthy_programs_are_passed_over_in_silence(first: int):
    wrong = failures(first, healthy=True)
    assert not wrong, wrong


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_the_truth_holds_in_plain_torch(seed: int):
    """The exam is examined too: no nbdebug here."""
    assert not verify.verify(programs.make(seed))
    assert not verify.verify(programs.make(seed, healthy=True))
    assert not verify.prove(seed)


def test_a_program_is_a_pure_function_of_its_seed():
    assert programs.make(7) == programs.make(7)
    assert programs.make(7).source != programs.make(8).source


def test_the_programs_are_as_varied_as_they_claim():
    made = [programs.make(seed) for seed in range(500)]
    phases = [program.truth.phase[0] for program in made]
    assert {"forward", "backward", "input", "parameter"} == set(phases)
    assert min(phases.count(phase) for phase in set(phases)) > 30
    assert {program.truth.step[0] for program in made} == set(range(8))
    assert len({program.truth.codes[0] for program in made}) >= 14
    assert sum("model = None" in program.source for program in made) > 30
    assert sum("optimizer.step(closure)" in program.source for program in made) > 30
    assert sum("torch.float16" in program.source for program in made) > 20
    assert sum("use_reentrant=True" in program.source for program in made) > 30
