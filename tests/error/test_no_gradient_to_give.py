"""Errors where a gradient is asked for and there is none to give: of inputs, results, optimizers and losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nbdebug

F = nn.functional
INPUTS, TARGETS = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 2, 1, 0, 2])


def explained(raising):
    """The one finding for what a function raises."""
    with pytest.raises(Exception) as caught:
        raising()
    report = nbdebug.explain(caught.value, names={})
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


def not_scalar():
    model = nn.Linear(4, 3)
    loss = F.cross_entropy(model(INPUTS), TARGETS, reduction="none")
    loss.backward()


def returns_none():
    model = nn.Linear(4, 3)

    def criterion(pred, target):
        value = F.cross_entropy(pred, target)  # noqa: F841

    loss = criterion(model(INPUTS), TARGETS)
    loss.backward()


def returns_tuple():
    model = nn.Linear(4, 3)

    def criterion(pred, target):
        return (F.cross_entropy(pred, target), pred)

    loss = criterion(model(INPUTS), TARGETS)
    loss.backward()


def grad_input():
    model = nn.Linear(4, 3)
    sample = torch.rand(2, 4)
    out = model(sample).sum()
    torch.autograd.grad(out, sample)


def grad_unused():
    model = nn.Linear(4, 3)
    sample = torch.rand(2, 4, requires_grad=True)
    moved = sample * 2
    out = model(sample).sum()
    torch.autograd.grad(out, [moved])


def list_held():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [nn.Linear(4, 4) for _ in range(3)]

        def forward(self, x):
            return x

    net = Net()
    torch.optim.Adam(net.parameters())


def nonleaf_optim():
    style = torch.rand(3, requires_grad=True) * 0.1
    torch.optim.Adam([style], lr=0.1)


def grad_none():
    w = torch.rand(3, requires_grad=True)
    scaled = w * 2
    scaled.sum().backward()
    scaled.grad.norm()


def grad_none_param():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "aux": nn.Linear(4, 3)})
    model["used"](INPUTS).sum().backward()
    total = 0
    for p in model.parameters():
        total += p.grad.norm()


def inference():
    encoder, head = (nn.Linear(4, 4), nn.Linear(4, 3))
    with torch.inference_mode():
        code = encoder(INPUTS)
    head(code).sum().backward()


def adv_grad_none():
    m = nn.Linear(4, 3)
    image = INPUTS.clone().requires_grad_(True)
    adv = image + 0.1
    F.cross_entropy(m(adv), TARGETS).backward()
    adv.grad.sign()


CASES = [
    (not_scalar, "`loss` has shape [5]", "loss.backward()", "loss.mean().backward()"),
    (returns_none, "`loss` is None: `criterion` returns nothing", "loss.backward()", "return loss"),
    (returns_tuple, "`loss` is a tuple", "loss.backward()", "loss[0].backward()"),
    (grad_input, "`sample` does not require grad", "torch.autograd.grad", "sample.requires_grad_()"),
    (grad_unused, "`moved` is not part of the graph", "torch.autograd.grad", "allow_unused=True"),
    (list_held, "`net.blocks` is a plain list of 3 modules", "torch.optim.Adam", "self.blocks = nn.ModuleList"),
    (
        nonleaf_optim,
        "`style` is not a leaf but the result of `mul`",
        "torch.optim.Adam",
        "style = style.detach().requires_grad_()",
    ),
    (grad_none, "`scaled.grad` is None: `scaled` is a result of `mul`", "scaled.grad.norm()", "scaled.retain_grad()"),
    (grad_none_param, "(`model.aux.weight`)", "total += p.grad.norm()", "p.grad is not None"),
    (inference, "`code` was made under `torch.inference_mode()`", "torch.inference_mode():", "code = code.clone()"),
    (adv_grad_none, "`adv.grad` is None: `adv` is a result of `add`", "adv.grad.sign()", "adv.retain_grad()"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("raising", "title", "line", "fix"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_cause_is_named_with_the_users_own_names(raising, title, line, fix):
    found = explained(raising)

    assert found.code == ("error/non-scalar-backward" if raising is not_scalar else "error/no-grad-path")
    assert title in found.title
    assert line in found.where.text
    assert fix in "\n".join(fix.code for fix in found.fixes)


class Plan:
    """An object of the user's without a backward."""

    grad = None


def slip_of_the_pen():
    Plan().backward()


def nothing_found():
    best = {}.get("best")
    best.norm()


def attribute_of_the_users():
    Plan().grad.norm()


def gradient_of_the_wrong_shape():
    weights = torch.ones(3, requires_grad=True)
    weights.sum().backward(torch.ones(3))


@pytest.mark.parametrize(
    "raising", [slip_of_the_pen, nothing_found, attribute_of_the_users, gradient_of_the_wrong_shape]
)
def test_errors_alike_in_words_only_are_not_taken(raising):
    with pytest.raises(Exception) as caught:
        raising()

    assert "error/no-grad-path" not in [found.code for found in nbdebug.explain(caught.value, names={})]
