"""Errors of a gradient's path: which op ended it, and for which of the user's variables."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
from torch import nn

import nbdebug
from tests import shell

F = nn.functional
INPUTS, TARGETS = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 2, 1, 0, 2])


def explained(raising):
    """The one finding for what a function raises."""
    with pytest.raises(Exception) as caught:
        raising()
    report = nbdebug.explain(caught.value, names={})
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.crit = nn.MSELoss()

    def predict(self, batch):
        return self.model(batch).round().long()

    def fit(self):
        for batch in [INPUTS, INPUTS]:
            pred = self.predict(batch)
            loss = self.crit(pred.float(), torch.ones(5, 1))
            loss.backward()


class Config:
    thr = 0.5


def detached_in_forward():

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, feats):
            logits = self.fc(feats)
            frozen_logits = logits.detach()
            return frozen_logits * 2

    model = nn.Sequential(nn.Linear(4, 4), Head())
    out = model(INPUTS)
    loss = F.cross_entropy(out, TARGETS)
    loss.backward()


def item_loss():
    model = nn.Linear(4, 3)

    def compute(pred, target):
        return F.cross_entropy(pred, target).item()

    loss = compute(model(INPUTS), TARGETS)
    loss.backward()


def rebuilt_losses():
    model = nn.Linear(4, 3)
    losses = []
    for row, label in zip(INPUTS, TARGETS):
        losses.append(F.cross_entropy(model(row)[None], label[None]))
    total = torch.tensor(losses).mean()
    total.backward()


def item_losses():
    model = nn.Linear(4, 3)
    losses = []
    for row, label in zip(INPUTS, TARGETS):
        step_loss = F.cross_entropy(model(row)[None], label[None])
        losses.append(step_loss.item())
    total = torch.tensor(losses).mean()
    total.backward()


def numpy_between():
    model = nn.Linear(4, 3)
    probs = model(INPUTS).softmax(1)
    arr = probs.detach().cpu().numpy()
    smooth = np.log(arr + 1e-06)
    loss = -torch.from_numpy(smooth)[range(5), TARGETS].mean()
    loss.backward()


def no_grad_block():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        feats = model(INPUTS)
    loss = feats.pow(2).mean()
    loss.backward()


def no_grad_decorator():
    model = nn.Linear(4, 3)

    @torch.no_grad()
    def evaluate(batch):
        return model(batch)

    loss = F.cross_entropy(evaluate(INPUTS), TARGETS)
    loss.backward()


def phase_off():
    model = nn.Linear(4, 3)
    for phase in ["val"]:
        with torch.set_grad_enabled(phase == "train"):
            out = model(INPUTS)
            loss = F.cross_entropy(out, TARGETS)
        loss.backward()


def frozen_all():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    for p in model.parameters():
        p.requires_grad = False
    model.eval()
    loss = F.cross_entropy(model(INPUTS), TARGETS)
    loss.backward()


def comparison():
    model = nn.Linear(4, 1)
    score = torch.sigmoid(model(INPUTS))
    hit = score > 0.5
    loss = (hit.float() - 1).abs().mean()
    loss.backward()


def max_index():
    model = nn.Linear(4, 3)
    outputs = model(INPUTS)
    _, predicted = torch.max(outputs, 1)
    loss = (predicted.float() - TARGETS.float()).pow(2).mean()
    loss.backward()


def global_off():
    model = nn.Linear(4, 3)
    torch.set_grad_enabled(False)
    loss = F.cross_entropy(model(INPUTS), TARGETS)
    loss.backward()


def np_mean():
    model = nn.Linear(4, 3)
    losses = []
    for _ in range(2):
        losses.append(F.cross_entropy(model(INPUTS), TARGETS).item())
    loss = np.mean(losses)
    loss.backward()


def aug_item():
    model = nn.Linear(4, 3)
    loss = 0
    for _ in range(2):
        loss += F.cross_entropy(model(INPUTS), TARGETS).item()
    loss.backward()


def helper_backward():
    model = nn.Linear(4, 3)

    def step(objective):
        objective.backward()

    def run():
        pred = model(INPUTS).data
        step(F.cross_entropy(pred, TARGETS))

    run()


def gradient_penalty():
    critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    mixed = torch.rand(3, 4, requires_grad=True)
    grads = torch.autograd.grad(critic(mixed).sum(), mixed)[0]
    penalty = (grads.norm(2, dim=1) - 1).pow(2).mean()
    penalty.backward()


def sampled():
    model = nn.Linear(4, 2)
    mean, raw = model(INPUTS).unbind(1)
    dist = torch.distributions.Normal(mean, raw.exp())
    action = dist.sample()
    loss = (action - 1).pow(2).mean()
    loss.backward()


def data_only():
    model = nn.Linear(4, 3)
    pred = model(INPUTS)  # noqa: F841
    loss = F.mse_loss(INPUTS, INPUTS + 1)
    loss.backward()


def retain():
    model = nn.Linear(4, 3)
    pred = model(INPUTS).argmax(1).float()
    pred.retain_grad()


def trainer():
    Trainer().fit()


def compiled_detach():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            hidden = self.fc(x)
            return hidden.detach()

    net = torch.compile(Net(), backend="eager")
    loss = net(INPUTS).sum()
    loss.backward()


def list_loop():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            ranks = x.argsort(dim=1)
            return ranks.float()

    net = Net()
    loss = sum((net(b) - 1).pow(2).mean() for b in [INPUTS, INPUTS])
    loss.backward()


def lambda_cut():
    model = nn.Linear(4, 3)
    metric = lambda a, b: (a.argmax(1) == b).float().mean()
    loss = 1 - metric(model(INPUTS), TARGETS)
    loss.backward()


def ckpt():
    from torch.utils.checkpoint import checkpoint

    (block,) = [nn.Sequential(nn.Linear(4, 4), nn.ReLU())]
    out = checkpoint(block, INPUTS, use_reentrant=True)
    loss = out.sum()
    loss.backward()


def vae_kl():
    enc = nn.Linear(4, 4)
    mu, logvar = enc(INPUTS).chunk(2, 1)
    with torch.no_grad():
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
    recon = F.mse_loss(z, INPUTS[:, :2])
    recon.backward()


def where_mask():
    m = nn.Linear(4, 1)
    p = m(INPUTS).sigmoid()
    pred = torch.where(p > 0.5, torch.ones_like(p), torch.zeros_like(p))
    loss = F.binary_cross_entropy(pred, torch.ones(5, 1))
    loss.backward()


def wrapped_loss():

    class Dice(nn.Module):
        def __init__(self, thr):
            super().__init__()
            self.thr = thr

        def forward(self, logits, target):
            probs = torch.sigmoid(logits)
            if self.thr is not None:
                probs = (probs > self.thr).float()
            return 1 - 2 * (probs * target).sum() / (probs.sum() + target.sum())

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    crit = Dice(0.5)
    for _ in range(1):
        loss = crit(net(INPUTS), torch.ones(5, 1))
        loss.backward()


def dict_pred():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            logits = self.fc(x)
            return {"logits": logits, "pred": logits.argmax(-1)}

    net = Net()
    out = net(INPUTS)
    loss = (out["pred"] - TARGETS).abs().float().mean()
    loss.backward()


def kwargs_call():
    model = nn.Linear(4, 1)

    def loss_fn(*, pred, target, cfg):
        return ((pred.sigmoid() > cfg.thr) != target).float().mean()

    loss = loss_fn(pred=model(INPUTS), target=torch.ones(5, 1).bool(), cfg=Config())
    loss.backward()


def nested_seq():

    class Quant(nn.Module):
        def forward(self, x):
            return (x * 8).to(torch.uint8).float() / 8

    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(Quant()))
    loss = net(INPUTS).sum()
    loss.backward()


def sum_losses():
    model = nn.Linear(4, 3)
    losses = {"a": F.cross_entropy(model(INPUTS), TARGETS).item(), "b": 0.1}
    total = sum(losses.values())
    total.backward()


def tuple_under_no_grad():
    encoder = nn.Linear(4, 4)

    @torch.no_grad()
    def encode(batch):
        both = encoder(batch)
        return (both[:, :2], both[:, 2:])

    mean, spread = encode(INPUTS)
    loss = (mean + spread).pow(2).mean()
    loss.backward()


def predicted(model, batch):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        return model(batch)
    finally:
        torch.set_grad_enabled(before)


def switched_back():
    model = nn.Linear(4, 3)
    scores = predicted(model, INPUTS)
    loss = F.cross_entropy(scores, TARGETS)
    loss.backward()


def switched_back_beside():
    model = nn.Linear(4, 3)
    print(predicted(model, INPUTS).argmax(1))
    loss = F.cross_entropy(model(INPUTS).detach(), TARGETS)
    loss.backward()


class Quiet:
    def __enter__(self):
        torch.set_grad_enabled(False)

    def __exit__(self, *raised):
        torch.set_grad_enabled(True)


def manager_of_ones_own():
    model = nn.Linear(4, 3)
    with Quiet():
        scores = model(INPUTS)
    F.cross_entropy(scores, TARGETS).backward()


@contextlib.contextmanager
def evaluating(model):
    with torch.no_grad():
        yield model.eval()
    model.train()


def manager_that_yields():
    with evaluating(nn.Linear(4, 3)) as model:
        scores = model(INPUTS)
    F.cross_entropy(scores, TARGETS).backward()


def chosen_manager():
    def mode(training):
        return torch.enable_grad() if training else torch.inference_mode()

    model = nn.Linear(4, 3)
    with mode(training=False):
        scores = model(INPUTS)
    F.mse_loss(scores, torch.ones(5, 3, requires_grad=True)).backward()


def timed(function):
    @functools.wraps(function)
    def wrapper(*args):
        with torch.no_grad():
            return function(*args)

    return wrapper


@timed
def scored(model, batch):
    return model(batch)


def decorator_of_ones_own():
    model = nn.Linear(4, 3)
    F.cross_entropy(scored(model, INPUTS), TARGETS).backward()


def stack_of_managers():
    model = nn.Linear(4, 3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        scores = model(INPUTS)
    F.cross_entropy(scores, TARGETS).backward()


def manager_by_hand():
    model, mode = nn.Linear(4, 3), torch.no_grad()
    mode.__enter__()
    scores = model(INPUTS)
    mode.__exit__(None, None, None)
    F.cross_entropy(scores, TARGETS).backward()


def generator_without():
    model = nn.Linear(4, 3)

    @torch.no_grad()
    def outputs():
        yield model(INPUTS)

    F.cross_entropy(next(outputs()), TARGETS).backward()


def off_in_a_method():
    model, meter = nn.Linear(4, 3), Quiet()
    F.cross_entropy(model(INPUTS), TARGETS).backward()
    meter.__enter__()
    F.cross_entropy(model(INPUTS), TARGETS).backward()


def left_off_in_the_loop():
    model = nn.Linear(4, 3)

    def right():
        torch.set_grad_enabled(False)
        return (model(INPUTS).argmax(1) == TARGETS).float().mean()

    try:
        for _ in range(2):
            F.cross_entropy(model(INPUTS), TARGETS).backward()
            print(right())
    finally:
        torch.set_grad_enabled(True)


CASES = [
    (
        detached_in_forward,
        "`.detach()` in `logits.detach()` cuts it off from `logits`",
        "frozen_logits = logits.detach()",
        "frozen_logits = logits",
    ),
    (
        item_loss,
        "`item` in `F.cross_entropy(pred, target).item()`",
        "return F.cross_entropy",
        "return F.cross_entropy(pred, target)",
    ),
    (
        rebuilt_losses,
        "`torch.tensor(losses)` creates a new tensor",
        "total = torch.tensor",
        "total = torch.stack(losses)",
    ),
    (item_losses, "`item` in `step_loss.item()`", "losses.append", "losses.append(step_loss)"),
    (numpy_between, "`arr` has no gradient", "arr = probs", "arr = probs"),
    (no_grad_block, "`feats` is computed under `with torch.no_grad()`", "with torch.no_grad():", "feats = model("),
    (switched_back, "`torch.set_grad_enabled(False)` in `predicted`", "torch.set_grad_enabled(False)", "return model("),
    (switched_back_beside, "`.detach()` in `model(INPUTS).detach()`", "loss = F.cross", "loss = "),
    (
        manager_of_ones_own,
        "`torch.set_grad_enabled(False)` in `__enter__`",
        "torch.set_grad_enabled(False)",
        "scores = ",
    ),
    (manager_that_yields, "`with torch.no_grad()` in `evaluating`", "with torch.no_grad():", "scores = model("),
    (
        chosen_manager,
        "`scores` was made under `torch.inference_mode()`",
        "return torch.enable_grad()",
        "with torch.no_grad()",
    ),
    (decorator_of_ones_own, "`with torch.no_grad()` in `wrapper`", "with torch.no_grad():", ""),
    (stack_of_managers, "`stack.enter_context(torch.no_grad())`", "stack.enter_context(", "scores = model("),
    (manager_by_hand, "`mode.__enter__()`", "mode.__enter__()", "scores = model("),
    (generator_without, "`@torch.no_grad()` in `outputs`", "@torch.no_grad()", ""),
    (left_off_in_the_loop, "gradients are off everywhere", "torch.set_grad_enabled(False)", "set_grad_enabled(True)"),
    (off_in_a_method, "gradients are off everywhere", "meter.__enter__()", "torch.set_grad_enabled(True)"),
    (no_grad_decorator, "under `@torch.no_grad()` in `evaluate`", "@torch.no_grad()", "def evaluate"),
    (phase_off, "`out` is computed under `with torch.set_grad_enabled", "with torch.set_grad_enabled", "out = model("),
    (
        frozen_all,
        "all parameters of `model.0` and `model.2` are frozen",
        "p.requires_grad = False",
        "p.requires_grad = True",
    ),
    (comparison, "`score > 0.5` is true or false", "hit = score > 0.5", "hit = torch.sigmoid("),
    (max_index, "`predicted` has no gradient: `torch.max(outputs, 1)`", "torch.max(outputs, 1)", "predicted = "),
    (global_off, "gradients are off everywhere", "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    (np_mean, "`item` in", "losses.append", "losses.append(F.cross_entropy("),
    (aug_item, "`loss` is a plain number", "loss += ", "loss += F.cross_entropy("),
    (helper_backward, "`pred` has no gradient: `.data`", "pred = model(", "pred = model("),
    (gradient_penalty, "`grads` is a gradient without a graph", "grads = torch.autograd.grad", "create_graph=True"),
    (sampled, "`dist.sample()` draws a sample without one", "action = dist.sample()", "dist.rsample()"),
    (data_only, "`pred`, which has one, is not used", "loss.backward()", "loss_fn(pred, target)"),
    (retain, "`pred` has no gradient", "pred = model(", "softmax(1)"),
    (
        trainer,
        "`long` has no derivative",
        "return self.model(batch).round().long()",
        "return self.model(batch).round()",
    ),
    (compiled_detach, "`.detach()` in `hidden.detach()`", "return hidden.detach()", "return hidden"),
    (list_loop, "`ranks` has no gradient: `x.argsort(dim=1)`", "ranks = x.argsort", "ranks = x"),
    (lambda_cut, "`a.argmax(1)` returns integers", "metric = lambda", "a.softmax(1)"),
    (ckpt, "`checkpoint(block, INPUTS, use_reentrant=True)` passes none", "out = checkpoint(", "use_reentrant=False"),
    (vae_kl, "`z` is computed under `with torch.no_grad()`", "with torch.no_grad():", "z = mu +"),
    (where_mask, "`p > 0.5` is true or false", "pred = torch.where", "torch.sigmoid((p - 0.5) / 0.1)"),
    (
        wrapped_loss,
        "`probs > self.thr` is true or false",
        "probs = (probs > self.thr)",
        "torch.sigmoid((probs - self.thr) / 0.1)",
    ),
    (dict_pred, "`logits.argmax(-1)` returns integers", "logits.argmax(-1)", "logits.softmax(-1)"),
    (
        kwargs_call,
        "`pred.sigmoid() > cfg.thr` is true or false",
        "return ((pred.sigmoid() > cfg.thr)",
        "torch.sigmoid((pred.sigmoid() - cfg.thr) / 0.1)",
    ),
    (nested_seq, "`(x * 8).to(torch.uint8)` returns integers", "to(torch.uint8)", "return (x * 8).float() / 8"),
    (sum_losses, "`total` has no gradient: `item`", "losses = {", "F.cross_entropy(model("),
    (tuple_under_no_grad, "`@torch.no_grad()` in `encode`", "@torch.no_grad()", "def encode"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("raising", "title", "line", "fix"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_cause_is_named_with_the_users_own_names(raising, title, line, fix):
    found = explained(raising)

    assert found.code == "error/no-grad-path"
    assert title in found.title
    assert line in found.where.text
    assert fix in "\n".join(fix.code for fix in found.fixes)


def test_eval_mode_is_not_the_cause():
    model = nn.Linear(4, 3).eval()

    def evaluated():
        model(INPUTS).detach().sum().backward()

    assert "not the cause" in explained(evaluated).evidence["in eval mode"]


def test_a_library_function_under_no_grad_is_named():
    space = {"torch": torch}
    exec("@torch.no_grad()\ndef generate(model, x):\n    return model(x)", space)  # a function without a source
    model, generate = nn.Linear(4, 3), space["generate"]

    def from_samples():
        loss = generate(model, INPUTS).sum()
        loss.backward()

    found = explained(from_samples)

    assert "`loss` comes from `generate`, which is decorated with `no_grad`" in found.title


def test_the_cut_may_stand_in_another_cell_of_the_notebook():
    with shell.started("import torch; from torch import nn; model, x = nn.Linear(4, 3), torch.ones(2, 4)") as book:
        book.run("scores = model(x)\nbest = scores.argmax(1)")
        book.run("loss = best.float().mean()")
        error = book.run("loss.backward()").error
        found = nbdebug.explain(error, names=book.shell.user_ns).findings[0]

    assert "`best` has no gradient: `scores.argmax(1)`" in found.title
    assert found.where.cell == "In [3]"


def test_cells_of_an_earlier_shell_of_this_process_are_not_this_notebooks():
    with shell.started("import torch") as earlier:
        for number in range(6):
            earlier.run(f"best = torch.ones(3) * {number}\nloss = best.sum()")
    with shell.started("import torch; from torch import nn; model, x = nn.Linear(4, 3), torch.ones(2, 4)") as book:
        book.run("scores = model(x)\nbest = scores.argmax(1)")
        book.run("loss = best.float().mean()")
        error = book.run("loss.backward()").error
        found = nbdebug.explain(error, names=book.shell.user_ns).findings[0]

    assert "`best` has no gradient: `scores.argmax(1)`" in found.title


@pytest.fixture(autouse=True)
def gradients_on():
    yield
    torch.set_grad_enabled(True)
