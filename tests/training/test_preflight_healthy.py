"""Set-ups that look odd and are sound: preflight has to stay silent on each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import nbdebug
from tests.training import healthy
from tests.training.loops import clusters, cross_entropy, loaders, mse, shapes


def linear(width=12, classes=5, hidden=24):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def frozen_backbone():
    """Pretrained in name only, frozen on purpose, and handed to the optimizer all the same."""
    body, head = nn.Sequential(nn.Linear(12, 32), nn.ReLU()), nn.Linear(32, 5)
    model = nn.Sequential(body, head)
    body.requires_grad_(False)
    return model, loaders(*clusters(600)), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


def branches_and_head_of_zeros():
    """What scales a branch, the end of the branch and the head begin as zeros: the head learns in the first step."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate, self.end = linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
            for layer in (self.gate, self.end):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            return x + (1 + self.gate(x)) * self.end(self.body(x))

    model = nn.Sequential(nn.Linear(12, 24), Gated(), Gated(), nn.Linear(24, 5))
    nn.init.zeros_(model[3].weight)
    return model, loaders(*clusters(600)), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


def returns_less_those_of_others():
    """A policy gradient whose baseline is the return of each other sample: (N, N) is meant."""

    def loss_fn(model, batch):
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        action = policy.sample()
        gain = (action == batch[1]).float()
        return -(policy.log_prob(action) * (gain - gain.view(-1, 1))).mean()

    model = linear()
    return model, loaders(*clusters(600)), loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3)


def discriminator_and_generator():
    """The loss is the generator's: the judge's parameters get gradients, and another optimizer holds them."""
    model = nn.ModuleDict({"make": linear(4, 2), "judge": linear(2, 1)})
    optimizers = [torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in ("make", "judge")]

    def loss_fn(model, batch):
        return F.softplus(-model["judge"](model["make"](torch.randn(len(batch[0]), 4)))).mean()

    return model, loaders(torch.randn(300, 2), torch.zeros(300)), loss_fn, optimizers


def judge_alone():
    """The judge's loss stops the gradient before the generator, whose own optimizer is there too."""
    model, pair, _, optimizers = discriminator_and_generator()

    def loss_fn(model, batch):
        made = model["make"](torch.randn(len(batch[0]), 4)).detach()
        return (F.softplus(-model["judge"](batch[0])) + F.softplus(model["judge"](made))).mean()

    return model, pair, loss_fn, optimizers


def stopped_gradient():
    """SimSiam: one of two branches is detached, and the same weights learn through the other."""
    model = nn.ModuleDict({"encode": linear(12, 8), "predict": linear(8, 8)})

    def loss_fn(model, batch):
        a, b = (model["encode"](batch[0] + torch.randn_like(batch[0]) * 0.1) for _ in range(2))
        return -(
            F.cosine_similarity(model["predict"](a), b.detach()) + F.cosine_similarity(model["predict"](b), a.detach())
        ).mean()

    return model, loaders(*clusters(400)), loss_fn, torch.optim.SGD(model.parameters(), lr=0.05)


class TwoViews(nn.Module):
    """The table of all pairs is made inside the model: each sample meets all others, on purpose."""

    def __init__(self):
        super().__init__()
        self.left, self.right = linear(12, 8), linear(12, 8)

    def forward(self, x, y):
        return F.normalize(self.left(x), dim=1) @ F.normalize(self.right(y), dim=1).T / 0.1


def contrastive_inside():
    model = TwoViews()
    x = torch.randn(400, 12)

    def loss_fn(model, batch):
        scores = model(*batch)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return model, loaders(x, x + torch.randn(400, 12) * 0.3), loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3)


def batch_norm_with_small_batches():
    x, y = shapes(240)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return model, loaders(x, y, batch=4), cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05)


def transformer_with_tied_weights():
    """Time first, weights shared between embedding and output, a mask, labels that are ignored in part."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.layer = nn.TransformerEncoderLayer(32, 4, 64)
            self.out = nn.Linear(32, 40, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.out(self.layer(self.embed(tokens.T), src_mask=mask)).transpose(0, 1)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    tokens = (torch.rand(320, 11) ** 3 * 40).long()  # a few words make most of the text, as in every text
    labels = tokens[:, 1:].clone()
    labels[:, 7:] = -100
    rows = [{"tokens": t, "labels": lab} for t, lab in zip(tokens[:, :-1], labels)]
    model = Model()
    return (
        model,
        (DataLoader(rows[:256], batch_size=16, shuffle=True), DataLoader(rows[256:], batch_size=16)),
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def warm_up_from_zero():
    """A rate of zero for one group on purpose, and for the other until the scheduler has stepped."""
    model = linear()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=1e-3
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return model, loaders(*clusters(400)), cross_entropy, optimizer, scheduler


class Endless(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(5)
        for _ in range(640):
            x = torch.randn(12, generator=g)
            yield x, int(x[0] > 0)


def stream_without_length():
    model = linear(12, 2)
    return (
        model,
        (DataLoader(Endless(), batch_size=32), None),
        cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )


def amounts_as_targets():
    """Prices in the hundred thousands: inputs are scaled, targets are not, and that is the user's choice."""
    x = torch.randn(500, 6)
    y = 250_000 + 40_000 * x[:, :1] - 15_000 * x[:, 1:2]
    model = linear(6, 1)
    return model, loaders(x, y), mse, torch.optim.Adam(model.parameters(), lr=0.1)


def thirty_to_seventy():
    x = torch.randn(600, 12)
    y = (x[:, 0] > 0.52).float()
    model = linear(12, 1)

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    return model, loaders(x, y), loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3)


def rare_class_sampled_evenly():
    x, y = torch.randn(1200, 12), (torch.rand(1200) < 0.03).long()
    weights = torch.where(y == 1, 1 / 0.03, 1 / 0.97)
    sampler = WeightedRandomSampler(weights, 1200, generator=torch.Generator().manual_seed(1))
    model = linear(12, 2)
    return (
        model,
        (DataLoader(TensorDataset(x, y), batch_size=64, sampler=sampler), None),
        cross_entropy,
        (torch.optim.Adam(model.parameters(), lr=1e-3)),
    )


class Augmented(Dataset):
    """Draws from NumPy's global numbers, which torch seeds anew in each worker and pass."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + torch.from_numpy(np.random.normal(size=12)).float() * 0.7, self.y[i]


def augmentation_in_workers():
    """Random in training, plain in validation: means and deviations differ somewhat, and should."""
    x, y = clusters(320)
    train = DataLoader(
        Augmented(x[:256], y[:256]),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        worker_init_fn=lambda i: np.random.seed(torch.initial_seed() % 2**32),
        multiprocessing_context="fork",
    )
    model = linear()
    return (
        model,
        (train, DataLoader(TensorDataset(x[256:], y[256:]), batch_size=32)),
        cross_entropy,
        (torch.optim.Adam(model.parameters(), lr=1e-3)),
    )


def raw_pixels_into_batch_norm():
    """Bytes from 0 to 255, and a normalisation right behind the first layer: it brings them to scale."""
    x, y = shapes(200)
    pixels = ((x + 4) * 30).clamp(0, 255).byte()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0].float()), batch[1])

    return model, loaders(pixels, y), loss_fn, torch.optim.SGD(model.parameters(), lr=0.05)


def last_layer_starts_at_zero():
    """A residual branch and a head that start at zero: the first loss hangs on no input, and all learn later."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.branch, self.head = nn.Linear(12, 24), linear(24, 24), nn.Linear(24, 5)
            for layer in (self.branch[2], self.head):
                nn.init.zeros_(layer.weight)

        def forward(self, x):
            x = torch.relu(self.into(x))
            return self.head(x + self.branch(x))

    model = Model()
    return model, loaders(*clusters(400)), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


def a_dozen_samples():
    x, y = clusters(16, classes=2)
    model = linear(12, 2)
    return (
        model,
        (DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True), None),
        cross_entropy,
        (torch.optim.Adam(model.parameters(), lr=1e-3)),
    )


def bits_that_meet_by_chance():
    """Eight switches: most rows of validation stand in training too, because there are only 256 of them."""
    x = (torch.rand(600, 8) > 0.5).float()
    y = x.sum(1, keepdim=True)
    model = linear(8, 1)
    return model, loaders(x, y), mse, torch.optim.Adam(model.parameters(), lr=1e-3)


def quantities_that_are_not_negative():
    """A softplus before targets of which a few are a little below zero, by the noise of the meter."""
    x = torch.rand(500, 6)
    y = x.sum(1, keepdim=True) ** 2 / 4 + torch.randn(500, 1) * 0.1
    model = nn.Sequential(linear(6, 1), nn.Softplus())
    return model, loaders(x, y), mse, torch.optim.Adam(model.parameters(), lr=1e-3)


class Mixup(nn.Module):
    """Mixes samples in training, on purpose, and in training only."""

    def __init__(self):
        super().__init__()
        self.body = linear()

    def forward(self, x):
        if self.training:
            x = 0.8 * x + 0.2 * torch.cat([x[1:], x[:1]])
        return self.body(x)


def mixup_in_training():
    model = Mixup()
    return model, loaders(*clusters(300)), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


def rare_words():
    """A bag of words, each in few texts: many never come in validation."""
    x = (torch.rand(400, 300) < torch.rand(300) * 0.05).float()
    y = (x[:, :40].sum(1) > 1).long()
    model = linear(300, 2)
    return model, loaders(x, y), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


class Recurrent(nn.Module):
    """Its first hidden state is a parameter of zeros that is not trained, on purpose."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, 16), requires_grad=False)
        self.read, self.out = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x):
        return self.out(self.read(x, self.first.expand(1, len(x), 16).contiguous())[0][:, -1])


def fixed_first_state():
    x = torch.randn(300, 6, 3)
    model = Recurrent()
    return (
        model,
        loaders(x, (x[:, :, 0].sum(1) > 0).long()),
        cross_entropy,
        torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def missing_targets_marked():
    """Minus one where nothing was measured; the mask comes after the difference."""
    x = torch.rand(400, 6)
    y = torch.where(torch.rand(400, 1) < 0.2, -1.0, x.mean(1, keepdim=True))
    model = nn.Sequential(linear(6, 1), nn.Sigmoid())

    def loss_fn(model, batch):
        known = batch[1] >= 0
        return ((model(batch[0]) - batch[1]).square() * known).sum() / known.sum()

    return model, loaders(x, y), loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3)


def series_with_a_trend():
    """Validation comes after training in time, and the level has risen."""
    level = torch.arange(900) / 450 + torch.randn(900) * 0.1
    x, y = level.unfold(0, 8, 1)[:-1] - 0.7, level[8:, None] - 0.7
    model = linear(8, 1)
    return model, loaders(x, y), mse, torch.optim.Adam(model.parameters(), lr=1e-3)


def copies_with_their_own_loss_module():
    """A learned weight between two losses stands in the loss, which is a module with a parameter in the optimizer."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_weight = nn.Parameter(torch.zeros(()))

        def forward(self, a, b):
            return a * torch.exp(-self.log_weight) + b + self.log_weight

    model, weigh = linear(12, 6), Weighed()

    def loss_fn(model, batch):
        out = model(batch[0])
        return weigh(F.cross_entropy(out[:, :5], batch[1]), F.mse_loss(out[:, 5], batch[0][:, 0]))

    optimizer = torch.optim.Adam([*model.parameters(), *weigh.parameters()], lr=1e-3)
    return model, loaders(*clusters(300)), loss_fn, optimizer


def similarities_to_prototypes():
    """Few-shot: the first samples of a batch are the support of the others."""

    class Prototypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = linear(12, 8)

        def forward(self, x):
            z = self.embed(x)
            return -torch.cdist(z, z[:5])

    model = Prototypes()
    return model, loaders(*clusters(320)), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


SETUPS = [
    frozen_backbone,
    branches_and_head_of_zeros,
    returns_less_those_of_others,
    discriminator_and_generator,
    judge_alone,
    stopped_gradient,
    contrastive_inside,
    batch_norm_with_small_batches,
    transformer_with_tied_weights,
    warm_up_from_zero,
    stream_without_length,
    amounts_as_targets,
    thirty_to_seventy,
    rare_class_sampled_evenly,
    augmentation_in_workers,
    raw_pixels_into_batch_norm,
    last_layer_starts_at_zero,
    a_dozen_samples,
    bits_that_meet_by_chance,
    quantities_that_are_not_negative,
    mixup_in_training,
    rare_words,
    fixed_first_state,
    missing_targets_marked,
    series_with_a_trend,
    copies_with_their_own_loss_module,
    similarities_to_prototypes,
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda build: build.__name__)
def test_an_odd_setup_that_is_sound_is_left_in_peace(setup):
    torch.manual_seed(3)
    model, (train, val), loss_fn, optimizer, *scheduler = setup()
    report = nbdebug.preflight(
        model, train, loss_fn, optimizer=optimizer, val_loader=val, scheduler=scheduler[0] if scheduler else None
    )
    assert report.ok, [f.title for f in report]
    assert not [line for line in report.unchecked if "Error" in line]


@pytest.mark.parametrize("build", healthy.KINDS.values(), ids=healthy.KINDS)
def test_a_healthy_training_is_left_in_peace(build):
    ns = build()
    if ns.loss_fn is None:
        pytest.skip("its loop alone knows its loss")
    report = nbdebug.preflight(
        ns.model, ns.train_loader, ns.loss_fn, optimizer=ns.optimizer, val_loader=ns.val_loader, scheduler=ns.scheduler
    )
    assert report.ok, [f.title for f in report]
