"""An old card, for which the wheel has no kernels any more."""

from types import SimpleNamespace

CODE, NAMES = "environment/gpu-arch-missing", ("sm_61", "Quadro P4000")


def machine(arches):
    return SimpleNamespace(
        facts={
            "torch": {"version": "2.8.0", "cuda": "12.8", "hip": None, "arch_list": arches},
            "gpus": [{"name": "Quadro P4000", "capability": [6, 1]}],
            "driver": {"version": "575.57.08", "cuda": "12.9"},
            "run": {"device": "cuda"},
        }
    )


def sick():
    return machine(["sm_70", "sm_75", "sm_80", "sm_90"])


def healthy():
    return machine(["sm_60", "sm_70", "sm_80"])
