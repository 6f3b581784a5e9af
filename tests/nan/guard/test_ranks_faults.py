"""A fault of the guard's own in one process: all guards leave together, none waits, training goes on in all."""

from __future__ import annotations

import pytest
import torch.distributed

from tests.nan.guard.kinds import changed
from tests.nan.guard.processes import Played, play
from tests.nan.guard.ranks_faults import CHOSEN, IN_A_TRIP

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
OTHERS = "OtherGuardFailed: the guard of process 1 has stopped"


def short(places: list[str]) -> list[str]:
    return [place.rpartition(".guard.")[2] for place in places]


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_faults", tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("place", CHOSEN, ids=short(CHOSEN))
def test_in_healthy_steps(played: Played, place: str) -> None:
    (raised, fault, moved), (raised_there, fault_there, moved_there) = (t[place] for t in played["in_healthy_steps"])
    assert raised == 0 < raised_there
    assert "planted in" in fault_there and fault.startswith(OTHERS)
    assert not moved and not moved_there, "trained as without a guard"


def test_told_once_in_each_process(played: Played) -> None:
    here, there = played.warned("in_healthy_steps")
    assert len(here) == len(there) == len(CHOSEN)
    assert all("training itself goes on" in said for said in (*here, *there))


@pytest.mark.parametrize("on_trip", ["trace", "record", "skip"])
@pytest.mark.parametrize("place", IN_A_TRIP, ids=short(IN_A_TRIP))
def test_in_a_bad_step(played: Played, place: str, on_trip: str) -> None:
    (_, fault, stopped, as_before), there = (told[f"{place}, {on_trip}"] for told in played["in_a_bad_step"])
    raised_there, fault_there, stopped_there, as_before_there = there
    assert stopped == (on_trip == "trace") and as_before, "the other process drops the step in any case"
    assert (fault == "") == (on_trip == "trace" or not fault_there) and (fault == "" or fault.startswith(OTHERS))
    if "BufferBackup.restore" not in place:  # without it nothing can be put back
        assert stopped_there == stopped and as_before_there
    assert not raised_there or fault_there or "restored" in place  # a replay that can't be made is no fault


def test_told_where_processes_may_have_parted(played: Played) -> None:
    """What rank 1 could not put back, or drop, is other than what the others have."""
    assert any("go on from a checkpoint" in said for said in played.warned("in_a_bad_step")[1])
    assert not any("checkpoint" in said for said in played.warned("in_healthy_steps")[1])


def test_while_a_grad_scaler_skips_steps(played: Played) -> None:
    here, there = played["with_a_grad_scaler"]
    for place, (_, fault, kept) in here.items():
        raised_there, fault_there, kept_there = there[place]
        assert raised_there and "planted in" in fault_there and fault.startswith(OTHERS), place
        assert not [name for name in changed(kept, kept_there) if "running" not in name], place


def test_with_a_closure(played: Played) -> None:
    here, there = played["with_a_closure"]
    for place, (_, fault) in here.items():
        assert there[place][0] and "planted in" in there[place][1] and fault.startswith(OTHERS), place


def test_another_guard_afterwards(played: Played) -> None:
    here, there = played["what_follows"]
    assert here["first"].startswith(OTHERS) and "planted in" in there["first"]
    assert here["bad"] == there["bad"] == (1,)
