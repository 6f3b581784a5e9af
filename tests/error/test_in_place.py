"""Values that backward needed and that were changed in place: by which statement."""

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


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).T
        weights = scores.softmax(-1)
        weights.masked_fill_(torch.eye(5).bool(), 0.0)
        return weights @ x


def sigmoid_mul():
    layer = nn.Linear(4, 4)
    gate = torch.sigmoid(layer(INPUTS))
    gate *= 2
    gate.sum().backward()


def item_assign():
    layer = nn.Linear(4, 4)
    probs = layer(INPUTS).softmax(1)
    probs[:, 0] = 0
    probs.pow(2).sum().backward()


def attn():
    model = nn.Sequential(nn.Linear(4, 4), Attn(), nn.Linear(4, 2))
    loss = model(INPUTS).sum()
    loss.backward()


def deep_seq():

    class Norm(nn.Module):
        def forward(self, x):
            y = x.exp()
            y /= y.sum(1, keepdim=True)
            return y

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Norm()), nn.Linear(4, 2))
    model(INPUTS).sum().backward()


def relu_fn():
    net = nn.Linear(4, 4)
    h = torch.tanh(net(INPUTS))
    out = F.relu(h, inplace=True)
    out.sum().backward()


def clamp_sqrt():
    w = torch.rand(4, requires_grad=True)
    root = torch.sqrt(w + 1)
    root.clamp_(max=0.5)
    root.sum().backward()


def exp_loop():
    w = torch.rand(3, requires_grad=True)
    state = torch.zeros(3)
    outs = []
    for i in range(3):
        state[i] = w[i] * 2
        outs.append((state * w).sum())
    sum(outs).backward()


def input_changed():
    conv = nn.Linear(4, 3)
    batch = INPUTS.clone()
    out = conv(batch)
    batch += 0.1 * torch.randn(5, 4)
    out.sum().backward()


def step_between():
    actor, critic = (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    critic_opt = torch.optim.SGD(critic.parameters(), 0.1)
    action = actor(INPUTS).tanh()
    value = critic(action)
    actor_loss = -value.mean()
    critic_loss = critic(action.detach()).pow(2).mean()
    critic_loss.backward()
    critic_opt.step()
    actor_loss.backward()


def step_loop():
    G, D = (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    opt_d = torch.optim.Adam(D.parameters())
    opt_g = torch.optim.Adam(G.parameters())

    def update(opt, loss):
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()

    fake = G(INPUTS)
    score = D(fake)
    d_loss = score.mean()
    g_loss = -score.mean()
    update(opt_d, d_loss)
    update(opt_g, g_loss)


def weights_nograd():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    out = model(INPUTS).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
    out.backward()


def relu_inplace_module():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.sig = nn.Sigmoid()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(self.sig(self.fc(x)))

    net = Net()
    net(INPUTS).sum().backward()


def leaf_update():
    w = torch.rand(4, requires_grad=True)
    (w * 2).sum().backward()
    w -= 0.1 * w.grad


def leaf_item():
    model = nn.Linear(4, 3)
    model.weight[0] = 0


def leaf_input_relu():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    image = torch.rand(2, 4, requires_grad=True)
    net(image).sum().backward()


def unbind_view():
    h = nn.Linear(4, 4)(INPUTS)
    rows = h.unbind(0)
    rows[0].mul_(2)


def expanded():
    b = torch.rand(4, 1).expand(4, 3)
    b += 1


def out_arg():
    w = torch.rand(4, requires_grad=True)
    buf = torch.empty(4)
    torch.mul(w, 2, out=buf)


def inference_inplace():
    with torch.inference_mode():
        base = torch.rand(3)
    base += 1


def mask_scores():
    q = nn.Linear(4, 4)
    att = q(INPUTS) @ q(INPUTS).T
    att = att.exp()
    att[torch.ones(5, 5).triu(1).bool()] = 0
    att = att / att.sum(-1, keepdim=True)
    att.sum().backward()


def gan_step():

    class GAN:
        def __init__(self):
            self.g, self.d = (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
            self.opt_d = torch.optim.SGD(self.d.parameters(), 0.1)
            self.opt_g = torch.optim.SGD(self.g.parameters(), 0.1)

        def train(self):
            fake = self.g(INPUTS)
            pred = self.d(fake)
            d_loss = pred.mean()
            d_loss.backward(retain_graph=True)
            self.opt_d.step()
            g_loss = -pred.mean()
            g_loss.backward()
            self.opt_g.step()

    GAN().train()


def weight_norm():
    m = nn.Linear(4, 3)
    m(INPUTS)
    m.weight.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        m.weight.copy_(m.weight / m.weight.norm())
    x1 = INPUTS.clone().requires_grad_()
    out2 = m(x1)
    with torch.no_grad():
        m.weight.mul_(2)
    out2.sum().backward()


def lambda_layer():
    lin = nn.Linear(4, 4)
    steps = [lin, torch.tanh, lambda t: t.add_(1), torch.relu]
    h = INPUTS
    for s in steps:
        h = s(h)
    h.sum().backward()


def ddp_like():

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            z = y * self.mean
            self.mean += y.detach().mean(0)
            return z

    net = Net()
    loss = net(INPUTS).sum() + net(INPUTS).sum()
    loss.backward()


def densenet():

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.relu = nn.ReLU(inplace=True)
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = torch.tanh(x)
            z = self.relu(y)
            return self.fc(z) + x

    m = nn.Sequential(nn.Linear(4, 4), Block(), Block())
    m(INPUTS).sum().backward()


def rnn_inplace():
    cell = nn.RNNCell(4, 4)
    h = torch.zeros(5, 4)
    outs = torch.zeros(3, 5, 4)
    for t in range(3):
        h = cell(INPUTS, h)
        outs[t] = h
        h[:, 0] = 0
    outs.sum().backward()


CASES = [
    (sigmoid_mul, "`gate *= 2` changes `gate` in place, but the backward of `sigmoid`", "gate *= 2", "gate = gate * 2"),
    (
        item_assign,
        "`probs[:, 0] = 0` changes `probs` in place",
        "probs[:, 0] = 0",
        "probs = probs.clone()\nprobs[:, 0] = 0",
    ),
    (attn, "`weights.masked_fill_(", "weights.masked_fill_", "weights = weights.masked_fill("),
    (deep_seq, "`y /= y.sum(1, keepdim=True)` changes `y`", "y /= ", "y = y / y.sum("),
    (
        relu_fn,
        "changes `h` in place, but the backward of `tanh`",
        "F.relu(h, inplace=True)",
        "F.relu(h, inplace=False)",
    ),
    (clamp_sqrt, "but the backward of `sqrt`", "root.clamp_", "root = root.clamp(max=0.5)"),
    (exp_loop, "changes `state` in place", "state[i] = ", "state = state.clone()"),
    (input_changed, "`batch += ", "batch += ", "batch = batch + "),
    (step_between, "`critic_opt.step()` changed `critic.1.weight`", "critic_opt.step()", "actor_loss.backward()"),
    (step_loop, "`opt.step()` changed `D.2.weight`", "opt.step()", "loss.backward()"),
    (weights_nograd, "`p.mul_(0.99)` changed `model.2.weight`", "p.mul_(0.99)", "out.backward()"),
    (relu_inplace_module, "`act` is ReLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.ReLU(inplace=False)"),
    (
        leaf_update,
        "`w -= 0.1 * w.grad` changes `w` in place, a leaf",
        "w -= ",
        "with torch.no_grad():\n    w -= 0.1 * w.grad",
    ),
    (leaf_item, "changes `model.weight` in place, a leaf", "model.weight[0] = 0", "with torch.no_grad():"),
    (leaf_input_relu, "changes `image` in place, a leaf", "", "image.clone()"),
    (unbind_view, "one of several views", "rows[0].mul_(2)", "new = rows[0].mul(2)"),
    (expanded, "`b`, whose elements share memory", "b += 1", "b = b.clone()"),
    (out_arg, "writes its result with `out=`", "torch.mul(w, 2, out=buf)", "buf = torch.mul(w, 2)"),
    (inference_inplace, "made under `torch.inference_mode()`", "base += 1", "base = base.clone()"),
    (mask_scores, "but the backward of `exp`", "att[torch.ones", "att = att.clone()"),
    (gan_step, "`self.opt_d.step()` changed `self.d.2.weight`", "self.opt_d.step()", "g_loss.backward()"),
    (weight_norm, "`m.weight.mul_(2)` changed `m.weight`", "m.weight.mul_(2)", "out2.sum().backward()"),
    (lambda_layer, "`lambda t: t.add_(1)` changes `t` in place", "lambda t: t.add_(1)", "t.add(1)"),
    (ddp_like, "`self.mean += y.detach().mean(0)` changes `self.mean`", "self.mean += ", "self.mean = self.mean + "),
    (densenet, "is ReLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.ReLU(inplace=False)"),
    (rnn_inplace, "`h[:, 0] = 0` changes `h`", "h[:, 0] = 0", "h = h.clone()"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("raising", "title", "line", "fix"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_cause_is_named_with_the_users_own_names(raising, title, line, fix):
    found = explained(raising)

    assert found.code == "error/inplace-modified"
    assert title in found.title
    assert line in found.where.text
    assert fix in "\n".join(fix.code for fix in found.fixes)


def test_the_fix_is_tried_and_the_block_is_told_among_several_alike():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

        def forward(self, x):
            mixed = self.inner(x)
            mixed *= x
            return mixed

    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 1))
    found = explained(lambda: model(INPUTS).sum().backward())

    assert "`mixed *= x`" in found.title
    assert found.where.module == "2"
    assert found.fixes[0].verified is True


def cured(raising):
    """The text of the first fix that works."""
    return next(fix.edit.new for fix in explained(raising).fixes if fix.verified)


def test_a_variable_of_the_function_around_is_not_made_one_of_its_own() -> None:
    prototypes = torch.rand(3, 4)

    def move(rows):
        with torch.no_grad():
            prototypes[0] = rows.mean(0)

    def step():
        rows = nn.Linear(4, 4)(INPUTS)
        loss = (rows @ prototypes.T).square().mean()
        move(rows)
        loss.backward()

    assert "prototypes.clone().T" in cured(step)


def test_a_state_that_is_written_on_one_sheet_is_read_as_a_copy() -> None:
    keep = nn.Linear(4, 4)

    def step():
        states = torch.zeros(4, 5, 4)
        for moment in range(3):
            states[moment + 1] = keep(states[moment]).tanh() + INPUTS
        states[1:].sum().backward()

    assert cured(step).strip() == "states[moment + 1] = keep(states[moment].clone()).tanh() + INPUTS"


def test_what_torch_forgives_is_not_blamed():
    """`+=` before the tanh, and a change of `.data`, leave what is needed alone."""
    layer = nn.Linear(4, 4)

    def forward(x):
        first = layer(x)
        first += 1
        second = first.tanh()
        second.data.clamp_(0)
        second.mul_(3)
        return second

    found = explained(lambda: forward(INPUTS).sum().backward())

    assert "`second.mul_(3)`" in found.title


def test_another_error_in_an_in_place_line_is_another_error():
    total = torch.zeros(3)

    def grown():
        nonlocal total
        total += torch.ones(4)

    with pytest.raises(RuntimeError) as caught:
        grown()

    assert "error/inplace-modified" not in [found.code for found in nbdebug.explain(caught.value, names={})]


class Hostile:
    """An object all of whose methods tell that they ran, and refuse."""

    __hash__ = None

    def _ran(self, *given):
        RAN.append(given)
        raise RuntimeError("not to be run")

    __getattribute__ = __getattr__ = __eq__ = __len__ = __bool__ = __iter__ = __repr__ = _ran
    __class__ = property(_ran)

    def __call__(self, x):
        return x


RAN = []


def test_no_code_of_the_users_runs_for_an_explanation():
    hostile, layer, password = Hostile(), nn.Linear(4, 4), "swordfish"

    def unpacked(tensor):
        RAN.append("unpack")
        return tensor

    def in_bad_company(other):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked):
            aside = layer(INPUTS).exp()
        gate = other(layer(INPUTS).sigmoid())
        gate.mul_(len(password))
        (gate + aside).sum().backward()

    with pytest.raises(RuntimeError) as caught:
        in_bad_company(hostile)
    RAN.clear()
    report = nbdebug.explain(caught.value, names={"hostile": hostile})

    assert "`gate.mul_(len(password))` changes `gate`" in report.findings[0].title
    assert not RAN
    assert "swordfish" not in str(report)
