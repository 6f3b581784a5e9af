"""A container with the default of 64 MB, and large pictures."""

from types import SimpleNamespace

CODE, NAMES = "environment/shared-memory-small", ("shm",)


def machine(size):
    return SimpleNamespace(
        facts={"platform": "linux", "shm": {"size": size}, "run": {"num_workers": 8, "batch_bytes": 50_000_000}}
    )


def sick():
    return machine(64 * 2**20)


def healthy():
    return machine(2**30)
