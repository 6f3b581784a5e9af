"""The discriminator's loss is computed and never sent backward: its optimizer steps without any gradient."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

CODE, WHERE = "training/gradients-cleared-before-step", ["critic_optimizer"]


def training(backward):
    torch.manual_seed(102)
    maker = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    critic = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer, critic_optimizer = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (maker, critic))

    def train(callback):
        for step in range(60):
            real, fake = torch.randn(32, 2) + 3, maker(torch.randn(32, 4))
            critic_loss = bce(critic(real), torch.ones(32, 1)) + bce(critic(fake.detach()), torch.zeros(32, 1))
            critic_optimizer.zero_grad()
            if backward:
                critic_loss.backward()
            critic_optimizer.step()
            loss = bce(critic(fake), torch.ones(32, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    model, optimizers = nn.ModuleDict({"maker": maker, "critic": critic}), [optimizer, critic_optimizer]
    return SimpleNamespace(model=model, optimizer=optimizers, train=train, **parts)


def sick():
    return training(backward=False)


def healthy():
    return training(backward=True)
