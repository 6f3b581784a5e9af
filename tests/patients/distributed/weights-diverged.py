"""Each rank makes its model with a seed of its own."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/weights-diverged", ("seeds", "torch.manual_seed(17 + rank)")

SOURCE = """torch.manual_seed(17 + rank)
"""


def ranks(values):
    def log(rank):
        seed = {"k": "seed", "value": 17 + rank, "lines": [("train.py", 1, "f")]}
        weights = {"step": 0, "when": "before", "late": [], "lr": [0.1], "lines": []}
        return [seed, {"k": "weights", "id": "0/0/before", "values": {"weight": [values[rank], 2.0]}, **weights}]

    return facts_of({0: log(0), 1: log(1)}, SOURCE)


def sick():
    return ranks([1.0, 1.5])


def healthy():
    return ranks([1.0, 1.0])
