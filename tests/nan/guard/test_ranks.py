"""Two processes that train one model with DDP: they decide alike, none waits for ever, each report names the rank."""

from __future__ import annotations

import itertools
import math

import pytest
import torch.distributed

from tests.nan.guard.kinds import changed
from tests.nan.guard.processes import Played, play
from tests.nan.guard.ranks_ddp import BAD, FAULTS, POLICIES, STEPS

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
LOSS = (
    "nan/log-of-nonpositive",
    "log",
    "forward",
    "return -torch.log(level * self.weights[i]).mean()  # the loss at fault",
    (3,),
)
GRADIENT = (
    "nan/sqrt-grad-at-zero",
    "sqrt",
    "backward",
    "return torch.sqrt(level * self.weights[i]).mean()  # the gradient at fault",
    (3,),
)
FOUND = {
    "loss of 1": [(1, LOSS)],
    "loss of 0": [(0, LOSS)],
    "gradient of 1": [(1, GRADIENT)],
    "both": [(0, LOSS)],
    "later and first": [(1, LOSS), (0, GRADIENT)],
}
"""What each report says, by the faults: the rank and the place; what was bad first comes first."""
BAD_RANKS = {"loss of 1": (1,), "loss of 0": (0,), "gradient of 1": (1,), "both": (0, 1), "later and first": (0, 1)}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_ddp", tmp_path_factory.mktemp("ddp"))


def weights(kept: dict, what: str = "model") -> dict:
    """Parameters and optimizer state, which all processes have alike; not their running statistics."""
    return {k: v for k, v in kept.items() if not any(word in k for word in ("running", "tracked"))}


def named(report: dict) -> list:
    return [(rank, (code, *rest)) for code, rank, *rest in report["findings"]]


@pytest.mark.parametrize("on_trip", POLICIES)
@pytest.mark.parametrize("kind", FAULTS)
def test_all_decide_alike_and_stay_alike(played: Played, kind: str, on_trip: str) -> None:
    one, other = (outcome[f"{on_trip}, {kind}"] for outcome in played["trips"])
    assert not changed(weights(one["after"]), weights(other["after"])), "the same parameters everywhere"
    assert one["outcomes"] == other["outcomes"] and one["norms"][:BAD] == other["norms"][:BAD]
    assert one["fault"] == other["fault"] == ""
    for told in (one, other):
        assert told["outcomes"][:BAD] == ["ok"] * BAD
        assert told["outcomes"][BAD] == ("tripped" if on_trip in ("trace", "raise") else "skipped")
        assert not math.isfinite(told["norms"][BAD])
        if on_trip in ("trace", "raise"):
            assert told["error"] == (BAD, "gradient" if kind == "gradient of 1" else "loss", 0)
            assert not changed(told["before"], told["after"]), "buffers of this process too"
        else:
            assert told["error"] is None and (told["steps"], told["skipped"]) == (STEPS, 1)


@pytest.mark.parametrize("kind", FAULTS)
def test_every_report_names_the_rank_that_was_bad_first(played: Played, kind: str) -> None:
    for rank, outcome in enumerate(played["trips"]):
        stopped, recorded = outcome[f"trace, {kind}"], outcome[f"record, {kind}"]
        ((_, _, bad, noted),) = recorded["trips"]
        for report in (stopped["report"], noted):
            assert named(report) == FOUND[kind], f"told by rank {rank}"
            assert f"Of 2 processes, rank {FOUND[kind][0][0]} was bad first" in report["notes"][0]
        assert stopped["bad"] == bad == BAD_RANKS[kind] and stopped["rank"] == rank
        assert "inf" in stopped["message"] or "nan" in stopped["message"] or "of rank" in stopped["message"]
        assert outcome[f"raise, {kind}"]["report"] is None and outcome[f"skip, {kind}"]["trips"] == []


@pytest.mark.parametrize("kind", ["loss of 1", "gradient of 1"])
@pytest.mark.parametrize("on_trip", ["skip", "record"])
def test_a_dropped_step_is_as_if_it_had_not_been(played: Played, kind: str, on_trip: str) -> None:
    """Where nobody is at fault in the other steps, they are the same with the fault's formula or without."""
    for rank, (outcome, expected) in enumerate(zip(played["trips"], played["dropped"], strict=True)):
        assert not changed(expected[kind], outcome[f"{on_trip}, {kind}"]["after"]), f"rank {rank}"


def test_one_all_reduce_a_step_and_the_same_bits(played: Played) -> None:
    for outcome in played["healthy"]:
        assert outcome["talked"] == outcome["steps"] == STEPS
        assert not changed(outcome["bare"], outcome["guarded"])


def test_located_by_hand_nobody_waits(played: Played) -> None:
    here, there = played["by_hand_in_one_process"]
    assert named(there) == [(1, GRADIENT)] and "rank 1" in there["notes"][0]
    assert [code for code, *_ in here["findings"]] == ["nan/not-located"] and "locate()" in here["notes"][0]


def test_a_guard_of_the_model_inside_the_ddp(played: Played) -> None:
    for given, rank in itertools.product(range(2), range(2)):
        told = played["the_model_inside"][rank][given]
        ((step, bad, report),) = told["trips"]
        assert (step, bad, told["steps"]) == (BAD, (1,), BAD + 1)
        assert named(report) == [(1, LOSS)]


def test_a_statistic_that_goes_bad_in_one_process(played: Played) -> None:
    for told in played["a_statistic_of_one_process"]:
        assert told["error"] == (BAD, "buffer", 0)
        ((code, rank, op, *_),) = told["report"]["findings"]
        assert (code, rank, op) == ("nan/running-stats-nonfinite", 1, "batch_norm")
        assert not changed(told["before"], told["after"])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_gradients_accumulated_without_sync(played: Played, kind: str) -> None:
    for told in played["many_batches_a_step"]:
        assert told[kind]["error"] == (BAD, kind, 0) and told[kind]["bad"] == (1,)
        assert named(told[kind]["report"]) == [(1, LOSS if kind == "loss" else GRADIENT)]
        assert not changed(told[kind]["before"], told[kind]["after"])


def test_clipped_as_torch_does_it(played: Played) -> None:
    one, other = played["clipped_and_dropped"]
    for told in (one, other):
        assert told["clipped"]["norms"] == pytest.approx(told["norms"], rel=1e-6)
        assert told["clipped"]["clipped"] == STEPS
        assert not changed(told["bare"], told["clipped"]["after"])
    assert one["above"]["outcomes"] == other["above"]["outcomes"]
    assert 0 < one["above"]["outcomes"].count("above") < STEPS
    assert not changed(weights(one["above"]["after"]), weights(other["above"]["after"]))


def test_with_a_grad_scaler(played: Played) -> None:
    for told in played["scaled"]:
        steep, bad = told["steep"], told["loss"]
        assert steep["outcomes"] == ["ok"] * BAD + ["scaler"] + ["ok"] * (STEPS - BAD - 1)
        assert steep["scale"] == 2.0**15 and steep["trips"] == []
        assert bad["error"] == (BAD, "loss", 0) and bad["bad"] == (1,)
        assert named(bad["report"])[0][0] == 1 and not changed(bad["before"], bad["after"])
    one, other = (told["steep"]["after"] for told in played["scaled"])
    assert not changed(weights(one), weights(other))


def test_with_a_closure(played: Played) -> None:
    for told in played["with_a_closure"]:
        assert told["error"] == (BAD, "loss", 0) and told["bad"] == (1,)
        ((code, rank, op, *_),) = told["report"]["findings"]
        assert (code, rank, op) == ("nan/log-of-nonpositive", 1, "log")
        assert not changed(told["before"], told["after"])


def test_an_update_that_is_bad_everywhere(played: Played) -> None:
    for told in played["in_half_precision"]:
        assert told["error"] == (0, "parameter", 0) and not changed(told["before"], told["after"])
        assert told["report"]["findings"][0][0] == "nan/optimizer-eps-underflow"


def test_a_process_that_ends_early_and_joins(played: Played) -> None:
    here, there = played["uneven_batches"]
    assert (here["healthy"]["steps"], there["healthy"]["steps"]) == (STEPS, 2)
    assert (here["gradient of 0"]["skipped"], there["gradient of 0"]["skipped"]) == (1, 0)
    for kind in ("healthy", "gradient of 0"):
        assert here[kind]["fault"] == there[kind]["fault"] == ""
        assert not changed(
            *(
                weights({k: v for k, v in told[kind]["after"].items() if k.startswith("model")})
                for told in (here, there)
            )
        )


@pytest.mark.parametrize("name", ["an_evaluation_in_one_process", "losses_averaged_for_a_log"])
def test_processes_that_talk_of_other_things(played: Played, name: str) -> None:
    for told in played[name]:
        assert told["error"] == (BAD, "loss", 0) and named(told["report"]) == [(1, LOSS)]
        assert not changed(told["before"], told["after"])


def test_a_guard_in_one_process_only_decides_alone(played: Played) -> None:
    here, there = played["a_guard_in_one_process_only"]
    assert here == {"same": True, "steps": STEPS} and there["same"]
    (said,), nothing = played.warned("a_guard_in_one_process_only")
    assert "process 1 has no guard" in said and nothing == []


def test_a_model_that_talks_to_the_others_is_not_run_again(played: Played) -> None:
    for told in played["a_model_that_talks"]:
        assert told["error"] == (BAD, "loss", 0) and told["bad"] == (1,)
        ((code, rank, *_),) = told["report"]["findings"]
        assert (code, rank) == ("nan/not-located", 1) and "communicates with other processes" in " ".join(
            told["report"]["text"].split()
        )


def test_a_process_that_fails_is_not_held_back(tmp_path) -> None:
    """Its loop raises: its guard closes at once, though the other process never comes to that step's end."""
    played = play("tests.nan.guard.ranks_alone", tmp_path, seconds=200)
    waited, held = played["an_error_in_one_process"]
    assert held < 5 and waited == "stopped by gloo"
