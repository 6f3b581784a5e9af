"""Rules for the loop: calls that are missing or come in the wrong order, observed as they happen, so that there is no
doubt."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from nbdebug import verdict
from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, percent
from nbdebug.tools.training.facts import ModuleMode, ScalerFact, Schedule, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    finding,
    submodule,
    suggestion,
    tested_fix,
    wrong_call,
)
from nbdebug.tools.training.rules.signs import STALE, helps
from nbdebug.verdict import carried_scale

CLIPPED = 0.1
"""Share of the scaler's steps in which gradients were clipped before they were unscaled."""
UNUSED = 9
"""Of the first twenty calls of backward on batches of their own, those whose gradients are cleared unused."""
EVALUATED = 0.2
"""Share of the steps that ran in eval mode after a switch; less is a passing phase, such as a calibration."""
DIFFERS = 0.02
"""Relative difference of the validation loss between the modes; below that the mode makes no difference."""

AGAIN = 0.9
"""The share of the loss at which the run ends with the weights that its steps leave, where validation gains, too: some
go on from averages on purpose, and gain by them."""

LONG = 100
"""Steps in which a copy that gives targets is updated, as a rule."""
SLOPE = 0.3
"""A correlation of rewards and their factors whose sign is sure."""

PLAIN_STEP = "optimizer.zero_grad()\nloss.backward()\noptimizer.step()"


@rule(
    code="training/zero-grad-missing",
    title="Gradients are never cleared: each step adds to the gradients of all earlier steps.",
    symptom="The loss falls at first, then swings more and more or diverges, at a modest learning rate.",
    cause="`backward()` adds to `.grad`. Without `optimizer.zero_grad()` the gradient is the sum over the whole run so "
    "far: a momentum of one, which nothing slows down.",
    confirm="Before `loss.backward()`, print `next(model.parameters()).grad`: it should be None or zero.",
    fix="Call `optimizer.zero_grad()` once before each backward; to accumulate gradients on purpose, once after each "
    "`optimizer.step()`.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients_in_PyTorch.html",
)
def zero_grad_missing(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.stale.share <= STALE or run.stale.steps < 3:
        return None
    functions = run.stale.functions
    where = f" in `{functions[0]}`" if functions else ""
    fix = tested_fix("Clear the gradients before each backward.", PLAIN_STEP, run.experiments.get("zero_grad"))
    return finding(
        "zero-grad-missing",
        f"Gradients are never cleared{where}: in {percent(run.stale.share)} of the optimizer's steps the old ones were "
        "still there when backward began",
        ["optimizer", *functions],
        [fix],
        run=run,
        place=run.places.get("backward"),
        evidence={
            "optimizer's steps": run.stale.steps,
            "share with old gradients": run.stale.share,
            "parameters": list(run.stale.names[:8]),
        },
    )


@rule(
    code="training/gradients-cleared-before-step",
    title="Gradients are cleared before the optimizer uses them.",
    symptom="The loss stays exactly where it is; the weights are the same after training as before.",
    cause="`optimizer.zero_grad()` comes between `loss.backward()` and `optimizer.step()`, or there is no step at all: "
    "it was forgotten, stands in a branch that is never taken, or Lightning's `automatic_optimization` is False.",
    confirm="Right before `optimizer.step()`, `next(model.parameters()).grad` is None or zero.",
    fix="The order is zero_grad, backward, step.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients_in_PyTorch.html",
)
def gradients_cleared_before_step(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    stale, first_steps = run.stale, min(run.stale.steps, 20)
    title, name = "", next(iter(run.idle), "optimizer")
    if run.backwards >= 3 and not run.moved:
        title = f"No optimizer steps: of {run.backwards:,} calls of backward, none changes a weight"
    elif len(run.losses) >= 3 and not run.moved:
        title = f"The loop only computes losses ({len(run.losses):,}): it calls no backward, and no optimizer steps"
    elif run.idle:
        title = f"`{name}` never steps: what it holds is called in each step, and stays as it is"
    elif run.starved:
        name, title = run.starved[0], f"`{run.starved[0]}` steps and never finds a gradient: no loss of its own has any"
    elif run.unused > UNUSED and run.backwards > 2 * run.optimizer_steps > 0:
        title = (
            f"The optimizer steps {count(run.optimizer_steps, 'time')} in {run.backwards:,} calls of backward: the "
            "gradients of the others are cleared unused"
        )
    if title:
        return finding(
            "gradients-cleared-before-step",
            title,
            ["step", name, *stale.functions],
            [Fix("Step the optimizer after each backward.", PLAIN_STEP.replace("optimizer", name))],
            run=run,
            place=run.places.get("optimizer" if run.unused > UNUSED and not run.idle else "backward")
            or run.places.get("training"),
            evidence={"calls of backward": run.backwards, "steps of an optimizer": run.optimizer_steps},
        )
    if stale.empty_steps < 3 or stale.empty_steps < 0.9 * first_steps:
        return None
    fix = tested_fix("Clear first, then backward, then step.", PLAIN_STEP, run.experiments.get("zero_grad"))
    return finding(
        "gradients-cleared-before-step",
        f"Gradients are cleared between backward and the optimizer's step: in {stale.empty_steps} of the first "
        f"{first_steps} steps the optimizer had no gradients, and the weights did not change",
        ["zero_grad", "optimizer", *stale.functions],
        [fix],
        run=run,
        place=run.places.get("backward"),
        evidence={"steps without gradients": stale.empty_steps},
    )


@rule(
    code="training/optimizer-recreated",
    title="The optimizer is made anew in each step.",
    symptom="The loss jumps about near where it began; a smaller learning rate makes it better, and not good.",
    cause="An optimizer that is made inside of the step, or of the loop over the batches, has no state: each step is "
    "the first one. Adam's first step moves every weight by the full learning rate, however small its gradient is; "
    "momentum adds up nothing.",
    confirm="Print `len(optimizer.state)` before `optimizer.step()`: it is 0 in each step.",
    fix="Make the optimizer once, before the loop, and pass it to the function that makes the step.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#constructing-it",
)
def optimizer_recreated(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.made_anew(run):
        return None
    kind, renewals, steps = run.renewed
    fix = tested_fix(
        "Make it once, before the loop.",
        f"optimizer = torch.optim.{kind}(model.parameters(), lr=...)  # before the loop over the epochs",
        run.experiments.get("one optimizer"),
    )
    return finding(
        "optimizer-recreated",
        f"`{kind}` is made anew: {renewals:,} times in {count(steps, 'step')} it begins with no state. "
        "What it averages over steps, as momentum, is lost each time",
        ["optimizer", kind, *run.stale.functions],
        [fix],
        run=run,
        phase="optimizer",
        place=run.places.get("made anew"),
        evidence={"optimizers": renewals + 1, "steps": steps},
    )


@rule(
    code="training/clip-before-unscale",
    title="Gradients are clipped while they still carry GradScaler's scale.",
    symptom="With mixed precision the model hardly learns, without it the same script does. The norm that "
    "`clip_grad_norm_` returns is in the thousands at every step.",
    cause="`scaler.scale(loss).backward()` leaves gradients that are 65,536 times too large. Clipped to 1 and then "
    "unscaled by `scaler.step`, they are 65,536 times too small.",
    confirm="Print what `clip_grad_norm_` returns, with and without the scaler: they differ by the scale.",
    fix="Call `scaler.unscale_(optimizer)` between backward and clipping.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)
def clip_before_unscale(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    scaler = None if run is None else run.scaler
    if run is None or scaler is None or scaler.clipped <= CLIPPED * scaler.steps:
        return None if run is None or scaler is None else _never_unscaled(run, scaler)
    fix = tested_fix(
        "Unscale first, then clip.",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {scaler.norm_after:.3g})\nscaler.step(optimizer)\n"
        "scaler.update()",
        run.experiments.get("unscaled first"),
    )
    return finding(
        "clip-before-unscale",
        f"Gradients are clipped before they are unscaled, in {scaler.clipped} of {scaler.steps} steps: from a norm of "
        f"{figures(scaler.norm_before)} to {figures(scaler.norm_after)} while they carry the scale "
        f"{figures(scaler.scale)}, so that the optimizer gets a norm of {figures(scaler.norm_after / scaler.scale)}",
        ["clip_grad_norm_", "unscale_", *run.stale.functions],
        [fix],
        run=run,
        place=run.places.get("backward"),
        evidence={
            "norm before clipping": scaler.norm_before,
            "norm after clipping": scaler.norm_after,
            "scale": scaler.scale,
            "steps": scaler.steps,
            "steps clipped too early": scaler.clipped,
        },
    )


@rule(
    code="training/eval-mode-in-training",
    title="The model trains in eval mode.",
    symptom="After a validation the training loss falls faster than before and the gap to validation widens; dropout "
    "does nothing, batch normalization uses its running statistics.",
    cause="`model.eval()` stays in force until `model.train()` is called. A validation that does not switch back "
    "leaves the rest of the run in eval mode; so does a pretrained model that was loaded in eval mode.",
    confirm="Put `assert model.training` before each forward of the training loop.",
    fix="Call `model.train()` at the end of the validation, or at the top of the loop over batches.",
    reference="https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval",
)
def eval_mode_in_training(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    wrong = [m for m in run.modes if not m.frozen and m.eval_steps > EVALUATED * (m.train_steps + m.eval_steps)]
    switched = [m for m in wrong if m.switched_at is not None]
    whole = wrong and len(wrong) == len([m for m in run.modes if not m.frozen])
    started = [m for m in wrong if m.from_start and m.train_steps == 0] if whole else []
    # Batch normalization alone in eval mode, in a model in train mode, is a known way to fine-tune.
    if not switched and not (started and (run.root_evaluated or any("Norm" not in m.kind for m in started))):
        return None
    blamed, own = switched or started, _evaluation_functions(run)
    since = f"from step {blamed[0].switched_at} on" if switched else "from the first step on"
    why = (
        "nothing calls `model.train()`"
        if not switched
        else f"`{own[0]}` leaves it in eval mode"
        if own
        else "after a `model.eval()`, nothing calls `model.train()`"
    )
    fix = tested_fix(
        "Go back to train mode after each validation, or at the top of each pass.",
        "model.train()",
        run.experiments.get("train mode"),
        by=1.02,
    )
    return finding(
        "eval-mode-in-training",
        f"The model trains in eval mode {since}: {why}. This affects {_module_list(blamed)}",
        [*own, "train", *run.stale.functions, *(m.module for m in blamed)],
        [fix],
        run=run,
        step=blamed[0].switched_at,
        place=run.places.get("evaluation" if own else "training"),
        evidence={"steps in train mode": blamed[0].train_steps, "steps in eval mode": blamed[0].eval_steps},
    )


def _evaluation_functions(run: TrainingRunFacts) -> list[str]:
    """The user's functions that call the model without gradients, and never with them."""
    training = run.functions.get("training", ())
    return [name for name in run.functions.get("evaluation", ()) if name not in training]


def _module_list(modes: Iterable[ModuleMode]) -> str:
    return ", ".join(f"`{m.module}` ({m.kind})" for m in list(modes)[:3])


@rule(
    code="training/train-mode-in-eval",
    title="Validation, or a frozen part, runs in train mode.",
    symptom="The validation loss is far worse than the training loss, or jumps about; it changes with the order and "
    "the size of the validation batches.",
    cause="Without `model.eval()` dropout drops and batch normalization uses the statistics of the validation batch, "
    "which may hold one class only; the running statistics take in the validation data as well. `model.train()` wakes "
    "a frozen part of the model, too: a teacher's answers are noise then.",
    confirm="Compute the validation loss twice, before and after `model.eval()`.",
    fix="Call `model.eval()` before the validation and `model.train()` after it.",
    reference="https://github.com/pytorch/tutorials/issues/1624",
)
def train_mode_in_eval(facts: TrainingFacts) -> Finding | None:
    title = "`{op}` drops {:.0%} in eval mode as well{line}: the function is not told of the mode"
    fix = Fix("Tell it: it drops in train mode only.", "F.dropout(x, p, training=self.training)")
    if drops := wrong_call(facts.static, "drops in eval mode", "train-mode-in-eval", title, ["forward"], fix):
        return drops
    run = facts.run
    if run is None:
        return None
    wrong = [m for m in run.modes if m.no_grad_train > m.no_grad_eval]
    if not wrong or run.mode_losses is None and not any("Norm" in m.kind for m in wrong):
        return _frozen_in_train_mode(run)
    difference, after = "", {"why not": "there is no val_loader to compare the modes on"}
    if run.mode_losses is not None:
        train_mode, eval_mode = run.mode_losses
        if abs(train_mode - eval_mode) <= DIFFERS * max(abs(eval_mode), 1e-8):
            return _frozen_in_train_mode(run)
        difference = f": the validation loss is {figures(train_mode)}, in eval mode {figures(eval_mode)}"
        after = {"validation in train mode": train_mode, "validation in eval mode": eval_mode}  # type: ignore[dict-item]
    own = _evaluation_functions(run)
    where = f" in `{own[0]}`" if own else ""
    title, code = "Evaluate in eval mode.", "model.eval()\n...\nmodel.train()"
    fix = Fix(title, code, None, after) if not difference else suggestion(title, code, "in eval mode", after)
    return finding(
        "train-mode-in-eval",
        f"Validation{where} runs in train mode, which matters for {_module_list(wrong)}{difference}",
        [*own, *(m.module for m in wrong), "val_loader"],
        [fix],
        run=run,
        place=run.places.get("evaluation"),
        evidence={"calls in train mode": wrong[0].no_grad_train},
    )


def _frozen_in_train_mode(run: TrainingRunFacts) -> Finding | None:
    """Where eval mode there helps, on training and on validation batches."""
    tried, frozen = run.experiments.get(signs.FROZEN_EVALUATED), signs.frozen_in_train_mode(run)
    if tried is None or not frozen or not helps(tried) or not signs.helps_validation(tried, signs.BETTER):
        return None
    paths = [m.module.split(".") for m in frozen]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*(path[:-1] for path in paths)))
    part = ".".join(name for name, *_ in alike)
    code = "\n".join(f"{submodule(name)}.eval()" for name in ([part] if part else [m.module for m in frozen]))
    return finding(
        "train-mode-in-eval",
        f"{f'`{part}`' if part else 'A part'} is not trained and runs in train mode, which matters for "
        f"{_module_list(frozen)}: the loss ends at {figures(tried.end_as_is)}, and with it in eval mode at "
        f"{figures(tried.end_changed)}",
        [part, *(m.module for m in frozen), "train"],
        [tested_fix("Leave it in eval mode.", f"model.train()\n{code}", tried)],
        run=run,
        place=run.places.get("training"),
    )


@rule(
    code="training/weights-not-restored",
    title="Training goes on from the weights of an evaluation.",
    symptom="Behind each evaluation the training loss is back at that of earlier steps, and the run hardly gets ahead.",
    cause="Averaged weights (EMA, SWA), or those of a checkpoint, are put into the model to evaluate it, and its own "
    "are not put back; or a second exchange brings the averages in once more. Or the weights are drawn anew in each "
    "pass.",
    confirm="Copy a weight behind the last step of a pass, and compare it before the first step of the next.",
    fix="Put the model's own weights back behind the evaluation, or evaluate a copy.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html",
)
def weights_not_restored(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    tried = facts.experiment("weights kept")
    if run is not None and (drawn := _drawn_anew(run)):
        return drawn
    if run is None or not run.set_back or tried is None:
        return None
    if not helps(tried, signs.BETTER if tried.val_changed is None else AGAIN) or not signs.helps_validation(tried):
        return None
    own, times = _evaluation_functions(run), len(run.set_back)
    title = "Put the model's own weights back behind the evaluation."
    code = (
        "state = copy.deepcopy(model.state_dict())\n...  # averaged weights in, evaluate\nmodel.load_state_dict(state)"
    )
    return finding(
        "weights-not-restored",
        f"Training goes on from other weights than its steps left, {count(times, 'time')}, each behind an evaluation "
        f"(first before step {run.set_back[0]:,}). The loss ends at {figures(tried.end_as_is)}; with the weights that "
        f"the steps left, at {figures(tried.end_changed)}",
        [*own, "evaluation", *run.stale.functions],
        [tested_fix(title, code, tried)],
        run=run,
        step=run.set_back[0],
        place=run.places.get("evaluation"),
        evidence={"evaluations that leave other weights": times},
    )


@rule(
    code="training/wrong-policy-gradient",
    title="The loss of a policy does not make what was rewarded more probable.",
    symptom="The reward falls, or stays at that of a policy which draws at random.",
    cause="Optimizers minimize: the loss is `-(log_prob * advantage).mean()`. Without the minus sign, or with the "
    "difference of reward and baseline the wrong way round, rewarded actions become rarer; without the product all "
    "that was drawn becomes more (or less) probable, whatever it brought. An advantage that keeps the graph of the "
    "values lets the policy's loss move the critic, too.",
    confirm="Compare the log-probability of the action with the highest reward before and after a step on its batch.",
    fix="`loss = -(log_prob * advantage.detach()).mean()`, with `advantage = reward - baseline`.",
    reference="https://spinningup.openai.com/en/latest/spinningup/rl_intro3.html",
)
def wrong_policy_gradient(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and run.trains_critic:
        return _trained_by_policy(run)
    if run is None or run.reward is None or run.reward_slope is None or run.reward_slope < 0:
        return None
    (name, values), slope = run.reward, run.reward_slope
    if not name or len(values) < 8 or 0 < slope < SLOPE or not verdict.of_rewards(name, values):
        return None
    went = " to ".join(figures(value) for value in verdict.ends_of(values))
    what = "takes the log-probabilities of all that was drawn alike, whatever it brought"
    if slope:
        what = f"makes rewarded actions rarer: it multiplies their log-probabilities by more (correlation {slope:.2f})"
    return finding(
        "wrong-policy-gradient",
        f"The policy's loss {what}. `{name}`, the reward, went from {went}",
        ["loss", "log_prob", *run.stale.functions],
        [Fix("Weight them by their advantage, with a minus sign.", "loss = -(log_prob * (reward - baseline)).mean()")],
        run=run,
        place=run.places.get("backward"),
        evidence={"correlation of rewards with factors in the loss": slope, "backward passes": run.backwards},
    )


def _trained_by_policy(run: TrainingRunFacts) -> Finding:
    return finding(
        "wrong-policy-gradient",
        "The policy's loss trains the critic as well: the advantage by which it multiplies log-probabilities still has "
        "the graph of the values, so that these are moved to where the policy's loss is low, and not to the returns",
        ["loss", "advantage", "log_prob", *run.stale.functions],
        [Fix("Take the advantage as a number.", "policy_loss = -(log_prob * advantage.detach()).mean()")],
        run=run,
        place=run.places.get("backward"),
    )


@rule(
    code="training/backward-never-called",
    title="A module's own `backward` is never called.",
    symptom="A layer that is to change the gradient (turn its sign, scale it, let it pass a rounding) changes nothing.",
    cause="Autograd calls the `backward` of a torch.autograd.Function. That of an nn.Module is a method like any "
    "other: the gradient goes through the operations of `forward`.",
    confirm="Print a line in this `backward`: it never appears.",
    fix="Write a torch.autograd.Function with both, and call its `apply` in the module's forward.",
    reference="https://docs.pytorch.org/docs/stable/notes/extending.html",
)
def backward_never_called(facts: TrainingFacts) -> Finding | None:
    title = "`{0}` ({1}) has a `backward` of its own, which nobody calls{line}: autograd goes through its forward"
    code = "class Turn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x.view_as(x)\n"
    code += "    @staticmethod\n    def backward(ctx, grad): return -grad"
    fix = Fix("Move it into a torch.autograd.Function, and call its `apply`.", code)
    return wrong_call(facts.static, "own backward", "backward-never-called", title, ["{1}"], fix)


@rule(
    code="training/target-never-updated",
    title="The copy of the model that gives its targets is never updated.",
    symptom="The loss is small, and the agent acts as if it saw one step ahead only.",
    cause="The targets are a reward and what a copy of the network says of the next state. The copy still has its "
    "first values: what is further off than one step never reaches the model.",
    confirm="Compare a weight of the copy before and after the training.",
    fix="Copy the model's weights into it every few hundred steps, or a small share of them in each.",
    reference="https://docs.pytorch.org/tutorials/intermediate/reinforcement_q_learning.html",
)
def target_never_updated(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.still is None or len(run.losses) < LONG or not run.still[2] > 2 * run.still[1]:
        return None
    name, known, against = run.still
    code = f"{name}.load_state_dict(model.state_dict())  # every few hundred steps"
    return finding(
        "target-never-updated",
        f"`{name}`, a copy of the model that gives the targets, has not changed in {count(len(run.losses), 'step')}. "
        f"The loss ends at {figures(known)}; with the model's own weights in `{name}` it is {figures(against)}",
        [name, "target", *run.stale.functions],
        [Fix("Copy the weights of the model into it from time to time.", code)],
        run=run,
        place=run.places.get("backward"),
        evidence={"loss with the copy as it is": known, "with the weights of the model's end": against},
    )


@rule(
    code="training/ends-ignored",
    title="The targets of Q-learning go on over the end of an episode.",
    symptom="Values rise far above what can be earned, the loss climbs again after a fall, and states near an end look "
    "as good as all others.",
    cause="The target is a reward and what is expected of the next state. After the last step of an episode nothing "
    "can be expected any more, and the flag that says so is not used.",
    confirm="Print the value of states just before an end: it should be about their reward.",
    fix="Multiply what is expected by `1 - done`. (An episode that was only cut off, because time was up, goes on.)",
    reference="https://docs.pytorch.org/tutorials/intermediate/reinforcement_q_learning.html",
)
def ends_ignored(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.over_ends is None:
        return None
    over = run.over_ends
    name = over.name or "done"
    marks = f"`{name}`" if over.name else "a flag of the batch that the loss does not use"
    return finding(
        "ends-ignored",
        f"The targets go on over the end of an episode: {marks} marks {count(over.ends, 'end')} among {over.rows:,} "
        f"transitions, and {figures(over.mean)} is added to their rewards on average for what would follow",
        [name, "target", "train_loader", *run.stale.functions],
        [Fix("Expect nothing after an end.", f"target = reward + gamma * following * (1 - {name}.float())")],
        run=run,
        place=over.where,
        evidence={"ends": over.ends, "transitions": over.rows, "added at ends": over.mean},
    )


@rule(
    code="training/scheduler-order",
    title="The learning rate scheduler is stepped at the wrong time.",
    symptom="A warning that `lr_scheduler.step()` came before `optimizer.step()`; or a learning rate that is used up "
    "after a few batches, or never rises.",
    cause="A scheduler counts its own calls. Stepped before the optimizer, its first rate is never used; stepped once "
    "a batch though it was built in epochs, it runs out early; stepped once an epoch though it was built in "
    "batches, it stays at its beginning.",
    confirm="Print `scheduler.get_last_lr()` after each step and compare it with the plan.",
    fix="Step it after `optimizer.step()`: once a batch for OneCycleLR and for warm-ups, once an epoch for schedules "
    "built in epochs.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
)
def scheduler_order(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    title = None if run is None else _schedule_fault(run)
    if run is None or run.schedule is None or not title:
        return None
    advice = (
        "Step the scheduler after the optimizer, as often as it was built for.",
        "optimizer.step()\nscheduler.step()",
    )
    if signs.rate_passes_peak(run):
        advice = (
            "End the warm-up at the optimizer's rate.",
            "LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup))",
        )
    if _is_squared(run, run.schedule):
        advice = "Return the factor alone.", "LambdaLR(optimizer, lambda epoch: 0.95**epoch)"
    fix = tested_fix(*advice, run.experiments.get("level rate"))
    return finding(
        "scheduler-order",
        title,
        ["scheduler", "lr", *run.stale.functions],
        [fix],
        run=run,
        evidence={
            "scheduler's steps": run.schedule.calls,
            "optimizer's steps": run.optimizer_steps,
            "passes over train_loader": run.passes,
            "planned steps": run.schedule.planned,
            "first rate": run.rates[0] if run.rates else None,
            "last rate": run.rates[-1] if run.rates else None,
        },
    )


def _schedule_fault(run: TrainingRunFacts) -> str:
    """What is wrong with the calls of the scheduler, in a sentence; "" where nothing is."""
    schedule, experiment = run.schedule, run.experiments.get("level rate")
    if schedule is None:
        return ""
    if schedule.foreign:
        return (
            f"{schedule.kind} changes the learning rate of an optimizer that never steps: the optimizer was created "
            "again after the scheduler was built"
        )
    if schedule.before_first:
        return (
            f"{schedule.kind}.step() is called before the optimizer's first step: every rate comes one step early and "
            "the first is never used"
        )
    per_batch = schedule.calls >= 0.9 * run.optimizer_steps and run.passes > 1
    falls = len(run.rates) > 1 and run.rates[-1] < 0.5 * max(run.rates)
    by_epoch = falls and (helps(experiment) or schedule.planned == run.passes)
    if per_batch and schedule.kind != "ReduceLROnPlateau" and by_epoch:
        return (
            f"{schedule.kind} is stepped once a batch ({schedule.calls} times in {run.passes} passes): the learning "
            f"rate went from {figures(max(run.rates))} to {figures(run.rates[-1])}"
        )
    if per_batch and schedule.planned == run.passes and signs.rate_swings(run) and "Cosine" in schedule.kind:
        return (
            f"{schedule.kind} is built for {schedule.planned} steps, as many as there are passes, and is stepped "
            f"{schedule.calls} times: the learning rate goes up and down, and ends at {figures(run.rates[-1])}"
        )
    if signs.rate_passes_peak(run) and helps(experiment):
        return (
            f"{schedule.kind} takes the learning rate beyond the {figures(schedule.peak)} of the optimizer, to "
            f"{figures(run.rates[-1])} at the end: nothing limits its warm-up. With the former throughout "
            "the same steps learn"
        )
    if schedule.calls >= 0.9 * run.optimizer_steps and signs.rate_grows(run) and helps(experiment):
        return (
            f"{schedule.kind} is stepped once a batch ({schedule.calls} times) and multiplies the learning rate each "
            f"time: it grew from {figures(run.rates[0])} to {figures(run.rates[-1])}; with the first rate throughout "
            "the same steps learn"
        )
    if _is_squared(run, schedule) and helps(experiment):
        return (
            f"The function of {schedule.kind} returns a learning rate, and is taken for a factor: the optimizer's "
            f"{figures(schedule.peak)} times about the same is {figures(run.rates[0])}, and never more"
        )
    if signs.rate_stays_low(run) and schedule.calls < 0.5 * run.optimizer_steps and helps(experiment):
        return (
            f"{schedule.kind} is built for {schedule.planned or 'far more'} steps and was stepped {schedule.calls} "
            f"times: the learning rate never rose above {figures(max(run.rates))} (its peak is "
            f"{figures(schedule.peak)})"
        )
    return ""


def _is_squared(run: TrainingRunFacts, schedule: Schedule) -> bool:
    rates, square = run.rates, schedule.peak**2
    falls = bool(rates) and rates[0] == max(rates)
    return schedule.kind == "LambdaLR" and falls and abs(rates[0] - square) < 0.01 * square < 0.01 * schedule.peak


@rule(
    code="training/accumulation-scale",
    title="Accumulated gradients are not those of the mean over their batches.",
    symptom="The learning rate that was right without accumulation makes the loss jump, or hardly move; it has to be "
    "changed with the number of batches that are added up.",
    cause="`backward()` adds gradients up. A loss that is a mean over its batch is to be divided by the number of "
    "batches of a step; undivided, or divided by another number, the steps are that many times too long.",
    confirm="Print the gradient's norm before `optimizer.step()` with 1 batch and with k: it is about the same.",
    fix="`(loss / k).backward()`, with the k of `if (i + 1) % k == 0: optimizer.step()`.",
    reference="https://huggingface.co/blog/gradient_accumulation",
)
def accumulation_scale(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.accumulation is None or signs.adapts(run):
        return None
    every, divisor, _ = run.accumulation
    by_count = divisor == round(divisor) != 1 and divisor != every  # no weight of a term, such as 0.3
    best = signs.best_of(run, "lr/")
    too_long = best is not None and signs.rate_may_be_high(run) and helps(best[1], signs.MUCH_BETTER)
    if not by_count and not (divisor == 1 and every >= 4 and too_long):
        return None
    what = f"divided by {divisor:g}" if by_count else "not divided"
    end = f"; with {best[0]} the same steps end at {figures(best[1].end_changed)}" if best and too_long else ""
    return finding(
        "accumulation-scale",
        f"A step adds up the gradients of {every} batches, and the mean loss of each is {what}: the steps are "
        f"{figures(every / divisor)} times those of the mean{end}",
        ["loss", "backward", "lr", *run.stale.functions],
        [Fix("Divide by the number of batches of a step.", f"(loss / {every}).backward()")],
        run=run,
        place=run.places.get("backward"),
        evidence={"batches of a step": every, "loss divided by": divisor},
    )


def _never_unscaled(run: TrainingRunFacts, scaler: ScalerFact) -> Finding | None:
    """precision/unscale-order, with what the experiment shows."""
    if not scaler.carried:
        return None
    found = carried_scale(scaler.carried, scaler.norm_before, scaler.scale)
    fix = tested_fix(found.fixes[0].title, found.fixes[0].code, run.experiments.get("unscaled first"))
    place = run.places.get("optimizer", found.where)
    return dataclasses.replace(found, where=dataclasses.replace(place, phase="optimizer"), fixes=(fix,))


def _drawn_anew(run: TrainingRunFacts) -> Finding | None:
    """New weights in each pass. In a study of several trainings each has passes of its own, and an optimizer."""
    gaps = {b - a for a, b in itertools.pairwise((0, *run.drawn_anew))}
    if len(run.drawn_anew) < 2 or len(gaps) != 1 or gaps != {run.batches_per_pass} or run.passes < 3:
        return None
    return finding(
        "weights-not-restored",
        f"Each pass begins with new weights ({count(len(run.drawn_anew), 'time')}, first at step {run.drawn_anew[0]}), "
        "which have nothing of those that the step before had left, and all that was learned is lost",
        ["init", "apply", *run.stale.functions],
        [Fix("Draw the weights once, before the loop.", "model.apply(init)  # before the loop over passes")],
        run=run,
        step=run.drawn_anew[0],
        place=run.places.get("training"),
        evidence={"steps with new weights": list(run.drawn_anew[:20])},
    )
