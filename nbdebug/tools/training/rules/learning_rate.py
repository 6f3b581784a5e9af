"""Rules for the size of the steps: a learning rate that is too high or too low, a schedule, a batch, a gradient."""

from __future__ import annotations

import math
import statistics

from nbdebug.registry import rule
from nbdebug.report import Finding
from nbdebug.tools.training.facts import Experiment, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules import signs as signs_data
from nbdebug.tools.training.rules.wording import run_finding as finding
from nbdebug.tools.training.rules.wording import short_number as short
from nbdebug.tools.training.rules.wording import tried

FAR = 20.0
"""A jump this far, and above the first loss, is told even if the loss comes back at once."""
LASTS = 0.05
"""A jump from which the loss is back after less than this share of the run is left alone."""


def _best(run: TrainingRunFacts, kind: str) -> tuple[str, Experiment] | None:
    """The trial of this kind that ends lowest."""
    found = [(name, t) for name, t in run.trials.items() if name.startswith(kind) and math.isfinite(t.end_changed)]
    return min(found, key=lambda item: item[1].end_changed) if found else None


@rule(
    code="training/lr-too-high",
    title="The learning rate is too high.",
    symptom="The loss jumps to a multiple of what it was and does not come back, swings, or becomes NaN.",
    cause="Each step is longer than the valley is wide: it lands higher up on the other side. How long a step may be "
    "is set by the curvature, which warm-up, normalisation and smaller batches change.",
    confirm="The same run with a tenth of the rate falls steadily. Healthy updates are between a ten-thousandth and a "
    "thirtieth of the weights.",
    fix="Divide `lr` by 10 until the loss falls steadily; warm up over the first hundreds of steps; clip gradients "
    "against single jumps.",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def lr_too_high(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    best = _best(run, "lr/") if run is not None else None
    if run is None or best is None or not signs.rate_in_doubt(run):
        return None
    name, trial = best
    if not signs.helps(trial, signs.MUCH_BETTER) or trial.end_changed > 0.9 * signs.first(run):
        return None
    rate, factor = max(run.rates, default=0.0), float(name.partition("/")[2])
    worst = max(signs.finite(run.losses), default=math.nan)
    end = "a loss that is not finite" if signs.blew_up(run) else f"a loss of {short(signs.last(run))}"
    title = (
        f"lr={rate:g} is too high: the loss goes from {short(signs.first(run))} to {short(worst)} and ends with "
        f"{end}; with lr={rate / factor:g} the same steps end at {short(trial.end_changed)}"
    )
    fix = tried("Lower the learning rate.", _with_rate(run, rate / factor, 1 / factor), trial)
    return finding(
        run,
        "lr-too-high",
        title,
        ["lr", "optimizer"],
        [fix],
        phase="optimizer",
        place=run.places.get("optimizer"),
        step=_first_jump(run),
        evidence={
            "largest loss": worst,
            "update over weight, by layer": {la.name: la.update for la in run.layers[:12]},
        },
    )


def _with_rate(run: TrainingRunFacts, rate: float, factor: float) -> str:
    """What to write for another rate; of several optimizers, each keeps its own in proportion."""
    if run.optimizers == 1:
        return f"optimizer = torch.optim.{run.optimizer}(model.parameters(), lr={rate:g})"
    return f"for optimizer in optimizers:\n    for group in optimizer.param_groups:\n        group['lr'] *= {factor:g}"


def _first_jump(run: TrainingRunFacts) -> int | None:
    """The callback's number of the first loss at twice the first one's."""
    start = abs(signs.first(run))
    at = next((i for i, v in enumerate(run.losses) if not math.isfinite(v) or v > signs.SPREADS * start), None)
    return None if at is None else run.numbers[at]


@rule(
    code="training/lr-too-low",
    title="The learning rate is too low: the weights hardly move.",
    symptom="The loss is the one of the first step, to three digits, though every parameter has a gradient.",
    cause="A step changes the weights by learning rate times gradient (with Adam by about the rate itself). Where that "
    "is a millionth of a weight, a run of a thousand steps changes nothing.",
    confirm="Healthy updates are between a ten-thousandth and a thirtieth of the weights they change.",
    fix="Multiply `lr` by 10 until the loss falls within some dozens of steps. SGD with momentum wants about 0.1 to "
    "0.01, Adam 1e-3 (3e-4 for transformers).",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def lr_too_low(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    best = _best(run, "lr*") if run is not None else None
    if run is None or best is None or not signs.slow(run) or not signs.helps(best[1], signs.MUCH_BETTER):
        return None
    name, trial = best
    rate, factor = max(run.rates, default=0.0), float(name.partition("*")[2])
    updates = [la.update for la in run.layers if math.isfinite(la.update)]
    title = (
        f"lr={rate:g} is too low: a step moves no layer by more than {max(updates):.1e} of its weights, and the "
        f"loss stays at {short(signs.last(run))}; with lr={rate * factor:g} the same steps end at "
        f"{short(trial.end_changed)}"
    )
    fix = tried("Raise the learning rate.", _with_rate(run, rate * factor, factor), trial)
    return finding(
        run,
        "lr-too-low",
        title,
        ["lr", "optimizer"],
        [fix],
        phase="optimizer",
        place=run.places.get("optimizer"),
        evidence={"update over weight, by layer": {la.name: la.update for la in run.layers[:12]}},
    )


@rule(
    code="training/plateau",
    title="The learning rate was cut while the model was still learning.",
    symptom="The loss improves for some epochs and then goes flat at a high value; the learning rate in the log has "
    "shrunk by orders of magnitude.",
    cause="A scheduler took the rate down too early: ReduceLROnPlateau in mode 'min' on a score that ought to rise, a "
    "patience shorter than the noise, milestones counted in another unit.",
    confirm="Train on with the first rate: the loss goes on falling.",
    fix="Give ReduceLROnPlateau mode='max' for accuracies and scores, and a patience of several evaluations.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
)
def plateau(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    at = signs.rate_fell(run) if run is not None else None
    if run is None or at is None or not signs.helps(run.trials.get("level rate")):
        return None
    trial, schedule = run.trials["level rate"], run.schedule
    name = schedule.kind if schedule is not None else "the schedule"
    metrics = schedule.metrics if schedule is not None else ()
    rising = len(metrics) > 2 and schedule is not None and schedule.mode == "min" and metrics[-1] > metrics[0]
    why = (
        (
            f"mode='min' waits for a fall, and the value it is given rises from {short(metrics[0])} to "
            f"{short(metrics[-1])}: "
        )
        if rising
        else ""
    )
    title = (
        f"{name} cut the learning rate from {short(max(run.rates))} to {short(run.rates[-1])} while the model was "
        f"still learning: {why}the loss stays at {short(trial.end_as_is)}, and with the first rate it ends at "
        f"{short(trial.end_changed)}"
    )
    code = (
        "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode='max', patience=5)"
        if rising
        else "# later milestones, a longer patience, or no schedule"
    )
    fix = tried("Tell the scheduler that the score should rise." if rising else "Cut the rate later.", code, trial)
    return finding(
        run,
        "plateau",
        title,
        ["scheduler", "lr", *(["mode"] if rising else [])],
        [fix],
        step=run.numbers[at],
        evidence={
            "rate at first": max(run.rates),
            "rate at the end": run.rates[-1],
            "given to the scheduler": list(metrics[:12]),
        },
    )


@rule(
    code="training/loss-spike",
    title="The loss jumps at a single step.",
    symptom="The loss falls smoothly, jumps by orders of magnitude at one step, and takes a good part of the run to "
    "come back; with the same order of the data always at the same step.",
    cause="Nearly always one batch: samples out of scale, broken targets, a corrupt file. One step on it moves the "
    "weights far away. Without such a batch: a restart of the schedule, or Adam after a quiet time.",
    confirm="Take the batch of that step and compute its loss with the weights of the start, beside its neighbours'.",
    fix="Look at the samples of that batch and repair or drop them; clip gradients as a guard.",
    reference="https://github.com/stanford-crfm/mistral/issues/115",
)
def loss_spike(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.spike is None:
        return None
    spike = run.spike
    at = signs_data.odd_batch(run)
    lasts = spike["recovers after"] > max(3, LASTS * spike["of"])
    far = spike["loss"] > max(FAR * spike["before"], abs(signs.first(run)))
    if not at or not (lasts or far):
        return None
    trial = run.trials.get("without the batch")
    title = (
        f"The loss jumps from {short(spike['before'])} to {short(spike['loss'])} at step {spike['step']}: the "
        f"batch of that step is unlike the others (with the weights of the run's {at} its loss is "
        f"{short(spike[f'its loss at the {at}'])}, its neighbours' {short(spike[NEIGHBOURS[at]])})"
    )
    fix = tried(
        "Leave the batch out, or repair its samples; clip gradients as a guard.",
        f"batch = list(train_loader)[{spike.get('batch', spike['index'])}]  # look at it\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        trial,
    )
    return finding(
        run,
        "loss-spike",
        title,
        ["train_loader"],
        [fix],
        step=spike["step"],
        evidence={k: v for k, v in spike.items() if k != "said"},
    )


NEIGHBOURS = {"start": "its neighbours'", "end": "its neighbours' at the end"}


@rule(
    code="training/exploding-gradients",
    title="Gradients grow on their way back through the network.",
    symptom="The loss starts far above that of guessing, or jumps from batch to batch; the gradient's norm is in the "
    "hundreds or more.",
    cause="Each layer, or each moment of a sequence, multiplies what passes through. A factor above one, applied forty "
    "times, is a thousand. Recurrence without a squashing activation, an init that is too wide, or missing "
    "normalisation do it.",
    confirm="Norm of the gradient at the output of each layer, or each moment, from the last to the first: it grows.",
    fix="Bound the recurrence (tanh, a gate, nn.GRU), initialise for a gain of one, normalise, and clip: "
    "`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`.",
    reference="https://arxiv.org/abs/1211.5063",
)
def exploding_gradients(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.explodes(run):
        return None
    back, forth = signs.amplifies(run), signs.grows(run)
    trial = run.trials.get("clip")
    if not signs.explodes_at_start(run) and signs.lower_rate_cures(run):
        return None  # it was the learning rate
    if max(back[0], forth[0]) <= signs.GROWS and not signs.helps(trial):
        return None
    factor, name = back if back[0] >= forth[0] else forth
    name = name or (run.layers[0].name if run.layers else "")
    times = sum(p.module == name for p in run.flow)
    way = f"through {times} calls of `{name}`" if times > 1 else f"up to `{name}`"
    norms = signs.finite(run.gradient_norms)
    over = short(run.start_gradient / max(run.weight_norm, 1e-12))
    what = "gradients" if back[0] >= forth[0] else "activations"
    title = (
        f"Gradients explode: the first one's norm is {short(run.start_gradient)}, {over} times that of the "
        f"weights; {what} grow by a factor of {short(factor)} {way}"
    )
    fix = tried(
        "Clip the gradients, and bound what is applied again and again (tanh, a gate, normalisation).",
        "loss.backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
        trial,
    )
    return finding(
        run,
        "exploding-gradients",
        title,
        [name],
        [fix],
        step=run.numbers[0] if run.numbers else None,
        evidence={
            "largest gradient norm": max(norms, default=None),
            "median gradient norm": statistics.median(norms) if norms else None,
            "gradient at the first call over the last": back[0],
            "activation likewise": forth[0],
        },
    )
