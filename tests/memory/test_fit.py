"""fit on the CPU: predicted peaks against the profiler's allocation events, remedies against remedies really taken."""

from __future__ import annotations

import functools
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbdebug.observe.snapshot import Snapshot
from nbdebug.tools.memory.fit import fit
from nbdebug.tools.memory.predict import remedies as blocks
from nbdebug.tools.memory.predict.job import FitRequest
from nbdebug.tools.memory.predict.predict import measure, predict
from tests.benchmarks.fit_models import CNN, GPT, MLP, adamw, classified, images, next_token, sgd
from tests.memory.real_steps import peak_of, training

SMALL = functools.partial(GPT, layers=2, width=32, heads=2, vocabulary=300, length=32)
FOUR = functools.partial(SMALL, layers=4)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """A busy machine must not decide what is tried."""
    module = sys.modules["nbdebug.tools.memory.fit"]
    monkeypatch.setattr(module, "SECONDS", 600.0)
    monkeypatch.setattr(module, "SLOW", 600.0)


def tokens(rows: int = 8, length: int = 32) -> torch.Tensor:
    return torch.randint(300, (rows, length + 1))


def predicted(model, batch, loss_fn, optimizer=None):
    return predict(FitRequest(model, batch, loss_fn, optimizer, torch.device("cpu")))


def halved(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return next_token(model, batch)


ROWS = {
    "mlp": (
        functools.partial(MLP, 64, 128, 10),
        lambda: (torch.randn(64, 64), torch.randint(10, (64,))),
        classified,
        adamw,
    ),
    "cnn": (functools.partial(CNN, 16), lambda: images(8, 64), classified, sgd),
    "gpt": (SMALL, tokens, next_token, adamw),
    "gpt, dropout": (functools.partial(SMALL, dropout=0.1), tokens, next_token, sgd),
    "gpt, autocast": (SMALL, tokens, halved, adamw),
    "gpt, checkpointed": (functools.partial(SMALL, checkpointed=True), lambda: tokens(16), next_token, adamw),
    "gpt, without an optimizer": (SMALL, tokens, next_token, None),
}


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ROWS)
def test_the_peak_is_that_of_the_profiler(name):
    build, make, loss_fn, kind = ROWS[name]
    model, batch = build(), make()
    optimizer = kind(model.parameters()) if kind else None
    said = predicted(model, batch, loss_fn, optimizer)
    peak = peak_of(model, batch, training(model, batch, loss_fn, optimizer))
    if name == "cnn" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        # without AVX-512 oneDNN copies more around a convolution than is modelled: 11% to 23% of the peak were measured
        assert 0.7 * peak <= said.peak <= 1.01 * peak
    else:
        assert said.peak == pytest.approx(peak, rel=0.01)
    assert sum(said.at_peak.values()) == said.peak


def test_the_split_adds_up_to_what_is_known():
    model, batch = MLP(8, 16, 4), (torch.randn(64, 8), torch.randint(4, (64,)))
    size = sum(p.numel() * 4 for p in model.parameters())
    report = fit(
        model,
        batch,
        nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters()),
        device="cpu",
        progress=False,
    )
    parts = report.facts["fit"]["at_peak"]
    assert parts["parameters"] == size and parts["inputs"] == 64 * 8 * 4 + 64 * 8
    assert parts["optimizer state"] == pytest.approx(2 * size, abs=4 * len(list(model.parameters())))
    assert report.ok and report.plot("memory")["total"] == report.facts["fit"]["peak"]
    assert report.plot("memory")["limit"] is None and "device_memory" in " ".join(report.unchecked)
    assert "A training step needs" in str(report) and report._repr_mimebundle_()["text/html"]


def test_each_remedy_saves_what_it_says():
    model, batch = FOUR(), tokens(16)
    said = fit(model, batch, next_token, optimizer=torch.optim.AdamW(model.parameters()), device="cpu", progress=False)
    needs = {r["name"]: r["needs"] for r in said.facts["fit"]["remedies"]}

    def really(change=lambda model: None, rows=16, loss_fn=next_token, kind=adamw):
        changed, part = FOUR(), batch[:rows]
        change(changed)
        optimizer = kind([p for p in changed.parameters() if p.requires_grad])
        if rows == len(batch):
            return peak_of(changed, part, training(changed, part, loss_fn, optimizer))

        def step():
            optimizer.zero_grad(set_to_none=True)
            for _ in range(len(batch) // rows):
                (loss_fn(changed, part) / 2).backward()
            optimizer.step()

        return peak_of(changed, part, step)

    row = blocks.rows(model)[0]
    assert row.holder == "blocks" and len(row.paths) == 4
    shorter = batch[:, :16]
    taken = {
        "checkpoint all": really(blocks.checkpointing(row)),
        "checkpoint half": really(blocks.checkpointing(row, 2)),
        "bf16 autocast": really(loss_fn=halved),
        "accumulate 2×": really(rows=8),
        "last block only": really(blocks.freezing(row)),
        "half the length": peak_of(
            model, shorter, training(model, shorter, next_token, torch.optim.AdamW(model.parameters()))
        ),
    }
    assert {name: needs[name] for name in taken} == pytest.approx(taken, rel=0.02)


def test_what_does_not_fit_is_named_with_what_would():
    model, batch = SMALL(), tokens(16)
    report = fit(model, batch, next_token, optimizer=adamw, device="cpu", device_memory="1MiB", progress=False)
    assert [f.code for f in report] == ["memory/activations-dominate"]
    assert "It does not fit" in report.headline and "1.00 MiB" in report.findings[0].title
    best = report.facts["fit"]["remedies"][0]
    assert best["fits"] and best["needs"] <= 1 << 20 and report.findings[0].fixes[0].code == best["code"]
    most = report.facts["fit"]["largest"]["rows"]
    assert 0 < most < 16
    for rows, fits in ((most, True), (most + 1, False)):
        peak = peak_of(model, batch[:rows], training(model, batch[:rows], next_token, adamw(model.parameters())))
        assert (peak <= 1 << 20) is fits


class Masked(nn.Module):
    """Asks a tensor for its value and picks rows by a mask, which tensors without data can't."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(32, 256), nn.Linear(256, 4)

    def forward(self, x):
        hidden = torch.relu(self.inner(x))
        if hidden.sum().item() > 0:
            hidden = hidden[x[:, 0] > -100]
        return self.head(hidden)


def test_where_values_are_asked_for_small_real_batches_are_measured():
    model, batch = Masked(), (torch.randn(64, 32), torch.randint(4, (64,)))
    optimizer = torch.optim.Adam(model.parameters())
    report = fit(
        model, batch, nn.CrossEntropyLoss(), optimizer=optimizer, device="cpu", device_memory="300KiB", progress=False
    )
    said = report.facts["fit"]
    assert said["how"].startswith("Measured on real steps of a copy with 1, 2, 4 rows")
    assert "DataDependent" in " ".join(report.unchecked)
    real = peak_of(model, batch, training(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer))
    assert said["peak"] == pytest.approx(real, rel=0.05)
    assert 0 < said["largest"]["rows"] < 64


class Locked(nn.Linear):
    """Can't be copied."""

    def __init__(self):
        super().__init__(16, 16)
        self.lock = threading.Lock()
        self.seen = []

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("kind", [SMALL, Masked, Locked], ids=["copied", "measured", "exchanged"])
def test_nothing_of_the_users_changes(kind):
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens() if kind is SMALL else torch.randn(8, 32 if kind is Masked else 16)
    loss_fn = next_token if kind is SMALL else lambda m, b: m(b).square().mean()
    loss_fn(model, batch).backward()
    optimizer.step()
    before, hooks, rolled = Snapshot.take(model, optimizer), len(model._forward_hooks), random.getstate()
    kept = {id(m): dict(m.__dict__) for m in model.modules()}
    if kind is Masked:
        measure(FitRequest(model, batch, loss_fn, optimizer, torch.device("cpu")))
    else:
        predicted(model, batch, loss_fn, optimizer)
    assert before.differences() == [] and random.getstate() == rolled and len(model._forward_hooks) == hooks
    assert all(m.__dict__.keys() == kept[id(m)].keys() for m in model.modules())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_loss_that_uses_the_users_own_model_is_followed():
    model, batch = SMALL(), tokens()
    one = predicted(model, batch, lambda m, b: next_token(model, b))
    assert one.peak == predicted(model, batch, next_token).peak
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("values", [True, False])
def test_a_batch_of_one_size_alone_is_answered(values):
    """values: the step reads them, so that it can't be predicted with tensors without data."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            if values and float(x.detach().sum()) > 1e9:
                x = x * 2
            return self.head(x.view(16, 6))

    batch = torch.randn(16, 6), torch.randint(4, (16,))
    report = fit(Net(), batch, nn.functional.cross_entropy, device_memory="1GiB", device="cpu")
    assert report.verdict == "healthy"
    said = "a batch of one size alone" if values else "a batch of another size fails (RuntimeError: shape"
    assert any(line.startswith("The largest batch: ") and said in line for line in report.unchecked)
    assert not values or "Measured on real steps of a copy with 16 rows, in" in str(report.full())


def test_the_users_own_error_passes():
    with pytest.raises(ZeroDivisionError):
        fit(SMALL(), tokens(), lambda model, batch: 1 / 0, device="cpu", progress=False)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"model": 3}, "builds one"),
        ({"batch": "text"}, "hold tensors"),
        ({"loss_fn": 3}, "a function of"),
        ({"device": "tpu"}, '"cuda" or "cpu"'),
        ({"device_memory": "lots"}, "a size is"),
        ({"autocast": "int8"}, "bfloat16"),
        ({"optimizer": 3}, "must be a torch.optim.Optimizer"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed, said):
    given = {"model": MLP(8, 8, 2), "batch": torch.randn(2, 8), "loss_fn": lambda m, b: m(b).mean(), "progress": False}
    with pytest.raises((TypeError, ValueError), match=said):
        fit(**{**given, **changed})


def test_a_remedy_that_the_model_does_not_take_logs_nothing(capfd):
    """Half the side of an image does not fit a Linear: torch logs such an error of a meta kernel with its traceback."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 16 * 16, 10))
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    loss_fn = nn.CrossEntropyLoss()
    report = fit(model, batch, loss_fn, device="cuda", device_memory="1MiB", progress=False)
    assert any("half the side" in said for said in report.unchecked)
    with pytest.raises(RuntimeError, match="shapes"):
        fit(nn.Linear(8, 2), (torch.randn(4, 9), torch.randint(2, (4,))), loss_fn, device="cpu", progress=False)
    assert "meta" not in capfd.readouterr().err
