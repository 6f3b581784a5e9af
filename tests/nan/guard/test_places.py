"""Where the fault is said to be: several models and optimizers, several calls, loss code of many kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.nan.judge import answer_of
from tests.nan.leftovers import assert_nothing_is_left


@pytest.fixture(autouse=True)
def no_leftovers():
    torch.manual_seed(0)
    yield
    assert_nothing_is_left()


class Adversaries:
    """Two models, two optimizers, in turns, as a GAN is trained."""

    def __init__(self, bad: int | None = None, who: str = "judge") -> None:
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.judge = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 1))
        self.of_maker = torch.optim.Adam(self.maker.parameters(), lr=1e-2)
        self.of_judge = torch.optim.Adam(self.judge.parameters(), lr=1e-2)
        self.real, self.noise = torch.randn(6, 5, 4), torch.randn(6, 5, 3)
        self.bad, self.who = bad, who
        self.models, self.optimizers = [self.maker, self.judge], [self.of_maker, self.of_judge]
        self.after_judge: dict = {}

    def step(self, i: int) -> None:
        fake = self.maker(self.noise[i])
        self.of_judge.zero_grad()
        level = torch.sigmoid(self.judge(self.real[i]))
        if self.bad == i and self.who == "judge":
            level = level * torch.tensor([1.0, 0, 1, 1, 1])[:, None]
        loss = -torch.log(level).mean() - torch.log(1 - torch.sigmoid(self.judge(fake.detach()))).mean()
        loss.backward()
        self.of_judge.step()
        self.after_judge = kept([self.judge], [self.of_judge])
        self.of_maker.zero_grad()
        level = torch.sigmoid(self.judge(fake))
        if self.bad == i and self.who == "maker":
            level = level * torch.tensor([1.0, 1, 0, 1, 1])[:, None]
        loss = -torch.log(level).mean()
        loss.backward()
        self.of_maker.step()

    def kept(self) -> dict:
        return kept(self.models, self.optimizers)


@pytest.mark.parametrize("named", [False, True])
def test_two_optimizers_in_turns_healthy(named: bool) -> None:
    bare, guarded = Adversaries(), Adversaries()
    for i in range(6):
        bare.step(i)
    models = {"maker": guarded.maker, "judge": guarded.judge} if named else guarded.models
    optimizers = {"maker": guarded.of_maker, "judge": guarded.of_judge} if named else guarded.optimizers
    with nbdebug.guard(models, optimizers) as guard:
        for i in range(6):
            guarded.step(i)
    assert not changed(bare.kept(), guarded.kept())
    assert guard.report().ok and guard.steps == 6, "a round of both optimizers is one step"


@pytest.mark.parametrize("who", ["judge", "maker"])
def test_two_optimizers_in_turns_one_goes_bad(who: str) -> None:
    gan = Adversaries(bad=3, who=who)
    with nbdebug.guard({"maker": gan.maker, "judge": gan.judge}, gan.optimizers):
        for i in range(3):
            gan.step(i)
        before = gan.kept()
        with pytest.raises(nbdebug.NonFiniteStep) as caught:
            gan.step(3)
    moved = changed(before, gan.kept())
    if who == "judge":
        assert not moved
    else:  # the judge keeps its own good update of this round, or goes back with the rest of it
        own = kept([gan.judge], [gan.of_judge])
        assert not moved or not changed(own, gan.after_judge)
        assert not [name for name in moved if name.startswith(("model 0", "optimizer 0"))]
    (finding,) = caught.value.report.findings
    assert (finding.code, finding.where.step) == ("nan/log-of-nonpositive", 3)
    assert finding.where.samples == ((1,) if who == "judge" else (2,))


def named(model: nn.Module, loss_of, parameters=None, bad: int = 1, optimizer=None) -> dict:
    """Train on `loss_of(i)` under the guard: step `bad` trips, and its report is the answer."""
    optimizer = optimizer or torch.optim.SGD(list(model.parameters()), lr=1e-3)
    before = {}
    with nbdebug.guard(model, optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(bad + 2):
            before = kept([model], [optimizer])
            optimizer.zero_grad()
            loss_of(i).backward()
            optimizer.step()
    assert not changed(before, kept([model], [optimizer]))
    assert caught.value.step == bad
    answer = answer_of(caught.value.report)
    assert "own_fault" not in answer, answer
    return answer


def test_a_model_called_several_times_in_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3))
    left, right = torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    right[1, 4] = left[1, 4]
    model[1].eval()  # else the two branches are never alike

    def loss_of(i: int) -> torch.Tensor:
        gap = model(left[i]) - model(right[i])
        return gap.square().sum(1).sqrt().mean()

    answer = named(model, loss_of)
    assert (answer["code"], answer["op"], answer["rows"]) == ("nan/sqrt-grad-at-zero", "sqrt", (4,))


def test_a_model_that_gets_its_own_output() -> None:
    model = nn.Linear(4, 4)
    inputs, scale = torch.rand(3, 5, 4), torch.ones(3, 5, 1)
    scale[1, 2] = 0

    def loss_of(i: int) -> torch.Tensor:
        out = inputs[i]
        for _ in range(3):
            out = model(out).sigmoid()
        return torch.log(out * scale[i]).mean()

    answer = named(model, loss_of)
    assert (answer["code"], answer["rows"]) == ("nan/log-of-nonpositive", (2,))


def test_a_teacher_outside_the_guard() -> None:
    model, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    inputs = torch.randn(3, 5, 4)

    def loss_of(i: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = F.one_hot(teacher(inputs[i]).argmax(1), 3).float() * 0.9 + 0.05
            wanted = wanted * torch.tensor([1.0, 1, 1, i != 1, 1])[:, None]
        scores = model(inputs[i]).log_softmax(1)
        return (wanted * (wanted.log() - scores)).sum(1).mean()

    answer = named(model, loss_of)
    assert (answer["code"], answer["op"], answer["rows"]) == ("nan/log-of-nonpositive", "log", (3,))


def test_targets_that_are_not_finite() -> None:
    model, inputs, targets = nn.Linear(4, 1), torch.randn(3, 5, 4), torch.randn(3, 5, 1)
    targets[1, 2] = float("nan")
    answer = named(model, lambda i: F.mse_loss(model(inputs[i]), targets[i]))
    assert (answer["code"], answer["rows"]) == ("nan/input-nonfinite", (2,))


def test_inputs_that_are_not_finite() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), torch.randn(3, 5, 4)
    inputs[1, 2, 0] = float("inf")
    answer = named(model, lambda i: model(inputs[i]).square().mean())
    assert (answer["code"], answer["rows"], answer["phase"]) == ("nan/input-nonfinite", (2,), "input")


def test_a_penalty_on_the_weights_in_the_loss_code() -> None:
    model, inputs = nn.Linear(4, 3), torch.randn(3, 5, 4)

    def loss_of(i: int) -> torch.Tensor:
        loss = model(inputs[i]).square().mean()
        kept_away = 1.0 if i != 1 else 0.0
        return loss + 1e-3 * torch.log((model.weight * kept_away).abs()).sum()  # the penalty

    answer = named(model, loss_of)
    assert (answer["code"], answer["op"], answer["module"] or "") == ("nan/log-of-nonpositive", "log", "")
    assert "the penalty" in answer["text"] or "torch.log" in answer["text"]


def test_a_loss_of_the_models_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=40)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(3, 40, (3, 4, 7))
    labels = ids.clone()
    labels[1] = -100  # every label is ignored: the mean of nothing
    answer = named(model, lambda i: model(input_ids=ids[i], labels=labels[i]).loss)
    assert answer["code"] == "nan/all-labels-ignored"


def test_a_model_that_returns_a_distribution() -> None:
    """What the loss starts from hangs on an object of some other library's."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, spread: torch.Tensor) -> torch.distributions.Normal:
            return torch.distributions.Normal(self.mean(x), spread, validate_args=False)

    model, inputs, actions = Policy(), torch.randn(3, 5, 4), torch.randn(3, 5, 2)
    spread = torch.ones(3, 5, 1)
    spread[1, 2] = 0.0
    answer = named(model, lambda i: -model(inputs[i], spread[i]).log_prob(actions[i]).mean())
    assert (answer["phase"], answer["rows"]) == ("forward", (2,))
    assert answer["code"] in ("nan/div-by-zero", "nan/log-of-nonpositive")


def test_two_models_one_of_which_is_guarded() -> None:
    """What goes bad in the other one is not this guard's business; its loss is not one of ours."""
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    ours, theirs = torch.optim.SGD(model.parameters(), lr=1e-2), torch.optim.SGD(other.parameters(), lr=1e-2)
    inputs = torch.randn(5, 4)
    with nbdebug.guard(model, ours) as guard:
        for i in range(4):
            ours.zero_grad(), theirs.zero_grad()
            one = model(inputs).square().mean()
            two = torch.log(other(inputs).square() * (i != 2)).mean()
            two.backward()
            one.backward()
            theirs.step(), ours.step()
    assert guard.steps == 4 and not guard.trips and guard.report().ok
    assert all(line.loss < 100 for line in guard.lines) and torch.isfinite(model.weight).all()
    assert not torch.isfinite(other.weight).all()


def test_a_result_that_is_filled_in_place_part_by_part() -> None:
    model, inputs, floor = nn.Linear(4, 2), torch.randn(3, 5, 4), torch.ones(3, 5)
    floor[1, 3] = 0.0

    def loss_of(i: int) -> torch.Tensor:
        out, level = torch.zeros(5, 2), model(inputs[i]).square()
        out[:, 0] = level[:, 0]
        out[:, 1] = torch.log(level[:, 1] * floor[i])
        return out.mean()

    answer = named(model, loss_of)
    assert (answer["code"], answer["op"], answer["rows"]) == ("nan/log-of-nonpositive", "log", (3,))


@pytest.mark.parametrize("least", [0.5, 0.0])
def test_a_model_that_is_mapped_over_the_batch(least: float) -> None:
    """torch.func's tensors can't be kept: the ops within are recorded instead of the call."""
    model, rows, scales = nn.Linear(4, 3), torch.rand(6, 4), torch.rand(6) + 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales[2] = least

    def one(row: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (model(row) / scale).square().sum()

    with nbdebug.guard(model, optimizer, on_trip="trace") as guard:
        report = None
        for _ in range(2):
            try:
                optimizer.zero_grad()
                torch.func.vmap(one)(rows, scales).mean().backward()
                optimizer.step()
            except nbdebug.NonFiniteStep as stopped:
                report = stopped.report
                break
    assert not guard.fault
    if least:
        assert report is None and guard.report().ok
    else:
        finding = report.findings[0]
        assert (finding.code, finding.where.samples) == ("nan/div-by-zero", (2,))
        assert finding.where.text == "return (model(row) / scale).square().sum()"
