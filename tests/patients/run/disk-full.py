"""Every checkpoint is kept."""

from nbdebug.tools.monitor.rules import MachineFacts, MachineSample

CODE, NAMES = "run/disk-full", ("1.00 GiB", "/data")
GIB = 2**30


def machine(left):
    samples = [MachineSample(time=n, steps=n, disk=left) for n in range(1, 41)]
    return MachineFacts(samples, disk=900 * GIB, folder="/data")


def sick():
    return machine(GIB)


def healthy():
    return machine(90 * GIB)
