"""Kinds of failures that were named wrongly once: each sick and healthy, asked of nan_trace and of the guard."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from tests.nan.judge import answer_of, statement
from tests.shell import started


@dataclasses.dataclass(frozen=True)
class Kind:
    """build(sick) gives (model, optimizer, step). said: what the headline says."""

    build: Callable[[bool], tuple[Any, Any, Callable[[], Any]]]
    code: str
    phase: str
    line: str = ""
    op: str | None = None
    rows: tuple[int, ...] | str | None = "any"
    step: int | None = None
    module: str | None = None
    said: str = ""
    steps: int = 3
    by: tuple[str, ...] = ("trace", "replay", "guard")


KINDS: list[Kind] = []


def kind(code: str, phase: str, **more: Any) -> Callable:
    """The function below builds this kind."""

    def add(build: Callable) -> Callable:
        KINDS.append(Kind(build, f"nan/{code}", phase, **more))
        return build

    return add


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def ask(kind: Kind, by: str, sick: bool) -> nbdebug.Report:
    torch.manual_seed(0)
    model, optimizer, step = kind.build(sick)
    if by != "guard":
        return nbdebug.nan_trace(step, model=model, optimizer=optimizer, max_steps=kind.steps, strategy=by)
    with nbdebug.guard(model if model is not None else {}, optimizer, on_trip="raise") as guard:
        for _ in range(kind.steps):
            try:
                step()
            except nbdebug.NonFiniteStep as error:
                return error.trip.locate()
    return guard.report()


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        each = [pytest.param(k, by, id=f"{k.build.__name__}-{by}") for k in KINDS for by in k.by]
        metafunc.parametrize(("kind", "by"), each)


@pytest.mark.filterwarnings("ignore")
def test_sick(kind: Kind, by: str):
    answer = answer_of(ask(kind, by, True))
    wanted = {"findings": 1, "code": kind.code, "phase": kind.phase}
    wanted |= {} if kind.step is None else {"step": kind.step}
    wanted |= {} if kind.op is None else {"op": kind.op}
    wanted |= {} if kind.rows == "any" else {"rows": kind.rows}
    wanted |= {} if kind.module is None else {"module": kind.module}
    assert {part: answer.get(part) for part in wanted} == wanted, answer
    if kind.line:
        with open(__file__, encoding="utf-8") as file:
            assert kind.line in statement(file.read(), answer["line"]), answer
    assert kind.said in answer["title"]


@pytest.mark.filterwarnings("ignore")
def test_healthy(kind: Kind, by: str):
    report = ask(kind, by, False)
    assert not report.findings and not report.unchecked, str(report)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers) if layers else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def steps_of(model, optimizer, batches, loss_of):
    """One training step over a loader of batches."""
    batches = iter(batches)

    def step():
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


# -- a number of the user's own that is NaN ----------------------------------------------------------------------------


def with_number(loss_of: Callable[..., torch.Tensor]) -> Callable:
    def build(sick: bool):
        model, numbers = net(), iter([0.5, math.nan if sick else 0.5, 0.5])
        batches = [torch.randn(5, 6) for _ in range(3)]
        optimizer = torch.optim.Adam(model.parameters())
        return steps_of(model, optimizer, batches, lambda x: loss_of(model(x), next(numbers)))

    return build


@kind("input-nonfinite", "forward", line="mean() * weight", op="mul", step=1, said="computes with a number that is NaN")
def weight_of_a_loss(sick):
    return with_number(lambda out, weight: out.square().mean() * weight)(sick)


@kind("input-nonfinite", "forward", line="masked_fill(", op="masked_fill", step=1)
def value_of_a_mask(sick):
    return with_number(lambda out, value: out.masked_fill(out > out.median(), value).square().mean())(sick)


@kind("input-nonfinite", "forward", line="torch.where(", step=1, said="computes with a number that is NaN")
def choice_of_a_number(sick):
    return with_number(lambda out, value: torch.where(out > out.median(), out, value).square().mean())(sick)


# -- class weights of 1/0 ----------------------------------------------------------------------------------------------


@kind("input-nonfinite", "input", line="classes(model(", step=0, said="inf in the `weight` of the loss (class 2)")
def class_without_a_row(sick):
    counts = torch.tensor([3.0, 2.0, 0.0 if sick else 1.0])
    classes, labels = nn.CrossEntropyLoss(weight=1 / counts), torch.tensor([0, 1, 2, 0, 1])
    model, batches = net(), [torch.randn(5, 6)] * 3
    return steps_of(model, torch.optim.Adam(model.parameters()), batches, lambda x: classes(model(x), labels))


@kind("input-nonfinite", "input", line="with_logits(", step=0, said="inf in the `pos_weight` of the loss (class 1)")
def class_without_a_positive(sick):
    weight = torch.tensor([1.0, torch.inf if sick else 1.0, 2.0])
    model, labels = net(), torch.tensor([[1.0, 0.0, 1.0]] * 5)

    def loss_of(x):
        return F.binary_cross_entropy_with_logits(model(x), labels, pos_weight=weight)

    return steps_of(model, torch.optim.Adam(model.parameters()), [torch.randn(5, 6)] * 3, loss_of)


# -- weights that an earlier step has spoiled --------------------------------------------------------------------------


def spoiled(optimizer_of: Callable, forget: bool = False) -> Callable:
    def build(sick: bool):
        model = net()
        optimizer = optimizer_of(model.parameters())
        level = [torch.ones(5), torch.ones(5), torch.zeros(5) if sick else torch.ones(5)] + [torch.ones(5)] * 4
        batches = [(torch.randn(5, 6), s) for s in level]
        model, optimizer, step = steps_of(
            model, optimizer, batches, lambda b: torch.log((model(b[0]).square().mean(1) + 0.1) * b[1]).mean()
        )
        for _ in range(3):
            step()
        if forget:
            optimizer.zero_grad()
        return model, optimizer, step

    return build


@kind("parameter-nonfinite", "parameter", said="spoiled by the update of an earlier step", step=0)
def spoiled_run_adam(sick):
    return spoiled(lambda p: torch.optim.Adam(p, lr=1e-3))(sick)


@kind("parameter-nonfinite", "parameter", said="spoiled by", step=0)
def spoiled_run_sgd(sick):
    return spoiled(lambda p: torch.optim.SGD(p, lr=1e-3))(sick)


@kind("parameter-nonfinite", "parameter", said="spoiled by an earlier run", step=0)
def spoiled_checkpoint(sick):
    model, optimizer, step = spoiled(lambda p: torch.optim.SGD(p, lr=1e-3), forget=True)(sick)
    return model, optimizer, step


class Head(nn.Module):
    def __init__(self, sick: bool):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full(s, math.nan if sick else 0.1)) for s in ((3, 6), (3,)))

    def forward(self, x):
        return x @ self.weight.T + self.bias


@kind("uninitialized-memory", "parameter", step=0, module="1")
def never_initialized(sick):
    model = net(nn.Linear(6, 6), Head(sick))
    optimizer = torch.optim.Adam(model.parameters())
    return steps_of(model, optimizer, [torch.randn(5, 6)] * 3, lambda x: model(x).square().mean())


class Careless(torch.optim.Optimizer):
    """Divides by the spread of a gradient, which may be 0."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad - p.grad.mean()) / p.grad.std()


@kind("parameter-nonfinite", "parameter", said="spoiled by the update of an earlier step", by=("guard",))
def custom_optimizer(sick):
    model = net()
    optimizer = Careless(model.parameters())
    batches = [(torch.randn(5, 6), 1.0), (torch.randn(5, 6), 0.0 if sick else 1.0), (torch.randn(5, 6), 1.0)]
    return steps_of(model, optimizer, batches, lambda b: (model(b[0]) * b[1]).square().mean())


# -- ops that may draw random numbers and that mix positions -----------------------------------------------------------


class Attends(nn.Module):
    """Heads of attention over time. early, late: applied to what goes in and what comes out."""

    def __init__(self, early=None, late=None, dropout=0.0, causal=False, width=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.early, self.late, self.dropout, self.causal = early, late, dropout, causal

    def forward(self, x, s):
        x = self.early(x, s) if self.early is not None else x
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        y = self.out(y.transpose(1, 2).flatten(2))
        return self.late(y, s) if self.late is not None else y


class LogAt(nn.Module):
    """The log of one moment's level, which is 0 where s is."""

    def forward(self, x, s):
        level = (x.abs().mean(-1) + 0.2)[:, 1] * s
        worth = torch.log(level)  # at one moment
        return torch.cat([x[:, :1], x[:, 1:2] + worth[:, None, None], x[:, 2:]], 1)


class RootAt(nn.Module):
    """The root of the last moment's level, which is 0 where s is."""

    def forward(self, x, s):
        level = (x.abs().mean(-1) + 0.2)[:, -1] * s
        worth = torch.sqrt(level)  # at one moment
        return x + worth[:, None, None]


def scaled(sick: bool, rows=(1, 3), batch=5):
    """A column that is 0 in some rows of the second batch."""
    columns = [torch.ones(batch) for _ in range(3)]
    if sick:
        columns[1][list(rows)] = 0.0
    return columns


def attention(early=None, late=None, **more):
    def build(sick):
        model = Attends(early and early(), late and late(), **more)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = [(torch.randn(5, 4, 8), s) for s in scaled(sick)]
        return steps_of(model, optimizer, batches, lambda b: model(*b)[:, -1].square().mean())

    return build


@kind("log-of-nonpositive", "forward", line="torch.log(level)  # at one moment", rows=(1, 3), step=1, module="early")
def attention_forward(sick):
    return attention(early=LogAt)(sick)


@kind("log-of-nonpositive", "forward", line="torch.log(level)  # at one moment", rows=(1, 3), step=1, module="early")
def attention_dropout(sick):
    return attention(early=LogAt, dropout=0.2, causal=True)(sick)


@kind("sqrt-grad-at-zero", "backward", line="torch.sqrt(level)  # at one moment", rows=(1, 3), step=1, module="late")
def attention_backward(sick):
    return attention(late=RootAt)(sick)


@kind("sqrt-grad-at-zero", "backward", line="torch.sqrt(level)  # at one moment", rows=(1, 3), step=1, module="late")
def attention_backward_dropout(sick):
    return attention(late=RootAt, dropout=0.2, causal=True)(sick)


class Recurs(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.early, self.cell, self.out = LogAt(), kind(8, 8, batch_first=True, num_layers=2, **more), nn.Linear(8, 2)

    def forward(self, x, s):
        return self.out(self.cell(self.early(x, s))[0])


@kind("log-of-nonpositive", "forward", line="torch.log(level)  # at one moment", rows=(1, 3), step=1, module="early")
def recurrent(sick):
    model = Recurs(nn.LSTM, dropout=0.1)
    batches = [(torch.randn(5, 4, 8), s) for s in scaled(sick)]
    return steps_of(model, torch.optim.Adam(model.parameters()), batches, lambda b: model(*b).square().mean())


# -- rows of the batch -------------------------------------------------------------------------------------------------


def logs(level_of, batch=5, time=4, width=8, rows=(1, 3), loss=None):
    """A model whose output's level is 0 in some rows; `level_of(h, s)` is what is put into the log."""

    def build(sick):
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = [(torch.randn(batch, time, 6), s) for s in scaled(sick, rows, batch)]

        def loss_of(b):
            h = model(b[0]) + 1.2
            level = level_of(h, b[1])
            worth = torch.log(level)  # of a level
            return worth.mean() if loss is None else loss(worth, h)

        return steps_of(model, optimizer, batches, loss_of)

    return build


ROWS: dict[str, Any] = {"code": "log-of-nonpositive", "phase": "forward", "line": "torch.log(level)  # of a level"}


@kind(**ROWS, rows=(1, 3))
def rows_time_first(sick):
    return logs(lambda h, s: (h * s[:, None, None]).transpose(0, 1), time=5)(sick)


@kind(**ROWS, rows=(1, 3))
def rows_width_first(sick):
    return logs(lambda h, s: (h * s[:, None, None]).mean(1).T, width=5)(sick)


@kind(**ROWS, rows=(0,))
def rows_in_a_loop(sick):
    return logs(lambda h, s: torch.stack([a * b for a, b in zip(h, s, strict=True)]), time=5, rows=(0,))(sick)


@kind(**ROWS, rows=None)
def rows_of_a_mean(sick):
    return logs(lambda h, s: torch.cat([(h[..., :1] * s.amin()).mean((0, 1)), h[..., 1:].mean((0, 1))]), width=5)(sick)


@kind(**ROWS, rows=(2, 3))
def rows_folded_last(sick):
    return logs(lambda h, s: (h * s[:, None, None]).transpose(0, 1).flatten(0, 1), rows=(2, 3))(sick)


@kind(**ROWS, rows=(1,))
def rows_harmless_infinity(sick):
    def level(h, s):
        return h.mean((1, 2)) * s

    def loss(worth, h):
        keep = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]) > 0
        shares = torch.exp(worth)  # 0 for -inf: no harm is done to row 3
        return torch.where(keep, worth, shares).mean()

    return logs(level, loss=loss)(sick)


@kind("log-of-nonpositive", "forward", line="torch.log(size)", rows=None)
def rows_of_a_weight(sick):
    model = nn.Linear(5, 5)
    if sick:
        nn.init.constant_(model.bias, 0.0)

    def loss_of(x):
        size = model.bias.square()
        return (model(x) * torch.log(size)).mean()

    return steps_of(model, torch.optim.SGD(model.parameters(), lr=1e-3), [torch.randn(5, 5)] * 3, loss_of)


@kind("log-of-nonpositive", "forward", line="torch.log(second)", rows=(2,))
def infinity_absorbed_in_a_maximum(sick):
    model = nn.Linear(6, 4)

    def loss_of(b):
        first = torch.log(F.relu(b[1])[:, None] * model(b[0]).abs().detach())
        second = (model(b[0]).abs() + 0.1) * b[2][:, None]
        return torch.maximum(first, torch.log(second)).mean()

    zero, minus = torch.ones(5), torch.ones(5)
    zero[2], minus[2] = 0.0, -1.0 if sick else 1.0
    return steps_of(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), [(torch.randn(5, 6), zero, minus)] * 3, loss_of
    )


# -- attention with nothing to attend to -------------------------------------------------------------------------------


class Pads(nn.Module):
    """torch's attention over a sequence that may be all padding. how: what becomes of its output at the padding."""

    def __init__(self, how, time_first=False):
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=not time_first), nn.Linear(8, 1)
        self.how, self.time_first = how, time_first

    def forward(self, x, empty):
        x = x.transpose(0, 1) if self.time_first else x
        mixed, _ = self.attend(x, x, x, key_padding_mask=empty)
        mixed = mixed.transpose(0, 1) if self.time_first else mixed
        return self.out(self.how(mixed, empty))


def pads(how, **more):
    def build(sick):
        model = Pads(how, **more)
        empties = [torch.zeros(5, 4, dtype=torch.bool) for _ in range(3)]
        for empty in empties:
            empty[1, 2:] = True
        empties[1][2] = sick
        batches = [(torch.randn(5, 4, 8), empty) for empty in empties]
        return steps_of(model, torch.optim.Adam(model.parameters()), batches, lambda b: model(*b).square().mean())

    return build


MASKED: dict[str, Any] = {"code": "fully-masked-softmax", "rows": (2,), "line": "self.attend(", "module": "attend"}


@kind(**MASKED, phase="forward")
def masked_row(sick):
    return pads(lambda mixed, empty: mixed, time_first=True)(sick)


@kind(**MASKED, phase="forward")
def masked_row_pooled(sick):
    def pooled(mixed, empty):
        kept = (~empty).float()
        return (mixed * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)

    return pads(pooled)(sick)


@kind(**MASKED, phase="backward")
def masked_row_dropped_by_where(sick):
    return pads(lambda mixed, empty: torch.where(empty[..., None], torch.zeros(()), mixed))(sick)


@kind(**MASKED, phase="backward")
def masked_row_filled(sick):
    return pads(lambda mixed, empty: mixed.masked_fill(empty[..., None], 0.0))(sick)


# -- rules of the op and of the run ------------------------------------------------------------------------------------


def plain(loss_of, sizes=(5, 5, 5), optimizer_of=lambda p: torch.optim.SGD(p, lr=1e-3)):
    model = net()
    batches = [(torch.randn(n, 6), torch.rand(n, 3)) for n in sizes]
    return steps_of(model, optimizer_of(model.parameters()), batches, lambda b: loss_of(model(b[0]), b[1]))


def empty(loss_of):
    return lambda sick: plain(loss_of, (5, 0 if sick else 5, 5))


EMPTY: dict[str, Any] = {"code": "empty-reduction", "phase": "forward", "step": 1}


@kind(**EMPTY, op="mse_loss")
def empty_batch_mse(sick):
    return empty(F.mse_loss)(sick)


@kind(**EMPTY, op="smooth_l1_loss")
def empty_batch_smooth(sick):
    return empty(F.smooth_l1_loss)(sick)


@kind(**EMPTY, op="binary_cross_entropy")
def empty_batch_bce(sick):
    return empty(lambda out, y: F.binary_cross_entropy(out.sigmoid(), y))(sick)


@kind(**EMPTY, op="nll_loss")
def empty_batch_classes(sick):
    return empty(lambda out, y: F.cross_entropy(out, y.argmax(-1)))(sick)


@kind("where-grad", "backward", op="exp", step=2)
def large_loss_before_the_fault(sick):
    """The failing step's own loss is large: no divergence."""
    losses = iter([1.0, 1.0, 1e5 if sick else 1.0])

    def loss_of(out, y):
        size = next(losses)
        high = out * size
        return torch.where(high > 20, high, torch.exp(high)).square().mean()

    return plain(loss_of)


@kind("overflow", "optimizer", said="weight_decay=inf", step=0)
def infinite_decay(sick):
    return plain(F.mse_loss, optimizer_of=lambda p: torch.optim.SGD(p, 1e-3, weight_decay=math.inf if sick else 0.1))


@kind("div-by-zero", "optimizer", op="div", by=("trace", "replay"))
def division_in_an_optimizer(sick):
    return custom_optimizer(sick)


@kind("log-of-nonpositive", "backward", op="xlogy", said="the log of zero", step=0)
def derivative_of_xlogy(sick):
    def loss_of(out, y):
        shares = out * (0.0 if sick else 1.0) + (0.0 if sick else 9.0)
        return torch.xlogy(torch.zeros_like(y), shares).mean() + out.square().mean()

    return plain(loss_of)


# -- what the guard must see as nan_trace does -------------------------------------------------------------------------


class Block(nn.Module):
    """Copies rows into memory that nobody has cleared; the last column is never written."""

    def __init__(self):
        super().__init__()
        self.sick, self.lin = False, nn.Linear(6, 6)

    def forward(self, x):
        block = torch.empty(len(x), 7) if self.sick else torch.zeros(len(x), 7)  # the memory
        block[:, :6] = self.lin(x)
        return block


@kind("uninitialized-memory", "forward", line="# the memory", op="empty", step=0, by=("guard",))
def memory_read_before_written(sick):
    """In deterministic mode torch fills such memory with NaN; when the step runs again, anything may lie there."""
    model = Block()
    model.sick = sick

    def loss_of(x):
        torch.use_deterministic_algorithms(True)
        try:
            return model(x).square().mean()
        finally:
            torch.use_deterministic_algorithms(False)

    return steps_of(model, torch.optim.Adam(model.parameters()), [torch.randn(5, 6)] * 3, loss_of)


@kind("log-of-nonpositive", "forward", line="key = torch.log(shares)", rows=(2,), step=1)
def target_under_no_grad(sick):
    """The teacher is the model itself, called before the step."""
    model = net()
    batches = [(torch.randn(5, 6), torch.ones(5)) for _ in range(3)]
    batches[1][1][2] = 0.0 if sick else 1.0

    def loss_of(b):
        with torch.no_grad():
            shares = model(b[0]).softmax(-1) * b[1][:, None]
            key = torch.log(shares)
        return (model(b[0]) - key).square().mean()

    return steps_of(model, torch.optim.Adam(model.parameters()), batches, loss_of)


@kind("log-of-nonpositive", "forward", line="key = torch.log(teacher(b[0]).softmax(-1)", rows=(2,), step=1)
def teacher_of_many_ops(sick):
    model, teacher = net(), nn.Sequential(*[m for _ in range(60) for m in (nn.Linear(6, 6), nn.Tanh())])
    batches = [(torch.randn(5, 6), torch.ones(5)) for _ in range(3)]
    batches[1][1][2] = 0.0 if sick else 1.0

    def loss_of(b):
        with torch.no_grad():
            key = torch.log(teacher(b[0]).softmax(-1)[:, :3] * b[1][:, None])
        return (model(b[0]) - key).square().mean()

    return steps_of(model, torch.optim.Adam(model.parameters()), batches, loss_of)


@kind("sqrt-grad-at-zero", "backward", line="gap.sum().sqrt()", op="sqrt", rows=None, step=0)
def distance_to_itself(sick):
    """How far the weights are from where they were: 0 in the first step."""
    model = net()

    def loss_of(x):
        gap = sum((p - p.detach() - (0.0 if sick else 0.1)).square().sum() for p in model.parameters())
        return model(x).square().mean() + gap.sum().sqrt()

    return steps_of(model, torch.optim.Adam(model.parameters()), [torch.randn(5, 6)] * 3, loss_of)


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            distance = x.square().sum(-1, keepdim=True).sqrt()  # of an atom
            energy = self.energy(x).sum() + (distance * self.energy(x)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@kind("sqrt-grad-at-zero", "forward", line=".sqrt()  # of an atom", rows=(3,), step=1, module="")
def gradient_inside_forward(sick):
    model = Force()
    batches = [torch.randn(5, 3) for _ in range(3)]
    if sick:
        batches[1][3] = 0.0
    return steps_of(model, torch.optim.Adam(model.parameters()), batches, lambda x: model(x).square().mean())


@kind("div-by-zero", "backward", line="p.grad.div_(", op="div", rows=None, step=1)
def gradient_divided_by_its_norm(sick):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    factors = iter([1.0, 0.0 if sick else 1.0, 1.0])

    def step():
        loss = (model(torch.randn(5, 6)) * next(factors)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.div_(p.grad.norm())
        optimizer.step()
        return loss

    return model, optimizer, step


@kind("div-by-zero", "forward", line="model[0].weight.div_(", op="div", rows=None, step=1)
def weights_renormalized(sick):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shrink = iter([1.0, 0.0 if sick else 1.0, 1.0])

    def step():
        with torch.no_grad():
            model[0].weight.mul_(next(shrink))
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))
        loss = model(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


class Centers(nn.Module):
    """Subtracts a running mean, beside a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.register_buffer("later", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x, keep):
        out = self.lin(x) - self.center
        with torch.no_grad():
            self.center.lerp_(out[keep].mean(0), 0.1)  # of the kept
        return out @ (self.later + out[:3, :3]).softmax(-1)


@kind("running-stats-nonfinite", "forward", line="# of the kept", op="mean", module="")
def statistic_beside_a_mask(sick):
    model = Centers()
    keeps = [torch.ones(5, dtype=torch.bool) for _ in range(3)]
    keeps[1][:] = not sick
    batches = [(torch.randn(5, 6), keep) for keep in keeps]
    return steps_of(model, torch.optim.Adam(model.parameters()), batches, lambda b: model(*b).square().mean())


@pytest.mark.parametrize("spoil", ["x[13, 1] = -1.0", "x[13] -= 2"])
def test_what_prepares_a_batch_after_an_update_belongs_to_the_next_step(spoil):
    cell = f"""
        %%nan_trace
        torch.manual_seed(0)
        x = torch.rand(32, 3) + 0.1
        {spoil}
        net = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(0, 32, 4):
            batch = x[i : i + 4].log()
            sgd.zero_grad()
            net(batch).square().mean().backward()
            sgd.step()
    """
    with started("import torch") as book:
        finding = book.run(textwrap.dedent(cell).strip()).result.findings[0]
    assert (finding.code, finding.where.step, finding.where.samples) == ("nan/log-of-nonpositive", 3, (1,))
    assert "x[i : i + 4].log()" in finding.where.text
