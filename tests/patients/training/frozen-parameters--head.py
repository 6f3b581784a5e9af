"""The names to be trained are those of another model: the layer that makes the output stays frozen as it was drawn."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE, RUN = "training/frozen-parameters", ["score", "score.weight"], True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pretrained, self.block, self.score = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 5, bias=False)
        nn.init.trunc_normal_(self.pretrained.weight, std=0.6, a=-0.7, b=0.7)
        nn.init.normal_(self.score.weight, std=0.02)

    def forward(self, x):
        return self.score(torch.layer_norm(self.block(torch.relu(self.pretrained(x))), (24,)))


def training(head):
    torch.manual_seed(68)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith((head, "block"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    return made(model, optimizer, cross_entropy, loaders(*clusters(600)), 8)


def sick():
    return training("classifier")


def healthy():
    return training("score")
