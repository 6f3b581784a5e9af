"""What diagnose(regularize=True) tries: smaller models are what their line says, augmentation never meets validation
rows, the rate warms up, and everything is as before afterwards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from nbdebug.tools.training.regularizers import _half_the_blocks, _half_the_width
from nbdebug.tools.training.rules.signs import OTHER_ORDER
from tests.training.loops import cross_entropy, loaders, made, shapes


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.norm = nn.Embedding(30, 16), nn.LSTM(16, 16, batch_first=True), nn.LayerNorm(16)
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(self.norm(self.cell(self.words(ids))[0][:, -1]))


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, 8).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, 16))


class Attention(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.words, self.blocks = nn.Embedding(30, 16), nn.ModuleList(Block() for _ in range(blocks))
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


def perceptron(outputs=4):
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, outputs))


WORDS = torch.randint(0, 30, (400, 6), generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
NARROW = [
    (
        nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2)),
        VECTORS,
        "model[0] = nn.Linear(in_features=10, out_features=4",
    ),
    (Convolutions(), shapes(40)[0], "model.head = nn.Linear(in_features=64, out_features=4"),
    (Recurrence(), WORDS, "model.cell = nn.LSTM(8, 8, batch_first=True); model.norm = nn.LayerNorm((8,)"),
]


@pytest.mark.parametrize(("model", "x", "words"), NARROW, ids=lambda part: type(part).__name__)
def test_half_the_width_is_what_the_forward_finds(model, x, words):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    code = _half_the_width(model, cross_entropy, [x, torch.zeros(len(x), dtype=torch.long)])
    assert words in code
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_half_the_blocks_where_all_are_alike():
    assert _half_the_blocks(Attention(4)) == "model.blocks = model.blocks[: 2]"
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert _half_the_blocks(nn.TransformerEncoder(layer, 3)) == "model.layers = model.layers[: 1]"
    for model in (NARROW[0][0], Convolutions(), Attention(1), nn.Sequential(nn.ReLU(), nn.ReLU())):
        assert _half_the_blocks(model) == ""
    tied = Recurrence()
    tied.out.weight = nn.Parameter(tied.cell.weight_ih_l0[:2].detach())
    tied.norm.bias = tied.norm.weight
    assert _half_the_width(tied, cross_entropy, [WORDS, torch.zeros(400, dtype=torch.long)]) == ""


def asked(model, x, y, lr=1e-2, passes=8, loss_fn=cross_entropy):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    training = made(model, optimizer, loss_fn, loaders(x, y, held=0.8), passes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = nbdebug.diagnose(
        training.train,
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        train_loader=training.train_loader,
        val_loader=training.val_loader,
        regularize=True,
        progress=False,
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters()) and len(optimizer.param_groups) == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert optimizer.param_groups[0]["weight_decay"] == 0 and optimizer.param_groups[0]["lr"] == lr
    (table,) = [t for t in report.tables if t.title.startswith("Regularizers")]
    assert [row[0] for row in table.rows[:2]] == ["as it is", OTHER_ORDER]
    return report, [row[0].partition(" (")[0] for row in table.rows]


KINDS = [
    (Convolutions, shapes(400)[0], {"half the width", "flips", "shifts", "noise"}),
    (lambda: Attention(2), WORDS, {"half the blocks", "word dropout", "words moved"}),
    (lambda: Attention(1), WORDS, {"the first 3 of 7 parameters frozen", "word dropout", "words moved"}),
    (perceptron, VECTORS, {"half the width", "noise"}),
]


@pytest.mark.parametrize(("build", "x", "names"), KINDS, ids=["pictures", "blocks", "one block", "vectors"])
def test_training_rows_alone_are_augmented(build, x, names):
    torch.manual_seed(3)
    rows, changed = {row.numpy().tobytes() for row in x}, set()

    def loss_fn(model, batch):
        inputs = batch[0]
        if not all(row.numpy().tobytes() in rows for row in inputs):
            changed.add(torch.is_grad_enabled())
        return cross_entropy(model, batch)

    _, tried = asked(build(), x, torch.arange(400) % 2, loss_fn=loss_fn)
    assert names <= set(tried), tried
    assert changed == {True}, "what is evaluated is never changed"


def test_dense_targets_and_rows_of_another_kind_are_not_moved():
    torch.manual_seed(4)
    pictures = torch.randn(400, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    _, tried = asked(model, pictures, pictures.clone(), loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert "noise" in tried and "flips" not in tried
    counts = torch.randint(0, 3, (400, 10)).float()
    report, tried = asked(perceptron(), counts, torch.arange(400) % 2)
    assert "noise" not in tried and any("it is not clear what the inputs" in text for text in report.unchecked)


def test_the_rate_warms_up_and_the_line_says_how():
    torch.manual_seed(5)
    x, rates = torch.randn(400, 10), []
    y = (x[:, 0] > 0).long()
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    training = made(model, optimizer, cross_entropy, loaders(x, y, held=0.8), 8)
    parts = {name: getattr(training, name) for name in ("loss_fn", "train_loader", "val_loader")}
    nbdebug.diagnose(training.train, model=model, optimizer=optimizer, **parts, regularize=True, progress=False)
    assert any(math.isclose(a, 5e-3) and math.isclose(b, 1e-2) for a, b in itertools.pairwise(rates))  # 2 of 24 steps
    assert min(rates) < 1e-3, "and falls to nothing at the end of the other"


def test_what_is_pretrained_is_not_made_anew():
    torch.manual_seed(6)
    model = perceptron()
    with torch.no_grad():
        model[0].weight.mul_(3)  # beyond any initialization
    _, tried = asked(model, VECTORS, torch.arange(400) % 2)
    assert "the first 2 of 4 parameters frozen" in tried and "half the width" not in tried


def test_with_two_optimizers_a_change_of_the_model_is_made_once():
    torch.manual_seed(7)
    model, hooks, decays = perceptron(), set(), set()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    train_loader, val_loader = loaders(VECTORS, torch.arange(400) % 4, held=0.8)

    def loss_fn(model, batch):
        hooks.add(len(model[1]._forward_hooks))
        decays.add(tuple(o.param_groups[0]["weight_decay"] for o in optimizers))
        return cross_entropy(model, batch)

    def train(callback):
        for step, batch in enumerate([*train_loader] * 8):
            loss = loss_fn(model, batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            callback(step, loss.item())

    parts = {"loss_fn": loss_fn, "train_loader": train_loader, "val_loader": val_loader}
    nbdebug.diagnose(train, model=model, optimizer=optimizers, **parts, regularize=True, progress=False)
    assert hooks == {0, 1} and (0.1, 0.1) in decays and (0, 0.1) not in decays
