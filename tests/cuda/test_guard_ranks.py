"""Two processes with a GPU each, through NCCL: their devices decide alike, and nothing is read.

The scenes are those of tests/nan/guard; fused optimizers take the decision on the device here, the host hears later.
"""

from __future__ import annotations

import pytest
import torch

from tests.nan.guard.kinds import changed
from tests.nan.guard.processes import Played, play
from tests.nan.guard.ranks_ddp import BAD, FAULTS, POLICIES, STEPS
from tests.nan.guard.test_ranks import BAD_RANKS, FOUND, GRADIENT, LOSS, named, weights

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LATE = (2,)


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_ddp", tmp_path_factory.mktemp("ddp"), device="cuda", seconds=240)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_fsdp", tmp_path_factory.mktemp("fsdp"), device="cuda", seconds=240)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_cuda", tmp_path_factory.mktemp("own"), device="cuda", seconds=240)


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Played:
    return play(
        "tests.nan.guard.ranks_faults",
        tmp_path_factory.mktemp("faults"),
        device="cuda",
        seconds=240,
        only="in_healthy_steps,what_follows",
    )


@pytest.mark.parametrize("on_trip", POLICIES)
@pytest.mark.parametrize("kind", FAULTS)
def test_all_decide_alike_and_stay_alike(played: Played, kind: str, on_trip: str) -> None:
    one, other = (outcome[f"{on_trip}, {kind}"] for outcome in played["trips"])
    assert not changed(weights(one["after"]), weights(other["after"]))
    assert one["outcomes"] == other["outcomes"] and one["fault"] == other["fault"] == ""
    for told in (one, other):
        assert told["outcomes"][:BAD] == ["ok"] * BAD
        assert told["outcomes"][BAD] == ("tripped" if on_trip in ("trace", "raise") else "skipped")
        if on_trip in ("trace", "raise"):
            step, reason, late = told["error"]
            assert (step, reason) == (BAD, "gradient" if kind == "gradient of 1" else "loss") and late in LATE
            assert not changed(told["before"], told["after"])
        else:
            assert told["error"] is None and told["steps"] == STEPS


@pytest.mark.parametrize("kind", FAULTS)
def test_every_report_names_the_rank_that_was_bad_first(played: Played, kind: str) -> None:
    for rank, outcome in enumerate(played["trips"]):
        stopped, ((_, _, bad, noted),) = outcome[f"trace, {kind}"], outcome[f"record, {kind}"]["trips"]
        for report in (stopped["report"], noted):
            assert named(report) == FOUND[kind], f"told by rank {rank}"
        assert stopped["bad"] == bad == BAD_RANKS[kind]


@pytest.mark.parametrize("kind", ["loss of 1", "gradient of 1"])
def test_a_dropped_step_is_as_if_it_had_not_been(played: Played, kind: str) -> None:
    for outcome, expected in zip(played["trips"], played["dropped"], strict=True):
        assert not changed(expected[kind], outcome[f"skip, {kind}"]["after"])


def test_one_all_reduce_a_step_and_the_same_bits(played: Played) -> None:
    for outcome in played["healthy"]:
        assert outcome["talked"] == outcome["steps"] == STEPS
        assert not changed(outcome["bare"], outcome["guarded"])


def test_located_by_hand_nobody_waits(played: Played) -> None:
    here, there = played["by_hand_in_one_process"]
    assert named(there) == [(1, GRADIENT)] and [code for code, *_ in here["findings"]] == ["nan/not-located"]


def test_a_guard_of_the_model_inside_the_ddp(played: Played) -> None:
    for told in (given for outcome in played["the_model_inside"] for given in outcome):
        ((step, bad, report),) = told["trips"]
        assert (step, bad) == (BAD, (1,)) and named(report) == [(1, LOSS)]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_gradients_accumulated_without_sync(played: Played, kind: str) -> None:
    for told in played["many_batches_a_step"]:
        assert told[kind]["error"][:2] == (BAD, kind) and told[kind]["bad"] == (1,)
        assert named(told[kind]["report"]) == [(1, LOSS if kind == "loss" else GRADIENT)]
        assert not changed(told[kind]["before"], told[kind]["after"])


def test_clipped_as_torch_does_it(played: Played) -> None:
    for told in played["clipped_and_dropped"]:
        assert told["clipped"]["norms"] == pytest.approx(told["norms"], rel=1e-5)
        assert told["clipped"]["clipped"] == STEPS and "above" in told["above"]["outcomes"]
    one, other = played["clipped_and_dropped"]
    assert one["above"]["outcomes"] == other["above"]["outcomes"]
    assert not changed(weights(one["clipped"]["after"]), weights(other["clipped"]["after"]))


def test_with_a_grad_scaler(played: Played) -> None:
    for told in played["scaled"]:
        assert told["steep"]["outcomes"] == ["ok"] * BAD + ["scaler"] + ["ok"] * (STEPS - BAD - 1)
        assert told["steep"]["scale"] == 2.0**15 and told["steep"]["trips"] == []
        assert told["loss"]["error"][:2] == (BAD, "loss") and told["loss"]["bad"] == (1,)
        assert not changed(told["loss"]["before"], told["loss"]["after"])


@pytest.mark.parametrize(
    ("name", "code", "rank"),
    [
        ("a_statistic_of_one_process", "nan/running-stats-nonfinite", 1),
        ("with_a_closure", "nan/log-of-nonpositive", 1),
        ("an_evaluation_in_one_process", "nan/log-of-nonpositive", 1),
        ("losses_averaged_for_a_log", "nan/log-of-nonpositive", 1),
        ("in_half_precision", "nan/optimizer-eps-underflow", 0),
        ("a_model_that_talks", "nan/not-located", 1),
    ],
)
def test_other_trips(played: Played, name: str, code: str, rank: int) -> None:
    for told in played[name]:
        first = told["report"]["findings"][0]
        assert first[:2] == (code, rank)
        assert not changed(told["before"], told["after"])


def test_a_process_that_ends_early_and_joins(played: Played) -> None:
    here, there = played["uneven_batches"]
    assert (here["healthy"]["steps"], there["healthy"]["steps"]) == (STEPS, 2)
    assert (here["gradient of 0"]["skipped"], there["gradient of 0"]["skipped"]) == (1, 0)


def test_a_guard_in_one_process_only_decides_alone(played: Played) -> None:
    here, there = played["a_guard_in_one_process_only"]
    assert here == {"same": True, "steps": STEPS} and there["same"]


@pytest.mark.parametrize("kind", ["second", "second, replicated", "first", "first, flat"])
def test_sharded_parameters(sharded: Played, kind: str) -> None:
    for told, norms, whole in zip(sharded["sharded"], sharded["norms"], sharded["unclipped"], strict=True):
        assert norms[kind]["guard"]["norms"] == pytest.approx(norms[kind]["torch"], rel=1e-5)
        assert whole[kind]["norms"] == pytest.approx(whole["one process"], rel=1e-2)
        for fault, reason in {"loss of 1": "loss", "gradient of 1": "gradient"}.items():
            stopped, skipped = told[f"trace, {kind}, {fault}"], told[f"skip, {kind}, {fault}"]
            assert stopped["error"] == (BAD, reason) and stopped["same"] and stopped["fault"] == ""
            assert stopped["bad"] == ((1,) if reason == "loss" else ())
            assert skipped["outcomes"][BAD] == "skipped" and skipped["steps"] == STEPS


def test_statistics_of_all_batches(own: Played) -> None:
    """Both losses are NaN; run by itself, only the batch of rank 1 is."""
    for told in own["shared_statistics"]:
        assert told["error"][:2] == (BAD, "loss") and told["bad"] == (1,)
        ((code, rank, op, phase, text, _),) = told["report"]["findings"]
        assert (code, rank, op, phase) == ("nan/log-of-nonpositive", 1, "log", "forward") and "the log at fault" in text
        assert any("Rank 0 got it from another process" in note for note in told["report"]["notes"])
        assert not changed(told["before"], told["after"])


def test_batches_that_ddp_moves_to_the_device(own: Played) -> None:
    for told in own["batches_on_the_cpu"]:
        assert named(told["report"]) == [(1, LOSS)]


def test_healthy_steps_read_nothing(own: Played) -> None:
    for told in own["nothing_is_read"]:
        assert told["steps"] == 30 and told["fault"] == ""


def test_its_cost_is_told(own: Played) -> None:
    for rank, told in enumerate(own["what_it_costs"]):
        print(
            f"rank {rank}: {told['bare']:.2f} ms a step, {told['guarded']:.2f} ms guarded, "
            f"ratio {told['guarded'] / told['bare']:.4f}"
        )
        assert told["bare"] > 0


def test_a_fault_of_one_guard_lets_all_leave(faults: Played) -> None:
    here, there = faults["in_healthy_steps"]
    for place, (raised, fault, moved) in there.items():
        if raised:
            assert "planted in" in fault and here[place][1].startswith("OtherGuardFailed"), place
        assert not moved and not here[place][2], place
    assert sum(bool(raised) for raised, *_ in there.values()) > 8
    assert faults["what_follows"][0]["bad"] == faults["what_follows"][1]["bad"] == (1,)
