"""Fixes of a run as edits of the user's own statement: of the loop, of what makes the loader, the optimizer or a layer,
and lines before the optimizer. Each program is written out, as in a cell. That they cure when they are pasted is shown
by `python -m tests.benchmarks.cure`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.report import Where
from nbdebug.tools.training import edits
from tests.training.loops import clusters


def first_fix(train, model, optimizer, loss_fn, train_loader, val_loader, code, scheduler=None):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    report = nbdebug.diagnose(
        train,
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        train_loader=train_loader,
        val_loader=val_loader,
        scheduler=scheduler,
        progress=False,
    )
    assert report.findings[0].code == f"training/{code}", str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert sum(len(group["params"]) for group in optimizer.param_groups) <= len(flags)
    return report.findings[0].fixes[0]


def loss_fn(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def trainer(model, optimizer, train_loader, passes=4):
    def train(callback):
        for epoch in range(passes):
            model.train()
            for i, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                callback(epoch * len(train_loader) + i, loss.item())

    return train


class Tower(nn.Module):
    """shift: of the first layer's bias; listed: its layers are in a plain list."""

    def __init__(self, shift=0.0, listed=False):
        super().__init__()
        layers = [nn.Linear(12, 24), nn.Linear(24, 24)]
        self.layers = layers if listed else nn.Sequential(*layers)
        self.head = nn.Linear(24, 5)
        for layer in layers:
            nn.init.constant_(layer.bias, shift)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def test_samples_in_the_order_of_their_labels_are_shuffled_where_the_loader_is_made():
    torch.manual_seed(0)
    x, y = clusters(1200)
    order = y.argsort()
    train_loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=32)
    val_loader = DataLoader(TensorDataset(*clusters(200, seed=5)), batch_size=64)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(callback):
        for epoch in range(2):
            for i, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                callback(epoch * len(train_loader) + i, loss.item())

    fix = first_fix(train, model, optimizer, loss_fn, train_loader, val_loader, "unshuffled-data")

    assert fix.verified
    assert fix.edit.new == (
        "    train_loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=32, shuffle=True)"
    )


def test_schedule_that_cuts_the_rate_too_early_is_left_out():
    torch.manual_seed(47)
    pair = TensorDataset(*clusters(1000)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.05)

    def train(callback):
        for epoch in range(5):
            for i, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                callback(epoch * len(train_loader) + i, loss.item())
            scheduler.step()

    fix = first_fix(train, model, optimizer, loss_fn, train_loader, val_loader, "plateau", scheduler)

    assert fix.verified
    assert fix.title.startswith("Keep the first rate")
    assert fix.edit.new.strip() == "pass  # scheduler.step()"


@pytest.mark.parametrize(
    ("sick", "code", "new"),
    [
        (
            {"shift": -6.0},
            "dead-relu",
            "    for layer in (tower.layers[0], tower.layers[1]):\n        torch.nn.init.kaiming_normal_(",
        ),
        ({"listed": True}, "parameters-not-in-optimizer", "        self.layers = nn.ModuleList(layers if listed"),
    ],
)
def test_layers_of_a_tower_are_drawn_anew_or_registered(sick, code, new):
    torch.manual_seed(3)
    pair = TensorDataset(*clusters(1000)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    tower = Tower(**sick)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=3e-3)

    fix = first_fix(trainer(tower, optimizer, train_loader), tower, optimizer, loss_fn, train_loader, val_loader, code)

    assert fix.verified
    assert fix.edit.new.startswith(new)


def test_optimizer_of_a_part_gets_the_whole_model():
    torch.manual_seed(3)
    pair = TensorDataset(*clusters(1000)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    net = Tower()
    nn.init.normal_(net.layers[0].weight, 0.0, 0.01)
    optimizer = torch.optim.RMSprop(net.head.parameters(), lr=1e-3)

    train = trainer(net, optimizer, train_loader)
    fix = first_fix(train, net, optimizer, loss_fn, train_loader, val_loader, "parameters-not-in-optimizer")

    assert fix.verified
    assert fix.edit.new == "    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)"


def test_frozen_parameters_are_unfrozen_before_the_optimizer_is_made():
    torch.manual_seed(3)
    pair = TensorDataset(*clusters(1000)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    net = Tower(shift=0.1)
    with torch.no_grad():
        net.layers[1].weight.zero_()
    net.layers.requires_grad_(False)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)

    train = trainer(net, optimizer, train_loader)
    fix = first_fix(train, net, optimizer, loss_fn, train_loader, val_loader, "frozen-parameters")

    assert fix.verified
    assert "net." in fix.edit.new and "requires_grad_(True)" in fix.edit.new
    assert fix.edit.new.endswith("    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)")


def test_inputs_are_scaled_where_the_model_is_called():
    torch.manual_seed(70)
    x, y = clusters(1000)
    x = 150 + 25 * x
    train_loader = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[800:], y[800:]), batch_size=64)
    reader = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(reader.parameters(), lr=0.1)

    def own_loss(reader, batch):
        return F.cross_entropy(reader(batch[0]), batch[1])

    train = trainer(reader, optimizer, train_loader)
    fix = first_fix(train, reader, optimizer, own_loss, train_loader, val_loader, "input-not-normalized")

    assert fix.verified, fix
    assert fix.edit.new.startswith("        return F.cross_entropy(reader((batch[0] - 1")


def test_validation_is_put_into_eval_mode_where_each_pass_goes_back_to_train_mode():
    torch.manual_seed(0)
    pair = TensorDataset(*clusters(512)), TensorDataset(*clusters(160, seed=5))
    x, y = pair[1].tensors
    train_loader = DataLoader(pair[0], batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[y.argsort()], y[y.argsort()]), batch_size=8)
    net = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    @torch.no_grad()
    def validate():
        return sum(F.cross_entropy(net(x), y).item() for x, y in val_loader)

    def train(callback):
        history = []
        for epoch in range(8):
            net.train()
            for i, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = loss_fn(net, batch)
                loss.backward()
                optimizer.step()
                callback(epoch * len(train_loader) + i, loss.item())
            history.append(validate())
        return history

    fix = first_fix(train, net, optimizer, loss_fn, train_loader, val_loader, "train-mode-in-eval")

    assert fix.verified
    assert fix.edit.new.startswith("        net.eval()\n        return sum(")


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(12, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 4, bias=False), nn.Linear(4, 5, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 1e-4 * self.up(self.down(x))


def test_small_factor_is_left_out_in_its_line():
    torch.manual_seed(54)
    pair = TensorDataset(*clusters(600)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    adapted = Adapted()
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)

    train = trainer(adapted, optimizer, train_loader, 8)
    fix = first_fix(train, adapted, optimizer, loss_fn, train_loader, val_loader, "vanishing-gradients")

    assert fix.verified
    assert fix.edit.new == "        return self.base(x) + 1.0 * self.up(self.down(x))"


def test_sigmoids_through_which_no_gradient_comes_become_relus():
    torch.manual_seed(47)
    pair = TensorDataset(*clusters(1000)), TensorDataset(*clusters(200, seed=5))
    train_loader, val_loader = DataLoader(pair[0], batch_size=32, shuffle=True), DataLoader(pair[1], batch_size=64)
    layers = [nn.Linear(12, 48)]
    for _ in range(4):
        layers += [nn.Sigmoid(), nn.Linear(48, 48)]
    model = nn.Sequential(*layers, nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    train = trainer(model, optimizer, train_loader)
    fix = first_fix(train, model, optimizer, loss_fn, train_loader, val_loader, "vanishing-gradients")

    assert fix.verified
    assert fix.edit.new == "        layers += [nn.ReLU(), nn.Linear(48, 48)]"
    assert sum(isinstance(module, nn.Sigmoid) for module in model) == 4


def test_classes_that_are_hardly_found_are_weighted_in_the_loss():
    torch.manual_seed(0)
    y = (torch.rand(1536) < 0.04).long()
    x = torch.randn(1536, 8) + y[:, None] * 0.75
    train_loader = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[1024:], y[1024:]), batch_size=64)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def own_loss(scorer, batch):
        return F.cross_entropy(scorer(batch[0]), batch[1])

    def train(callback):
        for epoch in range(10):
            for i, batch in enumerate(train_loader):
                optimizer.zero_grad()
                loss = own_loss(model, batch)
                loss.backward()
                optimizer.step()
                callback(epoch * len(train_loader) + i, loss.item())

    fix = first_fix(train, model, optimizer, own_loss, train_loader, val_loader, "class-imbalance")

    assert fix.verified
    assert "F.cross_entropy(scorer(batch[0]), batch[1], weight=torch.tensor([0.5" in fix.edit.new
    assert fix.after["with the fix"] > fix.after["mean share found of a class"] + 0.1


def test_states_are_joined_by_sample_and_no_sample_changes_another():
    class Both(nn.Module):
        """The two directions of a recurrent layer."""

        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 16), nn.Linear(32, 4)
            self.read = nn.GRU(16, 16, batch_first=True, bidirectional=True)

        def forward(self, tokens):
            hidden = self.read(self.embed(tokens))[1]
            return self.out(hidden.reshape(len(tokens), -1))

    torch.manual_seed(0)
    x = torch.randint(0, 10, (640, 6))
    y = (x[:, 0] > 4).long() + 2 * (x[:, -1] > 4).long()
    train_loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=32, shuffle=True)

    report = nbdebug.preflight(Both(), train_loader, loss_fn, val_loader=None)
    fix = next(f for f in report.findings if f.code == "training/batch-mixing").fixes[0]

    assert fix.verified
    assert fix.edit.new == "            return self.out(hidden.transpose(0, 1).reshape(len(tokens), -1))"
    assert fix.after["other samples changed"] == 0


def test_loss_is_divided_by_the_batches_of_a_step():
    torch.manual_seed(112)
    x, y = clusters(1700, spread=2.0)
    train_loader = DataLoader(TensorDataset(x[:1360], y[:1360]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[1360:], y[1360:]), batch_size=64)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(callback):
        step = 0
        for _ in range(6):
            optimizer.zero_grad()
            for i, batch in enumerate(train_loader):
                loss = loss_fn(model, batch)
                (loss / 2).backward()
                if (i + 1) % 8 == 0 or i + 1 == len(train_loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    callback(step, loss.item())
                    step += 1

    fix = first_fix(train, model, optimizer, loss_fn, train_loader, val_loader, "accumulation-scale")

    assert fix.verified
    assert fix.edit.new.strip() == "(loss / 8).backward()"


@pytest.mark.parametrize(
    ("line", "slug", "mended"),
    [
        (
            "opt.zero_grad(); loss.backward(); opt.step()",
            "loss-spike",
            "opt.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()",
        ),
        (
            "loss = net(x).sum(); loss.backward(); opt.step()",
            "zero-grad-missing",
            "loss = net(x).sum(); opt.zero_grad(); loss.backward(); opt.step()",
        ),
        (
            "loss.backward(); opt.zero_grad(); opt.step()",
            "gradients-cleared-before-step",
            "opt.zero_grad(); loss.backward(); opt.step()",
        ),
        (
            "opt.zero_grad(); opt.step(); loss.backward()",
            "gradients-cleared-before-step",
            "opt.zero_grad(); loss.backward(); opt.step()",
        ),
    ],
)
def test_statements_that_share_a_line_are_told_apart(tmp_path, line, slug, mended):
    file = tmp_path / "loop.py"
    file.write_text(f"def train():\n    for x in rows:\n        loss = net(x).sum()\n        {line}\n")
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    places = {"backward": Where(file=str(file), line=4)}
    loop = edits.LoopStatements({"net": net, "opt": opt}, net, [opt], None, places)

    assert next(edits.in_loop(slug, loop)).new.strip() == mended
