"""Which layers a pattern means, and when a condition is asked what."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbdebug.tools.breakpoints.condition import Condition
from nbdebug.tools.breakpoints.stop_at import matching_layers, stop_at
from tests.stop.nets import Block, Net

NET = Net()
NAMES = [name for name, _ in NET.named_modules()]


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("layers.2", ["layers.2"]),
        ("layers.1*", ["layers.1", "layers.1.fc", "layers.1.drop"]),
        ("", [""]),
        ("Dropout", [f"layers.{i}.drop" for i in range(3)]),
        ("*.fc", [f"layers.{i}.fc" for i in range(3)]),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("Lin*", [*(f"layers.{i}.fc" for i in range(3)), "head.0", "head.2"]),
    ],
)
def test_names_go_before_types(pattern: str, names: list[str]) -> None:
    found = matching_layers(NET, pattern)
    assert list(found) == names and all(NET.get_submodule(name) is found[name] for name in names)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.data())
def test_a_name_with_some_of_it_starred_still_finds_the_layer_once(name: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(name)))
    found = matching_layers(NET, name[:cut] + "*" + name[data.draw(st.integers(cut, len(name))) :])
    assert name in found and len({id(module) for module in found.values()}) == len(found)
    assert list(matching_layers(NET, name)) == [name]


def test_a_layer_that_is_used_twice_counts_once_and_answers_to_both_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net.append(net[0])
    assert list(matching_layers(net, "*[02]")) == ["0"] and list(matching_layers(net, "2")) == ["2"]


def test_wrappers_keep_the_names_of_the_model() -> None:
    assert list(matching_layers(nn.DataParallel(NET), "layers.1")) == ["layers.1"]
    assert list(matching_layers(nn.DataParallel(NET), "module.layers.1")) == ["module.layers.1"]


@pytest.mark.parametrize(
    "pattern, said", [("layer.2", "'layers.2'"), ("Droput", "'Dropout'"), ("zzz", "There are: 'layers'"), (3, "got 3")]
)
def test_what_names_no_layer_is_quoted_with_the_nearest(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"got 3|has the name") as wrong:
        matching_layers(NET, pattern)
    assert said in str(wrong.value) and repr(pattern) in str(wrong.value)


def test_a_scripted_model_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="TorchScript"):
        matching_layers(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), "0")


LIMIT = 3.0


@pytest.mark.parametrize(
    "when, late",
    [
        ("inp.max() > 1", False),
        ("step == 3 and name == 'a'", False),
        ("inp.max() > LIMIT", False),
        ("len([i for i in inp if i > LIMIT]) > here", False),
        ("not out.isfinite().all()", True),
        ("hidden.max() > 1", True),
        (None, False),
        (lambda inp, step: True, False),
        (lambda out: True, True),
        (lambda **given: True, True),
        (lambda inp, top=3: True, False),
    ],
)
def test_a_condition_waits_for_the_return_only_where_it_must(when: object, late: bool) -> None:
    here = 2
    assert Condition(when, "forward", sys._getframe()).late(None) is late and here == 2


def test_a_local_of_the_forward_goes_before_a_variable_of_the_same_name() -> None:
    hidden = 1
    condition = Condition("hidden > 5", "forward", sys._getframe())
    assert condition.late(Block.forward.__code__) and not condition.late(None) and hidden == 1


def test_an_expression_sees_what_its_writer_sees() -> None:
    mine = [4.0]
    frame = sys._getframe()
    assert Condition("any(v > LIMIT for v in mine) and inp == 1", "forward", frame).holds({"inp": 1})
    assert not Condition("any(v > LIMIT for v in mine) and inp == 1", "forward", frame).holds({"inp": 2}) and mine


@pytest.mark.parametrize(
    "when, phase, kind, said",
    [
        ("out.(", "forward", SyntaxError, "'out.('"),
        ("x = 1", "forward", SyntaxError, "'x = 1'"),
        (3, "forward", ValueError, "got 3"),
        (lambda loss: True, "forward", ValueError, "'loss'"),
        ("grad.max() > 1", "forward", ValueError, 'phase="backward"'),
    ],
)
def test_what_can_be_no_condition_is_refused_at_once(when: object, phase: str, kind: type, said: str) -> None:
    with pytest.raises(kind) as wrong:
        stop_at(NET, "head", when=when, phase=phase)
    assert said in str(wrong.value)


def test_other_arguments_are_checked_as_well() -> None:
    with pytest.raises(ValueError, match="got 'sideways'"):
        stop_at(NET, "head", phase="sideways")
    with pytest.raises(TypeError, match="got 3"):
        stop_at(3, "head")
