"""Batches are kept in a list: 40 MiB a step."""

from nbdebug.tools.monitor.rules import MachineFacts, MachineSample

CODE, NAMES = "run/host-memory-grows", ("4.00 GiB", "steps")
GIB = 2**30


def machine(grows):
    samples = [
        MachineSample(time=n, steps=2 * n, own=3 * GIB + grows * n, free=8 * GIB - grows * n) for n in range(1, 61)
    ]
    return MachineFacts(samples, host=16 * GIB)


def sick():
    return machine(GIB / 15)


def healthy():
    return machine(GIB / 15_000)
