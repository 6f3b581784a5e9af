"""One rank alone clips its gradients; some steps later the loss of the other one overflows: that came of it."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/weights-diverged", ("rank 0 alone", "if rank == 0:", "The loss of rank 1 is inf at step 3")

SOURCE = """loss.backward()
if rank == 0:
    clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
"""
ARM = {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 2, "first": 3, "last": 3}


def ranks(weights, marks, last):
    def log(rank):
        own = {"step": 0, "when": "after", "late": [], "lr": [0.1], "lines": []}
        after = {"k": "weights", "id": "0/1/after", "values": {"weight": [weights[rank], 2.0]}, **own}
        losses = [{"k": "loss", "id": n, "bad": False, "value": "1.0", "lines": []} for n in range(3)]
        lines = [("train.py", 1, "f")]
        end = {"k": "loss", "id": 3, "bad": last[rank] == "inf", "value": last[rank], "lines": lines}
        return [ARM, losses[0], {**after, "m": marks[rank]}, *losses[1:], end]

    return facts_of({0: log(0), 1: log(1)}, SOURCE)


def sick():
    return ranks([1.0, 1.5], [[1], []], ["1.0", "inf"])


def healthy():
    return ranks([1.0, 1.0], [[1], [1]], ["1.0", "1.0"])
