"""Both losses are zero: a leak, copied rows, one class, one target, rounding; a task that is solved is left in peace.
The floor of smoothed labels, EarlyStop, and the leak probe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.tools.training import signals
from tests.training.loops import clusters


def diagnosed(
    x: torch.Tensor, y: torch.Tensor, digits: int | None = None, smoothing: float = 0.0, rate: float = 1e-2
) -> nbdebug.Report:
    torch.manual_seed(1)
    regression = y.is_floating_point()
    outputs = y.shape[1] if regression else int(y.max()) + 1 + (int(y.max()) == 0)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    criterion: Any = nn.MSELoss() if regression else nn.CrossEntropyLoss(label_smoothing=smoothing)
    half = len(x) // 2
    loaders = [
        DataLoader(TensorDataset(x[part], y[part]), batch_size=40, shuffle=part.start is None)
        for part in (slice(half), slice(half, None))
    ]

    def train(callback: Any) -> None:
        for step in range(18):
            for inputs, targets in loaders[0]:
                optimizer.zero_grad()
                loss = criterion(model(inputs), targets)
                loss.backward()
                optimizer.step()
                callback(step, loss.item() if digits is None else round(loss.item() / 10, digits))

    return nbdebug.diagnose(
        train,
        model=model,
        optimizer=optimizer,
        loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1]),
        train_loader=loaders[0],
        val_loader=loaders[1],
        progress=False,
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    return x, (x[:, 0] * x[:, 1] + 0.5 * torch.randn(400) > 0).long()


def column(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x[:, 4] = 3 * y.float()
    return x, y


def copies(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:200].repeat(2, 1), y[:200].repeat(2)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (column, "training/leakage", "Column `4`"),
        (copies, "training/leakage", "200 of 200 validation samples"),
        (lambda x, y: (x, torch.ones_like(y)), "training/zero-loss", "all 200 labels are 1"),
        (lambda x, y: (x, torch.full((400, 1), 0.7)), "training/zero-loss", "all targets are 0.7"),
        (lambda x, y: (x, x[:, 2:5].clone()), "training/leakage", "is a column of the target"),
    ],
)
def test_zero_on_both_sides_has_its_cause(change: Any, code: str, words: str) -> None:
    report = diagnosed(*change(*data()))
    assert report.findings[0].code == code and words in report.findings[0].title, report


def test_a_loss_that_is_rounded_to_zero_is_none() -> None:
    report = diagnosed(*data(), digits=1)
    assert report.findings[0].code == "training/zero-loss" and "rounded" in report.findings[0].title


def test_a_task_that_is_solved_is_left_in_peace() -> None:
    x, _ = data()
    report = diagnosed(x, x[:, :1] * 2 + x[:, 1:2])
    assert not report.findings and any("Both losses" in note for note in report.notes), report


@pytest.mark.parametrize(("smoothing", "floor"), [(0.1, "0.349"), (0.9, "1.37")])
def test_a_run_that_comes_down_to_the_floor_of_smoothed_labels_is_no_plateau(smoothing: float, floor: str) -> None:
    x, y = clusters(400, classes=4, width=8, spread=0.3)
    report = diagnosed(x, y, smoothing=smoothing)
    note = next(n for n in report.notes if "can't fall below" in n)
    assert report.ok and floor in note and "no plateau" in note, report
    stays = diagnosed(x, y, smoothing=smoothing, rate=1e-7)
    assert not stays.ok and not any("no plateau" in n for n in stays.notes), stays


def test_a_batch_is_memorized_at_the_floor() -> None:
    x, y = clusters(64, classes=4, width=8, spread=0.3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    by_hand = nn.functional.one_hot(y, 4) * 0.9 + 0.025
    for targets, smoothing in ((y, 0.1), (by_hand, 0.0)):
        loader = DataLoader(TensorDataset(x, targets), batch_size=32)
        report = nbdebug.preflight(model, loader, nn.CrossEntropyLoss(label_smoothing=smoothing), optimizer=optimizer)
        notes = " ".join(report.notes)
        assert "memorizes one batch" in notes and "below 0.349: labels are smoothed by 0.1 over 4 classes" in notes


def named(x: torch.Tensor, y: torch.Tensor) -> tuple[str, int] | None:
    feature = signals.telling_feature(x, y)
    return None if feature is None else (feature.kind, feature.which)


def test_the_probe_names_one_column_token_or_pixel() -> None:
    x, y = data()
    assert named(x, y) is None
    x[:, 3] = y * 2 - 1 + 0.3 * torch.randn(400)
    assert named(x, y) == ("column", 3)
    assert named(torch.randn(400, 8) + 6 * y[:, None], y) is None, "classes that lie far apart"
    tokens = torch.randint(0, 30, (400, 12))
    assert named(tokens, y) is None
    tokens[:, 5] = torch.where(y == 1, 77, tokens[:, 5])
    assert named(tokens, y) == ("token", 77)
    pixels = torch.rand(400, 1, 8, 8)
    pixels[:, 0, 0, 7] = y.float()
    assert named(pixels, y) == ("number", 7)


def leaking(change: Any) -> bool:
    """Whether it is a leak: told on validation samples, too. change: given inputs that tell a part, and labels."""
    torch.manual_seed(3)
    x = torch.randn(900, 8)
    y = (x[:, 0] + 0.6 * x[:, 1] + torch.randn(900) > 0).long()
    x = change(x, y)
    feature = signals.telling_feature(x[:600], y[:600], (x[600:], y[600:]))
    return feature is not None and feature.others is not None


def in_column(x: torch.Tensor, value: torch.Tensor, column: int = 3) -> torch.Tensor:
    return x.index_copy(1, torch.tensor([column]), value[:, None])


def as_tokens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [(x.clamp(-2, 2) * 3).long() + 6 + 20 * torch.arange(8), torch.where(y == 1, 500, 501)[:, None]], 1
    )


@pytest.mark.parametrize(
    ("change", "leak"),
    [
        (lambda x, y: in_column(x, 2 * y + 0.3 * torch.randn(900)), True),
        (lambda x, y: in_column(x, 2 * y + 0.3 * torch.randn(900))[:, None, None].expand(-1, 1, 2, -1), True),
        (as_tokens, True),
        (lambda x, y: in_column(torch.randn(900, 8), 2 * y + 0.3 * torch.randn(900)), False),  # made by hand
        (lambda x, y: in_column(in_column(x, y + 0.2 * torch.randn(900)), y + 0.4 * torch.randn(900), 4), False),
        (lambda x, y: in_column(x, torch.where(torch.arange(900) < 600, y + 0.2 * torch.randn(900), 0.5)), False),
        (lambda x, y: in_column(x, torch.rand(900) * (2 * y - 1)), False),  # the label is its sign
    ],
    ids=["column", "pixel", "token", "alone", "supported", "not-in-validation", "threshold"],
)
def test_a_leak_stands_among_weaker_features_and_holds_on_validation(change: Any, leak: bool) -> None:
    assert leaking(change) is leak


def test_early_stop() -> None:
    model = nn.Linear(2, 1)
    stop = nbdebug.EarlyStop(patience=2, min_delta=0.01, model=model)
    answers = []
    for value in (1.0, 0.5, math.nan, 0.495, 0.2):
        with torch.no_grad():
            model.weight.fill_(value)
        answers.append(stop(value))
        if answers[-1]:
            break
    assert answers == [False, False, False, True] and (stop.best, stop.best_at, stop.stopped_at) == (0.5, 1, 3)
    stop.restore()
    assert float(model.weight[0, 0].detach()) == 0.5
    again = nbdebug.EarlyStop(patience=2, model=model)
    again.load_state_dict(stop.state_dict())
    assert repr(again).startswith("EarlyStop(best 0.5 at validation 1, stopped at 3")
    assert nbdebug.EarlyStop.of([0.1, 0.2, 0.3], patience=3, better="higher").stopped_at is None
    assert nbdebug.EarlyStop.of([3.0, 3.0, 3.0], patience=2).stopped_at == 2
    with pytest.raises(ValueError, match="patience"):
        nbdebug.EarlyStop(patience=0)
    with pytest.raises(RuntimeError, match="no weights"):
        nbdebug.EarlyStop().restore()


def test_one_label_is_no_fault_where_pairs_of_scores_are_compared() -> None:
    """The first of each pair is the better one, so that all labels are 1; their difference can't be large for all."""
    torch.manual_seed(3)
    pairs = torch.randn(400, 2, 6)
    worth = pairs[..., 0] + pairs[..., 1] ** 2
    pairs = pairs.gather(1, worth.argsort(1, descending=True)[..., None].expand(-1, -1, 6))
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(pairs, torch.ones(400)), batch_size=40, shuffle=True)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0]).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores[:, 0] - scores[:, 1], batch[1])

    def train(callback: Any) -> None:
        for step in range(12):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss.item())

    parts: Any = {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "train_loader": loader}
    assert not nbdebug.diagnose(train, **parts, progress=False).findings
    assert not nbdebug.preflight(model, loader, loss_fn, optimizer=optimizer).findings
