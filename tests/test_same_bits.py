"""Trainings of 24 kinds end under each watcher as they end without, to the last bit, random numbers included."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.shell import Notebook, started

STEPS = 4
KINDS: dict[str, Callable[[], SimpleNamespace]] = {}


def kind(build: Callable[[], SimpleNamespace]) -> Callable[[], SimpleNamespace]:
    KINDS[build.__name__] = build
    return build


def inputs(*shape: int) -> torch.Tensor:
    """A batch to which all three generators of random numbers give."""
    return torch.randn(*shape) + 0.1 * float(np.random.rand()) + 0.1 * random.random()


def plain(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    make: Any = torch.optim.Adam,
    after: Callable[[], object] = lambda: None,
    clip: float | None = None,
    **settings: Any,
) -> SimpleNamespace:
    """The step that everybody writes. after: what the loop does behind the update."""
    optimizer = make(model.parameters(), **{"lr": 1e-2, **settings})

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after()
        return value.detach()

    return SimpleNamespace(models=[model], optimizers=[optimizer], step=step)


def dense(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 2))


def regression(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: (model(inputs(6, 4)) - 1).square().mean()


@kind
def mlp_dropout() -> SimpleNamespace:
    model = dense(nn.Dropout(0.3))
    return plain(model, regression(model), clip=1.0)


@kind
def cnn() -> SimpleNamespace:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return plain(
        model, lambda: F.cross_entropy(model(inputs(4, 1, 8, 8)), torch.randint(3, (4,))), torch.optim.SGD, momentum=0.9
    )


@kind
def lstm() -> SimpleNamespace:
    model = nn.LSTM(3, 5, batch_first=True)
    return plain(model, lambda: model(inputs(4, 6, 3))[0][:, -1].square().mean())


@kind
def gru_packed() -> SimpleNamespace:
    model = nn.GRU(3, 5, batch_first=True)

    def loss() -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs(3, 5, 3), torch.tensor([5, 3, 2]), batch_first=True)
        return model(packed)[1].square().mean()

    return plain(model, loss)


@kind
def transformer() -> SimpleNamespace:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    mask = torch.tensor([[False, False, True], [False, True, True]])
    return plain(
        model, lambda: model(inputs(2, 3, 8), src_key_padding_mask=mask)[~mask].square().mean(), torch.optim.AdamW
    )


@kind
def embedding_sparse() -> SimpleNamespace:
    model = nn.Embedding(10, 4, sparse=True)
    return plain(model, lambda: model(torch.randint(10, (5,))).square().mean(), torch.optim.SparseAdam)


@kind
def gan() -> SimpleNamespace:
    generator, critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), dense()
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())

    def step() -> torch.Tensor:
        second.zero_grad()
        (critic(generator(inputs(5, 3)).detach()).mean() - critic(inputs(5, 4)).mean()).backward()
        second.step()
        first.zero_grad()
        loss = -critic(generator(inputs(5, 3))).mean()
        loss.backward()
        first.step()
        return loss.detach()

    return SimpleNamespace(models=[generator, critic], optimizers=[first, second], step=step)


@kind
def gradient_penalty() -> SimpleNamespace:
    model = dense()

    def loss() -> torch.Tensor:
        x = inputs(5, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    return plain(model, loss)


@kind
def vae() -> SimpleNamespace:
    encode, decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def loss() -> torch.Tensor:
        x = inputs(5, 6)
        mean, log = encode(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, log.exp()).rsample()
        return F.mse_loss(decode(code), x) + 0.1 * (mean.square() + log.exp().square() - 2 * log).mean()

    return plain(nn.ModuleList([encode, decode]), loss)


@kind
def scaler() -> SimpleNamespace:
    model, grad_scaler = dense(), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(inputs(5, 4)).float(), torch.ones(5, 2))
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        return loss.detach()

    return SimpleNamespace(models=[model], optimizers=[optimizer], step=step)


@kind
def lbfgs() -> SimpleNamespace:
    model = dense()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)

    def step() -> Any:
        x = inputs(6, 4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return SimpleNamespace(models=[model], optimizers=[optimizer], step=step)


@kind
def averaged() -> SimpleNamespace:
    model = dense(nn.BatchNorm1d(8))
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    made = plain(model, regression(model), after=lambda: mean.update_parameters(model))
    made.models.append(mean)
    return made


@kind
def compiled() -> SimpleNamespace:
    model = dense()
    return plain(model, regression(torch.compile(model, backend="eager")))  # type: ignore[arg-type]


@kind
def checkpointed() -> SimpleNamespace:
    model = dense(nn.Dropout(0.2))

    def loss() -> torch.Tensor:
        return checkpoint(model, inputs(6, 4).requires_grad_(), use_reentrant=False).square().mean()

    return plain(model, loss)


@kind
def checkpointed_reentrant() -> SimpleNamespace:
    model = dense(nn.Dropout(0.2))
    return plain(model, lambda: checkpoint(model, inputs(6, 4).requires_grad_(), use_reentrant=True).square().mean())


@kind
def weight_norm() -> SimpleNamespace:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    return plain(model, regression(model))


@kind
def spectral_norm() -> SimpleNamespace:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    return plain(model, regression(model))


@kind
def accumulation() -> SimpleNamespace:
    model = dense()
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-2), regression(model)

    def step() -> torch.Tensor:
        values = []
        for _ in range(3):
            values.append(loss() / 3)
            values[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(values).detach()  # type: ignore[union-attr]

    return SimpleNamespace(models=[model], optimizers=[optimizer], step=step)


@kind
def scheduled() -> SimpleNamespace:
    model = dense()
    made = plain(model, regression(model), torch.optim.SGD, after=lambda: made.scheduler.step())
    made.scheduler = torch.optim.lr_scheduler.OneCycleLR(made.optimizers[0], 0.1, total_steps=30)
    return made


@kind
def frozen_and_shared() -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    model[3].weight = model[0].weight
    return plain(model, regression(model))


@kind
def own_function() -> SimpleNamespace:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient.clamp(-1, 1)

    model = dense()
    return plain(model, lambda: (Straight.apply(model(inputs(6, 4))) + model(inputs(6, 4))).square().mean())


@kind
def functional() -> SimpleNamespace:
    model = dense()
    names = dict(model.named_parameters())

    def one(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()

    def step() -> torch.Tensor:
        gradients = torch.func.vmap(torch.func.grad(one), (None, 0))(
            {k: v.detach() for k, v in names.items()}, inputs(5, 4)
        )
        optimizer.zero_grad()
        for name, parameter in names.items():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()
        return next(iter(names.values())).detach().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(models=[model], optimizers=[optimizer], step=step)


@kind
def written_in_place() -> SimpleNamespace:
    model = dense()

    @torch.no_grad()
    def after() -> None:
        for parameter in model.parameters():
            parameter.clamp_(-1, 1).add_(torch.randn_like(parameter), alpha=1e-3)

    return plain(model, regression(model), torch.optim.RMSprop, after)


@kind
def policy() -> SimpleNamespace:
    model = dense()

    def loss() -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=model(inputs(6, 4)))
        action = chosen.sample()
        return -(chosen.log_prob(action) * torch.rand(6)).mean() - 0.01 * chosen.entropy().mean()

    return plain(model, loss, clip=0.5)


class Run:
    """A training from the start. steps: made so far."""

    def __init__(self, build: Callable[[], SimpleNamespace]) -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        made = build()
        self.models, self.optimizers, self._step, self.steps = made.models, made.optimizers, made.step, 0
        self.scheduler = getattr(made, "scheduler", None)

    def step(self) -> Any:
        self.steps += 1
        return self._step()

    def train(self, callback: Callable[..., object] = lambda *_: None) -> None:
        for number in range(STEPS):
            callback(number, self.step())

    def end(self) -> dict[str, Any]:
        numbers = {"torch": torch.get_rng_state().tolist(), "numpy": str(np.random.get_state())}
        return {**kept(self.models, self.optimizers), **numbers, "random": random.getstate()}


def within(watch: Callable[..., Any]) -> Callable[[Run], None]:
    def watched(run: Run) -> None:
        with watch(run.models, run.optimizers) as active:
            run.train()
        assert not active.fault

    return watched


def diagnosed(run: Run) -> None:
    before = copy.deepcopy(run.end())
    model = run.models[0] if len(run.models) == 1 else nn.ModuleList(run.models)
    nbdebug.diagnose(run.train, model=model, optimizer=run.optimizers, scheduler=run.scheduler, progress=False)
    assert not changed(before, run.end())
    run.steps = 0
    run.train()


WATCHERS: dict[str, Callable[[Run], object]] = {
    "guard": within(nbdebug.guard),
    "grad_watch": within(nbdebug.grad_watch),
    "nan_trace": lambda run: nbdebug.nan_trace(run.step, model=run.models, optimizer=run.optimizers, max_steps=STEPS),
    "nan_trace of the loop": lambda run: nbdebug.nan_trace(
        run.train, model=run.models, optimizer=run.optimizers, strategy="trace"
    ),
    "mem": lambda run: nbdebug.mem(run.step, model=run.models, optimizer=run.optimizers, progress=False),
}


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with started("train = None") as book:
        yield book


def in_the_panel(notebook: Notebook, run: Run) -> None:
    """Two switches are clicked and a step is asked for before the cell with the loop."""
    space = {f"model{n}": model for n, model in enumerate(run.models)}
    space |= {f"optimizer{n}": optimizer for n, optimizer in enumerate(run.optimizers)}
    notebook.shell.user_ns.update(space, train=run.train)
    panel = notebook.shell.magics_manager.magics["line"]["nbdebug"].__self__.state
    try:
        panel.switch("guard", True)
        panel.switch("grad_watch", True)
        panel.trace()
        assert notebook.run("train()").error is None
    finally:
        panel.off()
        for name in space:
            del notebook.shell.user_ns[name]


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_under_each_watcher(name: str, notebook: Notebook) -> None:
    ends: dict[int, dict[str, Any]] = {}
    watchers = {**WATCHERS, "diagnose": diagnosed, "panel": lambda run: in_the_panel(notebook, run)}
    for watcher, watch in watchers.items():
        run = Run(KINDS[name])
        watch(run)
        end = run.end()
        if run.steps not in ends:
            bare = Run(KINDS[name])
            for _ in range(run.steps):
                bare.step()
            ends[run.steps] = bare.end()
        assert run.steps and changed(ends[run.steps], end) == [], watcher
