"""A second backward through a freed graph: which variable brought the graph along."""

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


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.hidden = None

    def forward(self, x):
        if self.hidden is None:
            self.hidden = torch.zeros(5, 4)
        self.hidden = self.cell(x, self.hidden)
        self.last = self.hidden * 2
        return self.last


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.state = None

    def act(self, x):
        out, self.state = self.lstm(x[None], self.state)
        return out

    def learn(self):
        for _ in range(2):
            out = self.act(INPUTS)
            loss = out.mean()
            loss.backward()


def running_total():
    model = nn.Linear(4, 3)
    total = 0
    for _ in range(3):
        loss = F.cross_entropy(model(INPUTS), TARGETS)
        total += loss
        total.backward()


def lstm_tuple():
    rnn = nn.LSTM(4, 4, batch_first=True)
    head = nn.Linear(4, 3)
    hidden = None
    for _ in range(3):
        out, hidden = rnn(INPUTS[None], hidden)
        loss = head(out).pow(2).mean()
        loss.backward()


def in_function():
    rnn = nn.GRU(4, 4, batch_first=True)

    def train_step(batch, state):
        out, state = rnn(batch, state)
        loss = out.pow(2).mean()
        loss.backward()
        return state

    memory = None
    for _ in range(3):
        memory = train_step(INPUTS[None], memory)


def features_once():
    enc, head = (nn.Linear(4, 4), nn.Linear(4, 3))
    feats = enc(INPUTS).tanh()
    for _ in range(2):
        loss = F.cross_entropy(head(feats), TARGETS)
        loss.backward()


def held():
    net = nn.Sequential(nn.Linear(4, 4), Stateful())
    for _ in range(2):
        loss = net(INPUTS).pow(2).mean()
        loss.backward()


def replay():
    net = nn.Linear(4, 4)
    bank = []
    for _ in range(3):
        code = net(INPUTS).tanh()
        bank.append(code)
        loss = torch.stack(bank).pow(2).mean()
        loss.backward()


def retain_hidden():

    class RL:
        def __init__(self):
            self.net = nn.Linear(4, 2)
            self.log_probs = []

        def act(self, x):
            p = self.net(x).log_softmax(1)
            self.log_probs.append(p[:, 0])
            return p

        def finish(self):
            loss = -torch.stack(self.log_probs).sum()
            loss.backward()

    agent = RL()
    for _ in range(2):
        agent.act(INPUTS)
        agent.finish()


def gan():
    G, D = (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    for real in [INPUTS]:
        fake = G(torch.rand(5, 4)).tanh()
        d_loss = D(real).mean() - D(fake).mean()
        d_loss.backward()
        g_loss = D(fake).mean()
        g_loss.backward()


def gan_functions():
    G, D = (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))

    def train_d(images):
        loss = D(images).mean()
        loss.backward()

    def train_g(images):
        loss = -D(images).mean()
        loss.backward()

    for _ in [INPUTS]:
        fake = G(torch.rand(5, 4)).tanh()
        train_d(fake)
        train_g(fake)


def again():
    model = nn.Linear(4, 3)
    loss = F.cross_entropy(model(INPUTS), TARGETS)
    loss.backward()
    loss.backward()


def again_loop():
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loss = F.cross_entropy(model(INPUTS), TARGETS)
    for _ in range(3):
        opt.zero_grad()
        loss.backward()
        opt.step()


def ema_loss():
    model = nn.Linear(4, 3)
    smooth = None
    for _ in range(3):
        loss = F.cross_entropy(model(INPUTS), TARGETS)
        smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss
        (loss + 0.1 * smooth).backward()


def norm_weight():
    layer = nn.Linear(4, 3)
    unit = layer.weight / layer.weight.norm()

    def closure(batch):
        return F.linear(batch, unit).exp().mean()

    for _ in range(2):
        loss = closure(INPUTS)
        loss.backward()


def table_cached():

    class Pos(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = (self.scale * 2).sin()
            return x + self.cache

    net = nn.Sequential(nn.Linear(4, 4), Pos())
    for _ in range(2):
        net(INPUTS).sum().backward()


def list_h():
    rnn = nn.GRUCell(4, 4)
    h = torch.zeros(5, 4)
    for step in range(2):
        if step == 0:
            x = INPUTS
        else:
            x = INPUTS * 2
        h = rnn(x, h)
        loss = h.pow(2).mean()
        loss.backward()


def dict_state():
    rnn = nn.GRUCell(4, 4)
    state = {"h": torch.zeros(5, 4)}
    for _ in range(2):
        state["h"] = rnn(INPUTS, state["h"])
        loss = state["h"].pow(2).mean()
        loss.backward()


def outer_epoch():
    net = nn.Linear(4, 4)
    for _ in range(1):
        base = net(INPUTS).tanh()
        for head in [nn.Linear(4, 1), nn.Linear(4, 1)]:
            err = head(base).pow(2).mean()
            err.backward()


def lbfgs():
    enc, head = (nn.Linear(4, 4), nn.Linear(4, 1))
    opt = torch.optim.LBFGS(head.parameters())
    feats = enc(INPUTS).tanh()

    def closure():
        opt.zero_grad()
        loss = head(feats).pow(2).mean()
        loss.backward()
        return loss

    opt.step(closure)


def losses_loop():
    trunk = nn.Linear(4, 4)
    heads = [nn.Linear(4, 1) for _ in range(2)]
    shared = trunk(INPUTS).sigmoid()
    losses = [h(shared).mean() for h in heads]
    for part in losses:
        part.backward()


def ema_update():
    m = nn.Linear(4, 3)
    running = torch.zeros(3)
    for _ in range(2):
        out = m(INPUTS)
        running.mul_(0.9).add_(out.mean(0))
        loss = (out * running).sum()
        loss.backward()


def two_step_tbptt():
    rnn = nn.LSTM(4, 4, batch_first=True)
    fc = nn.Linear(4, 1)
    h, c = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    for chunk in torch.rand(2, 6, 4).split(3, 1):
        out, (h, c) = rnn(chunk, (h, c))
        loss = fc(out).mean()
        loss.backward()


def agent():
    Agent().learn()


def memory_dict():
    bank = {}
    net = nn.Linear(4, 4)
    for _ in range(2):
        z = net(INPUTS).tanh()
        prev = bank.get("z")
        loss = z.sum() if prev is None else (z - prev).pow(2).sum()
        loss.backward()
        bank["z"] = z


def multi_task():
    trunk, a, b = (nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1))
    shared = trunk(INPUTS).sigmoid()
    loss_a = a(shared).mean()
    loss_b = b(shared).mean()
    loss_a.backward()
    loss_b.backward()


CASES = [
    (running_total, "`total` adds up results with their graphs", "total += loss", "total += loss.item()"),
    (
        lstm_tuple,
        "`hidden` carries the graph of the previous iteration",
        "out, hidden = rnn(",
        "tuple(part.detach() for part in hidden)",
    ),
    (in_function, "`memory` carries the graph", "memory = train_step(", "memory = memory.detach()"),
    (features_once, "`feats` is computed once", "feats = enc(", "feats = feats.detach()"),
    (
        held,
        "`net.1.hidden` keeps the graph of an earlier step",
        "self.hidden = self.cell",
        "self.hidden = self.hidden.detach()",
    ),
    (replay, "`bank` keeps results of earlier iterations", "bank.append(code)", "bank.append(code.detach())"),
    (retain_hidden, "`self.log_probs` keeps the graph", "self.log_probs.append", "self.log_probs.clear()"),
    (gan, "both computed from `fake`, and the `backward()` of `d_loss`", "fake = G(", "D(fake.detach())"),
    (gan_functions, "both computed from `fake`", "fake = G(", "train_d(fake.detach())"),
    (again, "a second time on `loss`", "loss.backward()", "loss.backward(retain_graph=True)"),
    (
        again_loop,
        "a second time on `loss`, which was computed once",
        "loss = F.cross_entropy",
        "loss = F.cross_entropy(",
    ),
    (ema_loss, "`smooth` carries the graph", "smooth = loss if", "smooth = smooth.detach()"),
    (norm_weight, "`unit` is computed once", "unit = layer.weight", "unit = unit.detach()"),
    (table_cached, "`net.1.cache` keeps the graph", "self.cache = ", "self.cache = self.cache.detach()"),
    (list_h, "`h` carries the graph", "h = rnn(", "h = h.detach()"),
    (dict_state, "`state` keeps results", "state[", 'state["h"] = state["h"].detach()'),
    (outer_epoch, "`base` is computed once", "base = net(", "base = base.detach()"),
    (lbfgs, "`feats` is computed once", "feats = enc(", "feats = feats.detach()"),
    (losses_loop, "All losses are computed from `shared`", "shared = trunk(", "sum(losses).backward()"),
    (ema_update, "`running` carries the graph", "running.mul_(0.9)", "running = running.detach()"),
    (two_step_tbptt, "`h` and `c` carry the graph", "out, (h, c) = rnn(", "h = h.detach()\nc = c.detach()"),
    (
        agent,
        "`Agent.state` keeps the graph",
        "out, self.state = self.lstm(",
        "self.state = tuple(part.detach() for part in self.state)",
    ),
    (memory_dict, "`bank` keeps results", "bank[", 'bank["z"] = bank["z"].detach()'),
    (
        multi_task,
        "`loss_b` and an earlier loss are both computed from `shared`",
        "shared = trunk(",
        "(loss_a + loss_b).backward()",
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("raising", "title", "line", "fix"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_cause_is_named_with_the_users_own_names(raising, title, line, fix):
    found = explained(raising)

    assert found.code == "error/backward-twice"
    assert title in found.title
    assert line in found.where.text
    assert fix in "\n".join(fix.code for fix in found.fixes)


def test_a_kept_output_that_is_made_anew_each_time_is_not_blamed():
    found = explained(held)

    assert "last" not in found.title
    assert found.evidence["nodes in the graph of the loss"] > 0


def test_a_state_that_is_detached_is_not_blamed():
    cell, head = nn.GRUCell(4, 4), nn.Linear(4, 1)

    def two_states():
        state, trace = torch.zeros(5, 4), torch.zeros(5, 4)
        for _ in range(2):
            state = cell(INPUTS, state.detach())
            trace = 0.5 * trace + state
            head(trace).sum().backward()

    found = explained(two_states)

    assert "`trace` carries" in found.title
    assert "state" not in found.title


def test_what_was_computed_once_is_computed_again_from_the_model_on():
    """The loss alone would meet the freed graph of the output that it is made of."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        scores = model(INPUTS)
        loss = F.cross_entropy(scores, TARGETS)
        for _ in range(3):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    finding = explained(train)
    code = finding.fixes[0].code
    assert "scores = model(INPUTS)" in code and code.index("scores = ") < code.index("loss = ") < code.index("backward")
    assert finding.fixes[0].verified, code


def test_what_was_computed_before_the_loop_moves_into_it():
    fix = explained(features_once).fixes[0]
    assert fix.verified and fix.edit is not None, fix
    marks = [(mark, line.strip()) for mark, line in fix.edit.changed() if mark in "-+"]
    assert [mark for mark, _ in marks] == ["-", "+"] and marks[0][1] == marks[1][1], marks
