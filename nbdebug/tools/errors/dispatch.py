"""What can be said of one exception: the first kind that knows it names it; else the facts of its frames, no guess."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nbdebug.report import Finding, Link, Report
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.exceptions import Candidate, lines
from nbdebug.tools.errors.unknown import report_of
from nbdebug.tools.errors.values import message_of

ON_A_CARD = r"assert|memory access|misaligned|launch|cublas|cudnn"


@dataclasses.dataclass(frozen=True)
class ErrorKind:
    """look, check: "module.function" among the looks and the rules. words: of the exception's type and message; where
    they hold none of these, the look knows nothing of it and is not asked. Wider than the look's own patterns."""

    look: str
    check: str
    words: str = ""

    def may_know(self, scene: ErrorContext) -> bool:
        return re.search(self.words, f"{scene.type}: {scene.message}", re.IGNORECASE) is not None

    def ask(self, scene: ErrorContext) -> Finding | None:
        facts = _function(self.look)(scene)
        found: Finding | None = _function(self.check)(facts) if facts is not None else None
        return found


@functools.cache
def _function(path: str) -> Callable[[Any], Any]:
    module, _, name = path.rpartition(".")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"nbdebug.tools.errors.{module}"), name)
    return found


KINDS: tuple[ErrorKind, ...] = (
    ErrorKind("kinds.collate.look", "rules.dataloader.collate_mismatch"),
    ErrorKind("kinds.workers.look", "rules.dataloader.loader_worker_died"),
    ErrorKind(
        "kinds.distributed.look",
        "rules.distributed.nccl",
        r"^Dist|nccl|gloo|process|distributed|collective|rendezvous|c10d|store|clients|DDP|"
        r"reduction|ready only|backend|socket",
    ),
    ErrorKind("kinds.cuda.look", "rules.cuda.cuda_unavailable", r"cuda|nvidia|driver|device|kernel"),
    ErrorKind("kinds.cuda.look_proven", "rules.indices.index_out_of_range", ON_A_CARD),
    ErrorKind("kinds.cuda.detect_assert", "rules.cuda.device_assert", ON_A_CARD),
    ErrorKind("kinds.devices.look", "rules.devices.device_mismatch", r"device|[cg]pu|cuda|numpy|meta|generator"),
    ErrorKind("kinds.dtypes.look", "rules.dtypes.dtype_mismatch"),
    ErrorKind("kinds.cuda.detect_cudnn", "rules.cuda.cudnn_not_supported", r"cudnn|contiguous|engine|miopen"),
    ErrorKind("kinds.indices.look", "rules.indices.index_out_of_range"),
    ErrorKind("autograd.backward_twice.detect", "autograd.rules.backward_twice", r"second time|unpacked|backward"),
    ErrorKind(
        "autograd.in_place.detect",
        "autograd.rules.inplace_modified",
        r"in-?place|memory location|written-to|out=|leaf|view",
    ),
    ErrorKind(
        "autograd.no_grad.detect",
        "autograd.rules.no_grad_path",
        r"grad|graph|parameter list|non-leaf|inference|attribute|operand|nonetype",
    ),
    ErrorKind("kinds.state_dict.look_model", "rules.state_dict.state_dict_mismatch", r"state.?dict"),
    ErrorKind(
        "kinds.state_dict.look_optimizer",
        "rules.state_dict.state_dict_mismatch",
        r"state.?dict|param.?group|parameter group",
    ),
    ErrorKind("kinds.imports.look", "rules.imports.module_not_found", r"import|module|attribute|pickl|global"),
    ErrorKind("shapes.detect.detect", "shapes.rules.shape_mismatch"),
)
"""The narrow before the wide."""


MOST = 5
"""Findings of one group of exceptions."""


@dataclasses.dataclass
class Explanation:
    """findings: one for each member of a group that is known, in all one where there is no group. notes: what went
    wrong while looking."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def told(
    error: BaseException,
    names: Mapping[str, Any],
    ask_first: Callable[[BaseException], Finding | None] = lambda error: None,
) -> Explanation:
    """What is known of an exception, of those that led to it and of the members of a group. ask_first: another
    chapter's answer to one of them, or None."""
    answer = Explanation()
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
        scene = ErrorContext.of(candidate.error, names, candidate.led_to)
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


def unknown(error: BaseException, names: Mapping[str, Any]) -> Report:
    """The report on an error that no kind knows: on the first that was asked."""
    candidates = [candidate for line in lines(error) for candidate in line] or [Candidate(error)]
    scene = ErrorContext.of(candidates[0].error, names, candidates[0].led_to)
    return report_of(scene)


def _after(scene: ErrorContext) -> list[Link]:
    """How the cause reached the user: the process it came from, and the exceptions that followed it."""
    links = [Link(f"it was raised {scene.carried.where}")] if scene.carried else []
    return links + [
        Link(f"`{type(error).__name__}` followed from it: {_short(message_of(error))}".rstrip(": "))
        for error in scene.led_to[:5]
    ]


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 160 else line[:157] + "..."
