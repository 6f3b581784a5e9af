"""A card at its limit of heat."""

from nbdebug.tools.monitor.rules import MachineFacts, MachineSample

CODE, NAMES = "run/card-throttled", ("heat", "89 degrees")
GIB = 2**30


def machine(reason):
    samples = [
        MachineSample(time=n, steps=n, card=97, power=240, heat=89 if reason else 70, throttled=reason)
        for n in range(1, 61)
    ]
    return MachineFacts(samples)


def sick():
    return machine("heat")


def healthy():
    return machine("")
