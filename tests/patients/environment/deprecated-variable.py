"""A launcher sets the variable under its old name."""

from types import SimpleNamespace

CODE, NAMES = "environment/deprecated-variable", ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT")


def machine(name):
    return SimpleNamespace(facts={"packages": {"torch": "2.6.0"}, "env": {name: "1"}})


def sick():
    return machine("NCCL_BLOCKING_WAIT")


def healthy():
    return machine("TORCH_NCCL_BLOCKING_WAIT")
