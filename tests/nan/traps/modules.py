"""Modules: parametrizations, tied weights, built-in layers, what goes in and what comes out."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from tests.nan.traps.loops import seeded
from tests.nan.traps.registry import fault, silent, train


@fault("input-nonfinite", phase="input", op="", rows=(2,), step=1)
def the_input_is_a_dict():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 4)

        def forward(self, batch):
            return {"out": [self.lin(batch["features"]["x"])]}

    torch.manual_seed(0)
    model = Net()
    x = torch.stack([seeded((5, 3)), seeded((5, 3), 1)])
    x[1, 2, 0] = float("inf")

    def loss_of(i):
        out = model({"features": {"x": x[i]}, "ids": torch.arange(5)})  # here
        return out["out"][0].square().mean()

    return train(model, loss_of)


@fault("input-nonfinite", phase="input", op="", step=0, module="")
def the_given_attention_mask_is_nan():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, mask):
            return self.attend(x, x, x, attn_mask=mask)[0]

    torch.manual_seed(0)
    model = Net()
    mask = torch.zeros(3, 3)
    mask[0, 1] = float("nan")
    return train(model, lambda i: model(seeded((5, 3, 4)), mask).square().mean())  # here


@silent()
def the_given_attention_mask_is_minus_infinity():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x, mask, pad):
            return self.encode(x, mask=mask, src_key_padding_mask=pad)

    torch.manual_seed(0)
    model = Net()
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    pad = torch.zeros(5, 3)
    pad[1, 1:] = float("-inf")
    return train(model, lambda i: model(seeded((5, 3, 4)), mask, pad).square().mean())


@silent()
def a_buffer_of_minus_infinity():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.register_buffer("later", torch.full((3, 3), float("-inf")).triu(1))

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.softmax(q @ k.mT + self.later, -1) @ v

    torch.manual_seed(0)
    model = Attend()
    return train(model, lambda i: model(seeded((5, 3, 4))).square().mean())


@fault("parameter-nonfinite", phase="parameter", op="", module=["embed", "out"], step=0)
def tied_weights_are_nan():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.embed(ids))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.embed.weight[2, 1] = float("nan")
    return train(model, lambda i: F.cross_entropy(model(torch.tensor([0, 2, 3])), torch.tensor([1, 2, 3])))


@silent()
def tied_weights_all_well():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 6, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.embed(ids))

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: F.cross_entropy(model(torch.tensor([0, 2, 3])), torch.tensor([1, 2, 3])))


@fault("sqrt-of-negative", op="sqrt", module=["criterion", ""], step=0)
def a_criterion_of_its_own():
    class Spread(nn.Module):
        def forward(self, out):
            return torch.sqrt(out.square().mean() - 30)  # here

    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 4), Spread()
    return train(model, lambda i: criterion(model(seeded((5, 3)))))


@fault("sqrt-of-negative", op="sqrt", module="criterion", step=0)
def a_criterion_inside_the_model():
    class Spread(nn.Module):
        def forward(self, out, low):
            return torch.sqrt(out.square().mean() + low)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.criterion = Spread()
            self.body, self.side = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.criterion(self.body(x), 1.0) + self.criterion(self.side(x), -90.0)

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3))))


@fault("div-by-zero zero-times-inf", op=["native_layer_norm", "layer_norm"], module="1", step=1, rows=(2,))
def layer_norm_without_eps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4, eps=0.0), nn.Linear(4, 2))
    x = torch.stack([seeded((5, 3)), seeded((5, 3))])
    x[1, 2] = 0
    return train(model, lambda i: model(x[i]).square().mean())  # here


@fault("running-stats-nonfinite empty-reduction", op="mean", module="norm", step=[0, 1])
def running_statistics_spoiled_earlier():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("middle", torch.zeros(4))

        def forward(self, x, keep):
            out = x - self.middle
            with torch.no_grad():
                self.middle.mul_(0.9).add_(0.1 * x[keep].mean(0))  # here
            return out

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(3, 4), Norm()

        def forward(self, x, keep):
            return self.norm(self.lin(x), keep)

    torch.manual_seed(0)
    model = Net()
    return train(model, lambda i: model(seeded((5, 3)), torch.full((5,), i == 5)).square().mean())


@fault("log-of-nonpositive", op="log", module="head", step=1, rows=(0, 3))
def the_model_is_in_eval():
    @dataclasses.dataclass
    class Out:
        logs: torch.Tensor
        extra: tuple

    class Head(nn.Module):
        def forward(self, x, size):
            return torch.log(F.softplus(x) * size[:, None])  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), Head()

        def forward(self, x, size):
            return Out(self.head(self.norm(self.lin(x)), size), (x, None))

    torch.manual_seed(0)
    model = Net().eval()
    sizes = torch.ones(2, 5)
    sizes[1, [0, 3]] = 0
    return train(model, lambda i: model(seeded((5, 3)), sizes[i]).logs.mean())


@fault("div-by-zero", op="div", module="", step=0)
def a_quaternion_of_zeros():
    class Pose(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x * (self.turn / self.turn.norm())  # here

    model = Pose()
    return train(model, lambda i: model(seeded((5, 4))).square().mean())


@fault("div-by-zero", op="weight_norm_interface", step=0, module="")
def weight_normalization_of_a_pruned_row():
    torch.manual_seed(0)
    model = torch.nn.utils.weight_norm(nn.Linear(3, 4))
    with torch.no_grad():
        model.weight_v[2] = 0
    return train(model, lambda i: model(seeded((5, 3))).square().mean())  # here
