"""A plan for many ranks, simulated: with 1,000 ranks no process reads 1,000 logs.

Each rank chains a digest over its calls (number, op, shape, dtype) and writes one record a second into the store: the
number of calls of each group, and the digest at multiples of 64. A tree of comparers, one for 16 records, passes on one
record where all agree, else the two that differ; calls, lines and stacks are asked for from those two ranks alone, and
judged by the chapter's rules. 256 ranks: 87 kB a second through the store (340 bytes a rank; logs would be 400 kB a
step), 33 ms of work.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import torch.distributed as dist

from nbdebug.tools.distributed.rules import name_cause
from tests.distributed.events import facts_of

RANKS, FAN, EVERY = 256, 16, 64


class Store:
    """torch's store in this process, with its traffic counted."""

    def __init__(self) -> None:
        self.store, self.bytes = dist.HashStore(), 0

    def put(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self.bytes += len(text)
        self.store.set(key, text)

    def get(self, key: str) -> Any:
        text = self.store.get(key)
        self.bytes += len(text)
        return json.loads(text)


class Rank:
    """Chains a digest over its calls, and keeps those at multiples of 64."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls, self.left = rank, list[dict[str, Any]](), False
        self.chain, self.digests = hashlib.sha256(), {0: ""}

    def call(self, op: str, shape: str, line: int) -> None:
        lines = [("train.py", line, "f")]
        self.calls.append({"k": "call", "op": op, "shape": shape, "dtype": "float32", "lines": lines})
        self.chain.update(f"{op}{shape}".encode())
        if len(self.calls) % EVERY == 0:
            self.digests[len(self.calls)] = self.chain.hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """One a second. The last four digests: ranks are not all at one call."""
        last = {n: d for n, d in self.digests.items() if n > len(self.calls) - 4 * EVERY}
        return {"rank": self.rank, "n": len(self.calls), "left": self.left, "digests": last}


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record for many: the one behind and the one ahead, and two that do not agree, where there are such."""
    for one in records:
        if "apart" in one:
            return one
    first, last = (choose(records, key=lambda r: r["n"]) for choose in (min, max))
    for other in records:
        for n, digest in other["digests"].items():
            if first["digests"].get(n, digest) != digest:
                return {"apart": sorted((first["rank"], other["rank"]))}
        if other["left"] and other["n"] < last["n"]:
            return {"apart": sorted((other["rank"], last["rank"]))}
    return {**first, "digests": {**last["digests"], **first["digests"]}}


def compared(ranks: list[Rank], store: Store) -> dict[str, Any]:
    """A tick: each rank writes one record, each comparer reads 16 and writes one."""
    for rank in ranks:
        store.put(f"0/{rank.rank}", rank.record())
    level, width = 0, len(ranks)
    while width > 1:
        parents = -(-width // FAN)
        for parent in range(parents):
            own = range(parent * FAN, min((parent + 1) * FAN, width))
            store.put(f"{level + 1}/{parent}", joined([store.get(f"{level}/{n}") for n in own]))
        level, width = level + 1, parents
    return store.get(f"{level}/0")


def test_256_ranks() -> None:
    store, ranks = Store(), [Rank(n) for n in range(RANKS)]
    odd, gone = 137, 201

    def step(number: int) -> None:
        for rank in ranks:
            for part in range(8):
                if not rank.left:
                    rank.call("all_reduce", f"[{part + (number == 80 and part == 3 and rank.rank == odd)}]", part)

    for number in range(72):
        step(number)
    before, began = store.bytes, time.perf_counter()
    assert "apart" not in compared(ranks, store), "all alike"
    traffic, seconds = store.bytes - before, time.perf_counter() - began
    print(f"{RANKS} ranks: {traffic} bytes and {1000 * seconds:.0f} ms a tick; logs would be {8 * 200 * RANKS} a step")
    assert traffic < 256 * RANKS * 2 and seconds < 1, "about 200 bytes a rank, read and written once"

    for number in range(72, 96):
        step(number)
    apart = compared(ranks, store)["apart"]
    assert odd in apart
    cause = cause_of(ranks, apart)
    assert cause.code == "distributed/collective-mismatch" and "at call 644" in cause.title

    ranks = [Rank(n) for n in range(RANKS)]
    for number in range(40):
        ranks[gone].left = number >= 30
        step(number)
    apart = compared(ranks, store)["apart"]
    assert gone in apart
    cause = cause_of(ranks, apart)
    assert cause.where.rank == gone and f"rank {gone} has ended" in cause.title


def cause_of(ranks: list[Rank], apart: list[int]) -> Any:
    """The two ranks' calls alone, judged as those of two ranks."""
    ends = [{"k": "end", "code": 0}]
    logs = {n: [dict(call) for call in ranks[n].calls] + ends * ranks[n].left for n in apart}
    for own in logs.values():
        own[0]["ranks"] = list(logs)
    finding = name_cause(facts_of(logs))
    assert finding is not None
    return finding
