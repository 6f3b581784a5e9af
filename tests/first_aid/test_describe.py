"""describe(): a line for each tensor of anything; nothing is copied, nothing of the user's runs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbdebug import describe
from tests.shell import started


def lines(x: Any) -> dict[str, list[Any]]:
    tables = describe(x).tables
    return {row[0]: row[1:] for row in tables[0].rows} if tables else {}


def test_each_tensor_has_a_line_and_the_bad_ones_come_first() -> None:
    batch = {
        "ids": torch.arange(6).view(2, 3),
        "deep": [(torch.tensor([1.0, float("nan"), -2.0, float("inf")]), "text")],
        "mask": torch.full((2,), float("-inf")),
        "flag": torch.tensor([True, False]),
    }
    found = lines(batch)
    assert list(found) == ["x['deep'][0][0]", "x['mask']", "x['ids']", "x['flag']"]
    assert found["x['deep'][0][0]"] == ["[4]", "float32", "cpu", -2.0, 1.0, 1, 1]
    assert found["x['mask']"] == ["[2]", "float32", "cpu", None, None, 0, 2]
    assert found["x['ids']"][3:] == [0, 5, 0, 0]
    report = describe(batch)
    assert not report.ok and "holds NaN in 1 of 4 values" in report.symptoms[0].what
    del batch["deep"]
    assert describe(batch).ok, "an inf may be meant"


@pytest.mark.parametrize(
    ("x", "row"),
    [
        (torch.zeros(1).expand(10**6, 3), ["[1000000, 3]", "float32", "cpu", 0.0, 0.0, 0, 0]),
        (torch.empty(3, device="meta"), ["[3]", "float32", "meta", None, None, None, None]),
        (torch.tensor([1 + 2j]), ["[1]", "complex64", "cpu", 1.0, 2.0, 0, 0]),
        (torch.empty(0, 2), ["[0, 2]", "float32", "cpu", None, None, 0, 0]),
        (torch.eye(2).to_sparse(), ["[2, 2]", "float32", "cpu", 1.0, 1.0, 0, 0]),
        (torch.ones(2).to(torch.float8_e4m3fn), ["[2]", "float8_e4m3fn", "cpu", 1.0, 1.0, 0, 0]),
        (numpy.array([1.5, numpy.nan]), ["[2]", "float64", "cpu", 1.5, 1.5, 1, 0]),
        ([0.5, float("inf")], ["[2]", "float64", "cpu", 0.5, 0.5, 0, 1]),
    ],
)
def test_tensors_of_every_kind(x: Any, row: list[Any]) -> None:
    assert lines(x) == {"x": row}


def test_pieces_give_the_same_as_the_whole(monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 30)
    x[3, 4], x[39, 29], x[7, 7] = float("nan"), float("inf"), float("-inf")
    whole = lines(x)["x"]
    monkeypatch.setattr("nbdebug.tools.first_aid.describe.PIECE", 7)
    good = x[x.isfinite()]
    for view in (x, x.T, x.T[::1].T):
        assert lines(view)["x"][3:] == [good.min().item(), good.max().item(), 1, 2] == whole[3:]


def test_a_model_at_a_glance() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1).half())
    model[0].requires_grad_(False)
    model.eval()
    said = describe(model, name="net").headline
    assert "49 parameters in 4 tensors, 18% of them trained" in said and "eval mode" in said
    assert "float32 on cpu (2 tensors) and float16 on cpu (2 tensors)" in said
    model[1].weight.grad = torch.full((1, 8), float("nan")).half()
    report = describe(model, name="net")
    assert "gradients in 1 of 4 tensors, 1 of them not finite" in report.headline
    assert report.tables[0].rows[0][0] == "net.1.weight.grad"
    assert "no parameters" in describe(nn.ReLU()).headline
    assert "not known yet" in str(describe(nn.LazyLinear(3)))


def test_an_optimizer_and_a_loader() -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([w], lr=0.01)
    optimizer.state[w] = {key: torch.zeros(3) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(lines(optimizer)) == {f"x.state[0].{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert "learning rate 0.01, state for 1 of them" in describe(optimizer).headline
    loader = DataLoader(TensorDataset(torch.rand(5, 2)), batch_size=2, shuffle=True)
    state = torch.get_rng_state()
    assert list(lines(loader)) == ["x.dataset.tensors[0]"] and torch.equal(state, torch.get_rng_state())


def test_nothing_of_the_users_runs() -> None:
    class Hostile(Dataset):
        def __init__(self) -> None:
            self.rows, self.me = torch.rand(3), self

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __getitem__(self, i: int) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

        @property
        def secret(self) -> Any:
            raise AssertionError

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    class Net(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError

    @dataclasses.dataclass
    class Pair:
        a: Any
        b: Any

    odd = torch.rand(2).as_subclass(Odd)
    pair = collections.namedtuple("pair", "left right")
    things = [Hostile(), odd, Net(2, 1), Pair(torch.ones(1), 2), pair(torch.zeros(1), None), iter([1]), object(), int]
    assert list(lines(things)) == [
        *("x[0].rows", "x[1]", "x[2].weight", "x[2].bias", "x[3].a", "x[4].left"),
    ]
    assert "holds no tensor" in describe(5).headline


def test_the_magic() -> None:
    with started("import torch\nbatch = {'x': torch.tensor([1.0, float('nan')])}") as book:
        done = book.run("%describe batch")
        assert done.result.tables[0].rows[0][0] == "batch['x']" and "%describe batch" in done.shown
        assert book.run('%describe batch["x"] + 1').result.tables[0].rows[0][-2] == 1
        assert "UsageError" in book.run("%describe").printed and "UsageError" in book.run("%describe nothing").printed


def test_tables_and_arrays_that_run_backwards() -> None:
    table = pandas.DataFrame({"a": [1.0, float("nan")], "b": ["x", "y"], "a b": [1, 2]})
    report = describe(table, name="table")
    assert report.facts["tensors"] == 2 and "`table['a']` holds NaN in 1 of 2 values" in report.symptoms[0].what
    assert not describe(table["a"]).ok and describe(table["a b"]).ok
    backwards = numpy.arange(6.0)[::-1]
    backwards.flags.writeable = False
    assert describe(backwards).tables[0].rows[0][4:6] == [0, 5]
