"""How a rule of this tool puts its finding together: the finding, a fix with its proof, places and lines in sentences.

Numbers and lists are written by nbdebug/text.py."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.training.facts import Experiment, TrainingRunFacts
from nbdebug.tools.training.rules.signs import BETTER, helps

NOT_REPEATED = "the run could not be repeated with this change"
"""Why a fix has no experiment, where the rule knows no better; the report knows more."""

HE_INIT = (
    "Start with outputs around zero: no negative biases, He initialization.",
    "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')\ntorch.nn.init.zeros_(layer.bias)",
)
"""Title and code of a fix, as of the next two."""
GLOROT_INIT = (
    "Bring the inputs of the activation to a size of about one.",
    "torch.nn.init.xavier_uniform_(layer.weight)\ntorch.nn.init.zeros_(layer.bias)",
)
SHUFFLE = ("Shuffle the training data.", "DataLoader(dataset, batch_size=..., shuffle=True)")
PRINT_LOSS_INPUTS = Fix(
    "Print what goes into the loss.",
    "outputs, targets = model(batch[0]), batch[1]\n"
    "print(outputs.shape, outputs.min(), outputs.max(), targets.unique())",
)


def finding(
    slug: str,
    title: str,
    names: Iterable[str],
    fixes: Iterable[Fix],
    *,
    run: TrainingRunFacts | None = None,
    place: Where | None = None,
    module: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    chain: Iterable[str] = (),
    evidence: Mapping[str, Any] | None = None,
) -> Finding:
    """names: the modules, parameters, functions or arguments to blame, the most telling first. module: the one at which
    it is, where the place does not tell; with a run, the first of the names that is a module in it. Evidence that is
    None is left out."""
    names = [name for name in dict.fromkeys(names) if name]
    place = place or Where()
    if run is not None:
        known = _modules(run)
        module = next((name for name in names if name in known), None)
    where = dataclasses.replace(
        place, module=place.module or module, phase=phase or place.phase, step=place.step if step is None else step
    )
    rows = {name: value for name, value in (evidence or {}).items() if value is not None}
    return Finding(
        f"training/{slug}", title, where, {"where": names, **rows}, tuple(fixes), tuple(Link(text) for text in chain)
    )


def _modules(run: TrainingRunFacts) -> set[str]:
    """The names by which a run knows modules and frozen parameters."""
    return (
        {layer.name for layer in run.layers}
        | {mode.module for mode in run.modes}
        | {parameter.name for parameter in run.frozen}
        | {name for units in (*run.start_units, *run.end_units) for name in (units.layer, units.module)}
        | {call.module for call in run.layer_calls}
    )


def tested_fix(title: str, code: str, experiment: Experiment | None, by: float = BETTER) -> Fix:
    """A fix with the losses of its experiment, where there was one."""
    if experiment is None:
        return Fix(title, code, None, {"why not": NOT_REPEATED})
    after: dict[str, Any] = {"loss as it is": experiment.end_as_is, "loss with the fix": experiment.end_changed}
    after = {key: value if math.isfinite(value) else "not finite" for key, value in after.items()}
    if experiment.changed:
        after["steps"] = len(experiment.changed)
    if experiment.val_as_is is not None and experiment.val_changed is not None:
        validation = {
            "validation as it is": experiment.val_as_is,
            "validation with the fix": experiment.val_changed,
        }
        after |= {key: value for key, value in validation.items() if math.isfinite(value)}
    return Fix(title, code, helps(experiment, by), after)


def at_line(where: Where) -> str:
    """ " (train.py, line 31)", or "" where the line is not known."""
    return f" ({where.place})" if where.place else ""


def shape(sizes: Iterable[int]) -> str:
    """(64, 1) as "[64, 1]", as torch prints it."""
    return str(list(sizes))


def without_call(text: str | None, op: str) -> str:
    """A line of the user's without one call: "x.softmax(1)" becomes "x", "F.softmax(x, dim=1)" becomes "x"; "" where
    that can't be told from the text."""
    match = re.search(rf"(?P<owner>[\w.\])]*?)\.?\b{re.escape(op)}(?P<open>\()?", text or "")
    if match is None or text is None:
        return ""
    owner, end = match["owner"], match.end()
    if match["open"] is None:
        return text[: match.start()] + owner + text[end:] if op == "data" else ""
    close = _end(text[end:], ")")
    if close is None:
        return ""
    inner, rest = text[end : end + close], text[end + close + 1 :]
    if owner in ("", "F", "torch", "nn.functional", "torch.nn.functional", "functional"):
        return text[: match.start()] + inner[: _end(inner, ",")].strip() + rest
    if owner == "self":
        return ""  # a module of that name
    return text[: match.start()] + owner + rest


def _end(text: str, mark: str) -> int | None:
    """Where a mark stands first outside of brackets that open in this text; None where it never does."""
    depth = 0
    for i, character in enumerate(text):
        if depth == 0 and character == mark:
            return i
        depth += (character in "([{") - (character in ")]}")
    return None
