"""Two processes that share out a model's parameters: norms are those of all parts, and they decide alike."""

from __future__ import annotations

import pytest
import torch.distributed

from tests.nan.guard.processes import Played, play
from tests.nan.guard.ranks_ddp import BAD, POLICIES, STEPS
from tests.nan.guard.ranks_fsdp import FAULTS, KINDS

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play("tests.nan.guard.ranks_fsdp", tmp_path_factory.mktemp("fsdp"))


@every_kind
def test_norms_of_all_parts_and_clipping_by_them(played: Played, kind: str) -> None:
    for told in played["norms"]:
        assert told[kind]["guard"]["norms"] == pytest.approx(told[kind]["torch"], rel=1e-6)
        assert told[kind]["guard"]["clipped"] == STEPS
        bare, guarded = (
            [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in parts if b]
            for parts in (told[kind]["bare"], told[kind]["guard"]["after"])
        )
        assert len(bare) == len(guarded)
        for one, other in zip(bare, guarded, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@every_kind
def test_as_one_process_with_all_batches_would_have_it(played: Played, kind: str) -> None:
    one, other = played["unclipped"]
    assert one["parts"] != other["parts"] and 0 in (*one["parts"], *other["parts"]), "a process with a part of nothing"
    for told, bare in zip((one, other), played["bare"], strict=True):
        assert told[kind]["norms"] == pytest.approx(told["one process"], rel=1e-3)
        assert told[kind]["after"] == bare[kind], "the guard changes nothing"


@every_kind
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_trip", POLICIES)
def test_they_decide_alike(played: Played, kind: str, fault: str, on_trip: str) -> None:
    stops = on_trip in ("trace", "raise")
    one, other = (told[f"{on_trip}, {kind}, {fault}"] for told in played["sharded"])
    assert one["outcomes"] == other["outcomes"] and one["norms"][:BAD] == other["norms"][:BAD]
    for told in (one, other):
        assert told["fault"] == "" and told["outcomes"][BAD] == ("tripped" if stops else "skipped")
        assert told["steps"] == (BAD + 1 if stops else STEPS)
        if stops:
            assert told["error"] == (BAD, "loss" if "loss" in fault else "gradient") and told["same"]
            assert told["bad"] == ((1,) if "loss" in fault else ())


@every_kind
def test_the_report_says_why_it_names_no_place_and_whose_loss_was_bad(played: Played, kind: str) -> None:
    for told in played["sharded"]:
        by_loss, by_gradient = (told[f"trace, {kind}, {fault}"]["report"] for fault in FAULTS)
        by_hand = told[f"raise, {kind}, loss of 1"]["report"]
        assert by_hand["findings"][0][:2] == ("nan/not-located", 1) and "sharded over" in " ".join(
            by_hand["text"].split()
        )
        for report, rank in ((by_loss, 1), (by_gradient, None)):
            ((code, where, *_),) = report["findings"]
            assert (code, where) == ("nan/not-located", rank)
            assert "sharded over processes" in " ".join(report["text"].split())
        assert "rank 1 was bad first: its own loss was not finite" in by_loss["notes"][0]
        assert "is not known" in by_gradient["notes"][0]


def test_in_half_precision(played: Played) -> None:
    for told in played["in_half_precision"]:
        assert (told["error"], told["bad"], told["fault"]) == ((BAD, "loss"), (1,), "") and told["same"]


def test_a_guard_of_a_part_of_the_model(played: Played) -> None:
    for told in played["a_part_of_the_model"]:
        assert told == {"steps": BAD + 1, "bad": (1,), "fault": ""}
