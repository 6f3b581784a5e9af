"""Rules for calls that are missing or come in the wrong order: seen as they happen, no doubt about them."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.rules.signs import helps, rate_stays_low
from nbdebug.tools.training.rules.wording import run_finding as finding
from nbdebug.tools.training.rules.wording import short_number as short
from nbdebug.tools.training.rules.wording import tried

STALE = 0.5
"""Share of the optimizer's steps that used gradients with older ones in them. Accumulation clears them in each."""
CLIPPED = 0.1
"""Share of the scaler's steps in which gradients were clipped before they were unscaled."""
EVALUATED = 0.2
"""Share of the steps that ran in eval mode after a switch; less is a passing phase, such as a calibration."""
DIFFERS = 0.02
"""Relative difference of the validation loss between the modes; below that the mode makes no odds."""


@rule(
    code="training/zero-grad-missing",
    title="Gradients are never cleared: each step adds to those of all steps before.",
    symptom="The loss falls at first, then swings ever more widely or diverges, at a learning rate that is modest.",
    cause="`backward()` adds to `.grad`. Without `optimizer.zero_grad()` the gradient is the sum over the whole run so "
    "far: a momentum of one, which nothing ever brakes.",
    confirm="Before `loss.backward()`, look at `next(model.parameters()).grad`: it should be None or zero.",
    fix="Call `optimizer.zero_grad()` once before each backward, or, when gradients are accumulated on purpose, once "
    "after each `optimizer.step()`.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients_in_PyTorch.html",
)
def zero_grad_missing(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.stale.share <= STALE or run.stale.steps < 3:
        return None
    functions = run.stale.functions
    at = f" in `{functions[0]}`" if functions else ""
    title = (
        f"Gradients are never cleared{at}: in {run.stale.share:.0%} of the optimizer's steps the old ones were "
        "still there when backward began"
    )
    fix = tried(
        "Clear the gradients before each backward.",
        "optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
        run.trials.get("zero_grad"),
    )
    return finding(
        run,
        "zero-grad-missing",
        title,
        ["optimizer", *functions],
        [fix],
        place=run.places.get("backward"),
        evidence={
            "optimizer's steps": run.stale.steps,
            "share with old gradients": run.stale.share,
            "parameters": list(run.stale.names[:8]),
        },
    )


@rule(
    code="training/gradients-cleared-before-step",
    title="Gradients are cleared between backward and the optimizer's step.",
    symptom="The loss stays exactly where it is; the weights are the same after training as before.",
    cause="`optimizer.zero_grad()` stands behind `loss.backward()`: the optimizer steps on nothing.",
    confirm="Right before `optimizer.step()`, `next(model.parameters()).grad` is None or zero.",
    fix="The order is zero_grad, backward, step.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients_in_PyTorch.html",
)
def gradients_cleared_before_step(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.stale.emptied < 3 or run.stale.emptied < 0.9 * min(run.stale.steps, 20):
        return None
    functions = run.stale.functions
    title = (
        f"Gradients are cleared between backward and the optimizer's step: in {run.stale.emptied} of the first "
        f"{min(run.stale.steps, 20)} steps the optimizer found none, and the weights stay as they are"
    )
    fix = tried(
        "Clear first, then backward, then step.",
        "optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
        run.trials.get("zero_grad"),
    )
    return finding(
        run,
        "gradients-cleared-before-step",
        title,
        ["zero_grad", "optimizer", *functions],
        [fix],
        place=run.places.get("backward"),
        evidence={"steps without gradients": run.stale.emptied},
    )


@rule(
    code="training/clip-before-unscale",
    title="Gradients are clipped while they still carry GradScaler's scale.",
    symptom="With mixed precision the model hardly learns, without it the same script does. The norm that "
    "`clip_grad_norm_` returns is in the thousands at every step.",
    cause="`scaler.scale(loss).backward()` leaves gradients that are 65,536 times too large. Clipped to 1 and then "
    "unscaled by `scaler.step`, they are 65,536 times too small.",
    confirm="Print what `clip_grad_norm_` returns: it is the scale times what it is without the scaler.",
    fix="Call `scaler.unscale_(optimizer)` between backward and clipping.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)
def clip_before_unscale(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.scaler is None or run.scaler.clipped <= CLIPPED * run.scaler.steps:
        return None
    scaler = run.scaler
    title = (
        f"Gradients are clipped before they are unscaled: from a norm of {short(scaler.before)} to "
        f"{short(scaler.after)} while they carry the scale {scaler.scale:g}, in {scaler.clipped} of "
        f"{scaler.steps} steps; what the optimizer gets has norm {short(scaler.after / scaler.scale)}"
    )
    fix = tried(
        "Unscale first, then clip.",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {scaler.after:.3g})\nscaler.step(optimizer)\n"
        "scaler.update()",
        run.trials.get("unscaled first"),
    )
    return finding(
        run,
        "clip-before-unscale",
        title,
        ["clip_grad_norm_", "unscale_", *run.stale.functions],
        [fix],
        place=run.places.get("backward"),
        evidence={
            "norm before clipping": scaler.before,
            "norm after": scaler.after,
            "scale": scaler.scale,
            "steps": scaler.steps,
            "clipped too early": scaler.clipped,
        },
    )


@rule(
    code="training/eval-mode-in-training",
    title="The model trains in eval mode.",
    symptom="After a validation the training loss falls faster than before and the gap to validation widens; dropout "
    "does nothing, batch normalisation uses its running statistics.",
    cause="`model.eval()` stays in force until `model.train()` is called. A validation that does not switch back "
    "leaves the rest of the run in eval mode; so does a pretrained model that comes in eval mode.",
    confirm="`assert model.training` before each forward of the training loop.",
    fix="Call `model.train()` at the end of the validation, or at the top of the loop over batches.",
    reference="https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval",
)
def eval_mode_in_training(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    wrong = [m for m in run.modes if not m.frozen and m.evaluated > EVALUATED * (m.trained + m.evaluated)]
    switched = [m for m in wrong if m.switched is not None]
    whole = wrong and len(wrong) == len([m for m in run.modes if not m.frozen])
    started = [m for m in wrong if m.from_start and m.trained == 0] if whole else []
    # Batch normalisation alone in eval mode, in a model in train mode, is a known way to fine-tune.
    if not switched and not (started and (run.root_evaluated or any("Norm" not in m.kind for m in started))):
        return None
    blamed = switched or started
    own = [f for f in run.functions.get("evaluation", ()) if f not in run.functions.get("training", ())]
    by = f" `{own[0]}` left it so" if own else " It was left so by a `model.eval()`"
    since = f"from step {blamed[0].switched} on" if switched else "from the first step on"
    layers = ", ".join(f"`{m.module}` ({m.kind})" for m in blamed[:3])
    by = by if switched else " nothing has called `model.train()`"
    title = f"The model trains in eval mode {since}:{by}. It concerns {layers}"
    fix = tried(
        "Go back to train mode after each validation, or at the top of each pass.",
        "model.train()",
        run.trials.get("train mode"),
        by=1.02,
    )
    return finding(
        run,
        "eval-mode-in-training",
        title,
        [*own, "train", *run.stale.functions, *(m.module for m in blamed)],
        [fix],
        step=blamed[0].switched,
        place=run.places.get("evaluation" if own else "training"),
        evidence={"steps in train mode": blamed[0].trained, "steps in eval mode": blamed[0].evaluated},
    )


@rule(
    code="training/train-mode-in-eval",
    title="Validation runs in train mode.",
    symptom="The validation loss is far worse than training's, or jumps about; it changes with the order and the size "
    "of the validation batches.",
    cause="Without `model.eval()` dropout drops and batch normalisation uses the statistics of the validation batch, "
    "which may hold one class only; the running statistics take the validation data in as well.",
    confirm="Compute the validation loss twice, before and after `model.eval()`.",
    fix="`model.eval()` before the validation and `model.train()` after it.",
    reference="https://github.com/pytorch/tutorials/issues/1624",
)
def train_mode_in_eval(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    wrong = [m for m in run.modes if m.unlearnt_train > m.unlearnt_eval]
    if not wrong or run.modes_on_val is None and not any("Norm" in m.kind for m in wrong):
        return None
    said = ""
    if run.modes_on_val is not None:
        training, evaluated = run.modes_on_val
        if abs(training - evaluated) <= DIFFERS * max(abs(evaluated), 1e-8):
            return None
        said = f": the validation loss reads {short(training)} where eval mode gives {short(evaluated)}"
    own = [f for f in run.functions.get("evaluation", ()) if f not in run.functions.get("training", ())]
    at = f" `{own[0]}`" if own else ""
    fix = Fix(
        "Evaluate in eval mode.",
        "model.eval()\n...\nmodel.train()",
        run.modes_on_val is not None or None,
        {"validation in train mode": run.modes_on_val[0], "validation in eval mode": run.modes_on_val[1]}
        if run.modes_on_val
        else {"why not": "there is no val_loader to compare the modes on"},
    )
    names = ", ".join(f"`{m.module}` ({m.kind})" for m in wrong[:3])
    return finding(
        run,
        "train-mode-in-eval",
        f"Validation{at} runs in train mode, with {names}{said}",
        [*own, *(m.module for m in wrong), "val_loader"],
        [fix],
        place=run.places.get("evaluation"),
        evidence={"calls in train mode": wrong[0].unlearnt_train},
    )


@rule(
    code="training/scheduler-order",
    title="The learning rate scheduler is stepped at the wrong time.",
    symptom="A warning that `lr_scheduler.step()` came before `optimizer.step()`; or a learning rate that is used up "
    "after a few batches, or never gets off the ground.",
    cause="A scheduler counts its own calls. Stepped before the optimizer, its first rate is never used; stepped once "
    "a batch though it was built in epochs, it runs out early; stepped once an epoch though it was built in "
    "batches, it stays at its beginning.",
    confirm="Print `scheduler.get_last_lr()` after each step and compare with the plan.",
    fix="After `optimizer.step()`: once a batch for OneCycleLR and for warm-ups, once an epoch for schedules built in "
    "epochs.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
)
def scheduler_order(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.schedule is None:
        return None
    schedule, said = run.schedule, ""
    per_batch = schedule.calls >= 0.9 * run.optimizer_steps and run.passes > 1
    trial = run.trials.get("level rate")
    if schedule.foreign:
        said = (
            f"{schedule.kind} changes the learning rate of another optimizer than the one that steps: it was built "
            "before the optimizer was made anew"
        )
    elif schedule.before_first:
        said = (
            f"{schedule.kind}.step() is called before the optimizer's first step, so that every rate comes one "
            "step early and the first is never used"
        )
    elif per_batch and schedule.kind != "ReduceLROnPlateau" and (helps(trial) or schedule.planned == run.passes):
        said = (
            f"{schedule.kind} is stepped once a batch ({schedule.calls} times in {run.passes} passes): the "
            f"learning rate went from {short(max(run.rates))} to {short(run.rates[-1])}"
        )
    elif rate_stays_low(run) and schedule.calls < 0.5 * run.optimizer_steps and helps(trial):
        said = (
            f"{schedule.kind} is built for {schedule.planned or 'far more'} steps and was stepped {schedule.calls} "
            f"times: the learning rate never rose above {short(max(run.rates))} (it was to reach "
            f"{short(schedule.peak)})"
        )
    if not said:
        return None
    fix = tried(
        "Step the scheduler after the optimizer, as often as it was built for.",
        "optimizer.step()\nscheduler.step()",
        trial,
    )
    return finding(
        run,
        "scheduler-order",
        said,
        ["scheduler", "lr", *run.stale.functions],
        [fix],
        evidence={
            "scheduler's steps": schedule.calls,
            "optimizer's steps": run.optimizer_steps,
            "passes over train_loader": run.passes,
            "planned for": schedule.planned,
            "first rate": run.rates[0] if run.rates else None,
            "last rate": run.rates[-1] if run.rates else None,
        },
    )
