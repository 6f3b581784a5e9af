"""The product of the factors is added as it is: alpha / rank, 2, is forgotten."""

from tests.quality.adapters import network, trained

CODE, NAMES = "quality/adapter-scale", ["scale of 1", "alpha / rank"]


def sick():
    return trained(network(scaled=False))


def healthy():
    return trained(network(scaled=True))
