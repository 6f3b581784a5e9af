"""preflight: what it leaves as it was, what it takes, what it says; faults of kinds that no case of ours shows."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from nbdebug.tools.training.preflight import _placed, static_facts
from tests.training.loops import clusters, cross_entropy, loaders, mse, shapes


def network(width=12, classes=5, hidden=20):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def codes(report):
    return [finding.code.removeprefix("training/") for finding in report]


def blamed(report):
    return report.findings[0].evidence["where"]


def looked_at(model, pair, loss_fn, optimizer=None, **more):
    return nbdebug.preflight(model, pair[0], loss_fn, optimizer=optimizer, val_loader=pair[1], **more)


# What it leaves as it was


@pytest.fixture
def everything():
    """A model with batch statistics and dropout, an optimizer in the middle of its run, a loader with a generator."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(216, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pair = loaders(*shapes(200))
    for batch in list(pair[0])[:3]:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    return model, optimizer, pair


def test_model_optimizer_and_random_numbers_stay_as_they_were(everything):
    model, optimizer, pair = everything
    before = Snapshot.take(model, optimizer, others=())
    order = pair[0].generator.get_state()
    report = looked_at(model, pair, cross_entropy, optimizer)
    assert any("are trained; float32 on cpu." in note for note in report.notes), report.notes
    assert before.differences() == []
    assert torch.equal(pair[0].generator.get_state(), order)


def test_parts_of_other_types_and_devices_are_told_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half(), nn.BatchNorm1d(2))
    assert _placed(model) == "float32 on cpu (4 tensors) and float16 on cpu (2 tensors)"
    assert _placed(nn.BatchNorm1d(2)) == "float32 on cpu"
    model[2].running_mean = torch.zeros(2, device="meta")
    assert _placed(model).endswith("(2 tensors); buffers on meta")


def test_a_run_after_it_is_the_run_without_it(everything):
    model, optimizer, pair = everything
    twin, other = copy.deepcopy((model, optimizer))
    seeds = torch.get_rng_state(), pair[0].generator.get_state()

    def trained(model, optimizer):
        torch.set_rng_state(seeds[0])
        pair[0].generator.set_state(seeds[1])
        for batch in pair[0]:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
        return model.state_dict()

    looked_at(model, pair, cross_entropy, optimizer)
    for (name, a), b in zip(trained(model, optimizer).items(), trained(twin, other).values()):
        assert torch.equal(a, b), name


def test_no_hook_is_left(everything):
    model, optimizer, pair = everything
    looked_at(model, pair, cross_entropy, optimizer)
    assert not any(vars(m)[key] for m in model.modules() for key in vars(m) if key.endswith("_hooks"))


def test_interrupted_it_leaves_everything_as_it_was(everything):
    model, optimizer, pair = everything
    before, calls = Snapshot.take(model, optimizer), []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    with pytest.raises(KeyboardInterrupt):
        looked_at(model, pair, loss_fn, optimizer)
    assert before.differences() == []


def test_a_model_that_cannot_be_copied_is_put_back():
    torch.manual_seed(5)
    model = network()
    model.history = [model[0].weight * 2]  # a tensor with a history: deepcopy refuses it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Snapshot.take(model, optimizer)
    report = looked_at(model, loaders(*clusters(200)), cross_entropy, optimizer)
    assert before.differences() == []
    assert report.ok


def test_a_loss_that_uses_its_own_model_is_followed():
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    before = Snapshot.take(model, optimizer)
    report = looked_at(
        model, loaders(*clusters(200)), lambda _, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer
    )
    assert codes(report) == ["parameters-not-in-optimizer"] and blamed(report)[:2] == ["0.weight", "0.bias"]
    assert before.differences() == []


# What it takes


def test_a_criterion_is_taken_as_a_loss_of_outputs_and_targets():
    model = network()
    pair = loaders(*clusters(200))
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy, lambda outputs, y: F.cross_entropy(outputs, y)):
        report = nbdebug.preflight(model, pair[0], criterion)
        assert report.ok and "loss_fn(outputs, targets)" in report.subject
    assert "loss_fn(model, batch)" in nbdebug.preflight(model, pair[0], cross_entropy).subject


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((lambda x: x, [1], F.mse_loss), "model must be a torch.nn.Module"),
        ((network(), iter([1]), F.mse_loss), "read more than once"),
        ((network(), None, F.mse_loss), "loader must be"),
        ((network(), [1], "mse"), "loss_fn must be a function"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments, said):
    with pytest.raises(TypeError, match=said):
        nbdebug.preflight(*arguments)


def test_a_loader_without_batches_and_a_wrong_optimizer_are_refused():
    with pytest.raises(ValueError, match="no batch"):
        nbdebug.preflight(network(), [], cross_entropy)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        nbdebug.preflight(network(), loaders(*clusters(64))[0], cross_entropy, optimizer="adam")


def test_the_users_own_error_passes():
    def loss_fn(model, batch):
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        nbdebug.preflight(network(), loaders(*clusters(64))[0], loss_fn)


def test_batches_in_dicts_and_outputs_in_objects():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, inputs, labels):
            scores = self.body(inputs)
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}

    x, y = clusters(200)
    rows = [{"inputs": a, "labels": b} for a, b in zip(x, y)]
    report = nbdebug.preflight(Model(), DataLoader(rows, batch_size=20), lambda model, batch: model(**batch))
    assert report.ok
    assert any(line.what == "mixed samples" for line in report.ruled_out)


# What it says


def test_the_report_has_the_parameter_table_the_verdict_and_what_was_ruled_out():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    report = looked_at(model, loaders(*clusters(300)), cross_entropy, optimizer)
    text = str(report)
    assert report.ok
    assert "The model memorizes one batch with Adam at 0.01" in text
    assert "guessing gives 1.61" in text and "divide each loss by k" in text
    assert [line["name"] for line in report.facts["parameters"]] == [name for name, _ in model.named_parameters()]
    assert all(line["held"] and line["reached"] and line["rate"] == 0.01 for line in report.facts["parameters"])
    assert len(report.ruled_out) >= 8
    json.dumps(report.to_dict())


def test_what_was_not_given_is_said_not_to_be_checked():
    report = nbdebug.preflight(network(), loaders(*clusters(64))[0], cross_entropy)
    assert any("no optimizer" in line for line in report.unchecked)
    assert any("no val_loader" in line for line in report.unchecked)


def test_conversions_that_give_the_tensor_itself_are_no_riddle():
    report = nbdebug.preflight(
        network(),
        loaders(*clusters(100))[0],
        lambda model, batch: F.cross_entropy(model(batch[0]).float().contiguous().to("cpu"), batch[1].long()),
    )
    assert report.ok


def test_a_batch_that_is_not_memorized_gets_a_verdict_and_a_next_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    loader = loaders(*clusters(200, spread=0.3))[0]
    overfit = static_facts(model, loader, cross_entropy, optimizer=optimizer).overfit
    assert overfit.memorized and overfit.tries[0][0] == "SGD" and overfit.tries[-1][0] == "Adam"
    assert "does not memorize one batch with your SGD at 1e-07" in overfit.verdict
    assert "learning rate" in overfit.next_step


def test_a_loss_that_is_summed_and_frozen_statistics_are_told():
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 5))
    model[1].requires_grad_(False)
    report = nbdebug.preflight(
        model,
        loaders(*clusters(200))[0],
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
    )
    assert report.ok
    assert "is a sum over the batch" in str(report.full())
    assert "running statistics will change" in str(report.full())


def test_a_loss_that_is_not_finite_is_sent_to_nan_trace():
    report = nbdebug.preflight(
        network(12, 1),
        loaders(*clusters(100))[0],
        lambda model, batch: model(batch[0]).log().mean() * 1e30 * float("inf"),
    )
    assert "%nan_trace" in str(report)


# Faults


def test_half_of_the_parameters_in_sgd_is_named_with_the_missing_ones():
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    named = dict(model.named_parameters())
    held = ["0.bias", "2.weight", "4.bias"]
    optimizer = torch.optim.SGD([named[name] for name in held], lr=0.1)
    report = looked_at(model, loaders(*clusters(200)), cross_entropy, optimizer)
    assert codes(report) == ["parameters-not-in-optimizer"]
    assert set(blamed(report)) == set(named) - set(held) | {"optimizer"}
    assert "3 of 6" in report.findings[0].title


@pytest.mark.parametrize(
    "cut, op",
    [
        (lambda x: x.argmax(1, keepdim=True).float().expand(-1, 20), "argmax"),
        (lambda x: x.data, "data"),
        (lambda x: torch.tensor(x.tolist()), "tolist"),
    ],
    ids=["argmax", "data", "tolist"],
)
def test_every_way_to_cut_the_graph_is_named(cut, op):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 20), nn.Linear(20, 5)

        def forward(self, x):
            return self.last(cut(self.first(x)))

    model = Cut()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = looked_at(model, loaders(*clusters(200)), cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert codes(report) == ["detached-graph"]
    assert blamed(report)[:2] == ["first.weight", "first.bias"]
    assert report.findings[0].where.op == op and report.findings[0].where.line is not None


def test_no_grad_around_a_part_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.head = network(12, 8), nn.Linear(8, 5)

        def forward(self, x):
            with torch.no_grad():
                x = self.encode(x)
            return self.head(x)

    model = Model()
    pair = loaders(*clusters(200))
    report = looked_at(model, pair, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert codes(report) == ["detached-graph"] and "torch.no_grad()" in report.findings[0].title
    assert looked_at(model, pair, cross_entropy, torch.optim.SGD(model.head.parameters(), lr=0.1)).ok  # a fixed encoder


def test_nothing_that_could_learn_is_frozen_parameters():
    model = network()
    model.requires_grad_(False)
    report = looked_at(model, loaders(*clusters(200)), cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert codes(report) == ["frozen-parameters"]


@pytest.mark.parametrize("classes", [3, 10])
def test_the_floor_of_a_double_softmax_is_the_true_one(classes):
    model = nn.Sequential(nn.Linear(12, classes), nn.Softmax(1))
    report = nbdebug.preflight(model, loaders(*clusters(200, classes=classes))[0], cross_entropy)
    sure = F.one_hot(torch.arange(classes), classes).float()
    assert codes(report) == ["double-softmax"]
    assert report.findings[0].evidence["lowest loss possible"] == pytest.approx(
        float(F.cross_entropy(sure, torch.arange(classes))), abs=1e-6
    )


def test_softmax_before_and_in_the_loss_written_by_hand_is_not_taken_for_a_mistake():
    """log of a softmax, then nll_loss: right, if clumsy."""
    model = nn.Sequential(nn.Linear(12, 5), nn.Softmax(1))
    report = nbdebug.preflight(
        model, loaders(*clusters(200))[0], lambda model, batch: F.nll_loss(torch.log(model(batch[0]) + 1e-8), batch[1])
    )
    assert report.ok


def test_a_softmax_over_the_batch_mixes_samples():
    model = network()
    report = nbdebug.preflight(
        model, loaders(*clusters(200))[0], lambda model, batch: F.nll_loss(F.log_softmax(model(batch[0]), 0), batch[1])
    )
    assert codes(report) == ["missing-log-softmax"] and "dimension 0" in report.findings[0].title

    class Over(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return torch.softmax(self.body(x), 0)

    report = nbdebug.preflight(
        Over(), loaders(*clusters(200))[0], lambda model, batch: F.nll_loss(torch.log(model(batch[0])), batch[1])
    )
    assert codes(report)[0] == "batch-mixing" and report.findings[0].where.op == "softmax"


class Tagger(nn.Module):
    """Scores for each moment, time first."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.read(x.transpose(0, 1))[0])


@pytest.mark.parametrize("right", [True, False])
def test_outputs_flattened_in_another_order_than_targets_are_named(right):
    x = torch.randn(200, 5, 6)

    def loss_fn(model, batch):
        scores = model(batch[0]).transpose(0, 1) if right else model(batch[0])
        return F.cross_entropy(scores.reshape(-1, 3), batch[1].reshape(-1))

    report = nbdebug.preflight(Tagger(), loaders(x, (x[..., 0] > 0).long())[0], loss_fn)
    assert codes(report) == ([] if right else ["batch-mixing"])
    assert right or "rows 0, 32, 64, 96" in report.findings[0].title and "rows 0, 1, 2, 3" in report.findings[0].title


@pytest.mark.parametrize("right", [True, False])
def test_a_view_between_model_and_loss_that_mixes_is_named(right):
    """(time, batch, classes) viewed as if it were (batch, time, classes)."""
    x = torch.randn(200, 5, 6)

    def loss_fn(model, batch):
        scores = model(batch[0])
        rows = scores.transpose(0, 1) if right else scores.view(len(batch[0]), 5, 3)
        return F.cross_entropy(rows.mean(1), batch[1])

    report = nbdebug.preflight(Tagger(), loaders(x, (x[:, 0, 0] > 0).long())[0], loss_fn)
    assert codes(report) == ([] if right else ["batch-mixing"])
    assert right or report.findings[0].where.op == "view"


@pytest.mark.parametrize(
    "last, targets, code",
    [
        (nn.Tanh(), torch.randn(300, 1) * 5, ["wrong-output-activation"]),
        (nn.Tanh(), torch.rand(300, 1) * 2 - 1, []),
        (nn.ReLU(), torch.rand(300, 1) + 0.5, []),
        (nn.Softplus(), torch.randn(300, 1), ["wrong-output-activation"]),
        (nn.LeakyReLU(), torch.randn(300, 1), []),
    ],
    ids=["tanh", "tanh-in-reach", "relu-in-reach", "softplus", "leaky"],
)
def test_targets_out_of_reach(last, targets, code):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 1), last)
    assert codes(nbdebug.preflight(model, loaders(torch.randn(300, 6), targets)[0], mse)) == code


def test_validation_that_is_the_training_set_is_told():
    x, y = clusters(200)
    data = TensorDataset(x, y)
    report = nbdebug.preflight(
        network(),
        DataLoader(data, batch_size=20, shuffle=True),
        cross_entropy,
        val_loader=DataLoader(data, batch_size=20),
    )
    assert codes(report) == ["leakage"] and "both loaders read the same dataset" in report.findings[0].title


def test_weights_drawn_for_another_width_are_bad_init():
    torch.manual_seed(0)
    model = network(64, 10, 128)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight)
    report = nbdebug.preflight(model, loaders(*clusters(300, classes=10, width=64))[0], cross_entropy)
    assert codes(report) == ["bad-init"] and blamed(report)[0] in ("0", "2")


def test_a_part_without_a_name_of_pythons_is_frozen_by_the_fix_as_it_stands():
    model = network()
    for p in model[0].parameters():
        p.require_grad = False
    report = nbdebug.preflight(model, loaders(*clusters(200))[0], cross_entropy)
    assert codes(report) == ["frozen-parameters"]
    exec(report.findings[0].fixes[0].code, {"model": model})
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_weights_of_one_column_multiply_each_loss_by_all_of_them():
    train, _ = loaders(*clusters(300))

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * (1.0 + batch[1][:, None])).mean()

    report = nbdebug.preflight(network(), train, loss_fn)
    assert codes(report) == ["wrong-loss-shape"] and "[32, 1] and [32] gives [32, 32]" in report.findings[0].title


def test_two_layers_of_zeros_are_bad_init():
    model = network()
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    report = nbdebug.preflight(model, loaders(*clusters(200))[0], cross_entropy)
    assert codes(report)[0] in ("bad-init", "dead-relu")


def test_all_labels_alike_and_all_ignored_are_zero_loss():
    x = torch.randn(200, 12)
    report = nbdebug.preflight(network(), loaders(x, torch.full((200,), 3))[0], cross_entropy)
    assert codes(report) == ["zero-loss"] and "All 160 labels are 3" in report.findings[0].title
    report = nbdebug.preflight(
        network(),
        loaders(x, torch.full((200,), -100))[0],
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
    )
    assert codes(report) == ["zero-loss"] and "ignored" in report.findings[0].title


class Jittered(torch.utils.data.Dataset):
    """A regression whose inputs are augmented, or not."""

    def __init__(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.scale = torch.randn(64, 4, generator=generator), scale

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index] + self.scale * torch.randn(4), self.x[index].sum()[None]


@pytest.mark.parametrize("scale", [0.1, 0.0])
def test_validation_that_is_augmented_is_noted(scale):
    model = torch.nn.Linear(4, 1)
    train, val = (torch.utils.data.DataLoader(Jittered(s), batch_size=16) for s in (0.1, scale))
    before = torch.get_rng_state()
    report = nbdebug.preflight(model, train, torch.nn.MSELoss(), val_loader=val)
    assert any("Validation items are random" in note for note in report.notes) == bool(scale)
    assert torch.equal(before, torch.get_rng_state())
