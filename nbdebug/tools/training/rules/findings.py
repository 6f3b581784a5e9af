"""How a rule puts its finding together: the finding, a fix with its proof, places and lines in sentences. (Numbers and
lists are written by nbdebug/text.py.)"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.training.facts import (
    Experiment,
    HeldOut,
    TrainingRunFacts,
)
from nbdebug.tools.training.rules.signs import BETTER, FROZEN_EVALUATED, HEAD_UNFROZEN, helps
from nbdebug.tools.training.static_facts import StaticFacts, TellingFeature

EXPERIMENT = "experiment"
"""Key of `Fix.after`: what was done in place of the text that is shown."""
NOT_REPEATED = "the run could not be repeated with this change"
"""Why a fix has no experiment, where the rule knows no better; the report knows more."""

CURES = {
    "zero_grad": ("gradients that pile up", "with gradients cleared"),
    "unscaled first": ("gradients that carry the scale", "with gradients unscaled first"),
    "one optimizer": ("an optimizer that begins anew", "with each new one given the state of the last"),
    "weights kept": ("other weights behind an evaluation", "with the weights that the steps leave"),
    "train mode": ("layers in eval mode", "with all layers in train mode"),
    FROZEN_EVALUATED: ("a frozen part in train mode", "with it in eval mode"),
    "without the batch": ("one bad batch", "without {batch}"),
    "shuffled": ("the order of the samples", "shuffled"),
    "level rate": ("a learning rate that falls too early", "with a constant learning rate"),
    HEAD_UNFROZEN: ("a frozen output layer", "with the output layer trained"),
    "unfrozen": ("frozen parameters", "with all of them trained"),
    "without suspect labels": ("wrong labels", "without the samples whose label the model contradicts"),
    "rescaled": ("the size of the initial weights", "with each layer's output scaled to size one"),
    "normalized": ("the size of the activations", "with each layer's output normalized"),
    "relu": ("saturating activations", "with ReLU in their place"),
    "clip": ("single large gradients", "with their norm clipped at 1"),
    "factor 1": ("a small constant factor", "without the constant factor"),
    "lr/": ("a learning rate that is too high", "with the rate divided by {factor}"),
    "lr*": ("a learning rate that is too low", "with the rate multiplied by {factor}"),
    "no penalty": ("a penalty on the weights", "without it"),
    "no weight decay": ("weight decay", "without it"),
    "less dropout": ("dropout", "with 0.1 at most"),
    "exchanged labels": ("labels of pairs the wrong way round", "with the labels exchanged"),
    "matched": ("targets in no order", "against the targets in the order that is nearest"),
    "scores*100": ("scores that stay small", "with scores a hundred times as large"),
    "scores*10": ("scores that stay small", "with scores ten times as large"),
    "weaker term": ("a term that outweighs the others", "with a hundredth of its gradient or less"),
    "standardized": ("inputs that are off scale", "with inputs of mean 0 and deviation 1"),
    "reference": ("a model that is too simple", "with a network of two hidden layers of 128 units"),
}
"""By the beginnings of their names, the cause that an experiment would cure and how it was tried, in a sentence."""

IN_A_TRAINER = {
    r"optimizer = (torch.optim.\w+)\(model.parameters\(\), lr=([\d.e-]+)\)": {
        "transformers": r"TrainingArguments(..., learning_rate=\2)",
        "lightning": r"return \1(self.parameters(), lr=\2)  # in configure_optimizers",
    },
    r"torch.optim.AdamW\(model.parameters\(\), lr=..., weight_decay=([\d.e-]+)\)": {
        "transformers": r"TrainingArguments(..., weight_decay=\1)",
        "lightning": r"return torch.optim.AdamW(self.parameters(), lr=..., weight_decay=\1)  # in configure_optimizers",
    },
    r"(?s)(?:loss.backward\(\)\n)?[\w.]*clip_grad_norm_\(model.parameters\(\), ([\d.]+)\)(?:\noptimizer.step\(\))?": {
        "transformers": r"TrainingArguments(..., max_grad_norm=\1)",
        "lightning": r"Trainer(..., gradient_clip_val=\1)",
    },
    r"warmup_steps = (\d+)": {"transformers": r"TrainingArguments(..., warmup_steps=\1)"},
    r"(?s)if val_loss < best:.*": {
        "transformers": 'TrainingArguments(..., eval_strategy="epoch", save_strategy="epoch", '
        "load_best_model_at_end=True)\nTrainer(..., callbacks=[EarlyStoppingCallback(early_stopping_patience=3)])",
        "lightning": 'Trainer(..., callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")])',
    },
}
"""By what a loop of one's own says, what a trainer that runs the loop is told in its place."""


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
    fixes = (fix if run is None else _in_a_trainer(fix, run.trainer) for fix in fixes)
    return Finding(
        f"training/{slug}", title, where, {"where": names, **rows}, tuple(fixes), tuple(Link(text) for text in chain)
    )


def _in_a_trainer(fix: Fix, trainer: str) -> Fix:
    for own, told in IN_A_TRAINER.items():
        if trainer in told and re.search(own, fix.code):
            return dataclasses.replace(fix, code=re.sub(own, told[trainer], fix.code))
    return fix


def wrong_call(static: StaticFacts, kind: str, slug: str, title: str, names: Iterable[str], fix: Fix) -> Finding | None:
    """Of a call that can't be meant, the first of its kind. title, names: with places for op, line and sizes."""
    call = next((c for c in static.wrong_calls if c.kind == kind), None)
    if call is None:
        return None
    said = title.format(*call.sizes, op=call.op, line=at_line(call.where), sizes=shape(call.sizes))
    blamed = [name.format(*call.sizes) for name in names]
    return finding(slug, said, [call.where.module or "", *blamed, call.op], [fix], place=call.where)


def _modules(run: TrainingRunFacts) -> set[str]:
    """The names by which a run knows modules and frozen parameters."""
    return (
        {layer.name for layer in run.layers}
        | {mode.module for mode in run.modes}
        | {parameter.name for parameter in run.frozen}
        | {name for units in (*run.start_units, *run.end_units) for name in (units.layer, units.module)}
        | {call.module for call in run.layer_calls}
    )


REREAD = {
    "written": "Reading a sample changes it: the dataset writes in place into what it holds, once more in each pass",
    "shared": "The rows of a batch are one and the same, whatever their labels: the dataset writes each sample into "
    "one tensor, and gives that",
}
"""By what reading samples again has shown."""


def tested_fix(title: str, code: str, experiment: Experiment | None, by: float = BETTER) -> Fix:
    """A suggestion with the losses of its experiment, where there was one. by: what counts as help."""
    if experiment is None:
        return Fix(title, code, None, {"why not": NOT_REPEATED})
    after: dict[str, Any] = {"loss as it is": experiment.end_as_is, "loss in the experiment": experiment.end_changed}
    after = {key: value if math.isfinite(value) else "not finite" for key, value in after.items()}
    if experiment.changed:
        after["steps"] = len(experiment.changed)
    if experiment.val_as_is is not None and experiment.val_changed is not None:
        validation = {
            "validation as it is": experiment.val_as_is,
            "validation in the experiment": experiment.val_changed,
        }
        after |= {key: value for key, value in validation.items() if math.isfinite(value)}
    no_help = "" if helps(experiment, by) else ", which does not help"
    return suggestion(title, code, in_words(experiment.what) + no_help, after)


def suggestion(title: str, code: str, experiment: str, numbers: Mapping[str, Any]) -> Fix:
    """A fix whose text was not run: what was, in words ("with gradients cleared"), and what was seen there."""
    return Fix(title, code, None, {EXPERIMENT: experiment, **numbers})


def in_words(experiment: str, batch: str = "its batch") -> str:
    """How an experiment of this name was made: "with the learning rate divided by 10"."""
    how = next((how for start, (_, how) in CURES.items() if experiment.startswith(start)), "with one thing changed")
    return how.format(factor=experiment[3:], batch=batch)


def submodule(name: str) -> str:
    """The code of a part of the model; "" is the model."""
    if all(key.isidentifier() for key in name.split(".")) or not name:
        return f"model.{name}".rstrip(".")
    return f"model.get_submodule({name!r})"


def tensor_of(numbers: Iterable[str]) -> str:
    """The code of a tensor of these numbers."""
    return f"torch.tensor([{', '.join(numbers)}])"


def pos_weight(weights: Sequence[str]) -> str:
    """What stands for the weights of 0 and 1 in a binary cross entropy."""
    return f"{float(weights[1]) / float(weights[0]):.3g}"


def confused(held_out: HeldOut) -> dict[str, list[str] | None]:
    """What is commonly predicted in a label's place, as evidence."""
    pairs = [f"{label} → {prediction}: {times}" for label, prediction, times in held_out.confusions]
    return {"commonest (label → prediction)": pairs or None}


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


def feature_name(feature: TellingFeature) -> str:
    """A feature of the inputs, at the start of a sentence."""
    if feature.kind == "number":
        return f"Number {feature.which} of the flattened input"
    return (
        f"{feature.kind.capitalize()} {feature.which} of the inputs{' (whether it occurs)' * (feature.kind == 'token')}"
    )
