"""SciPy of before NumPy 2."""

from types import SimpleNamespace

CODE, NAMES = "environment/numpy-abi", ("numpy", "scipy", "1.11.4")


def machine(numpy):
    return SimpleNamespace(facts={"packages": {"numpy": numpy, "scipy": "1.11.4", "torch": "2.4.0"}})


def sick():
    return machine("2.1.3")


def healthy():
    return machine("1.26.4")
