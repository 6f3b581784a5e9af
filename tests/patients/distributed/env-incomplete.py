"""A child starts with an environment of the script's own making."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/env-incomplete", ("RANK", "WORLD_SIZE", "clean")

SOURCE = """clean = {"PATH": path}
subprocess.run(command, env=clean)
"""


def ranks(missing, output):
    child = {"k": "child", "missing": missing, "lines": [("train.py", 2, "f")]}
    return facts_of({0: [child], 1: [child]}, SOURCE, output=output)


def sick():
    return ranks(["RANK", "WORLD_SIZE"], "ValueError: environment variable RANK expected, but not set")


def healthy():
    return ranks([], "")
