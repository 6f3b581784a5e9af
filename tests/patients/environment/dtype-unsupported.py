"""bfloat16 on a card of the generation before it."""

from types import SimpleNamespace

CODE, NAMES = "environment/dtype-unsupported", ("bfloat16", "Tesla T4")


def machine(dtype):
    return SimpleNamespace(
        facts={
            "torch": {"version": "2.5.0", "cuda": "12.4", "hip": None},
            "gpus": [{"name": "Tesla T4", "capability": [7, 5]}],
            "run": {"device": "cuda", "dtype": dtype},
        }
    )


def sick():
    return machine("bfloat16")


def healthy():
    return machine("float16")
