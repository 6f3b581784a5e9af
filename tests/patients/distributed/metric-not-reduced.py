"""Each rank scores its own half of the rows; the first prints the score of its half."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/metric-not-reduced", ("Rank 0", "accuracy = hits / seen")

SOURCE = """hits = seen = 0
with torch.no_grad():
    for x, y in loader:
        hits += (model(x).argmax(1) == y).sum().item()
        seen += len(y)
accuracy = hits / seen
if rank == 0:
    print(f"accuracy {accuracy:.3f}")
"""


def score(digests, prints=(), reduced=False):
    line = [["train.py", 4, "<module>"]]
    return {"k": "score", "id": 0, "digests": digests, "reduced": reduced, "lines": line, "prints": list(prints)}


def sick():
    return facts_of({0: [score([1.0, 2.0], [["train.py", 8, "<module>"]])], 1: [score([3.0, 4.0])]}, SOURCE)


def healthy():
    """The same rows on both."""
    return facts_of({0: [score([1.0, 2.0], [["train.py", 8, "<module>"]])], 1: [score([1.0, 2.0])]}, SOURCE)
