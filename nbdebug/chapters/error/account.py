"""What can be said of one exception: the first kind that knows it names it; else the facts of its frames, no guess."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nbdebug.chapters.error.causes import Candidate, lines
from nbdebug.chapters.error.kinds import KINDS
from nbdebug.chapters.error.lying import message_of
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.unknown import facts_of, notes_of
from nbdebug.finding import Finding, Link

MOST = 5
"""Findings of one group of exceptions."""


@dataclasses.dataclass
class Told:
    """findings: one for each member of a group that is known, in all one where there is no group. notes: what went
    wrong while looking."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def told(
    error: BaseException,
    names: Mapping[str, Any],
    ask_first: Callable[[BaseException], Finding | None] = lambda error: None,
) -> Told:
    """What is known of an exception, of those that led to it and of the members of a group. ask_first: another
    chapter's answer to one of them, or None."""
    answer = Told()
    for line in lines(error):
        found = next(
            (
                f
                for candidate in line
                if (f := ask_first(candidate.error) or _known(candidate, names, answer.notes)) is not None
            ),
            None,
        )
        if found is not None and found not in answer.findings and len(answer.findings) < MOST:
            answer.findings.append(found)
    return answer


def _known(candidate: Candidate, names: Mapping[str, Any], notes: list[str]) -> Finding | None:
    try:
        scene = Scene.of(candidate.error, names, candidate.led_to)
    except Exception as failed:  # whatever hostile thing lies in the frames: the next exception may be readable
        notes.append(f"The frames of the {type(candidate.error).__name__} could not be read ({type(failed).__name__}).")
        return None
    for kind in KINDS:
        try:
            found = kind.ask(scene) if kind.may_know(scene) else None
        except Exception as failed:  # our own fault, or an object that refuses to be looked at: the next kind is asked
            notes.append(
                f"nbdebug could not look for {kind.look.split('.')[-2].replace('_', ' ')} here: "
                f"{type(failed).__name__}."
            )
            continue
        if found is not None:
            return dataclasses.replace(found, chain=(*found.chain, *_after(scene)))
    return None


def unknown(error: BaseException, names: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(facts, notes) of an error that no kind knows: of the first that was asked."""
    candidates = [candidate for line in lines(error) for candidate in line] or [Candidate(error)]
    scene = Scene.of(candidates[0].error, names, candidates[0].led_to)
    return facts_of(scene), notes_of(scene)


def _after(scene: Scene) -> list[Link]:
    """How the cause reached the user: the process it came from, and the exceptions that followed it."""
    links = [Link(f"it was raised {scene.carried.where}")] if scene.carried else []
    return links + [
        Link(f"`{type(error).__name__}` followed from it: {_short(message_of(error))}".rstrip(": "))
        for error in scene.led_to[:5]
    ]


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 160 else line[:157] + "..."
