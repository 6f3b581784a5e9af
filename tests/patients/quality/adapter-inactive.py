"""The forward pass of both layers leaves the factors out."""

from tests.quality.adapters import LoRALinear, network

CODE, NAMES = "quality/adapter-inactive", ["0", "2"]


class Forgotten(LoRALinear):
    def forward(self, x):
        return self.linear(x)


def sick():
    return network(Forgotten)


def healthy():
    return network(LoRALinear)
