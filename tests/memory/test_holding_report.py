"""The report of `mem()`: its tables add up, devices are told; nothing of the user's code runs."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbdebug.tools.memory.facts import Device, HeldMemory, Holding
from nbdebug.tools.memory.inventory import held_memory, rounded
from nbdebug.tools.memory.mem import _notes_of_held as notes
from nbdebug.tools.memory.mem import held_report, mem
from nbdebug.tools.memory.owners import OwnerIndex

MIB = 1 << 20


class Untouchable:
    """An object that must not be asked anything."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self) -> None:
        object.__setattr__(self, "slot", torch.zeros(1033, 2))
        object.__getattribute__(self, "__dict__")["cache"] = {"k": torch.zeros(1033, 3)}

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("the user's code ran")

    __getattribute__ = __getattr__ = __repr__ = __str__ = __iter__ = __len__ = __bool__ = _refuse
    __eq__ = __hash__ = __setattr__ = __class_getitem__ = _refuse
    prop = property(_refuse)


def _refuse(*args: Any) -> Any:
    raise AssertionError("the user's code ran")


Lists: Any = type("Lists", (list,), dict.fromkeys(["__iter__", "__len__", "__getitem__", "__repr__"], _refuse))
Dicts: Any = type(
    "Dicts",
    (dict,),
    dict.fromkeys(["items", "values", "keys", "__iter__", "__getitem__", "__len__", "__repr__"], _refuse),
)


@dataclasses.dataclass
class State:
    loss: Any
    more: Any = None


def test_nothing_of_the_users_runs() -> None:
    thing = Untouchable()
    names = {"thing": thing, "many": Lists([torch.zeros(1033, 5)]), "some": Dicts(a=torch.zeros(1033, 7))}
    held = held_memory({}, {}, names)
    found = {h.name: h.bytes for h in held.holdings}
    assert found["thing.slot"] == 1033 * 8 and found["thing.cache['k']"] == 1033 * 12
    assert found["many[0]"] == 1033 * 20 and found["some['a']"] == 1033 * 28
    assert held_report(names=names).tables


LEAF = object()
TREES = st.recursive(
    st.just(LEAF) | st.none() | st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(inner, max_size=2).map(lambda items: collections.deque(items)),
        st.tuples(inner, inner).map(lambda pair: State(*pair)),
    ),
    max_leaves=12,
)


def planted(tree: Any, path: str, made: dict[str, torch.Tensor]) -> Any:
    """The tree with a tensor at each leaf; `made` gets each under the expression that leads to it."""
    if tree is LEAF:
        made[path] = torch.zeros(1039 + len(made))
        return made[path]
    if isinstance(tree, dict):
        return {key: planted(value, f"{path}[{key!r}]", made) for key, value in tree.items()}
    if isinstance(tree, State):
        return State(planted(tree.loss, f"{path}.loss", made), planted(tree.more, f"{path}.more", made))
    if isinstance(tree, (list, tuple, collections.deque)):
        return type(tree)([planted(value, f"{path}[{n}]", made) for n, value in enumerate(tree)])
    return tree


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_the_name_of_every_tensor_in_nested_containers_leads_to_it(tree: Any) -> None:
    made: dict[str, torch.Tensor] = {}
    root = planted(tree, "root", made)
    naming = OwnerIndex()
    naming.variables({"root": root})
    naming.walk()
    found = {owned.owner.name: owned for owned in naming.owned.values() if owned.owner is not None}
    assert len(found) == len(made)
    for path, tensor in made.items():
        assert eval(path, {"root": root}) is tensor
        assert found[path].piece.bytes == tensor.nbytes and found[path].owner.kind == "variable"  # type: ignore


def test_the_tables_add_up() -> None:
    net = nn.Linear(64, 64)
    history = [net(torch.randn(8, 64)).sum() for _ in range(3)]
    report = held_report(names={"net": net, "history": history, "x": torch.zeros(10, 10)})
    live = sum(d["live"] for d in report.facts["devices"])
    titles = {table.title: table for table in report.tables}
    assert list(titles) == ["By owner", "By kind", "Largest tensors", "Devices"]
    for table in ("By owner", "By kind"):
        place = titles[table].columns.index("held (bytes)")
        assert sum(row[place] for row in titles[table].rows) == live == report.plot("memory")["total"]
    assert report.subject.startswith("model `net`") and report.ok and json.dumps(report.facts)
    assert "held by" in str(report) and "By owner" in str(report) and report._repr_mimebundle_()["text/html"]
    assert list(report.frame("By owner")["owner"])


def test_a_view_that_keeps_a_large_storage_is_remarked() -> None:
    first = torch.zeros(1 << 18)[:4]
    rows = {row[0]: row for row in held_report(names={"first": first}).tables[2].rows}
    assert rows["first"][2] == MIB and "a view of 16 bytes" in rows["first"][5]


def test_mem_takes_the_variables_of_its_caller() -> None:
    mine = torch.zeros(1049, 3)
    names = {row[0] for row in mem().tables[2].rows}
    assert "mine" in names and mine.any().item() is False


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        held_report(names={}, device="nowhere")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        held_report(3, names={})


def test_one_device_alone() -> None:
    report = held_report(names={"x": torch.zeros(8)}, device="cuda:0")
    assert report.headline == "No tensor is held." or torch.cuda.is_available()


def test_idle_and_unmet_memory_in_words() -> None:
    card = Device("cuda:0", 300 * MIB, 400 * MIB, 1000 * MIB, 500 * MIB, 1000 * MIB, 80 << 30, 70 << 30, 50 * MIB)
    said = " ".join(notes(HeldMemory((Holding("variable", "x", 300 * MIB, device="cuda:0"),), (card,), 1, 1)))
    assert "60% of what is reserved" in said and "600 MiB" in said and "expandable_segments" in said
    assert "100 MiB on cuda:0 are allocated without any tensor" in said
    assert [rounded(n) for n in (1, 512, 513)] == [512, 512, 1024]
