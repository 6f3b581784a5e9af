"""check_diffusion(): what a denoiser predicts beside what its sampler takes it for; its schedule; its loss by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.tensors import tensors_in
from nbdebug.report import Fix, Report, RuledOut, Table
from nbdebug.text import count, figures, percent
from nbdebug.tools.quality.compare import kept
from nbdebug.tools.quality.rules import Evidence, findings_of

TYPES = {"epsilon": "the noise", "sample": "the clean data", "v_prediction": "the velocity v"}
NAMES = {name: name for name in TYPES} | {
    **dict.fromkeys(("eps", "noise"), "epsilon"),
    **dict.fromkeys(("x0", "x_start"), "sample"),
    **dict.fromkeys(("v", "velocity"), "v_prediction"),
}
KNOWN, APART = 0.6, 0.6
"""A type is what the model predicts where it leaves no more than the first of that target's variance, and no more than
the second of what it leaves of each other target's: a model that has learnt nothing leaves all of it."""
BINS, MOST = 10, 64
"""Bins of time steps; clean items that are used."""
MIN_SNR = 5.0
"""Of the weights min(SNR, 5) (Hang et al. 2023, arXiv 2303.09556)."""
PASSES, CLEAR, DISTINCT = 8, 0.05, 6.0
"""Runs of the training step; share of noise from which on it can be told; standard errors of an offset."""
TERMINAL = 1e-4
"""Signal-to-noise ratio at the last step beyond which sampling begins at what training never saw (arXiv 2305.08891)."""


def check_diffusion(
    model: Callable[..., Any],
    schedule: Any,
    clean: torch.Tensor,
    *,
    prediction: str | None = None,
    call: Callable[[Any, torch.Tensor, torch.Tensor], Any] | None = None,
    step: Callable[[torch.Tensor], Any] | None = None,
) -> Report:
    """Say what a diffusion model predicts, whether its sampler takes it for that, and how its loss goes over the steps.

    model: called as `model(noisy, steps)`, noisy (N, …) and steps (N) of int64, without gradients and in eval mode.
    schedule: a tensor of `alphas_cumprod` (T), a mapping or an object with `alphas_cumprod` or `betas` (a scheduler of
    diffusers). clean: training items (N, …) as training uses them; 64 are taken. prediction: what the sampler takes the
    output for: "epsilon", "sample" (x0) or "v_prediction"; None: what the schedule says. call: `call(model, noisy,
    steps)` where the model takes other inputs. step: your training step without backward, `step(clean)`: what noise it
    adds is then measured, with its offset (a part that a channel's elements share) and whether that follows the item.

    Each target's loss is given relative to its own variance: 1 is what a model of nothing has. `report.frame()` has
    the losses by time step, signal-to-noise ratio and min-SNR weight. Model, modes, buffers and random numbers are as
    before afterwards. Raises ValueError for a schedule that is none, an unknown prediction, or another output shape.
    """
    alphas, betas, said = _schedule(schedule)
    said = prediction or said
    if said is not None and said not in NAMES:
        raise ValueError(f"prediction takes epsilon, sample or v_prediction; got {said!r}")
    wanted = None if said is None else NAMES[said]
    clean = clean[:MOST].detach()
    seen = list(_wrong_schedule(alphas, betas))
    if not seen:
        with same_random_numbers(), torch.no_grad(), kept([model], evaluate=True):
            table, losses = _losses(model, alphas, clean, call)
            noise = (
                _noise(model, step, alphas, clean) if isinstance(model, torch.nn.Module) and step is not None else ""
            )
        own = _type(losses)
        if own and wanted and own != wanted:
            seen.append(_other_type(own, wanted, losses))
    else:
        table, losses, own, noise = [], {}, "", ""
    known = f"The model predicts {TYPES[own]} ({own})" if own else "What the model predicts is not clear"
    left = f": of its variance {percent(losses[own])} is left" if own else ": no target is matched"
    columns = ("steps", "signal / noise", *TYPES, "min-SNR weight")
    return Report(
        "check_diffusion()",
        findings_of(seen),
        tuple(
            [RuledOut("a sampler that takes it for something else", f"both are {own}")] if own and own == wanted else []
        ),
        tuple([] if wanted else ["what the sampler takes the output for: prediction= is not given"]),
        (*_notes(alphas, clean, table, own), *[noise] * bool(noise)),
        subject=f"{count(len(alphas), 'time step')}, {count(len(clean), 'clean item')}",
        facts={"prediction": own or None, "sampler": wanted, "left": losses},
        headline="" if seen else f"{known}{left}.",
        tables=(
            Table(
                "Loss by time step",
                columns,
                table,
                "Losses relative to each target's variance; the weight is for epsilon.",
            ),
        )
        if table
        else (),
    )


def _schedule(schedule: Any) -> tuple[torch.Tensor, torch.Tensor | None, str | None]:
    """(alphas_cumprod, betas or None, prediction type or None), in float64."""
    if isinstance(schedule, torch.Tensor):
        schedule = {"alphas_cumprod": schedule}
    alphas, betas = _part(schedule, "alphas_cumprod"), _part(schedule, "betas")
    if alphas is None and betas is not None:
        alphas = torch.cumprod(1 - torch.as_tensor(betas, dtype=torch.float64), 0)
    if alphas is None or torch.as_tensor(alphas).ndim != 1 or len(alphas) < 2:
        raise ValueError("schedule takes alphas_cumprod (T), or something with alphas_cumprod or betas")
    said = _part(schedule, "prediction_type") or _part(_part(schedule, "config"), "prediction_type")
    plain = torch.as_tensor(alphas).detach().double().cpu()
    return plain, None if betas is None else torch.as_tensor(betas).detach().double().cpu(), said


def _part(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _wrong_schedule(alphas: torch.Tensor, betas: torch.Tensor | None) -> Iterator[Evidence]:
    wrong = ""
    if not bool(((alphas >= 0) & (alphas <= 1)).all()):
        wrong = f"alphas_cumprod goes from {figures(float(alphas.min()))} to {figures(float(alphas.max()))}, not 0 to 1"
    elif bool((alphas.diff() > 1e-7).any()):
        backwards = bool((alphas.diff() >= 0).all())
        wrong = "alphas_cumprod rises" + (": it is the wrong way round" if backwards else " in between")
    elif betas is not None and len(betas) == len(alphas):
        right = torch.cumprod(1 - betas, 0)
        if float((right - alphas).abs().max()) > 1e-3:
            place = int((right - alphas).abs().argmax())
            wrong = f"alphas_cumprod is not the cumulative product of 1 - betas: at step {place} it is "
            wrong += f"{figures(float(alphas[place]))}, the product {figures(float(right[place]))}"
    if wrong:
        yield Evidence("quality/noise-schedule", wrong[0].upper() + wrong[1:], values={"steps": len(alphas)})


def _losses(model: Any, alphas: torch.Tensor, clean: torch.Tensor, call: Any) -> tuple[list[Any], dict[str, float]]:
    """(rows by bin of steps, share of each target's variance that is left over the middle of the schedule)."""
    maker = torch.Generator().manual_seed(0)
    rows, sums = [], {name: [0.0, 0.0] for name in TYPES}
    edges = torch.linspace(0, len(alphas), min(BINS, len(alphas)) + 1, device="cpu").long().tolist()
    for start, end in itertools.pairwise(edges):
        steps = torch.randint(start, end, (len(clean),), generator=maker, device="cpu")
        noise = torch.randn(clean.shape, generator=maker, device="cpu").to(clean)
        level = alphas[steps].to(clean).view(-1, *[1] * (clean.ndim - 1))
        signal, other = level.sqrt(), (1 - level).sqrt()
        noisy, at = signal * clean + other * noise, steps.to(clean.device)
        output = model(noisy, at) if call is None else call(model, noisy, at)
        found = _part(output, "sample")
        output = output if found is None else found
        if getattr(output, "shape", None) != clean.shape:
            raise ValueError(f"the model gives {tuple(getattr(output, 'shape', ()))} for noisy {tuple(clean.shape)}")
        targets = {"epsilon": noise, "sample": clean, "v_prediction": signal * noise - other * clean}
        left = {}
        for name, target in targets.items():
            error = float((output.float() - target.float()).square().mean())
            whole = float((target.float() - target.float().mean()).square().mean())
            left[name] = error / max(whole, 1e-12)
            if 0.1 < float(level.mean()) < 0.9:  # beyond, v is all but one of the others
                sums[name][0] += error
                sums[name][1] += whole
        ratio = float((alphas[start:end] / (1 - alphas[start:end]).clamp_min(1e-12)).median())
        rows.append((f"{start} to {end - 1}", ratio, *left.values(), min(ratio, MIN_SNR) / max(ratio, 1e-12)))
    return rows, {name: error / whole if whole else math.inf for name, (error, whole) in sums.items()}


def _noise(model: Any, step: Any, alphas: torch.Tensor, clean: torch.Tensor) -> str:
    """What noise a training step adds to clean items, in a sentence."""
    calls: list[list[torch.Tensor]] = []
    hook = lambda module, args, kwargs: calls.append(tensors_in((args, kwargs)))  # noqa: E731
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        for _ in range(PASSES):
            step(clean)
    finally:
        handle.remove()
    means, own, rest = [], [], []
    for inputs in calls if clean.ndim > 2 else ():
        noisy = next((t for t in inputs if t.shape == clean.shape and t.is_floating_point()), None)
        at = next((t for t in inputs if t.shape == clean.shape[:1] and not t.is_floating_point()), None)
        if noisy is not None and at is not None and bool((at < len(alphas)).all()):
            level = alphas[at.cpu()].to(clean).view(-1, *[1] * (clean.ndim - 1))
            rows = (1 - level).flatten() > CLEAR
            noise = ((noisy - level.sqrt() * clean) / (1 - level).sqrt())[rows].flatten(2).double()
            means += [noise.mean(-1)]
            own += [clean[rows].flatten(2).mean(-1).abs()]
            rest += [noise.var(-1) if len(noise) else noise.mean(-1)]
    if not sum(map(len, means)):
        return "The training step's noise is not known: the model is not given noisy items with whole steps."
    mean, bright, spread = (torch.cat(part).flatten() for part in (means, own, rest))
    size, deviation = math.prod(clean.shape[2:]), math.sqrt(float(spread.mean()))
    if not abs(deviation - 1) < 0.1:
        return f"The training step's noise has a deviation of {figures(deviation)} by this schedule, not of 1."
    halves = bright <= bright.median()
    dark, light, both = ((part.square().mean() - 1 / size).item() for part in (mean[halves], mean[~halves], mean))
    if both < DISTINCT * (error := math.sqrt(2 / len(mean)) / size):
        return "The training step adds plain noise: no offset."
    low, high, whole = (figures(math.sqrt(max(0.0, square))) for square in (dark, light, both))
    follows = abs(light - dark) > DISTINCT * 2 * (error + math.sqrt(2 / len(mean)) * both)
    text = f"{low} where a channel's mean is small, {high} where it is large: adaptive" if follows else whole
    return f"The training step's noise has an offset of {text}."


def _type(losses: Mapping[str, float]) -> str:
    """What is predicted; "" where no target is matched better than the others."""
    best, second = sorted(losses, key=lambda name: losses[name])[:2]
    return best if losses[best] <= min(KNOWN, APART * losses[second]) else ""


def _other_type(own: str, wanted: str, losses: Mapping[str, float]) -> Evidence:
    title = f"The model predicts {TYPES[own]} ({own}), and the sampler takes it for {TYPES[wanted]} ({wanted})"
    fix = Fix(
        "Give the sampler the type that the model was trained for.",
        f'scheduler = type(scheduler).from_config(scheduler.config, prediction_type="{own}")',
    )
    values = {f"left of {name}": loss for name, loss in losses.items()}
    return Evidence("quality/prediction-type", title, values=values, fix=fix)


def _notes(alphas: torch.Tensor, clean: torch.Tensor, table: list[Any], own: str) -> Iterator[str]:
    last = float(alphas[-1] / (1 - alphas[-1]).clamp_min(1e-12))
    if last > TERMINAL:
        yield (
            f"The last step keeps {percent(math.sqrt(float(alphas[-1])))} of the signal, and sampling begins at pure "
            "noise: very dark and very bright items are hard to make (rescale the betas, or train with a noise offset)."
        )
    low, high, spread = float(clean.min()), float(clean.max()), float(clean.float().std())
    if low >= 0 or not 0.2 < spread < 3:
        yield (
            f"Clean items go from {figures(low)} to {figures(high)} with a deviation of {figures(spread)}; the "
            "schedule's noise has one of 1, and is made for data around 0 (pictures of -1 to 1, scaled latents)."
        )
    if own and table:
        column = 2 + list(TYPES).index(own)
        worst = max(table, key=lambda row: row[column])
        yield f"Most is left at steps {worst[0]}: {percent(worst[column])} of the target's variance."
