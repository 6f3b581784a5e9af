"""A cluster with a driver of CUDA 11 and a wheel of CUDA 12."""

from types import SimpleNamespace

CODE, NAMES = "environment/driver-too-old", ("470.199.02", "11.4", "12.4")


def machine(cuda):
    return SimpleNamespace(
        facts={
            "platform": "linux",
            "torch": {"version": "2.5.0", "cuda": cuda, "hip": None},
            "gpus": [{"name": "A40", "capability": [8, 6]}],
            "driver": {"version": "470.199.02", "cuda": "11.4"},
            "run": {"device": "cuda"},
        }
    )


def sick():
    return machine("12.4")


def healthy():
    return machine("11.8")
