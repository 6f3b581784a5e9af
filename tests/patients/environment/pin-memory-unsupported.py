"""Pinned memory on a Mac."""

from types import SimpleNamespace

CODE, NAMES = "environment/pin-memory-unsupported", ("pin_memory", "mps")


def machine(pin):
    return SimpleNamespace(
        facts={
            "platform": "darwin",
            "torch": {"version": "2.5.0", "cuda": None, "hip": None, "mps": True},
            "gpus": [],
            "run": {"device": "mps", "pin_memory": pin},
        }
    )


def sick():
    return machine(True)


def healthy():
    return machine(False)
