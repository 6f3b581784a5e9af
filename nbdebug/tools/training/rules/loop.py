"""Rules for calls that are missing or come in the wrong order: observed as they happen, so there is no doubt."""

from __future__ import annotations

from collections.abc import Iterable

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import figures, percent
from nbdebug.tools.training.facts import ModuleMode, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules.signs import STALE, helps, rate_grows, rate_stays_low
from nbdebug.tools.training.rules.wording import finding, suggestion, tested_fix

CLIPPED = 0.1
"""Share of the scaler's steps in which gradients were clipped before they were unscaled."""
EVALUATED = 0.2
"""Share of the steps that ran in eval mode after a switch; less is a passing phase, such as a calibration."""
DIFFERS = 0.02
"""Relative difference of the validation loss between the modes; below that the mode makes no difference."""

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
    title="Gradients are cleared between backward and the optimizer's step.",
    symptom="The loss stays exactly where it is; the weights are the same after training as before.",
    cause="`optimizer.zero_grad()` comes after `loss.backward()`: the optimizer has no gradients to use.",
    confirm="Right before `optimizer.step()`, `next(model.parameters()).grad` is None or zero.",
    fix="The order is zero_grad, backward, step.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients_in_PyTorch.html",
)
def gradients_cleared_before_step(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    stale, first_steps = run.stale, min(run.stale.steps, 20)
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
    if run is None or run.scaler is None or run.scaler.clipped <= CLIPPED * run.scaler.steps:
        return None
    scaler = run.scaler
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
    title="Validation runs in train mode.",
    symptom="The validation loss is far worse than the training loss, or jumps about; it changes with the order and "
    "the size of the validation batches.",
    cause="Without `model.eval()` dropout drops and batch normalization uses the statistics of the validation batch, "
    "which may hold one class only; the running statistics take in the validation data as well.",
    confirm="Compute the validation loss twice, before and after `model.eval()`.",
    fix="Call `model.eval()` before the validation and `model.train()` after it.",
    reference="https://github.com/pytorch/tutorials/issues/1624",
)
def train_mode_in_eval(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    wrong = [m for m in run.modes if m.no_grad_train > m.no_grad_eval]
    if not wrong or run.mode_losses is None and not any("Norm" in m.kind for m in wrong):
        return None
    difference, after = "", {"why not": "there is no val_loader to compare the modes on"}
    if run.mode_losses is not None:
        train_mode, eval_mode = run.mode_losses
        if abs(train_mode - eval_mode) <= DIFFERS * max(abs(eval_mode), 1e-8):
            return None
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
    fix = tested_fix(
        "Step the scheduler after the optimizer, as often as it was built for.",
        "optimizer.step()\nscheduler.step()",
        run.experiments.get("level rate"),
    )
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
    if schedule.calls >= 0.9 * run.optimizer_steps and rate_grows(run) and helps(experiment):
        return (
            f"{schedule.kind} is stepped once a batch ({schedule.calls} times) and multiplies the learning rate each "
            f"time: it grew from {figures(run.rates[0])} to {figures(run.rates[-1])}; with the first rate throughout "
            "the same steps learn"
        )
    if rate_stays_low(run) and schedule.calls < 0.5 * run.optimizer_steps and helps(experiment):
        return (
            f"{schedule.kind} is built for {schedule.planned or 'far more'} steps and was stepped {schedule.calls} "
            f"times: the learning rate never rose above {figures(max(run.rates))} (its peak is "
            f"{figures(schedule.peak)})"
        )
    return ""
