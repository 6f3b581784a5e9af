"""Events that ranks would have written, as the rules' facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.tools.distributed.facts import RanksFacts


def facts_of(logs: Mapping[int, Iterable[Mapping[str, Any]]], source: str = "", **more: Any) -> RanksFacts:
    """Of a run that is over. logs: rank → its events; source: the text of "train.py"."""
    facts = RanksFacts(len(logs), sources={"train.py": source}, over=True, **more)
    for rank, events in logs.items():
        for event in events:
            facts.add(rank, event)
    return facts
