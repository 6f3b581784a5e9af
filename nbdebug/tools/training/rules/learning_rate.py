"""Rules over the size of the steps: a learning rate that is too high or too low, a schedule, a batch, a gradient."""

from __future__ import annotations

import math
import statistics

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count, figures, percent
from nbdebug.tools.training.facts import TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import at_line, finding, tested_fix
from nbdebug.tools.training.static_facts import LossCall

SMALL_CLIP = 0.05
"""A norm below what recipes clip at (0.1 to 10)."""

LEFT = 0.1
"""A run that has come down to this share of its first loss has learned, whatever its schedule."""
FAR = 20.0
"""A jump this far, and above the first loss, is a finding even if the loss comes back at once."""
LASTS = 0.05
"""A jump from which the loss is back after less than this share of the run is left alone."""


@rule(
    code="training/lr-too-high",
    title="The learning rate is too high.",
    symptom="The loss jumps to a multiple of what it was and does not come back, swings, or becomes NaN.",
    cause="Each step is longer than the valley is wide: it ends higher up on the other side. How long a step may be "
    "depends on the curvature, which warm-up, normalization and the batch size change.",
    confirm="Run the same training with a tenth of the rate: the loss falls steadily. Healthy updates are between "
    "0.01% and 3% of the weights.",
    fix="Divide `lr` by 10 until the loss falls steadily; warm up over the first hundreds of steps; clip gradients "
    "against single jumps.",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def lr_too_high(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    best = signs.best_of(run, "lr/") if run is not None else None
    if run is None or best is None or not signs.rate_may_be_high(run):
        return None
    name, experiment = best
    if not signs.helps(experiment, signs.MUCH_BETTER) or experiment.end_changed > 0.9 * signs.first_loss(run):
        return None
    rate, factor = max(run.rates, default=0.0), float(name.partition("/")[2])
    worst = max(signs.finite(run.losses), default=math.nan)
    end = "a loss that is not finite" if signs.not_finite(run) else f"a loss of {figures(signs.last_loss(run))}"
    return finding(
        "lr-too-high",
        f"lr={rate:g} is too high: the loss goes from {figures(signs.first_loss(run))} to {figures(worst)} and ends "
        f"with {end}; with lr={rate / factor:g} the same steps end at {figures(experiment.end_changed)}",
        ["lr", "optimizer"],
        [tested_fix("Lower the learning rate.", _with_rate(run, rate / factor, 1 / factor), experiment)],
        run=run,
        phase="optimizer",
        place=run.places.get("optimizer"),
        step=_first_jump(run),
        evidence={"largest loss": worst, **_updates(run)},
    )


def _with_rate(run: TrainingRunFacts, rate: float, factor: float) -> str:
    """The code for another rate; of several optimizers, each keeps its own in proportion."""
    if run.optimizers == 1:
        return f"optimizer = torch.optim.{run.optimizer}(model.parameters(), lr={rate:g})"
    return f"for optimizer in optimizers:\n    for group in optimizer.param_groups:\n        group['lr'] *= {factor:g}"


def _first_jump(run: TrainingRunFacts) -> int | None:
    """The callback's number of the first loss at twice the first one's."""
    start = abs(signs.first_loss(run))
    jumps = (i for i, v in enumerate(run.losses) if not math.isfinite(v) or v > signs.DIVERGES * start)
    at = next(jumps, None)
    return None if at is None else run.step_numbers[at]


def _updates(run: TrainingRunFacts) -> dict[str, dict[str, float]]:
    return {"update over weight, by layer": {layer.name: layer.update for layer in run.layers[:8]}}


@rule(
    code="training/lr-too-low",
    title="The learning rate is too low: the weights hardly move.",
    symptom="The loss is the same as in the first step, to three digits, though every parameter has a gradient.",
    cause="A step changes the weights by learning rate times gradient (with Adam by about the rate itself). Where that "
    "is a millionth of a weight, a run of a thousand steps changes nothing.",
    confirm="Healthy updates are between 0.01% and 3% of the weights that they change.",
    fix="Multiply `lr` by 10 until the loss falls within some dozens of steps. SGD with momentum usually needs 0.01 to "
    "0.1, Adam 1e-3 (3e-4 for transformers).",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def lr_too_low(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and _warms_up_for_long(run):
        return _warm_up(run)
    best = signs.best_of(run, "lr*") if run is not None else None
    if run is None or best is None:
        return None
    name, experiment = best
    small, limit = signs.updates_are_small(run), signs.least_gain(run)
    if not signs.helps(experiment, limit) or not signs.helps_validation(experiment, 1.0 if small else 0.5):
        return None
    rate, factor = max(run.rates, default=0.0), float(name.partition("*")[2])
    fixes = [tested_fix("Raise the learning rate.", _with_rate(run, rate * factor, factor), experiment, limit)]
    call = next((c for c in facts.static.loss_calls if _is_far(c)), None)
    if call is not None:
        low, high, *start = map(figures, (call.target_low or 0.0, call.target_high or 0.0, call.low, call.high))
        why = f"Scale the targets: they are {low} to {high}, and the outputs start at {start[0]} to {start[1]}."
        fixes += [Fix(why, "target = (target - train_mean) / train_std  # output * train_std + train_mean later")]
    what, clip = f"lr={rate:g} is too low", run.regularization.get("clip", 1.0)
    if clip < SMALL_CLIP and not signs.adapts(run) and statistics.median(run.gradient_norms) > 0.99 * clip:
        what = f"Gradients are clipped to a norm of {figures(clip)}, which is too small"
        fixes = [Fix("Clip at 1, as most do.", "clip_grad_norm_(model.parameters(), 1.0)"), *fixes]
    most = percent(max(signs.updates(run))).removeprefix("under ")
    return finding(
        "lr-too-low",
        f"{what}: a step changes no layer's weights by more than {most} of their size, and "
        f"the loss stays at {figures(signs.last_loss(run))}; with lr={rate * factor:g} the same "
        f"steps end at {figures(experiment.end_changed)}",
        ["lr", "optimizer", *["clip_grad_norm_"] * ("clipped" in what)],
        fixes,
        run=run,
        phase="optimizer",
        place=run.places.get("optimizer"),
        evidence=_updates(run),
    )


def _is_far(call: LossCall) -> bool:
    """The nearest of the targets is at ten times the outputs with which the run starts."""
    if call.target_low is None or call.target_high is None or call.classes is not None:
        return False
    nearest = min(abs(call.target_low), abs(call.target_high))
    return call.target_low * call.target_high > 0 and nearest > 10 * max(abs(call.low), abs(call.high))


def _warms_up_for_long(run: TrainingRunFacts) -> bool:
    """A schedule that is stepped once a batch, as it should be, and is still at the foot of its rise at the end."""
    schedule = run.schedule
    return (
        schedule is not None
        and signs.rate_stays_low(run)
        and run.rates[-1] >= max(run.rates)
        and schedule.calls >= 0.9 * run.optimizer_steps
        and signs.helps(run.experiments.get("level rate"))
    )


def _warm_up(run: TrainingRunFacts) -> Finding:
    assert run.schedule is not None, "the rule has looked"
    peak, experiment = run.schedule.peak, run.experiments["level rate"]
    return finding(
        "lr-too-low",
        f"The warm-up is longer than the run: after {count(len(run.losses), 'step')} {run.schedule.kind} is still at a "
        f"rate of {figures(run.rates[-1])}, and its peak is {figures(peak)}. The loss stays at "
        f"{figures(experiment.end_as_is)}; at the peak's rate throughout the same steps end at "
        f"{figures(experiment.end_changed)}",
        ["scheduler", "lr", "optimizer"],
        [tested_fix("Warm up for a tenth of the run.", f"warmup_steps = {max(1, len(run.losses) // 10)}", experiment)],
        run=run,
        phase="optimizer",
        evidence={"last rate": run.rates[-1], "peak": peak, "steps": len(run.losses)},
    )


@rule(
    code="training/plateau",
    title="The learning rate was cut while the model was still learning.",
    symptom="The loss improves for some epochs and then stays at a high value; the learning rate in the log has "
    "shrunk by orders of magnitude.",
    cause="A scheduler lowered the rate too early: ReduceLROnPlateau in mode 'min' on a score that should rise, a "
    "patience shorter than the noise, milestones counted in another unit.",
    confirm="Continue the training with the first rate: the loss keeps falling.",
    fix="Give ReduceLROnPlateau mode='max' for accuracies and scores, and a patience of several evaluations.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
)
def plateau(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.has_room(run, LEFT) or not signs.helps(run.experiments.get("level rate")):
        return None
    at = signs.rate_fell(run)
    if at is None:
        at = next((i for i, rate in enumerate(run.rates) if rate < 0.3 * max(run.rates)), None)
    if at is None or not run.rates[-1] < 0.3 * max(run.rates):
        return None
    experiment, schedule = run.experiments["level rate"], run.schedule
    metrics = schedule.metrics if schedule is not None else ()
    rising = len(metrics) > 2 and schedule is not None and schedule.mode == "min" and metrics[-1] > metrics[0]
    why = (
        f"; mode='min' waits for a fall, and the value that it receives rises from {figures(metrics[0])} to "
        f"{figures(metrics[-1])}"
        if rising
        else ""
    )
    title, code = (
        (
            "Tell the scheduler that the score should rise.",
            "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode='max', patience=5)",
        )
        if rising
        else ("Cut the rate later.", "# later milestones, a longer patience, or no schedule")
    )
    return finding(
        "plateau",
        f"{schedule.kind if schedule is not None else 'The schedule'} cut the learning rate from "
        f"{figures(max(run.rates))} to {figures(run.rates[-1])} while the model was still learning{why}. The loss "
        f"stays at {figures(experiment.end_as_is)}; with the first rate it ends at {figures(experiment.end_changed)}",
        ["scheduler", "lr", *(["mode"] if rising else [])],
        [tested_fix(title, code, experiment)],
        run=run,
        step=run.step_numbers[at],
        evidence={
            "first rate": max(run.rates),
            "last rate": run.rates[-1],
            "values passed to the scheduler": list(metrics[:12]) or None,
        },
    )


@rule(
    code="training/loss-spike",
    title="The loss jumps at a single step.",
    symptom="The loss falls smoothly, jumps by orders of magnitude at one step, and takes a good part of the run to "
    "come back; with the same order of the data always at the same step.",
    cause="Nearly always one batch: samples out of scale, broken targets, a corrupt file. One step on it moves the "
    "weights far away. Without such a batch: a restart of the schedule, or Adam after a phase of tiny gradients.",
    confirm="Compute the loss of that step's batch with the initial weights, and that of the batches around it.",
    fix="Look at the samples of that batch and repair or drop them; clip gradients as a guard.",
    reference="https://github.com/stanford-crfm/mistral/issues/115",
)
def loss_spike(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.spike is None:
        return None
    spike, when = run.spike, signs.outlier_batch(run)
    lasts = spike["recovers after"] > max(3, LASTS * spike["of"])
    far = spike["loss"] > max(FAR * spike["before"], abs(signs.first_loss(run)))
    if not when or not (lasts or far):
        return None
    own, others = spike[f"its loss at the {when}"], spike["its neighbours'" + " at the end" * (when == "end")]
    fix = tested_fix(
        "Leave the batch out, or repair its samples; clip gradients as a guard.",
        f"batch = list(train_loader)[{spike.get('batch', spike['index'])}]  # look at it\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        run.experiments.get("without the batch"),
    )
    return finding(
        "loss-spike",
        f"The loss jumps from {figures(spike['before'])} to {figures(spike['loss'])} at step {spike['step']}: the "
        f"batch of that step is unlike the others (with the weights from the {when} of the run its loss is "
        f"{figures(own)}, and {figures(others)} for its neighbours)",
        ["train_loader"],
        [fix],
        run=run,
        step=spike["step"],
        evidence={
            "loss at the jump": spike["loss"],
            "loss before": spike["before"],
            "steps until it is back": spike["recovers after"],
            "batch": spike.get("batch"),
            f"its loss at the {when}": own,
            f"its neighbours' loss at the {when}": others,
        },
    )


@rule(
    code="training/exploding-gradients",
    title="Gradients grow on the way back through the network.",
    symptom="The loss starts far above that of guessing, or jumps from batch to batch; the gradient's norm is in the "
    "hundreds or more.",
    cause="Each layer, or each time step of a sequence, multiplies the gradient. A factor of 1.2, applied forty times, "
    "is more than a thousand. Recurrence without a squashing activation, a wide initialization, or missing "
    "normalization do it.",
    confirm="Print the norm of the gradient at the output of each layer, or each time step, from last to first: it "
    "grows.",
    fix="Bound the recurrence (tanh, a gate, nn.GRU), initialize for a gain of one, normalize, and clip: "
    "`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`.",
    reference="https://arxiv.org/abs/1211.5063",
)
def exploding_gradients(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and run.unclipped is not None:
        return _clipped_too_early(run, *run.unclipped)
    if run is None or not signs.explodes(run):
        return None
    back, forth = signs.gradient_growth(run), signs.activation_growth(run)
    experiment = run.experiments.get("clip")
    if not signs.explodes_at_start(run) and signs.lower_rate_helps(run) or "weaker term" in run.experiments:
        return None  # the cause is the learning rate, or one of the loss's terms
    if max(back[0], forth[0]) <= signs.GROWTH and not signs.helps(experiment):
        return None
    what, (factor, name) = ("gradients", back) if back[0] >= forth[0] else ("activations", forth)
    name = name or (run.layers[0].name if run.layers else "")
    calls = sum(call.module == name for call in run.layer_calls)
    path = f"through {count(calls, 'call')} of `{name}`" if calls > 1 else f"up to `{name}`"
    norms = signs.finite(run.gradient_norms)
    if signs.explodes_at_start(run):
        title = (
            f"Gradients explode: the first gradient norm is {figures(run.start_gradient)}, "
            f"{figures(run.start_gradient / max(run.weight_norm, 1e-12))} times that of the weights; {what} grow by a "
            f"factor of {figures(factor)} {path}"
        )
    else:
        title = (
            f"Gradients explode during the run: the largest gradient norm is {figures(max(norms))}, the median "
            f"{figures(statistics.median(norms))}"
        )
    fix = tested_fix(
        "Clip the gradients, and bound what is applied again and again (tanh, a gate, normalization).",
        "loss.backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
        experiment,
    )
    return finding(
        "exploding-gradients",
        title,
        [name],
        [fix],
        run=run,
        step=run.step_numbers[0] if run.step_numbers else None,
        evidence={
            "largest gradient norm": max(norms, default=None),
            "median gradient norm": statistics.median(norms) if norms else None,
            "growth of gradients": back[0],
            "growth of activations": forth[0],
        },
    )


def _clipped_too_early(run: TrainingRunFacts, limit: float, place: Where) -> Finding | None:
    """Clipping before backward, where larger gradients than its limit came to the optimizer."""
    norms = signs.finite(run.gradient_norms)
    above = sum(norm > limit for norm in norms)
    if not above:
        return None
    return finding(
        "exploding-gradients",
        f"Gradients are clipped before `backward()`, when there are none{at_line(place)}: {count(above, 'step')} of "
        f"{len(norms):,} had a norm above the limit of {limit:g}, the largest {figures(max(norms))}",
        ["clip_grad_norm_", *run.stale.functions],
        [
            Fix(
                "Clip between backward and step.",
                f"loss.backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), {limit:g})\noptimizer.step()",
            )
        ],
        run=run,
        place=place,
        evidence={"limit": limit, "norm when it is clipped": 0.0, "largest gradient norm": max(norms)},
    )
