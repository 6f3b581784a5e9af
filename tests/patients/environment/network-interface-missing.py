"""The variable names the interface of another cluster."""

from types import SimpleNamespace

CODE, NAMES = "environment/network-interface-missing", ("NCCL_SOCKET_IFNAME", "ib0")


def machine(value):
    return SimpleNamespace(
        facts={
            "interfaces": ["lo", "enp5s0"],
            "env": {"NCCL_SOCKET_IFNAME": value},
            "run": {"backend": "nccl", "world_size": 4},
        }
    )


def sick():
    return machine("ib0")


def healthy():
    return machine("^lo,docker")
