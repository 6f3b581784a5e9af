"""The rules: from the facts before and during a training to the causes, most likely first.

One fault gives one finding. Calls that are wrong or missing, data that is wrong and losses that do not fit the output
are causes; a loss that stays, rises or overfits follows from them. So where a cause of the first kind is found, its
consequences become a part of its chain; among the others the first of ORDER is kept.

    data            what the loaders give
    labels          labels that are wrong, out of range, ignored, or beside other samples
    losses          outputs and losses that do not fit each other
    layers          parameters that are not trained though they should be, initial weights, single layers
    batch_mixing    samples that depend on each other, or stand beside the targets of others
    loop            the calls that the loop makes
    learning_rate   the size of its steps
    overfitting     what the run reaches
    signs           what the course of a run shows, before anything is tried
    findings        findings and fixes in sentences
"""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rules
from nbdebug.report import Finding, Link
from nbdebug.tools.training.facts import TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import (
    batch_mixing,
    data,
    labels,
    layers,
    learning_rate,
    loop,
    losses,
    overfitting,
    signs,
)

DECLARED = (layers, batch_mixing, data, losses, labels, loop, learning_rate, overfitting)
"""Where the rules stand: to import these modules is to declare them."""

ORDER = (
    "label-out-of-range",
    "detached-graph",
    "parameters-not-in-optimizer",
    "zero-grad-missing",
    "gradients-cleared-before-step",
    "optimizer-recreated",
    "clip-before-unscale",
    "unscale-order",
    "wrong-policy-gradient",
    "target-never-updated",
    "ends-ignored",
    "weights-not-restored",
    "wrong-loss-shape",
    "double-softmax",
    "missing-log-softmax",
    "wrong-output-activation",
    "inverted-mask",
    "loss-sign",
    "batch-mixing",
    "backward-never-called",
    "input-dropped",
    "target-wraps",
    "wrong-softmax-dim",
    "frozen-parameters",
    "eval-mode-in-training",
    "train-mode-in-eval",
    "running-statistics",
    "preprocessing-mismatch",
    "shifted-twice",
    "leakage",
    "same-seed-workers",
    "input-not-normalized",
    "unshuffled-data",
    "exchanged-labels",
    "class-ignored",
    "label-noise",
    "accumulation-scale",
    "scheduler-order",
    "loss-spike",
    "zero-loss",
    "bad-init",
    "dead-relu",
    "exploding-gradients",
    "saturated-activation",
    "vanishing-gradients",
    "plateau",
    "lr-too-high",
    "lr-too-low",
    "over-regularized",
    "model-too-large-for-data",
    "overfit",
    "class-imbalance",
    "underfit",
)
"""Most telling first: what is certain once it is seen, then what an experiment has shown, then what remains."""

FOLLOWS = frozenset(ORDER[ORDER.index("loss-spike") :])
"""What may be a consequence: it is folded into a cause that stands before it in ORDER."""


WEAK = frozenset({"underfit", "overfit", "model-too-large-for-data", "vanishing-gradients", "class-imbalance"})
"""Causes that may be consequences of another one."""


def name_all(facts: TrainingFacts) -> list[Finding]:
    """The findings, most likely first, with consequences folded into their cause."""
    checks = [layers.frozen_in_run, *(r.check for r in rules("training"))]
    findings = list({f.code: f for check in reversed(checks) if (f := check(facts)) is not None}.values())
    findings.sort(key=lambda f: ORDER.index(slug(f)) if slug(f) in ORDER else len(ORDER))
    if not findings:
        return []
    first, *others = findings
    causes = [f for f in others if slug(f) not in FOLLOWS]
    consequences = tuple(Link(f"also: {f.title}", f.where) for f in others if slug(f) in FOLLOWS)
    return [dataclasses.replace(first, chain=(*first.chain, *consequences)), *causes]


def is_weak(run: TrainingRunFacts, finding: Finding) -> bool:
    """Whether it may be a consequence of a cause that only an intervention shows."""
    clipped = run.experiments.get("clip")
    little = (
        slug(finding) == "exploding-gradients" and clipped is not None and not signs.helps(clipped, signs.MUCH_BETTER)
    )
    return slug(finding) in WEAK or little


def slug(finding: Finding) -> str:
    """The part of a code behind the chapter."""
    return finding.code.partition("/")[2]
