"""Batches are made by Python, one after another."""

from nbdebug.tools.monitor.rules import MachineFacts, MachineSample

CODE, NAMES = "run/card-waits", ("4%", "99%")
GIB = 2**30


def machine(card, core):
    return MachineFacts([MachineSample(time=n, steps=n, card=card, core=core) for n in range(1, 61)])


def sick():
    return machine(4, 99)


def healthy():
    """A busy card, driven by one busy core."""
    return machine(95, 99)
