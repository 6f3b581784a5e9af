"""A bad row in the second rank's share."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rank-nonfinite", ("rank 1", "nan", "step 2")

SOURCE = """loss = model(shard[step]).pow(2).mean()
"""


def ranks(value):
    def losses(own):
        return [
            {"k": "loss", "id": n, "bad": v == "nan", "value": v, "lines": [("train.py", 1, "f")]}
            for n, v in enumerate(own)
        ]

    return facts_of({0: losses(["1.0", "0.9", "0.8"]), 1: losses(["1.1", "0.8", value])}, SOURCE)


def sick():
    return ranks("nan")


def healthy():
    return ranks("0.7")
