"""Where nobody can type: what is recorded, of which moment, and what conditions choose."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch import nn

from nbdebug.tools.breakpoints.stop_at import stop_at
from tests.stop.nets import Block, made, nothing_left, place, rows, step


def test_a_layer_of_ones_own_is_recorded_at_its_return_with_its_locals() -> None:
    net, x = made()
    stop = stop_at(net, "layers.1")
    step(net, x)
    (report,) = stop.records
    assert stop.hits == 1 and not stop.active and nothing_left(net)
    assert report.headline == (
        f"Stopped at `layers.1` (Block) at the return of its forward, in step 0: {place('return result')}."
    )
    assert list(rows(report)) == ["inp", "out"] and list(rows(report, 1)) == ["hidden"]  # x and result are those
    assert rows(report)["out"][:3] == ["(8, 4)", "float32", "cpu"] and rows(report)["out"][-1] == 0
    for text in (str(report), report._repr_mimebundle_()["text/html"]):
        assert "hidden" in text and "training continues" in text and "stop_at(model" in text
    assert "hidden" in report.frame("Locals of Block.forward")["name"].tolist()


def test_a_layer_of_torchs_own_is_recorded_at_the_line_that_calls_it() -> None:
    net, x = made()
    stop = stop_at(net, "layers.2.fc", when="out.numel() == 32")
    step(net, x)
    facts = stop.records[0].facts
    assert "after its forward" in stop.records[0].headline
    assert facts["stop"]["place"] == place("hidden = self.fc(x)") and facts["stop"]["type"] == "Linear"


def test_numbers_are_those_of_the_finite_elements() -> None:
    net = nn.Sequential(nn.Identity())
    stop = stop_at(net, "0", once=False)
    net(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    net(torch.full((2,), float("nan")))
    net(torch.tensor([[1, 2], [3, 6]]))
    net(torch.zeros(0))
    found = [rows(report)["inp"][3:] for report in stop.records]
    assert found == [[1.0, 3.0, 2.0, 2], [None, None, None, 2], [1, 6, 3.0, 0], [None, None, None, None]]


def test_conditions_pick_the_moment() -> None:
    net, x = made()
    with (
        stop_at(net, "layers.*", when=lambda module, step: isinstance(module, Block) and step == 1) as early,
        stop_at(net, "layers.0", when="hidden.min() < 0 and step == 2") as local,
    ):
        for _ in range(4):
            step(net, x)
    assert [r.facts["stop"]["step"] for r in early.records + local.records] == [1, 2]
    assert early.records[0].facts["stop"]["layer"] == "layers.0" and nothing_left(net)


def test_every_hit_counts_where_it_is_not_once(capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    stop = stop_at(net, "Dropout", once=False)
    step(net, x)
    step(net, x)
    assert stop.hits == len(stop.records) == 6 and stop.active and sys.getprofile() is None
    assert capsys.readouterr().err.count("Stopped at") == 3 and "not shown" in str(stop.records[2])
    stop.clear()
    assert nothing_left(net)


def test_a_pattern_of_layer_and_parts_stops_at_the_first_that_is_reached() -> None:
    net, x = made()
    stop = stop_at(net, "layers.1*")
    step(net, x)
    assert [r.facts["stop"]["layer"] for r in stop.records] == ["layers.1"]


def test_a_condition_that_fails_says_so_once_and_stops_nothing(capsys: pytest.CaptureFixture) -> None:
    net, x = made()
    stop = stop_at(net, "layers.*", when="out.no_such_thing > 1", once=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor does a strict filter end the training
        step(net, x)
    said = capsys.readouterr().err
    assert said.count("no_such_thing") == 2 and "AttributeError" in said and "shown once" in said
    assert not stop.hits and stop.active
