"""Training loops of many shapes: several models, scalers, guards, closures, exceptions."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.nan.traps.registry import fault, silent, train


def seeded(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@fault("log-of-nonpositive", op="log", step=1, batch=5, rows=(0, 1, 2, 3, 4))
def gan_discriminator_is_sure():
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    steps = iter(range(9))

    def step():
        gain = 1.0 if next(steps) != 1 else 1e4
        real, made = seeded((5, 4)), generator(seeded((5, 3), 1))
        fake = critic((made.detach().abs() + 1) * gain * critic[0].weight.sign())
        loss = -torch.log(critic(real)).mean() - torch.log(1 - fake).mean()  # here
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        F.softplus(-critic[0](made)).mean().backward()
        second.step()
        return loss

    return SimpleNamespace(model={"generator": generator, "critic": critic}, optimizer=None, step=step)


@fault("div-by-zero", op="div", module=["generator.tail", "tail"], step=1, rows=(2,))
def gan_generator_divides():
    class Tail(nn.Module):
        def forward(self, x, size):
            return x / size[:, None]  # here

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.tail = nn.Linear(3, 4), Tail()

        def forward(self, x, size):
            return self.tail(self.lin(x), size)

    torch.manual_seed(0)
    generator, critic = Generator(), nn.Linear(4, 1)
    both = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    sizes = iter(torch.tensor([[1.0, 2, 1, 1, 2], [1.0, 2, 0, 1, 2]]))

    def step():
        made = generator(seeded((5, 3)), next(sizes))
        for optimizer, sign in zip(both, (1, -1)):
            optimizer.zero_grad()
            loss = sign * critic(made.detach() if sign == 1 else made).mean()
            loss.backward()
            optimizer.step()
        return loss

    return SimpleNamespace(
        model=[generator, critic] and {"generator": generator, "critic": critic}, optimizer=None, step=step
    )


@fault("log-of-nonpositive", op="log", step=1, batch=6, rows=(0, 1, 2, 3, 4, 5))
def actor_critic_spread_below_zero():
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    spread = nn.Parameter(torch.tensor([0.05, 1.0]))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters(), spread], lr=0.1)

    def step():
        seen = seeded((6, 4))
        chosen = torch.distributions.Normal(actor(seen), spread.expand(6, 2), validate_args=False)
        score = chosen.log_prob(actor(seen).detach() + 0.01)  # here
        loss = -(score.mean() - critic(seen).square().mean()) + 30 * spread[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model={"actor": actor, "critic": critic}, optimizer=optimizer, step=step)


@fault("log-of-nonpositive", op="log", step=1)
def lbfgs_closure():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    scales = iter([1.0, 0.0])

    def step():
        scale = next(scales)

        def closure():
            optimizer.zero_grad()
            height = model(seeded((6, 3))).square() + 0.1
            loss = -torch.log(height * scale).mean()  # here
            loss.backward()
            return loss

        return optimizer.step(closure)

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def scaled(scale: float, loss_of):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    steps = iter(range(9))

    def step():
        optimizer.zero_grad()
        loss = loss_of(model, next(steps))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@silent(note="skip")
def scaler_skips_a_step():
    return scaled(2.0**127, lambda model, i: model(seeded((5, 3))).square().mean() * 40)


@silent()
def scaler_all_well():
    return scaled(2.0**10, lambda model, i: model(seeded((5, 3))).square().mean())


@fault("sqrt-of-negative", op="sqrt", step=1)
def scaler_skips_but_the_loss_is_nan():
    return scaled(
        2.0**10, lambda model, i: torch.sqrt(model(seeded((5, 3))).square() + 0.1 - 50 * (i == 1)).mean()
    )  # here


@silent()
def guarded_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = iter(range(9))

    def step():
        optimizer.zero_grad()
        loss = (model(seeded((5, 3))) * (0.0 if next(steps) == 1 else 1.0)).square().sum(1).sqrt().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            optimizer.zero_grad()
            return loss
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=0)
def two_losses_second_is_bad():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        out = model(seeded((5, 3)))
        first, second = out.square().mean(), torch.sqrt((out * 0.0).square().sum())  # here
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@silent()
def retained_graph_twice():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

    def step():
        optimizer.zero_grad()
        loss = model(seeded((5, 3))).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("overflow", op="exp", step=1)
def the_step_returns_nothing():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    made = train(model, lambda i: torch.exp(model(seeded((5, 3))) + 300 * i).mean())  # here
    inner = made.step
    made.step = lambda: (inner(), None)[1]
    return made


@fault("overflow", op="exp", step=1)
def the_step_returns_a_dict():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    made = train(model, lambda i: torch.exp(model(seeded((5, 3))) + 300 * i).mean())  # here
    inner = made.step
    made.step = lambda: {"loss": inner(), "lr": 0.1}
    return made


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", module="", step=0)
def updated_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def step():
        squares = (model(seeded((5, 3))) * 0.0).square().sum()
        loss = torch.sqrt(squares)  # here
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes):
                parameter -= 0.1 * slope
        return loss

    return SimpleNamespace(model=model, optimizer=None, step=step)


@fault("sqrt-grad-at-zero", op="sqrt", phase="backward", step=0)
def closure_with_a_bad_derivative():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = seeded((5, 3))

    def closure():
        optimizer.zero_grad()
        apart = (model(x) - model(x)).square().sum(-1).sqrt()  # here
        loss = apart.mean() + model(x).square().mean()
        loss.backward()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=lambda: optimizer.step(closure))


@fault("input-nonfinite", phase="input", op="", step=0, rows=(3,))
def infinity_written_into_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    def loss_of(i):
        x = seeded((5, 3))
        x[3, 1] = float("inf")  # here
        return model(x).square().mean()

    return train(model, loss_of)


@fault("input-nonfinite", phase="input", op="", step=1, rows=(0,))
def loader_with_a_gap():
    torch.manual_seed(0)
    x = seeded((7, 3))
    x[3, 1] = float("nan")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, seeded((7, 2), 2)), batch_size=3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(loader)

    def step():
        given, wanted = next(batches)
        loss = F.mse_loss(model(given), wanted)  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@fault("empty-reduction", op="std", step=2)
def last_batch_of_one():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(seeded((7, 3)), batch_size=3)
    model, batches = nn.Linear(3, 1), iter(loader)

    def loss_of(i):
        gain = model(next(batches)).squeeze(-1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)  # here
        return gain.square().mean()

    return train(model, loss_of)


@silent()
def evaluation_inside_the_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def loss_of(i):
        model.eval()
        with torch.no_grad():
            score = model(seeded((5, 3), 9)) / 0.0
            print("", end=str(score.mean().item())[:0])
        model.train()
        return model(seeded((5, 3))).square().mean()

    return train(model, loss_of)
