"""On Windows the index gave a wheel without CUDA, on a machine with a card."""

from types import SimpleNamespace

CODE, NAMES = "environment/cpu-only-build", ("torch", "2.4.1+cpu")


def machine(version, cuda):
    return SimpleNamespace(
        facts={
            "platform": "win32",
            "packages": {"torch": version},
            "torch": {"version": version, "cuda": cuda, "hip": None},
            "gpus": [{"name": "RTX 3060", "capability": [8, 6]}],
            "driver": {"version": "566.14", "cuda": "12.7"},
            "run": {"device": "cuda"},
        }
    )


def sick():
    return machine("2.4.1+cpu", None)


def healthy():
    return machine("2.4.1+cu121", "12.1")
