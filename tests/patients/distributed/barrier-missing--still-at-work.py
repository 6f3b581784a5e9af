"""Rank 0 is still at work on the file when rank 1 has failed: it is in the branch that speaks of it."""

from tests.distributed.events import facts_of

CODE = "distributed/barrier-missing"
NAMES = ("before rank 0 has written it", "vocab = json.load(open(path))", "build(words, path)")

SOURCE = """path = "vocab.json"
if rank == 0:
    words = count(files)
    build(words, path)
vocab = json.load(open(path))
"""
ARM = {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 2, "first": 3, "last": 4}
LINES = [("train.py", 5, "<module>")]
ERROR = {"k": "error", "type": "FileNotFoundError", "text": "No such file", "path": "/data/vocab.json", "lines": LINES}


def sick():
    stack = {"k": "stack", "lines": [("train.py", 3, "<module>")], "stack": [], "m": [1]}
    return facts_of({0: [ARM, stack], 1: [ERROR, {"k": "came", "seconds": None, "runs": False}]}, SOURCE)


def healthy():
    """Each rank its own file."""
    own = [
        {
            "k": "file",
            "id": f"/data/vocab-{rank}.json/0",
            "path": f"/data/vocab-{rank}.json",
            "digest": "a",
            "lines": LINES,
        }
        for rank in (0, 1)
    ]
    return facts_of({0: own[:1], 1: own[1:]}, SOURCE)
