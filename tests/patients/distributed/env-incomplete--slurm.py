"""A script that reads Slurm's variables is started by torchrun."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/env-incomplete", ("SLURM_PROCID", 'rank = int(os.environ["SLURM_PROCID"])', "torchrun sets")

SOURCE = """rank = int(os.environ["SLURM_PROCID"])
"""


def log(key):
    line = [("train.py", 1, "<module>")]
    return [{"k": "error", "type": "KeyError", "text": repr(key), "lines": line, "unset": [], "t": 1.0, "peer": False}]


def sick():
    return facts_of({0: log("SLURM_PROCID"), 1: log("SLURM_PROCID")}, SOURCE)


def healthy():
    """Slurm is there, and the ranks end well."""
    return facts_of({0: [{"k": "end", "code": 0}], 1: [{"k": "end", "code": 0}]}, SOURCE)
