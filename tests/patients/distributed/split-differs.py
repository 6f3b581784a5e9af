"""Each rank has seeded the generator from which the split is drawn with a number of its own."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/split-differs", ("random_split(rows, sizes", "Ranks 0 and 1")

SOURCE = """torch.manual_seed(rank)
kept, held = random_split(rows, sizes)
loader = DataLoader(kept, sampler=DistributedSampler(kept))
"""
AT = [("train.py", 2, "<module>")]
ONE = {"k": "pass", "id": "0/0", "backwards": 2, "complete": True, "shuffles": True, "loader": "0", "sampler": AT}


def ranks(*splits):
    shares = {rank: [rank + 2 * n for n in range(9)] for rank in range(len(splits))}
    logs = {
        rank: [{**ONE, "lines": AT, "rows": shares[rank], "content": shares[rank], "split": [split, AT]}]
        for rank, split in enumerate(splits)
    }
    return facts_of(logs, SOURCE)


def sick():
    return ranks("a", "b")


def healthy():
    return ranks("a", "a")
