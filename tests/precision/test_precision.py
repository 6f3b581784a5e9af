"""precision(): the set, the cause, the proof; and a model that is left as it was."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nbdebug
from nbdebug.tools.precision import compare
from nbdebug.tools.precision.casting import CastCopies
from nbdebug.tools.precision.trial import HalfTrials, off
from tests.precision import models

MOST = {1: 8, 2: 14, 4: 24, 8: 44}


def asked(model: nn.Module, **options):
    return nbdebug.precision(model, models.batch(), models.loss_fn, progress=False, **({"mode": "cast"} | options))


def between(model: nn.Module, alone: set[str], pairs: list[set[str]]) -> float:
    """A tolerance that one of a pair keeps and both together do not."""
    copies, trials = CastCopies(model, torch.float16, "cast"), HalfTrials(models.loss_fn, [models.batch()])
    reference = trials.run(copies.reference(torch.float32))

    def distance(kept: set[str]) -> float:
        return off(trials.run(copies.half(kept)), reference)

    (both,) = pairs
    one, two = max(distance(alone | {name}) for name in both), distance(alone)
    assert one < 0.8 * two
    return (one * two) ** 0.5


@pytest.mark.parametrize("sick, pairs", [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1)])
@pytest.mark.parametrize("nested", [True, False])
def test_planted_modules_are_found_and_nothing_else(sick: int, pairs: int, nested: bool) -> None:
    model, alone, together = models.planted(sick, pairs, seed=nested, nested=nested)
    report = asked(model, tolerance=between(model, alone, together) if pairs else 0.05)
    kept = set(report.fp32_modules)
    assert models.works(kept, alone, together) and len(kept) == len(alone) + len(together), (kept, alone, together)
    assert report.facts["tries"] <= MOST[sick]
    assert "taking any one out fails" in report.headline
    assert report.findings[0].fixes[0].verified is True


def test_the_kinds_are_told_apart() -> None:
    causes = {
        models.Overflows: "half-overflow",
        models.FailsBackward: "half-overflow",
        models.Guarded: "half-underflow",
        models.Biased: "unsafe-op-in-half",
    }
    for kind, code in causes.items():
        report = asked(nn.Sequential(models.Calm(), kind(), models.Calm(), nn.Linear(models.WIDTH, 1)), tolerance=0.02)
        assert report.fp32_modules == ("1",), kind
        assert [f.code for f in report] == [f"precision/{code}"], kind
        where = report.findings[0].where
        assert where.module == "1" and where.module_type == kind.__name__


def test_the_line_of_the_op_is_named() -> None:
    where = asked(nn.Sequential(models.Overflows(), nn.Linear(models.WIDTH, 1))).findings[0].where
    assert where.op == "mul" and "large * large" in where.text and where.file.endswith("models.py")


class SquaresBehind(nn.Module):
    """A sum of squares beyond float16 in the forward behind a part: the part is kept, the line is here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = 400.0 * (self.inner(x).abs() + 1)
        return large / (large * large).sum(-1, keepdim=True).sqrt()


def test_an_overflow_behind_the_kept_module_is_shown_where_it_is() -> None:
    report = nbdebug.precision(
        SquaresBehind(),
        models.batch(),
        lambda model, x: (model(x) - 1).square().mean(),
        mode="autocast",
        progress=False,
    )
    finding = report.findings[0]
    assert finding.code == "precision/half-overflow" and " behind `" in finding.title
    assert "(large * large).sum" in finding.where.text and finding.where.op == "mul"


def test_dropout_and_memory_as_it_is_handed_out_are_not_blamed() -> None:
    class Dropped(models.Overflows):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5))

    torch.manual_seed(0)
    where = asked(nn.Sequential(Dropped(), nn.Linear(models.WIDTH, 1))).findings[0].where
    assert where.op == "mul" and "large * large" in where.text


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_that_draws_other_numbers_in_half(
    overflows: bool, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    dropout = nn.functional.dropout

    def other(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype != torch.float32:
            torch.rand(1)
        return dropout(x, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "dropout", other)
    torch.manual_seed(0)
    inner = models.Overflows() if overflows else models.Calm()
    model = nn.Sequential(models.Calm(), nn.Dropout(0.5, inplace), inner, nn.Linear(models.WIDTH, 1))
    assert asked(model).fp32_modules == (("2",) if overflows else ())
    assert nn.functional.dropout is other


@pytest.mark.parametrize("mode", ["cast", "autocast"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_healthy_model_needs_nothing(mode: str, dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        models.Calm(),
        nn.LayerNorm(models.WIDTH),
        nn.Dropout(0.2),
        models.Calm(),
        nn.BatchNorm1d(models.WIDTH),
        nn.Linear(models.WIDTH, 1),
    )
    report = asked(model, mode=mode, dtype=dtype)
    assert report.ok and report.fp32_modules == () and "Nothing needs float32" in str(report)


def test_autocast_leaves_to_the_search_what_it_does_not_protect() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(models.WIDTH, models.WIDTH)
            nn.init.constant_(self.large.weight, 9e4)

        def forward(self, x):
            return torch.tanh(self.large(x.abs() + 1) * 1e-6)

    report = asked(nn.Sequential(models.Calm(), Squares(), nn.Linear(models.WIDTH, 1)), mode="autocast")
    assert report.fp32_modules == ("1.large",) and report.findings[0].code == "precision/half-overflow"


def test_the_model_the_random_numbers_and_the_batch_stay_as_they_were() -> None:
    model, _, _ = models.planted(2, 0, 5)
    model.append = nn.Sequential(nn.BatchNorm1d(models.WIDTH), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flags = [p.requires_grad for p in model.parameters()]
    batch = models.batch()
    nbdebug.precision(model, batch, models.loss_fn, mode="cast", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(batch, models.batch())
    assert all(p.grad is None for p in model.parameters()) and flags == [p.requires_grad for p in model.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_tied_weights_recurrent_layers_and_several_batches() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.sick = models.Guarded()
            self.out = nn.Linear(8, 20, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.sick(self.rnn(self.embed(ids))[0]))

    torch.manual_seed(0)
    batches = [torch.randint(0, 20, (2, 5)) for _ in range(3)]

    def loss_fn(model, ids):
        return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())

    report = nbdebug.precision(Tied(), batches[0], loss_fn, mode="cast", more_batches=batches[1:], progress=False)
    assert report.fp32_modules == ("sick",)


class Parts(nn.Module):
    """One of an op's outputs is not used, a checkpointed part drops, and a weight is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.drop, self.head = Halves(), nn.Dropout(0.2), nn.Linear(4, 2)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used, _ = self.two(x)
        used = checkpoint(lambda t: self.drop(t).relu(), used, use_reentrant=False)
        return self.head((used * self.turn).abs())


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.wide(x).chunk(2, -1)
        return first, second


def test_what_gradients_and_a_second_forward_may_look_like() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 2)
    report = nbdebug.precision(Parts(), batch, nn.functional.mse_loss, "bfloat16", progress=False)
    assert report.verdict == "healthy" and not report.fp32_modules, report


def test_a_criterion_and_pairs_will_do() -> None:
    pair = (models.batch(), torch.zeros(4, 1))
    report = nbdebug.precision(
        nn.Sequential(models.Overflows(), nn.Linear(8, 1)), pair, nn.MSELoss(), mode="cast", progress=False
    )
    assert report.fp32_modules == ("0",)


def test_a_budget_and_an_interrupt_give_the_best_set_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone, _ = models.planted(4, 0, 1)
    report = asked(model, budget=1e-9)
    assert report.fp32_modules == ("",) and "the time was up" in str(report)
    made, half = [], CastCopies.half

    def interrupted(self, kept=()):
        made.append(kept)
        if len(made) == 6:
            raise KeyboardInterrupt
        return half(self, kept)

    monkeypatch.setattr(CastCopies, "half", interrupted)
    report = asked(model)
    assert models.works(report.fp32_modules, alone, []) and "it was interrupted" in str(report)


def test_a_step_that_is_bad_in_float32_is_another_chapters() -> None:
    report = nbdebug.precision(nn.Linear(8, 1), models.batch(), lambda m, x: m(x).mean() * float("nan"), progress=False)
    assert not report.findings and "%nan_trace" in str(report)


def test_gradients_that_need_a_scale() -> None:
    def loss_fn(model, x):
        return model(x).float().square().mean() * 1e-9 + 1

    report = nbdebug.precision(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), models.batch(), loss_fn, mode="cast", progress=False
    )
    assert [f.code for f in report] == ["precision/loss-scale-needed"]
    assert report.findings[0].fixes[0].verified is True
    assert asked(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))).ok


def test_an_epsilon_that_is_zero_in_the_dtype() -> None:
    model = nn.Linear(8, 1).half()
    for eps, codes in ((1e-8, ["precision/epsilon-underflow"]), (1e-4, [])):
        report = asked(model, optimizer=torch.optim.Adam(model.parameters(), eps=eps))
        assert [f.code for f in report] == codes


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"model": "net"}, "must be a torch.nn.Module; got .net."),
        ({"dtype": "float8"}, "'float8'"),
        ({"mode": "half"}, "'half'"),
        ({"tolerance": 0}, "tolerance is a number above zero; got 0"),
        ({"loss_fn": 3}, "got 3"),
    ],
)
def test_arguments_that_make_no_sense_are_quoted(wrong: dict, match: str) -> None:
    given = SimpleNamespace(model=nn.Linear(8, 1), loss_fn=models.loss_fn, dtype="float16", mode="cast", tolerance=0.1)
    vars(given).update(wrong)
    with pytest.raises((TypeError, ValueError), match=match):
        nbdebug.precision(
            given.model, models.batch(), given.loss_fn, given.dtype, mode=given.mode, tolerance=given.tolerance
        )


def test_what_the_users_loss_raises_passes() -> None:
    def loss_fn(model, x):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        nbdebug.precision(nn.Linear(8, 1), models.batch(), loss_fn, progress=False)


def test_where_no_op_stands_out_the_line_of_the_forward_or_of_the_call_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(models.Calm(), models.Biased(), models.Calm(), nn.Linear(models.WIDTH, 1))
    where = asked(model, tolerance=0.015).findings[0].where
    assert where.line and where.file.endswith("models.py") and "def forward" in where.text

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.last = nn.Linear(models.WIDTH, models.WIDTH), nn.Linear(models.WIDTH, 1)
            nn.init.constant_(self.large.weight, 6e4)

        def forward(self, x):
            return self.last(torch.tanh(self.large(x.abs() + 1) * 1e-6))

    where = asked(Calls(), mode="autocast").findings[0].where
    assert where.module == "large" and where.op in ("addmm", "linear") and "self.large(x.abs()" in where.text


def test_float64_says_how_far_off_float32_is_itself() -> None:
    report = asked(nn.Sequential(models.Calm(), models.Overflows(), nn.Linear(models.WIDTH, 1)))
    assert any("float32 is accurate enough as the reference" in note for note in report.notes)
    tables = {table.title: table for table in report.tables}
    rows = {row[0]: row for row in tables["Values and errors of each module"].rows}
    assert 0 < rows["0"][6] < 1e-4, "in percent"
    costs = tables["What a step costs"].rows
    assert [row[0] for row in costs] == ["all in float32", "all in float16", "the set in float32"]
    assert all(row[1] > 0 for row in costs)

    class Cancels(nn.Module):
        def forward(self, x):
            return (x + 3e6) - 3e6 + x

    off = asked(nn.Sequential(nn.Linear(8, 8), Cancels(), nn.Linear(8, 1)), dtype="bfloat16", tolerance=0.05)
    said = next(note for note in off.notes if "float32 itself differs" in note)
    assert "`1`" in said and "may need float64" in said


def test_where_float64_does_not_fit_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(nn.Module):
        def forward(self, x):
            return x @ torch.eye(8)

    report = asked(nn.Sequential(nn.Linear(8, 8), Narrow(), nn.Linear(8, 1)))
    assert any("float64: the step raised" in said for said in report.unchecked)
    assert report.fp32_modules == ("1",) and "`1` does not run in float16: RuntimeError" in report.findings[0].title
    from nbdebug.tools.precision import compare as exact

    monkeypatch.setitem(exact.SECONDS, "cpu", 0.0)
    assert any("a float32 step takes" in said for said in asked(nn.Linear(8, 1)).unchecked)


def test_of_a_large_step_only_the_forward_runs_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where what its backward needs would take twice the memory of the step."""
    monkeypatch.setattr(compare, "LARGE", 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    batch = torch.randn(32, 8), torch.randint(0, 3, (32,))
    report = nbdebug.precision(model, batch, nn.CrossEntropyLoss(), "bfloat16", progress=False)
    text = " ".join(str(report.full()).split())
    assert report.ok and re.search(r"differs from float64 by [^.]*\.?\d*% in the loss\.", text), text
