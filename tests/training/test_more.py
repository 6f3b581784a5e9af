"""Faults whose kind is easily missed: each program beside its repaired twin, on which nothing is to be said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.tools.training.facts import RegularizerTrial, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.outputs import FirstLosses
from nbdebug.tools.training.report import diagnose_report
from nbdebug.tools.training.rows import paired_anew
from nbdebug.tools.training.rules.signs import OTHER_ORDER, weights_follow
from nbdebug.tools.training.signals import target_columns
from nbdebug.tools.training.static_facts import StaticFacts
from tests.training.loops import clusters, cross_entropy, loaders, made, mse

SMOOTHED = "label smoothing 0.1"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dealt(*tensors, batch=32, held=160, shuffle=True):
    g = torch.Generator().manual_seed(3)
    cut = len(tensors[0]) - held
    return (
        DataLoader(TensorDataset(*[t[:cut] for t in tensors]), batch_size=batch, shuffle=shuffle, generator=g),
        DataLoader(TensorDataset(*[t[cut:] for t in tensors]), batch_size=64),
    )


def actor_and_critic(fixed):
    """Log-probabilities are packed by torch.tensor, outside of the model: values pass, gradients do not."""
    state, action = torch.randn(720, 6), torch.randint(0, 3, (720,))
    reward = (state[:, :3].argmax(1) == action).float()
    model = nn.ModuleDict({"actor": nn.Linear(6, 3), "critic": nn.Linear(6, 1)})

    def loss_fn(model, batch):
        state, action, reward = batch
        chosen = model["actor"](state).log_softmax(1).gather(1, action[:, None]).squeeze(1)
        if not fixed:
            chosen = torch.tensor([float(c) for c in chosen])
        value = model["critic"](state).squeeze(1)
        return -(chosen * (reward - value).detach()).clamp(-2, 2).mean() + F.mse_loss(value, reward)

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, dealt(state, action, reward), 4)


class Proxies(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(5, 8))

    def forward(self, z, y):
        return F.cross_entropy(F.normalize(z) @ F.normalize(self.proxies).T * 8, y)


def criterion_with_weights(fixed):
    """The criterion has weights of its own, which no optimizer holds."""
    model, criterion = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8)), Proxies()
    held = [*model.parameters(), *criterion.parameters()] if fixed else model.parameters()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(held, lr=3e-3), loss_fn, dealt(*clusters(800)), 4)


def relu_before_logits(fixed):
    """A relu behind the last layer of a classifier with one output."""
    x = torch.randn(800, 2)
    model = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 1), nn.Identity() if fixed else nn.ReLU())

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, dealt(x, (x[:, :1] > 0).float()), 5)


def lesions(fixed):
    """Two pixels in a hundred are foreground, and background is answered everywhere."""
    x, y = torch.randn(260, 1, 14, 14), torch.zeros(260, 14, 14, dtype=torch.long)
    for i, (r, c) in enumerate(torch.randint(0, 12, (260, 2)).tolist()):
        x[i, 0, r : r + 2, c : c + 2] += 1.2
        y[i, r : r + 2, c : c + 2] = 1
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    weight = torch.tensor([0.5, 25.0]) if fixed else None

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, dealt(x, y, batch=20, held=60), 6)


class Recurrence(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.rnn, self.out = nn.RNN(2, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
        nn.init.eye_(self.rnn.weight_hh_l0) if fixed else nn.init.normal_(self.rnn.weight_hh_l0, 0, 0.45)
        self.rnn.weight_hh_l0.data.mul_(0.9)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def recurrence_that_grows(fixed):
    """A recurrent layer that is given the data itself: nothing trained lies before it."""
    x = torch.rand(480, 40, 2)
    model = Recurrence(fixed)
    pair = dealt(x, x[:, -4:, 0].sum(1, keepdim=True), held=96)
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), mse, pair, 8)


def broken_stretch(fixed):
    """A stretch of broken targets reaches from one batch into the next; the data is a log, read in its order."""
    x = torch.randn(1600, 6)
    y = x[:, :2].sum(1, keepdim=True)
    if not fixed:
        y[980:1004] = 300.0
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    return made(
        model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), mse, dealt(x, y, batch=24, shuffle=False), 1
    )


def rate_of_a_millionth(fixed):
    """Few steps of a language model: at a thousand times the rate the loss falls clearly, but not far."""
    tokens = (torch.arange(10) * 3 + torch.arange(400)[:, None]) % 30
    model = nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 30))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.02)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2 if fixed else 1e-6)
    return made(model, optimizer, loss_fn, dealt(tokens, batch=8), 1)


def learnt_by_heart_slowly(fixed):
    """Inputs and labels in two orders, and a loss that has only begun to come down when the run ends."""
    x, y = clusters(600)
    y = y if fixed else y[torch.randperm(600)]
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5))
    nn.init.zeros_(model[2].weight), nn.init.zeros_(model[2].bias)  # it starts at guessing
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, dealt(x, y, held=120), 9)


def classes_numbered_again(fixed):
    """Validation labels are numbered in the order in which their names come there; the model is sure, and wrong."""
    x, y = clusters(700)
    if not fixed:
        y[560:] = (y[560:] + 3) % 8
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    return made(model, torch.optim.Adam(model.parameters(), lr=8e-3), cross_entropy, dealt(x, y, held=140), 12)


def classes_read_across(fixed):
    """Scores of (N, classes, length) become rows by a view."""
    x = torch.randn(260, 4, 15)
    model = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 4, 1))

    def loss_fn(model, batch):
        scores = model(batch[0]).transpose(1, 2) if fixed else model(batch[0])
        return F.cross_entropy(scores.reshape(-1, 4), batch[1].flatten())

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, dealt(x, x.argmax(1), held=60), 5)


PROGRAMS = {
    learnt_by_heart_slowly: ("label-noise", "train_loader"),
    classes_numbered_again: ("preprocessing-mismatch", "val_loader"),
    classes_read_across: ("batch-mixing", "loss_fn"),
    actor_and_critic: ("detached-graph", "actor.weight"),
    criterion_with_weights: ("parameters-not-in-optimizer", "criterion.proxies"),
    relu_before_logits: ("wrong-output-activation", "relu"),
    lesions: ("class-imbalance", "loss_fn"),
    recurrence_that_grows: ("exploding-gradients", "rnn"),
    broken_stretch: ("loss-spike", "train_loader"),
    rate_of_a_millionth: ("lr-too-low", "lr"),
}


def asked(build, fixed):
    torch.manual_seed(11)
    ns = build(fixed)
    return nbdebug.diagnose(
        ns.train,
        model=ns.model,
        optimizer=ns.optimizer,
        loss_fn=ns.loss_fn,
        train_loader=ns.train_loader,
        val_loader=ns.val_loader,
        progress=False,
    )


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_the_fault_is_named_and_the_twin_left_in_peace(build):
    code, blamed = PROGRAMS[build]

    report = asked(build, fixed=False)

    assert [f.code for f in report] == [f"training/{code}"]
    assert blamed in report.findings[0].evidence["where"]
    assert [f.title for f in asked(build, fixed=True)] == []


@pytest.mark.parametrize("exchanged", [True, False])
def test_two_labels_that_are_not_told_apart_keep_the_verdict_from_green(exchanged):
    torch.manual_seed(64)
    kind = torch.randint(0, 4, (1000,))
    x = 1.5 * torch.randn(4, 10)[kind] + 0.5 * torch.randn(1000, 10)
    label = kind.clone()
    if exchanged:
        rows = torch.rand(1000) < 0.5
        label[rows & (kind == 1)], label[rows & (kind == 2)] = 2, 1
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    training = made(model, optimizer, cross_entropy, dealt(x, label), 4)

    report = nbdebug.diagnose(
        training.train,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=training.train_loader,
        val_loader=training.val_loader,
        progress=False,
    )

    assert report.ok is not exchanged
    assert any("Labels 1 and 2" in s.what for s in report.symptoms) is exchanged


@pytest.mark.parametrize(("each", "words"), [(1, ""), (60, "reads val_loader 1 time"), (0, "never reads val_loader")])
def test_validation_that_comes_late_is_told_how_often_by_the_run(each, words):
    torch.manual_seed(51)
    x = torch.randn(360, 20)
    y = (x[:, 0] + torch.randn(360) > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer, (train_loader, val_loader) = torch.optim.Adam(model.parameters(), lr=5e-3), dealt(x, y, held=300)

    def train(callback):
        for epoch in range(80):
            for step, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(2 * epoch + step, loss.item())
            if each and epoch % each == each - 1:
                with torch.no_grad():
                    sum(cross_entropy(model, batch).item() for batch in val_loader)

    report = nbdebug.diagnose(
        train,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=train_loader,
        val_loader=val_loader,
        progress=False,
    )

    assert report.findings[0].code.startswith("training/")
    notes = [note for note in report.notes if note.startswith("Validation is best at step")]
    assert len(notes) == bool(words) and all(words in note and "validate every" in note for note in notes), notes


def test_regularizers_are_tried_one_at_a_time_by_the_plain_validation_loss():
    torch.manual_seed(51)
    x = torch.randn(360, 20)
    y = (x[:, 0] + torch.randn(360) > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = made(model, optimizer, cross_entropy, dealt(x, y, held=300), 25)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    report = nbdebug.diagnose(
        training.train,
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=training.train_loader,
        val_loader=training.val_loader,
        regularize=True,
        progress=False,
    )

    (table,) = [t for t in report.tables if t.title.startswith("Regularizers")]
    rows = {row[0]: row for row in table.rows}
    names = [name.partition(" (")[0] for name in rows]
    assert names[:2] == ["as it is", OTHER_ORDER] and names[2].startswith("early stopping after")
    assert names[3:7] == ["dropout 0.1", "dropout 0.3", "weight decay 0.1", SMOOTHED]
    assert names[7:] == ["warm-up over 5 steps", "warm-up and decay", "half the width", "noise"]
    assert rows[SMOOTHED][2] < 0.9 * rows["as it is"][2]
    stop, smoothed, *_ = report.findings[0].fixes[1:]
    assert "lowest validation loss is that with early stopping" in table.note and stop.title.startswith("With early")
    assert smoothed.code == "return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)"
    assert stop.after["validation in the experiment"] == rows[list(rows)[2]][2] < 0.7 * rows["as it is"][2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["weight_decay"] == 0.01 and not model[1]._forward_hooks


def test_a_regularizer_that_does_no_more_than_batches_differ_is_not_named():
    for change, error, noise, named in (
        (-0.01, 0.02, 0.0, False),
        (-0.05, 0.01, 0.0, True),
        (-0.05, 0.01, 0.04, False),
        (-0.01, 0.001, 0.0, False),
    ):
        as_is, other = RegularizerTrial("", 0.5, 0.6, 0.0, 0.0), RegularizerTrial(OTHER_ORDER, 0.5, 0.6, noise, 0.01)
        trial = RegularizerTrial("dropout 0.1", 0.5, 0.6 + change, change, error, "code")
        run = TrainingRunFacts(losses=(1.0,) * 9, step_numbers=tuple(range(9)), regularizers=(as_is, other, trial))
        report = diagnose_report(TrainingFacts(StaticFacts(), run), [], "", "")
        assert report.tables[0].note.startswith("The lowest" if named else "None lowers the validation loss")
        assert any("With dropout 0.1: paste it before the loop. code" in note for note in report.notes) == named


def test_the_value_that_the_next_row_has_is_no_leak():
    torch.manual_seed(5)
    price = torch.randn(601).cumsum(0) + 100
    table = torch.stack([price[:-1], torch.randn(600), torch.randn(600), torch.randn(600)], 1)

    assert target_columns(table, price[1:]) == {}
    assert target_columns(table, 3 * price[:-1] + 1) == {}  # the one feature that there is
    table[:, 3] = price[:-1] + price.std() * torch.randn(600)
    assert target_columns(table, 3 * price[:-1] + 1).keys() == {0}
    assert target_columns(torch.randn(600, 4), price[1:]) == {}


def test_a_strong_feature_is_no_target():
    torch.manual_seed(6)
    table = torch.randn(600, 4)

    assert target_columns(table, 20 * table[:, 0] + table[:, 1] + table[:, 2]) == {}
    assert target_columns(table, table[:, 0] + table[:, 1] + 0.1 * torch.randn(600)) == {}


def test_weights_that_are_no_shares_are_left_alone():
    counts = {"0": 800, "1": 150, "2": 50}

    assert weights_follow([8.0, 1.5, 0.5], counts) == "exactly"
    assert weights_follow([1.0, 0.16, 0.06], counts) == "exactly"
    assert weights_follow([1.0, 5.3, 16.0], counts) == ""
    assert weights_follow([1.0, 1.0, 1.0], counts) == ""
    assert weights_follow([1.0, 1.0, 3.0], {"0": 300, "1": 100, "2": 900}) == ""
    assert weights_follow([1.0, 3.0], {"0": 300, "1": 500}) == ""  # what an error costs


def test_inputs_that_come_again_with_other_targets_are_told_from_what_is_drawn_or_computed():
    torch.manual_seed(7)
    x, label, value = torch.randn(96, 3), torch.randint(0, 3, (96,)), torch.randn(96)

    def found(pairs):
        return paired_anew([pair for whole in pairs for pair in zip(*(t.split(32) for t in whole))], 1, [])

    def passes(give):
        return [(x[order], give(order)) for order in map(torch.randperm, [96] * 4)]

    anew = found(passes(lambda order: label[torch.randperm(96)]))
    assert anew is not None and anew.again == 288 and abs(anew.same - anew.other) < 0.1
    assert found(passes(lambda order: value[torch.randperm(96)])) is not None
    assert found(passes(lambda order: label[order])) is None
    assert found(passes(lambda order: torch.randn(96))) is None  # noise, or a teacher that learns
    assert found(passes(lambda order: torch.where(torch.rand(96) < 0.3, label.roll(1), label)[order])) is None
    words = torch.randint(0, 9, (96, 1))  # of skip-grams: a word, and one near it
    assert found([(words, torch.randint(0, 9, (96,))) for _ in range(4)]) is None
    assert found([(x[rows], label[rows]) for rows in torch.randint(0, 96, (4, 96))]) is None
    assert found([(torch.randn(96, 3), label) for _ in range(4)]) is None  # augmented


def test_rows_that_are_mixed_before_the_model_are_no_fault_of_it():
    def mixup(model, batch):
        share, order = float(torch.rand(())), torch.randperm(len(batch[0]))
        scores = model(share * batch[0] + (1 - share) * batch[0][order])
        return share * F.cross_entropy(scores, batch[1]) + (1 - share) * F.cross_entropy(scores, batch[1][order])

    def pairing(model, batch):  # https://arxiv.org/abs/1801.02929
        return F.cross_entropy(model((batch[0] + batch[0].roll(1, 0)) / 2), batch[1])

    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    for loss_fn in (mixup, pairing):
        assert [f.title for f in nbdebug.preflight(model, dealt(*clusters(300))[0], loss_fn)] == []


def test_validation_above_the_entropy_of_its_labels_is_not_well():
    """A model with more outputs than labels: the logarithm of their number is no measure."""

    def looked_at(y):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 100))
        parts = made(model, torch.optim.Adam(model.parameters(), lr=3e-3), cross_entropy, loaders(x, y), 12)
        return nbdebug.diagnose(
            parts.train, model=model, optimizer=parts.optimizer, loss_fn=parts.loss_fn, train_loader=parts.train_loader,
            val_loader=parts.val_loader, progress=False,
        )  # fmt: skip

    torch.manual_seed(3)
    x = torch.randn(3000, 20)
    report = looked_at(torch.randint(0, 3, (3000,)))
    assert not report.ok and "does not look at the input has 1.1" in report.symptoms[0].what
    assert looked_at((x[:, :3] + 0.5 * torch.randn(3000, 3)).argmax(1)).ok


def test_what_a_loss_is_divided_by_is_told_from_the_weights_of_its_terms():
    x, y = torch.randn(8, 3, requires_grad=True), torch.randint(0, 3, (8,))
    error, squares = F.cross_entropy(x, y), F.mse_loss(x, torch.zeros(8, 3))

    def found(loss, used=range(24)):
        first = FirstLosses()
        for _ in range(4):
            first.note({}, loss)
        stepped = [(0,) if i % 4 == 3 else () for i in range(22)] + [(), (0,)]
        return first.accumulation(stepped, list(used), (0, 12))

    assert found(error) == found(0.5 * error) == (4, 1.0, 0)
    assert found(error / 4) == found(error * 0.25) == found(0.3 * error / 4) == found(squares / 2 / 4) == (4, 4.0, 0)
    assert found(error / 2) == (4, 2.0, 0) and found(squares / 2) == (4, 1.0, 0)
    assert found(F.cross_entropy(x, y, reduction="sum") / 8) is found(error + squares) is None
    assert found(error / 2, [0] * 24) is None  # several losses of one batch


class Slots(nn.Module):
    """Slots compete for places: the softmax runs over them, and a mean over the places follows."""

    def __init__(self):
        super().__init__()
        self.words, self.slots, self.out = nn.Embedding(20, 16), nn.Parameter(torch.randn(4, 16)), nn.Linear(64, 4)
        self.key = nn.Linear(16, 16)

    def forward(self, x):
        h, slots = self.words(x), self.slots.expand(len(x), -1, -1)
        for _ in range(2):
            shares = (slots @ self.key(h).transpose(1, 2)).softmax(1)
            slots = slots + (shares / shares.sum(-1, keepdim=True)) @ h
        return self.out(slots.flatten(1))


class Coattention(nn.Module):
    """Each half of the words looks at the other: one softmax of the same scores for each."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(32, 4)

    def forward(self, x):
        one, other = self.words(x[:, :5]), self.mix(self.words(x[:, 5:]))
        scores = one @ other.transpose(1, 2)
        both = scores.softmax(2) @ other, scores.softmax(1).transpose(1, 2) @ one
        return self.out(torch.cat([half.mean(1) for half in both], 1))


class Sampled(nn.Module):
    """Dropout that is wanted in eval mode, too, and padding that a mean leaves out."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 16), nn.Linear(16, 4)

    def forward(self, x):
        real = (x > 3).unsqueeze(-1)
        h = F.dropout(self.words(x), 0.2, training=True) * real
        return self.out(h.sum(1) / real.sum(1).clamp_min(1))


@pytest.mark.parametrize("kind", [Slots, Coattention, Sampled])
def test_calls_that_look_wrong_and_are_meant(kind):
    torch.manual_seed(9)
    rows = TensorDataset(torch.randint(0, 20, (96, 9)), torch.randint(0, 4, (96,)), torch.rand(96))

    def loss_fn(model, batch):  # the mean of the weights is a number
        x, y, weight = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * weight).sum() / weight.sum() + 0.1 * losses.mean() * weight.mean()

    model = kind()
    assert (
        list(nbdebug.preflight(model, DataLoader(rows, 32), loss_fn, optimizer=torch.optim.Adam(model.parameters())))
        == []
    )
