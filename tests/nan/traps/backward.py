"""Faults of the derivative: second derivatives, hooks, recomputation, complex numbers, sparse gradients."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=0)
def gradient_penalty_of_a_dead_critic():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        critic[0].bias.fill_(-50)

    def loss_of(i):
        x = seeded((5, 3)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        length = slope.square().sum(1).sqrt()  # here
        return (length - 1).square().mean()

    return train(critic, loss_of)


@silent()
def gradient_penalty_all_well():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss_of(i):
        x = seeded((5, 3)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return train(critic, loss_of)


@fault("pow-domain", phase="backward", op="pow", module="bend", rows=(2,), step=0)
def second_derivative_of_a_power():
    class Bend(nn.Module):
        def forward(self, x):
            return torch.pow(x, 1.5)  # here

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.bend = nn.Linear(3, 4), Bend()

        def forward(self, x, size):
            return self.bend((self.lin(x).square() + 0.1) * size[:, None]).sum()

    torch.manual_seed(0)
    critic = Critic()
    sizes = torch.tensor([1.0, 1, 0, 1, 1])

    def loss_of(i):
        x = seeded((5, 3)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x, sizes), x, create_graph=True)
        return slope.square().mean()

    return train(critic, loss_of)


@fault("div-by-zero grad-overflow", phase="backward", op="div", module=None, step=0)
def the_users_tensor_hook():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def shrink(grad):
        return grad / grad.sub(grad).sum()  # here

    def loss_of(i):
        out = model(seeded((5, 3)))
        out.register_hook(shrink)
        return out.square().mean()

    return train(model, loss_of)


@fault("div-by-zero", op="div", module=["", "lin"], step=0)
def the_users_forward_hook():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.lin(x))

    torch.manual_seed(0)
    model = Net()

    def rescale(module, given, out):
        spread = (out - out).abs().sum(-1, keepdim=True)
        return out / spread  # here

    model.lin.register_forward_hook(rescale)
    return train(model, lambda i: model(seeded((5, 3))).square().mean())


@silent()
def the_users_harmless_hooks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    seen = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.detach().mean() / 0.0))
    model[2].register_full_backward_hook(lambda m, a, b: None)
    model[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.0,))
    return train(model, lambda i: model(seeded((5, 3))).square().mean())


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=0)
def sparse_gradient():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)

    def loss_of(i):
        found = model(torch.tensor([1, 2, 2]))
        return torch.sqrt((found[1] - found[2]).square().sum()) + found.sum()  # here

    return train(model, loss_of, optimizer=torch.optim.SparseAdam(list(model.parameters())))


@silent()
def sparse_gradient_all_well():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    return train(
        model,
        lambda i: model(torch.tensor([1, 2, 2])).square().sum(),
        optimizer=torch.optim.SparseAdam(list(model.parameters())),
    )


@fault("sqrt-grad-at-zero domain-error div-by-zero", phase="backward", op="hypot", step=0)
def hypotenuse_of_nothing():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3))) * 0.0
        return torch.hypot(out[:, 0], out[:, 1]).mean()  # here

    return train(model, loss_of)


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=0, rows=(1,))
def complex_root_at_zero():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3))) * torch.tensor([1.0, 0, 1, 1, 1])[:, None]
        turned = torch.complex(out[:, :2], out[:, 2:])
        return turned.sqrt().abs().square().mean()  # here

    return train(model, loss_of)


@silent()
def complex_length_at_zero():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3))) * torch.tensor([1.0, 0, 1, 1, 1])[:, None]
        turned = torch.fft.fft(torch.complex(out[:, :2], out[:, 2:]))
        return turned.abs().mean() + torch.atan2(out[:, 0], out[:, 1]).mean()

    return train(model, loss_of)


@fault("div-by-zero", op="div", step=0, rows=(1,))
def complex_division():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3)))
        size = torch.complex(torch.tensor([1.0, 0, 1, 1, 1]), torch.zeros(5))
        turned = torch.complex(out[:, :2], out[:, 2:]) / size[:, None]  # here
        return turned.abs().mean()

    return train(model, loss_of)


@silent()
def products_with_zeros():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        out = model(seeded((5, 3))) * torch.tensor([1.0, 0, 1, 0])
        return out.prod(-1).mean() + out.cumprod(-1).mean() + torch.cdist(out * 0, out * 0).sum() + (out * 0).std()

    return train(model, loss_of)


@fault("log-of-nonpositive where-grad", phase="backward", op="log", step=0)
def the_loss_is_washed():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss_of(i):
        level = model(seeded((5, 3))).relu() * 0
        return torch.nan_to_num(torch.log(level).mean(), neginf=0.0)  # here

    return train(model, loss_of)


@fault("div-by-zero", phase="backward", op="div", module="halved", step=0)
def own_function_with_a_bad_derivative():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.abs().sum(-1)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad[:, None] * (x / x.abs())  # here

    class Wrap(nn.Module):
        def forward(self, x):
            return Half.apply(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.halved = nn.Linear(3, 4), Wrap()

        def forward(self, x):
            return self.halved(self.lin(x) * torch.tensor([1.0, 0, 1, 0]))

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3))).mean())


@fault("sqrt-grad-at-zero", phase="backward", op="sqrt", step=1)
def manual_update_without_optimizer():
    torch.manual_seed(0)
    weight = torch.randn(3, 4, requires_grad=True)
    steps = iter(range(9))

    def step():
        out = seeded((5, 3)) @ weight * (1.0 if next(steps) == 0 else 0.0)
        loss = out.square().sum().sqrt()  # here
        loss.backward()
        with torch.no_grad():
            weight.sub_(0.01 * weight.grad)
        weight.grad = None
        return loss

    return SimpleNamespace(model=None, optimizer=None, step=step, parameters=[weight])
