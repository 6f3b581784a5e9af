"""preflight tries fixes on one batch: what helps is proven by numbers, what can't be tried has a reason, and the model
stays as it was. It keeps its time."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from nbdebug.report import Where
from nbdebug.tools.training import preflight as probe
from nbdebug.tools.training.fixes import PatchedCalls, verdict
from tests.training.loops import clusters, cross_entropy, loaders, mse, shapes


@pytest.fixture(autouse=True, scope="module")
def functions_are_known():
    """The session has frozen what it imported: an edit finds the user's functions through the garbage collector."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(*last: nn.Module, width: int = 12, classes: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, classes), *last)


def tried(model, pair, loss_fn, optimizer=None, **more):
    """(code without its chapter, the first fix) of the first finding; the model must be as before."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    before = Snapshot.take(model, optimizer)
    report = nbdebug.preflight(model, pair[0], loss_fn, optimizer=optimizer, val_loader=pair[1], **more)
    assert before.differences() == []
    assert report.findings, report
    return report.findings[0].code.removeprefix("training/"), report.findings[0].fixes[0], report


def proven(fix, text: str = "") -> None:
    """text: what the edit of the user's own lines writes; "": it is an experiment, and the fix is a suggestion."""
    assert (fix.edit is None) == (not text) and text in fix.code, fix
    assert (fix.verified is True and "tried on" in fix.after) if text else (fix.verified is None), fix
    assert bool(text) != ("experiment" in fix.after), fix
    lower = fix.after["loss with the fix" if text else "loss in the experiment"] < 0.7 * fix.after.get(
        "loss as it is", math.inf
    )
    assert lower or fix.after["steps with the fix"] < 0.7 * fix.after["steps"], fix


class Handmade(nn.Module):
    def forward(self, x):
        e = x.exp()
        return e / e.sum(1, keepdim=True)


@pytest.mark.parametrize("last", [nn.Softmax(1), Handmade()], ids=["module", "by hand"])
def test_a_softmax_too_many_is_left_out(last) -> None:
    code, fix, report = tried(network(last), loaders(*clusters(200)), cross_entropy)
    assert code == "double-softmax"
    proven(fix)
    assert set(report.plot("losses")["curves"]) == {"as it is", "with the fix"}
    assert "Loss of one batch, trained on alone" in str(report.full())
    assert 'alt="loss of one batch, trained on alone, as it is:' in report._repr_mimebundle_()["text/html"]


def test_a_log_softmax_is_put_in() -> None:
    code, fix, _ = tried(network(), loaders(*clusters(200)), lambda model, batch: F.nll_loss(model(batch[0]), batch[1]))
    assert code == "missing-log-softmax" and fix.verified is True and "F.cross_entropy(model(" in fix.code
    assert fix.after["loss as it is"] < 0 < fix.after["loss with the fix"] < 0.5


def test_shapes_are_made_the_same() -> None:
    x = torch.randn(300, 12)
    code, fix, _ = tried(network(classes=1), loaders(x, x[:, 0] * 3), mse)
    assert code == "wrong-loss-shape"
    proven(fix, "F.mse_loss(model(batch[0]), batch[1].unsqueeze(-1))")


def test_labels_are_counted_from_zero() -> None:
    x, y = clusters(200)
    code, fix, report = tried(network(), loaders(x, y + 1), cross_entropy)
    assert code == "label-out-of-range" and "batch[1] - 1)" in fix.code and fix.verified is True
    assert fix.after["loss as it is"] == "none: it raises" and fix.after["loss with the fix"] < 0.5
    assert "from 1 to 5" in report.findings[0].title


def test_a_class_more_than_outputs_is_not_tried_and_says_why() -> None:
    x, y = clusters(200, classes=6)
    code, fix, _ = tried(network(), loaders(x, y), cross_entropy)
    assert code == "label-out-of-range" and fix.verified is None and "another model" in fix.after["why not"]


@pytest.mark.parametrize("several", [False, True])
def test_missing_parameters_are_handed_over(several: bool) -> None:
    model = network()
    held = [torch.optim.SGD([p], 0.3) for p in model[2].parameters()]
    code, fix, _ = tried(
        model, loaders(*clusters(200)), cross_entropy, held if several else torch.optim.SGD([model[0].bias], 0.3)
    )
    assert code == "parameters-not-in-optimizer"
    proven(fix)
    assert fix.after["optimizer"].startswith("SGD")


def test_layers_in_a_plain_list_are_handed_over() -> None:
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.out = [nn.Linear(12, 20), nn.Linear(20, 20)], nn.Linear(20, 5)

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.out(x)

    model = Listed()
    inner = [p.detach().clone() for layer in model.layers for p in layer.parameters()]
    code, fix, _ = tried(model, loaders(*clusters(200)), cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    assert code == "parameters-not-in-optimizer" and "nn.ModuleList" in fix.code
    assert "loss in the experiment" in fix.after
    assert all(torch.equal(a, b) for a, b in zip(inner, [p for layer in model.layers for p in layer.parameters()]))


def test_inputs_are_standardized() -> None:
    x, y = shapes(300, noise=0.2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 4))
    code, fix, _ = tried(model, loaders(x * 100 + 100, y), cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    assert code == "input-not-normalized"
    proven(fix)


def test_frozen_parameters_are_thawed() -> None:
    model = network()
    model.requires_grad_(False)
    code, fix, _ = tried(model, loaders(*clusters(200)), cross_entropy, torch.optim.SGD(model.parameters(), 0.3))
    assert code == "frozen-parameters"
    proven(fix)
    assert not any(p.requires_grad for p in model.parameters())


class Cut(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.how = nn.Linear(12, 20), nn.Linear(20, 5), how

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                x = torch.relu(self.first(x) - 2)
        else:
            x = torch.relu(self.first(x) - 2).detach()
        return self.last(x)


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_a_cut_graph_is_joined(how: str) -> None:
    model = Cut(how)
    code, fix, _ = tried(model, loaders(*clusters(200)), cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    assert code == "detached-graph"
    assert fix.verified is True and (
        "torch.enable_grad()" in fix.code if how == "no_grad" else "detach" not in fix.code
    )


def test_what_one_batch_cannot_show_has_a_reason() -> None:
    x, y = clusters(200)
    code, fix, _ = tried(network(), (loaders(x, y)[0],) * 2, cross_entropy)
    assert code == "leakage" and fix.verified is None and "validation" in fix.after["why not"]


def test_diagnose_tells_them_too() -> None:
    model = network(nn.Softmax(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, val = loaders(*clusters(200))

    def loop(callback):
        for step, batch in enumerate(list(train) * 4):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss)

    report = nbdebug.diagnose(
        loop,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=train,
        val_loader=val,
        progress=False,
    )
    assert report.findings[0].code == "training/double-softmax"
    proven(report.findings[0].fixes[0])


# Verdicts


@pytest.mark.parametrize(
    ("as_is", "fixed", "comparable", "verified"),
    [
        ([2.3, 1.5], [2.3, 0.1], True, True),
        ([2.3, math.nan], [2.3, 0.5], True, True),
        ([], [1.6, 0.1], True, True),
        ([2.3, 1.5], [2.3, 1.4], True, False),
        ([2.3, 2.29], [2.3, 2.28], True, None),
        ([2.3, *[1.0] * 99, 0.1], [2.3, 0.1], True, True),
        ([2.3, 0.1], [2.3, 0.1], True, None),
        ([-0.1, -80.0], [1.6, 0.1], False, True),
        ([-0.1, -80.0], [1.6, 1.59], False, None),
    ],
)
def test_verdicts(as_is, fixed, comparable, verified) -> None:
    found, why = verdict(as_is, fixed, comparable)
    assert found is verified and bool(why) == (verified is None)


def test_calls_are_answered_otherwise_on_their_line_alone() -> None:
    x = torch.arange(4.0)
    with PatchedCalls({"relu"}, Where(), lambda func, args, kwargs: args[0] * 10) as mode:
        assert torch.equal(F.relu(x), x * 10) and torch.equal(torch.tanh(x), x.tanh())
    assert mode.count == 1
    with PatchedCalls({"relu"}, Where(file="elsewhere.py", line=3), lambda func, args, kwargs: args[0] * 10) as mode:
        assert torch.equal(F.relu(x), x)
    assert mode.count == 0


# Time


def test_what_there_is_no_time_for_is_told(monkeypatch) -> None:
    """By a clock that goes on by a second with each loss."""
    clock = [0.0]
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(model, batch):
        clock[0] += 1
        return cross_entropy(model, batch)

    code, fix, report = tried(network(nn.Softmax(1)), loaders(*clusters(200)), slow, seconds=2.5)
    assert code == "double-softmax" and fix.verified is None and fix.after["why not"] == "there was no time"
    late = [line for line in report.unchecked if "the 2.5 s for preflight were over" in line]
    for what in ("Overfitting one batch", "Whether the fix of double-softmax helps", "Dead and saturated units"):
        assert any(line.startswith(what) for line in late), report.unchecked
    assert "dead units" not in {r.what for r in report.ruled_out} and report.facts["seconds"] < 20


@pytest.mark.parametrize("seconds", [0, -1, "long", None])
def test_a_time_that_is_none_is_refused(seconds) -> None:
    with pytest.raises(ValueError, match="seconds takes a number above 0"):
        nbdebug.preflight(network(), loaders(*clusters(64))[0], cross_entropy, seconds=seconds)


class Sure(nn.Module):
    """Classes whose scores are so large that the softmax gives 0 and 1 alone, whatever the next step does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return F.softmax(self.head(x), dim=1)


def test_a_saturated_softmax_is_no_cut_graph_and_its_cure_may_start_far_above():
    torch.manual_seed(0)
    x, y = clusters(160)
    pair = loaders(3000 * x, y)
    model = Sure()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(callback):
        for i in range(3):
            for j, (rows, labels) in enumerate(pair[0]):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(rows), labels)
                loss.backward()
                optimizer.step()
                callback(100 * i + j, loss.item())

    given = {"optimizer": optimizer, "loss_fn": cross_entropy, "train_loader": pair[0], "val_loader": pair[1]}
    report = nbdebug.diagnose(train, model=model, progress=False, **given)

    assert "training/detached-graph" not in [finding.code for finding in report.findings]
    double = next(finding for finding in report.findings if finding.code == "training/double-softmax")
    assert double.fixes[0].verified
    assert double.fixes[0].after["loss with the fix"] < double.fixes[0].after["loss as it is"]
