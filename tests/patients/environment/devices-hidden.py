"""A job script from a machine with eight cards hides all but one of two."""

from types import SimpleNamespace

CODE, NAMES = "environment/devices-hidden", ("CUDA_VISIBLE_DEVICES",)


def machine(value):
    return SimpleNamespace(
        facts={
            "torch": {"version": "2.5.0", "cuda": "12.4", "hip": None},
            "gpus": [{"name": "L4", "capability": [8, 9]}] * 2,
            "env": {"CUDA_VISIBLE_DEVICES": value},
            "run": {"device": "cuda", "world_size": 2},
        }
    )


def sick():
    return machine("0,7")


def healthy():
    return machine("1,0")
