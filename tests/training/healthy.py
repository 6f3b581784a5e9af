"""Healthy trainings of many kinds: what they have in common is that nothing is wrong with them.

Each function builds one: model, optimizer, loss_fn, loaders, scheduler, and `train(callback)`, a loop as people write
them. They are small, take a second or less, and are as imperfect as healthy trainings are: noise that can't be learnt,
a loss that has not yet settled, some dead units, a jump now and then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import clusters, cross_entropy, loaders, made, mse, shapes, validation

KINDS: dict[str, Callable[[], SimpleNamespace]] = {}


def healthy(build: Callable[[], SimpleNamespace]) -> Callable[[], SimpleNamespace]:
    KINDS[build.__name__] = build
    return build


@healthy
def regression_with_noise():
    """A third of the targets' variance is noise, which is where the loss has to stop."""
    torch.manual_seed(0)
    x = torch.randn(1000, 6)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * 0.7 + torch.randn(1000, 1) * 0.6
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, loaders(x, y), 12)


@healthy
def regression_with_large_targets():
    """House prices in thousands: the loss starts in the tens of thousands."""
    torch.manual_seed(1)
    x = torch.randn(800, 5)
    y = 200 + 60 * x[:, :1] - 30 * x[:, 1:2] + 10 * x[:, 2:3].abs() + torch.randn(800, 1) * 5
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-2), mse, loaders(x, y), 15)


@healthy
def linear_regression():
    """Ten numbers and a straight line: a small model that is large enough."""
    torch.manual_seed(2)
    x = torch.randn(600, 10)
    y = x @ torch.randn(10, 1) + 0.1 * torch.randn(600, 1)
    model = nn.Linear(10, 1)
    return made(model, torch.optim.SGD(model.parameters(), lr=0.05), mse, loaders(x, y), 10)


@healthy
def classification():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 5))
    pair = loaders(*clusters(1200, spread=1.5))
    return made(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        cross_entropy,
        pair,
        10,
        validate=validation(model, cross_entropy, pair[1]),
    )


@healthy
def classification_of_overlapping_classes():
    """Classes that can't be told apart for a part of the samples: the loss stops near that, and should."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    return made(
        model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, loaders(*clusters(1500, spread=4.0)), 10
    )


@healthy
def clicks():
    """Rare events with much chance in them: the loss comes down a little from that of the base rate."""
    torch.manual_seed(5)
    x = torch.randn(3000, 8)
    y = (torch.rand(3000) < torch.sigmoid(x[:, 0] * 0.9 + x[:, 1] * 0.6 - 0.8)).float()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, loaders(x, y, batch=64), 6)


@healthy
def language_model():
    """A text with rules and chance in it; the loss of a transformer falls to the entropy of the chance."""
    torch.manual_seed(6)
    words = torch.randint(0, 16, (400, 17))
    for t in range(1, 17):
        follows = (words[:, t - 1] * 3 + 1) % 16
        words[:, t] = torch.where(torch.rand(400) < 0.7, follows, words[:, t])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(16, 32), nn.Embedding(16, 32)
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
            self.out = nn.Linear(32, 16)

        def forward(self, tokens):
            size = tokens.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(size)
            return self.out(
                self.layer(self.embed(tokens) + self.place(torch.arange(size)), src_mask=mask, is_causal=True)
            )

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=80)
    return made(
        model, optimizer, loss_fn, loaders(words[:, :-1], words[:, 1:]), 8, scheduler=scheduler, each="batch", clip=1.0
    )


@healthy
def autoencoder():
    torch.manual_seed(7)
    x = torch.tanh(torch.randn(800, 3) @ torch.randn(3, 20)) + torch.randn(800, 20) * 0.1
    model = nn.Sequential(
        nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20)
    )

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[0])

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, loaders(x, torch.zeros(800)), 15)


@healthy
def variational_autoencoder():
    """Its loss is two terms that pull at each other, and draws random numbers."""
    torch.manual_seed(8)
    x = torch.tanh(torch.randn(800, 2) @ torch.randn(2, 12))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(12, 4), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 12))

        def forward(self, x):
            mean, log_var = self.encode(x).chunk(2, 1)
            return self.decode(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var

    def loss_fn(model, batch):
        out, mean, log_var = model(batch[0])
        divergence = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(1).mean()
        return F.mse_loss(out, batch[0]) * 12 + 0.1 * divergence

    model = Model()
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, torch.zeros(800)), 12)


@healthy
def gan():
    """Two networks against each other, with two optimizers: neither loss goes to zero, nor should it."""
    torch.manual_seed(9)
    real = torch.randn(640, 2) * 0.3 + torch.tensor([1.0, -1.0])
    generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    judge = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(24, 1))
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    optimizers = [
        torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.9)),
    ]
    pair = loaders(real, torch.zeros(640))
    true, false = torch.ones(32, 1), torch.zeros(32, 1)

    def train(callback):
        step = 0
        for _ in range(10):
            for batch, _ in pair[0]:
                with torch.no_grad():
                    fake = generator(torch.randn(len(batch), 4))
                optimizers[1].zero_grad()
                loss = F.binary_cross_entropy_with_logits(
                    judge(batch), true[: len(batch)]
                ) + F.binary_cross_entropy_with_logits(judge(fake), false[: len(batch)])
                loss.backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                out = judge(generator(torch.randn(len(batch), 4)))
                F.binary_cross_entropy_with_logits(out, true[: len(batch)]).backward()
                optimizers[0].step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizers,
        loss_fn=None,
        train_loader=pair[0],
        val_loader=None,
        scheduler=None,
        train=train,
    )


@healthy
def contrastive():
    """Two views of a sample against those of all others in the batch: samples mix in the loss, on purpose."""
    torch.manual_seed(10)
    x = torch.randn(800, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def loss_fn(model, batch):
        views = [batch[0] + torch.randn_like(batch[0]) * 0.5 for _ in range(2)]
        a, b = (F.normalize(model(v), dim=1) for v in views)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))

    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, loaders(x, torch.zeros(800)), 8)


@healthy
def momentum_teacher():
    """Self-distillation: a copy of the network, moved slowly, runs without gradients and in train mode in each step."""
    torch.manual_seed(11)
    x = torch.randn(640, 12)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    head = nn.Linear(8, 8)
    whole = nn.ModuleDict({"model": model, "head": head})
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.Adam(whole.parameters(), lr=3e-3)
    pair = loaders(x, torch.zeros(640))

    def train(callback):
        step = 0
        for _ in range(8):
            for batch, _ in pair[0]:
                with torch.no_grad():
                    goal = teacher(batch + torch.randn_like(batch) * 0.1)
                optimizer.zero_grad()
                loss = F.mse_loss(head(model(batch)), goal)
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for p, q in zip(teacher.parameters(), model.parameters()):
                        p.lerp_(q, 0.02)
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=whole,
        optimizer=optimizer,
        loss_fn=None,
        train_loader=pair[0],
        val_loader=None,
        scheduler=None,
        train=train,
    )


@healthy
def recurrent_network():
    torch.manual_seed(12)
    tokens = torch.randint(0, 8, (800, 14))
    label = (tokens[:, 0] > 3).long() + 2 * (tokens[:, -1] > 3).long()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(8, 12), nn.GRU(12, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, tokens):
            return self.out(self.rnn(self.embed(tokens))[0][:, -1])

    model = Model()
    return made(
        model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(tokens, label), 10, clip=1.0
    )


@healthy
def hand_written_recurrence():
    """A cell in a loop over time, with tanh and clipping."""
    torch.manual_seed(13)
    x = torch.randn(600, 20, 4)
    y = x.mean(1)[:, :2] * 3

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.hidden, self.out = nn.Linear(4, 24), nn.Linear(24, 24), nn.Linear(24, 2)

        def forward(self, x):
            state = x.new_zeros(len(x), 24)
            for t in range(x.shape[1]):
                state = torch.tanh(self.inside(x[:, t]) + self.hidden(state))
            return self.out(state)

    model = Model()
    return made(model, torch.optim.Adam(model.parameters(), lr=3e-3), mse, loaders(x, y), 10, clip=1.0)


@healthy
def convolutions_with_batch_norm():
    torch.manual_seed(14)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    pair = loaders(*shapes(600, noise=1.2))
    return made(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        cross_entropy,
        pair,
        6,
        validate=validation(model, cross_entropy, pair[1]),
    )


@healthy
def deep_residual_network():
    torch.manual_seed(15)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Linear(12, 24), *(Block() for _ in range(8)), nn.Linear(24, 5))
    return made(model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy, loaders(*clusters(800)), 6)


@healthy
def deep_relu_stack():
    """Eight layers without any normalisation, in torch's own init: slow at first, and then it learns."""
    torch.manual_seed(16)
    layers = [nn.Linear(12, 48), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(48, 48), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(48, 5))
    return made(model, torch.optim.Adam(model.parameters(), lr=2e-3), cross_entropy, loaders(*clusters(1000)), 12)


@healthy
def frozen_backbone_with_adapter():
    """The backbone is frozen, in eval mode, and in the optimizer; an adapter and a head are trained."""
    torch.manual_seed(17)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
            self.down, self.up, self.head = nn.Linear(64, 8), nn.Linear(8, 64), nn.Linear(64, 5)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            x = self.backbone(x)
            return self.head(x + self.up(F.relu(self.down(x))))

    model = Model()
    model.backbone.requires_grad_(False)
    return made(model, torch.optim.AdamW(model.parameters(), lr=3e-3), cross_entropy, loaders(*clusters(1000)), 8)


@healthy
def linear_probe():
    """Everything but the last layer is frozen and left out of the optimizer; features of chance are enough for it."""
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 5))
    model[0].requires_grad_(False)
    return made(model, torch.optim.Adam(model[2].parameters(), lr=1e-2), cross_entropy, loaders(*clusters(1000)), 8)


@healthy
def grad_scaler_with_clipping():
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pair = loaders(*clusters(1000))

    def train(callback):
        step = 0
        for _ in range(8):
            for batch in pair[0]:
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(model, batch)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def accumulation():
    """Four batches to a step; the gradients of three are left standing on purpose."""
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    pair = loaders(*clusters(1600), batch=16)

    def train(callback):
        step, total = 0, 0.0
        optimizer.zero_grad()
        for _ in range(8):
            for i, batch in enumerate(pair[0]):
                loss = cross_entropy(model, batch) / 4
                loss.backward()
                total += loss.item()
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                    callback(step, total)
                    step, total = step + 1, 0.0

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def two_optimizers():
    """Sparse embeddings with one optimizer, the rest with another."""
    torch.manual_seed(21)
    tokens = torch.randint(0, 50, (800, 6))
    label = (tokens[:, 0] % 3).long()
    model = nn.Sequential(
        nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3)
    )
    dense = [p for m in model[1:] for p in m.parameters()]
    optimizers = [torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2), torch.optim.Adam(dense, lr=3e-3)]
    pair = loaders(tokens, label)

    def train(callback):
        step = 0
        for _ in range(8):
            for batch in pair[0]:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizers,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def group_with_rate_zero():
    """A parameter group with lr 0, on purpose, until it is thawed half-way; no decay on biases."""
    torch.manual_seed(22)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": [model[2].weight], "lr": 1e-2},
            {"params": [model[2].bias], "lr": 1e-2, "weight_decay": 0.0},
        ]
    )
    pair = loaders(*clusters(1000))

    def train(callback):
        step = 0
        for passed in range(8):
            if passed == 4:
                optimizer.param_groups[0]["lr"] = 1e-3
            for batch in pair[0]:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def cosine_with_warm_up():
    """A warm-up and a cosine down to zero, stepped once a batch."""
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 180),
        ],
        [20],
    )
    return made(
        model, optimizer, cross_entropy, loaders(*clusters(1000, spread=1.5)), 8, scheduler=scheduler, each="batch"
    )


@healthy
def rate_cut_on_plateau():
    """ReduceLROnPlateau on the validation loss, which has indeed come to rest when the rate is cut."""
    torch.manual_seed(24)
    x = torch.randn(600, 6)
    y = x @ torch.randn(6, 1) + torch.randn(600, 1) * 0.5
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=2)
    pair = loaders(x, y)
    return made(
        model, optimizer, mse, pair, 24, scheduler=scheduler, each="metric", validate=validation(model, mse, pair[1])
    )


@healthy
def steps_by_closure():
    """LBFGS, which calls the loss several times in one step."""
    torch.manual_seed(25)
    x, y = clusters(200, spread=1.5)
    model = nn.Linear(12, 5)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    pair = loaders(x, y, batch=160)

    def train(callback):
        for step in range(8):
            for batch in pair[0]:

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = cross_entropy(model, batch) + 1e-3 * model.weight.square().sum()
                    loss.backward()
                    return loss

                callback(step, float(optimizer.step(closure)))

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def fine_tuning_with_frozen_statistics():
    """Batch normalisation is kept in eval mode while everything is trained, as for small batches of detection."""
    torch.manual_seed(26)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    pair = loaders(*shapes(500), batch=16)

    def train(callback):
        step = 0
        for _ in range(8):
            model.train()
            model[1].eval()
            for batch in pair[0]:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def loss_that_may_be_negative():
    """A Gaussian's log-likelihood, with its width learnt: below zero when it fits well."""
    torch.manual_seed(27)
    x = torch.rand(1000, 2) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + torch.randn(1000, 1) * 0.1
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss_fn(model, batch):
        mean, log_width = model(batch[0]).chunk(2, 1)
        return (log_width + 0.5 * ((batch[1] - mean) * (-log_width).exp()).square()).mean()

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, loaders(x, y), 20)


@healthy
def series_in_order():
    """A series read in its order, on purpose: neighbouring batches are alike, and it learns all the same."""
    torch.manual_seed(28)
    time = torch.arange(1200) / 40
    series = torch.sin(time) + 0.3 * torch.sin(3.1 * time) + torch.randn(1200) * 0.05
    x = series.unfold(0, 12, 1)[:-1]
    y = series[12:, None]
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pair = (
        DataLoader(TensorDataset(x[:960], y[:960]), batch_size=32),
        DataLoader(TensorDataset(x[960:], y[960:]), batch_size=32),
    )
    return made(model, optimizer, mse, pair, 8)


@healthy
def rare_class_that_is_plain_to_see():
    """Two in a hundred samples are of the second class, and are found without any weights."""
    torch.manual_seed(29)
    y = (torch.rand(2400) < 0.025).long()
    x = torch.randn(2400, 10)
    x[:, :3] += y[:, None] * 3.0
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2))
    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), cross_entropy, loaders(x, y, batch=50), 6)


@healthy
def nodes_of_one_graph():
    """Training and validation nodes stand in one graph: both loaders give all of it, with a mask each."""
    torch.manual_seed(30)
    label = torch.randint(0, 3, (300,))
    near = torch.where(label[:, None] == label[None], 0.06, 0.006)
    edges = (torch.rand(300, 300) < near).float()
    edges = ((edges + edges.T) > 0).float() + torch.eye(300)
    scale = edges.sum(1).rsqrt()
    edges, x = scale[:, None] * edges * scale, torch.randn(300, 16) + torch.randn(3, 16)[label] * 0.6
    seen = torch.rand(300) < 0.6

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 3)

        def forward(self, x, edges):
            return self.second(edges @ F.dropout(F.relu(self.first(edges @ x)), 0.2, self.training))

    def loss_fn(model, batch):
        x, edges, label, counts = batch
        return F.cross_entropy(model(x, edges)[counts], label[counts])

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    return made(model, optimizer, loss_fn, ([(x, edges, label, seen)], [(x, edges, label, ~seen)]), 40)


@healthy
def one_of_two_networks():
    """A GAN of which only the generator and its optimizer are asked about; the judge learns with one of its own."""
    torch.manual_seed(31)
    real = torch.randn(640, 2) * 0.4 + 1
    generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    judge = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    mine, other = (torch.optim.Adam(m.parameters(), lr=2e-3) for m in (generator, judge))
    pair = loaders(real, torch.zeros(640))

    def loss_fn(model, batch):
        return F.softplus(-model["judge"](model["generator"](torch.randn(len(batch[0]), 4)))).mean()

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in pair[0]:
                other.zero_grad()
                fake = generator(torch.randn(len(batch[0]), 4)).detach()
                judged = (F.softplus(-judge(batch[0])) + F.softplus(judge(fake))).mean()
                judged.backward()
                other.step()
                mine.zero_grad()
                loss_fn(model, batch).backward()
                mine.step()
                callback(step, judged.item())
                step += 1

    return SimpleNamespace(
        model=model, optimizer=mine, loss_fn=loss_fn, train_loader=pair[0], val_loader=None, scheduler=None, train=train
    )


@healthy
def survival_times():
    """Cox regression: the loss sorts the patients by time before it asks the model."""
    torch.manual_seed(32)
    x = torch.randn(900, 6)
    risk = 1.5 * x[:, 0] - x[:, 1] * x[:, 2]
    died, left = torch.empty(900).exponential_() / risk.exp(), torch.empty(900).exponential_(0.5)
    seen = torch.stack([torch.minimum(died, left), (died < left).float()], 1)

    def loss_fn(model, batch):
        x, (time, event) = batch[0], batch[1].T
        latest_first = time.argsort(descending=True)
        hazard, event = model(x[latest_first])[:, 0], event[latest_first]
        return -((hazard - hazard.logcumsumexp(0)) * event).sum() / event.sum().clamp_min(1)

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return made(model, optimizer, loss_fn, loaders(x, seen, batch=60), 15)


@healthy
def policy_that_reports_its_cost():
    """A policy gradient whose loss has the value of the mean cost, and the gradient of weighted log-probabilities."""
    torch.manual_seed(33)
    needs = torch.randn(960, 5)
    costs = (needs @ torch.randn(5, 4)).softmax(1)

    def loss_fn(model, batch):
        choice = torch.distributions.Categorical(logits=model(batch[0]))
        drawn = choice.sample()
        cost = batch[1].gather(1, drawn[:, None])[:, 0]
        surrogate = (choice.log_prob(drawn) * (cost - cost.mean())).mean()
        return surrogate + (cost.mean() - surrogate).detach()

    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return made(model, optimizer, loss_fn, loaders(needs, costs, batch=64), 15)


@healthy
def actor_critic_with_a_learned_temperature():
    """A critic, an actor that is trained through it by draws with a gradient, and the weight of the actor's entropy."""
    torch.manual_seed(34)
    state, action = torch.randn(960, 3), torch.rand(960, 1) * 4 - 2
    brought = -((action[:, 0] - state[:, 0]) ** 2) + 0.1 * torch.randn(960)
    pair = loaders(torch.cat([state, action], 1), brought, batch=64)
    model = nn.ModuleDict(
        {
            "critic": nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 1)),
            "actor": nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2)),
        }
    )
    model.register_parameter("temperature", nn.Parameter(torch.tensor(-1.0)))
    critic, actor = (torch.optim.Adam(model[name].parameters(), lr=3e-3) for name in ("critic", "actor"))
    temperature = torch.optim.Adam([model.temperature], lr=3e-3)

    def loss_fn(model, batch):
        return F.mse_loss(model["critic"](batch[0])[:, 0], batch[1])

    def train(callback):
        step = 0
        for _ in range(12):
            for batch in pair[0]:
                critic.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                critic.step()
                state = batch[0][:, :3]
                mean, deviation = model["actor"](state).unbind(1)
                choice = torch.distributions.Normal(mean, deviation.clamp(-3, 1).exp())
                drawn = choice.rsample()
                surprise = choice.log_prob(drawn)
                worth = model["critic"](torch.cat([state, drawn[:, None]], 1))[:, 0]
                actor.zero_grad()
                (model.temperature.exp().detach() * surprise - worth).mean().backward()
                actor.step()
                temperature.zero_grad()
                (-model.temperature * (surprise.detach() - 0.5)).mean().backward()
                temperature.step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=[critic, actor, temperature],
        loss_fn=loss_fn,
        train_loader=pair[0],
        val_loader=pair[1],
        scheduler=None,
        train=train,
    )


@healthy
def output_layer_that_is_fixed():
    """The classes have directions of their own, at right angles, which are never trained; the features move to them."""
    torch.manual_seed(35)
    head = nn.Linear(16, 5, bias=False)
    nn.init.orthogonal_(head.weight, 4.0)
    head.requires_grad_(False)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    return made(model, optimizer, cross_entropy, loaders(*clusters(600, spread=2.5)), 8)
