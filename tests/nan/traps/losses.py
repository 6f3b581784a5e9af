"""Losses: labels, masks, weights, targets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


def linear(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, width)


@fault("all-labels-ignored", op=["nll_loss", "nll_loss_nd"], step=1)
def all_labels_ignored():
    model = linear()
    labels = torch.tensor([[0, 1, 2, 3, 0], [-100] * 5])
    return train(model, lambda i: F.cross_entropy(model(seeded((5, 3))), labels[i]))  # here


@silent()
def all_labels_ignored_but_summed():
    model = linear()
    return train(model, lambda i: F.cross_entropy(model(seeded((5, 3))), torch.full((5,), -100), reduction="sum"))


@silent()
def some_labels_ignored():
    model = linear()
    return train(model, lambda i: F.cross_entropy(model(seeded((5, 3))), torch.tensor([0, -100, 2, -100, 1])))


@fault("all-labels-ignored div-by-zero", op=["nll_loss", "nll_loss_nd"], step=0)
def classes_without_weight():
    model = linear()
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0])
    return train(
        model, lambda i: F.cross_entropy(model(seeded((5, 3))), torch.tensor([0, 1, 0, 1, 1]), weight=weights)
    )  # here


@fault("input-nonfinite parameter-nonfinite", phase=["input", "parameter"], module=None)
def class_weights_are_nan():
    model = linear()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    return train(model, lambda i: criterion(model(seeded((5, 3))), torch.tensor([0, 1, 0, 1, 1])))


@fault("input-nonfinite", phase="input", rows=(1, 3), step=1)
def sample_weights_are_nan():
    model = linear()
    weights = torch.ones(3, 5)
    weights[1, [1, 3]] = float("nan")

    def loss_of(i):
        each = F.cross_entropy(model(seeded((5, 3))), torch.tensor([0, 1, 0, 1, 1]), reduction="none")
        return (each * weights[i]).mean()  # here

    return train(model, loss_of)


@fault("ctc-infeasible", op="ctc_loss", rows=(0, 2), step=0)
def ctc_too_short():
    model = linear(6)

    def loss_of(i):
        logs = model(seeded((4, 3, 3))).log_softmax(-1)
        return F.ctc_loss(
            logs,
            torch.tensor([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0], [1, 1, 1, 2, 2]]),  # here
            torch.tensor([4, 4, 4]),
            torch.tensor([5, 2, 5]),
        )

    return train(model, loss_of)


@silent()
def ctc_too_short_but_told():
    model = linear(6)

    def loss_of(i):
        logs = model(seeded((4, 3, 3))).log_softmax(-1)
        return F.ctc_loss(
            logs,
            torch.tensor([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0], [1, 1, 1, 2, 2]]),
            torch.tensor([4, 4, 4]),
            torch.tensor([5, 2, 5]),
            zero_infinity=True,
        )

    return train(model, loss_of)


@fault("label-out-of-range", op=["nll_loss", "log_softmax", "nll_loss_nd"], rows=(2,), step=1)
def the_right_answer_is_masked():
    model = linear()
    legal = torch.ones(2, 5, 4, dtype=torch.bool)
    legal[1, 2, 3] = legal[:, 0, 1] = False

    def loss_of(i):
        scores = model(seeded((5, 3))).masked_fill(~legal[i], float("-inf"))
        return F.cross_entropy(scores, torch.tensor([0, 1, 3, 2, 1]))  # here

    return train(model, loss_of)


@fault("zero-times-inf", op="mul", rows=(0, 4), step=0)
def soft_labels_times_minus_infinity():
    model = linear()
    legal = torch.ones(5, 4, dtype=torch.bool)
    legal[0, 2] = legal[4, 1] = False

    def loss_of(i):
        logs = model(seeded((5, 3))).masked_fill(~legal, float("-inf")).log_softmax(-1)
        wanted = F.one_hot(torch.tensor([0, 1, 3, 2, 0]), 4).float()
        return -(wanted * logs).sum(-1).mean()  # here

    return train(model, loss_of)


@fault("label-out-of-range log-of-nonpositive domain-error", op=["xlogy", "kl_div"], rows=(1,), step=1)
def divergence_from_a_negative_share():
    model = linear()
    shares = torch.full((2, 5, 4), 0.25)
    shares[1, 1, 0] = -0.25
    return train(
        model, lambda i: F.kl_div(model(seeded((5, 3))).log_softmax(-1), shares[i], reduction="batchmean")
    )  # here


@fault("label-out-of-range log-of-nonpositive", op="log", step=1, rows=(1, 2))
def masks_of_255():
    model = linear(1)
    masks = torch.tensor([[0.0, 1, 1, 0], [0, 255, 255, 0]])

    def loss_of(i):
        p = torch.sigmoid(model(seeded((4, 3))).squeeze(-1) * 0 + 40.0 * masks[i].clamp(max=1) + model.bias)
        return -(
            masks[i] * torch.log(p + 1e-12) + (1 - masks[i]) * torch.log(1 - p + 1e-12 * (masks[i] < 2))
        ).mean()  # here

    return train(model, loss_of)


@silent()
def counts_of_zero_in_poisson():
    model = linear(1)
    counts = torch.tensor([0.0, 1.0, 4.0, 0.0, 2.0])
    return train(model, lambda i: F.poisson_nll_loss(model(seeded((5, 3))).squeeze(-1), counts, full=True))


@silent()
def variance_of_zero_in_gaussian():
    model = linear(1)
    return train(
        model, lambda i: F.gaussian_nll_loss(model(seeded((5, 3))), torch.zeros(5, 1), torch.zeros(5, 1), full=True)
    )


@silent()
def sure_probabilities_in_bce():
    model = linear(1)
    return train(model, lambda i: F.binary_cross_entropy(torch.sigmoid(model(seeded((5, 3))) * 1e4), torch.ones(5, 1)))


@silent()
def missing_targets_left_out_first():
    model = linear(1)
    wanted = torch.tensor([0.5, float("nan"), 1.0, float("nan"), 0.0])

    def loss_of(i):
        known = ~torch.isnan(wanted)
        return (model(seeded((5, 3))).squeeze(-1)[known] - wanted[known]).square().mean()

    return train(model, loss_of)


@fault("where-grad", op="sub", phase="backward", rows=(1,), step=0)
def missing_targets_masked_by_where():
    model = linear(1)
    wanted = torch.tensor([0.5, float("nan"), 1.0, 2.0, 0.0])

    def loss_of(i):
        there = ~torch.isnan(wanted)
        errors = (model(seeded((5, 3))).squeeze(-1) - wanted).square()  # here
        return torch.where(there, errors, 0.0).sum() / there.sum()

    return train(model, loss_of)


@fault("where-grad", phase="backward", step=0)
def missing_targets_left_out_too_late():
    model = linear(1)
    wanted = torch.tensor([0.5, float("nan"), 1.0, float("nan"), 0.0])

    def loss_of(i):
        errors = (model(seeded((5, 3))).squeeze(-1) - wanted).square()  # here
        return errors[~torch.isnan(errors)].mean()

    return train(model, loss_of)


@fault("zero-times-inf", op="mul", step=0)
def mask_times_infinity():
    model = linear()
    pad = torch.tensor([1.0, 1, 0, 1, 1])

    def loss_of(i):
        scores = model(seeded((4, 3)))[:, :1] * torch.ones(5)
        scores = scores + (1 - pad) * float("-inf")  # here
        return scores.softmax(-1).square().mean()

    return train(model, loss_of)


@fault("zero-times-inf", op=["native_dropout", "mul", "dropout", "div", "bernoulli"], step=0)
def dropout_over_minus_infinity():
    model = linear()

    def loss_of(i):
        scores = model(seeded((50, 3))).masked_fill(torch.arange(4) == 2, float("-inf"))
        scores = F.dropout(scores, 0.5)  # here
        return scores.softmax(-1).square().mean()

    return train(model, loss_of)


@fault("fully-masked-softmax overflow inf-minus-inf", op=["add", "softmax"], rows=(2,), step=0)
def lowest_plus_lowest_everywhere():
    model = linear()
    lowest = torch.finfo(torch.float32).min
    pads = torch.zeros(5, 4)
    pads[2] = lowest

    def loss_of(i):
        scores = model(seeded((5, 3))) + pads + pads  # here
        weights = scores.softmax(-1)  # here
        return weights.square().mean()

    return train(model, loss_of)


@silent()
def lowest_plus_lowest_in_places():
    model = linear()
    pads = torch.zeros(5, 4)
    pads[2, 1:] = torch.finfo(torch.float32).min
    return train(model, lambda i: (model(seeded((5, 3))) + pads + pads).softmax(-1).square().mean())


@fault("div-by-zero", op="div", step=2)
def temperature_reaches_zero():
    model = linear()

    def loss_of(i):
        temperature = 1.0 - 0.5 * i
        scores = model(seeded((5, 3))) / temperature  # here
        return scores.softmax(-1).square().mean()

    return train(model, loss_of)


@fault("overflow", op="exp", step=0)
def contrast_too_sharp():
    model = linear()

    def loss_of(i):
        z = F.normalize(model(seeded((5, 3))), dim=-1)
        raised = torch.exp(z @ z.T / 0.001)  # here
        return -torch.log(raised.diag() / raised.sum(-1)).mean()

    return train(model, loss_of)


@fault("inf-minus-inf", op="sub", rows=(1,), step=0)
def ratio_of_two_closed_sums():
    model = linear()
    keep = torch.ones(5, 4, dtype=torch.bool)
    keep[1] = False

    def loss_of(i):
        scores = model(seeded((5, 3))).masked_fill(~keep, float("-inf"))
        above = torch.logsumexp(scores[:, :2], -1)
        below = torch.logsumexp(scores, -1)
        return (above - below).mean()  # here

    return train(model, loss_of)


@fault("empty-reduction", op="mean", step=1)
def sequence_of_no_length():
    model = linear()
    return train(model, lambda i: model(seeded((5, 4, 3))[:, : 4 * (1 - i)]).mean(1).square().mean())  # here
