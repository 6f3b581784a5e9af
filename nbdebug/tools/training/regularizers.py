"""What makes a run generalize better: one change at a time, from its start, judged by validation without smoothing.

Each is a line that the user pastes, and that line is what is run (of label smoothing and an earlier stop what has the
same effect): on the model and the optimizer themselves, whose start is put back; on a copy where it has fewer
parameters; on the training rows alone where it is an augmentation.

Where labels are not told apart, the batches are also read without the flips that the loader makes (`without_flips`).
`EarlyStop` ends a loop of one's own where the validation loss has stopped falling, with the best weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import at_site, locate, other_cells
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import tensors_in
from nbdebug.report import Where
from nbdebug.text import count, percent
from nbdebug.tools.training.edits import in_label_loss, users_files
from nbdebug.tools.training.evaluate import (
    MOST,
    FixedBatches,
    LossFn,
    OtherCalls,
    ProbeErrors,
    batches_of,
    mean_and_error,
    mode,
    parts_of,
    preserve_rng,
    targets_of,
    under,
)
from nbdebug.tools.training.facts import RegularizerTrial, TrainingRunFacts
from nbdebug.tools.training.fixes import PatchedCalls
from nbdebug.tools.training.one_step import is_fresh
from nbdebug.tools.training.retrain import RetrainChange, Retrainer
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.static_facts import NOWHERE, StaticFacts

DROPOUTS, DECAYS, SMOOTHINGS = (0.1, 0.3), (0.01, 0.1), (0.1,)
"""What is tried of each; what the run has already is left out."""
MOST_SECONDS = 120.0
"""For all of them: they are tried on demand."""
PAIRS = 3
"""Validation batches from which on the change of their losses has an error."""
ALIKE = 0.1
"""Relative difference of the validation loss in parts, whose sizes may differ by a few samples."""
WARM, EARLY = 20, 0.9
"""Steps from which on a warm-up, over a tenth of them, is tried; a stop is tried before this share of them."""
SMALLEST_SIDE, FEWEST_TOKENS = 8, 4
"""Of a picture, and of a row of token ids."""
FLIPS = frozenset({"flip", "fliplr", "flipud"})
NO_FLIPS, LAST_OF = "no flips", 10
INPUTS = ("input_ids", "pixel_values", "x", "input", "inputs", "image", "images")
"""Names of what a model is given, in a batch that is a dict."""
CROSS_ENTROPY = "input target weight size_average ignore_index reduce reduction label_smoothing".split()
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)
FLAT = (nn.Linear, nn.LayerNorm, nn.RNN, nn.LSTM, nn.GRU)
LAYERS = (*FLAT, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, *NORMS)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """code: what is pasted. steps: where they are fewer than the run's; on: what trains, where it is a copy."""

    what: str
    code: str = ""
    change: RetrainChange = dataclasses.field(default_factory=RetrainChange)
    steps: int | None = None
    on: Retrainer | None = None


def regularizers(run: TrainingRunFacts, retrainer: Retrainer, steps: int, static: StaticFacts) -> TrainingRunFacts:
    """Each tried from the start of the run. All are judged by the loss without label smoothing, that of the run too."""
    if not retrainer.on_val.batches:
        return dataclasses.replace(run, unchecked=(*run.unchecked, "Regularization: no val_loader was given"))
    judge, own, errors = copy.copy(retrainer), retrainer.loss_fn, ProbeErrors()
    judge.loss_fn, judge.until = _smoothed(own, 0.0), time.perf_counter() + MOST_SECONDS
    judge.on_val = _in_parts(judge.on_val)
    trials = _Trials(run, judge, own, steps, static)
    tried: list[RegularizerTrial] = []
    skipped: list[str] = []
    base: list[float] = []

    def attempt(trial: _Trial) -> None:
        on = trial.on or judge
        change = dataclasses.replace(trial.change, loss_fn=trial.change.loss_fn or own)
        result = on.train(change, trial.steps or steps, at_end=on.on_val.losses)
        base.extend([] if base else result.at_end)
        pairs = [b - a for a, b in zip(base, result.at_end)]
        if result.val is not None and pairs:
            mean, error = mean_and_error(pairs)
            sure = error if len(pairs) >= PAIRS else None
            tried.append(RegularizerTrial(trial.what, result.train, result.val, mean, sure, trial.code))

    try:
        for kind, make in trials.kinds().items():
            for trial in errors.run(f"Regularization by {kind}", lambda m=make: list(m()), []):  # type: ignore[misc]
                if judge.time_is_up:
                    skipped.append(trial.what)
                else:
                    errors.run(f"Regularization by {trial.what}", lambda t=trial: attempt(t), None)  # type: ignore[misc]
    finally:
        for fixed in (retrainer.on_train, retrainer.on_val):
            fixed.loss_fn = own
    missing = (f"Regularizers for which there was no time: {', '.join(skipped)}",) * bool(skipped)
    unchecked = (*run.unchecked, *missing, *trials.unclear, *errors.lines)
    return dataclasses.replace(run, regularizers=tuple(tried), unchecked=unchecked)


def _in_parts(fixed: FixedBatches) -> FixedBatches:
    """Few validation batches in several parts each, where that gives the same loss: each part is a pair."""
    most = -(-MOST // len(fixed.batches))
    batches = [part for batch in fixed.batches for part in parts_of(batch, most)]
    parts = FixedBatches(fixed.model, fixed.loss_fn, batches, most=None)
    (whole, _), (now, _) = fixed.mean() or (0.0, 0.0), parts.mean() or (0.0, 0.0)
    return parts if abs(now - whole) < ALIKE * abs(whole) else fixed


class _Trials:
    """What there is to try. judge: repeats the run, and measures without smoothing; loss_fn: the run's own loss;
    unclear: what was not tried, and why."""

    def __init__(self, run: TrainingRunFacts, judge: Retrainer, loss_fn: LossFn, steps: int, static: StaticFacts):
        self.run, self.judge, self.loss_fn, self.steps, self.static = run, judge, loss_fn, steps, static
        self.unclear: list[str] = []

    def kinds(self) -> Mapping[str, Callable[[], Iterable[_Trial]]]:
        return {
            "nothing": self.as_is,
            "early stopping": self.stop,  # what helps most often comes first: the time may be up
            "dropout": self.dropout,
            "weight decay": self.decay,
            "label smoothing": self.smoothing,
            "warm-up": self.warm_up,
            "fewer parameters": self.fewer,
            "augmentation": self.augmentation,
        }

    def _pasted(self, code: str) -> RetrainChange:
        def prepare(model: nn.Module) -> None:
            for optimizer in self.judge.optimizers if "optimizer" in code else [None]:  # once for each, or once
                _names_after(code, model=model, optimizer=optimizer)

        return RetrainChange(prepare=prepare)

    def as_is(self) -> Iterator[_Trial]:
        yield _Trial("")
        yield _Trial(signs.OTHER_ORDER, "", RetrainChange(batches=self.judge.batches[::-1]))  # what noise alone does

    def dropout(self) -> Iterator[_Trial]:
        model = self.judge.model
        layers = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
        hidden = _hidden_activations(model)
        for p in DROPOUTS if layers or hidden else ():
            code = (
                f'model.apply(lambda m: "Dropout" in type(m).__name__ and setattr(m, "p", {p}))'
                if layers
                else f"for name in {hidden}: model.get_submodule(name).register_forward_hook("
                f"lambda m, _, out: nn.functional.dropout(out, {p}, m.training))"
            )
            if p != self.run.regularization.get("dropout"):
                yield _Trial(f"dropout {p:g}", code, self._pasted(code))

    def decay(self) -> Iterator[_Trial]:
        for decay in DECAYS:
            code = f'for group in optimizer.param_groups: group["weight_decay"] = {decay}'
            if decay != self.run.regularization.get("weight decay"):
                yield _Trial(f"weight decay {decay:g}", code, self._pasted(code))

    def smoothing(self) -> Iterator[_Trial]:
        calls = [c for c in self.static.loss_calls if c.op == "cross_entropy" and c.target_low is not None]  # of labels
        for share in SMOOTHINGS:
            if calls and all(round(c.smoothing, 3) != share for c in calls):
                places = [where.file for where in self.run.places.values() if where.file]
                loops = (file for place in places for file in (place, *other_cells(place)))
                files = dict.fromkeys([*users_files(self.judge.model, self.loss_fn), *loops])
                edit = next(in_label_loss(files, calls[0], "label_smoothing", f"{share}"), None)
                code = edit.code if edit is not None else f"F.cross_entropy(output, target, label_smoothing={share})"
                change = RetrainChange(loss_fn=_smoothed(self.loss_fn, share))
                yield _Trial(f"label smoothing {share:g}", code, change)

    # Fewer parameters

    def fewer(self) -> Iterator[_Trial]:
        """Half the blocks where there are such; else half the width where that can be built; else a frozen half."""
        model, batch = self.judge.model, self.judge.batches[0]
        shapes, total = _seen(model, self.loss_fn, batch).outputs, sum(p.numel() for p in model.parameters())
        with preserve_rng(self.loss_fn):
            torch.manual_seed(0)
            codes = {"half the blocks": _half_the_blocks(model)}
            with contextlib.suppress(Exception):  # of a forward that is written for these widths
                fresh = sum(p.numel() for p in model.parameters() if p.requires_grad and is_fresh(p))
                if 2 * fresh > total:  # new layers would forget what trained ones know
                    codes["half the width"] = _half_the_width(model, self.loss_fn, batch)
            for what, code in codes.items():
                small = self._copy(code) if code else None
                with contextlib.suppress(Exception):
                    if small is not None and _seen(small.model, self.loss_fn, batch).outputs == shapes:
                        left = sum(p.numel() for p in small.model.parameters())
                        yield _Trial(f"{what} ({left:,} of {total:,} parameters)", code, on=small)
                        return
        members = [p for p in model.parameters() if p.requires_grad]
        if len(members) > 3:
            half = len(members) // 2
            code = f"for p in [p for p in model.parameters() if p.requires_grad][:{half}]: p.requires_grad_(False)"
            yield _Trial(f"the first {half} of {len(members)} parameters frozen", code, self._pasted(code))
        self.unclear.append("Regularization by a smaller model: none could be built by halving blocks or widths")

    def _copy(self, code: str) -> Retrainer:
        """What trains a copy of the model with this change, by copies of the optimizers."""
        small = copy.copy(self.judge)
        model, optimizers = copy.deepcopy((small.model, small.optimizers))
        names = {id(p): name for name, p in model.named_parameters()}
        device = next(model.parameters()).device
        model = _names_after(code, model=model)["model"].to(device)
        now = dict(model.named_parameters())
        for group in (g for o in optimizers for g in o.param_groups):
            group["params"] = [now[names[id(p)]] for p in group["params"] if names.get(id(p)) in now]
        small.model, small.optimizers, small.start = model, optimizers, Snapshot.take(model, optimizers)
        small.on_train, small.on_val = (
            FixedBatches(model, small.loss_fn, fixed.batches, most=None) for fixed in (small.on_train, small.on_val)
        )
        return small

    # Augmentation

    def augmentation(self) -> Iterator[_Trial]:
        """Of training rows alone, where it is clear what a batch holds."""
        batch, target = self.judge.batches[0], targets_of(self.judge.batches[0])
        seen = _seen(self.judge.model, self.loss_fn, batch)
        keys = range(len(batch)) if isinstance(batch, (list, tuple)) else INPUTS if hasattr(batch, "keys") else ()
        known = [key for key in keys if isinstance(key, int) or key in batch]
        given = [k for k in known if isinstance(batch[k], torch.Tensor) and batch[k] is not target]
        given = [k for k in given if batch[k].shape in seen.inputs]
        kinds = _augmentations(batch[given[0]], target, seen) if len(given) == 1 and target is not None else {}
        if not kinds:
            self.unclear.append("Regularization by augmentation: it is not clear what the inputs of a batch are")
        for what, code in kinds.items():
            batches = _Augmented(self.judge.batches, given[0], eval(f"lambda {code}", {"torch": torch}))
            yield _Trial(what, f"augment = lambda {code}", RetrainChange(batches=batches))

    # The course

    def warm_up(self) -> Iterator[_Trial]:
        warm = max(2, self.steps // 10)
        factors = {
            f"warm-up over {warm} steps": f"lambda step: min(1, (step + 1) / {warm})",
            "warm-up and decay": f"lambda step: min((step + 1) / {warm}, ({self.steps} - step) / {self.steps - warm})",
        }
        if len(set(self.run.rates)) > 1:
            self.unclear.append("Regularization by warm-up: the run has a schedule of its own")
            return
        for what, factor in factors.items() if self.steps >= WARM else ():
            code = f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {factor})"
            yield _Trial(what, code, RetrainChange(factor=eval(factor)))

    def stop(self) -> Iterator[_Trial]:
        best = signs.best_validation(self.run)
        if best is not None and 0 < best.step < EARLY * self.steps:
            saved = percent(1 - best.step / len(self.run.losses))
            what = f"early stopping after {count(best.step, 'step')} (saves {saved} of them)"
            yield _Trial(what, "stop = nbdebug.EarlyStop(model=model)", steps=best.step)


def _names_after(code: str, **names: Any) -> dict[str, Any]:
    """The variables after a line of ours."""
    names |= {"torch": torch, "nn": nn}
    exec(code, names)
    return names


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Shapes of what a model is given and gives, and of what its embeddings look up."""

    inputs: list[torch.Size]
    outputs: list[torch.Size]
    tokens: list[torch.Size]
    padding: list[int]


def _seen(model: nn.Module, loss_fn: LossFn, batch: Any) -> _Seen:
    seen = _Seen([], [], [], [])

    def look_up(module: Any, args: Any, out: Any) -> None:
        seen.tokens.extend(t.shape for t in tensors_in(args))
        seen.padding.extend([] if module.padding_idx is None else [module.padding_idx])

    def whole(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.inputs.extend(t.shape for t in tensors_in((args, kwargs)))
        seen.outputs.extend(t.shape for t in tensors_in(out))

    with contextlib.ExitStack() as hooks, preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False):
        for embedding in (m for m in model.modules() if isinstance(m, nn.Embedding)):
            hooks.enter_context(embedding.register_forward_hook(look_up))
        hooks.enter_context(model.register_forward_hook(whole, with_kwargs=True))
        loss_fn(model, batch)
    return seen


def _path(name: str) -> str:
    """How a module is written: "layers.0" as `model.layers[0]`."""
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".") if part)


def _half_the_blocks(model: nn.Module) -> str:
    """The first half of each row of equal blocks."""
    halved: dict[str, str] = {}
    for name, module in model.named_modules():
        parts = list(module) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []
        kinds = {(type(p), *((n, q.shape) for n, q in p.named_parameters())) for p in parts}
        inside = any(name.startswith(f"{outer}.") for outer in halved)
        if len(parts) > 1 and len(kinds) == 1 and any(parts[0].children()) and not inside:
            halved[name] = f"{_path(name)} = {_path(name)}[: {len(parts) // 2}]"
    return "; ".join(halved.values())


def _half_the_width(model: nn.Module, loss_fn: LossFn, batch: Any) -> str:
    """Each hidden layer anew, of half the width: what comes in is as wide as the forward finds it. "" where that can't
    be; raises what a forward raises that is written for its widths."""
    small = copy.deepcopy(model)
    layers = {module: name for name, module in small.named_modules() if type(module) in LAYERS}
    called: list[nn.Module] = []
    handles = [layer.register_forward_hook(lambda m, *_: called.append(m)) for layer in layers]
    kept = {size for shape in _seen(small, loss_fn, batch).outputs for size in shape[1:]}
    for handle in handles:
        handle.remove()
    makers = [layer for layer in called if not isinstance(layer, NORMS)]
    texts: dict[str, str] = {}
    members = list(model.named_parameters(remove_duplicate=False))
    if len(set(makers)) < 2 or len(members) > len(list(model.parameters())):  # tied ones are one
        return ""

    def fit(layer: Any, args: Any) -> None:
        name, was = layers[layer], repr(layer)
        if name in texts:
            return
        sizes = [int(size) for size in re.findall(SIZE, was)[:2]]
        width = sizes[1] if layer is makers[-1] or sizes[1] in kept or sizes[1] < 4 else sizes[1] // 2
        channel = args[0].shape[-1 if isinstance(layer, FLAT) else 1]
        now = [sizes[0] if isinstance(layer, nn.Embedding) else channel, width][: 1 if isinstance(layer, NORMS) else 2]
        numbers = iter(now)
        texts[name] = "nn." + re.sub(SIZE, lambda _: str(next(numbers)), was, count=len(now))
        fresh = _names_after(f"layer = {texts[name]}")["layer"].to(args[0].device).train(layer.training)
        if texts[name] == f"nn.{was}":
            texts[name] = ""
        else:
            layer.__dict__.update(fresh.__dict__)

    for layer in layers:
        layer.register_forward_pre_hook(fit)
    _seen(small, loss_fn, batch)
    return "; ".join(f"{_path(name)} = {text}" for name, text in texts.items() if text)


SIZE = r"(?<![A-Za-z\d.])\d+"
"""A whole number in the text of a layer, and not that of its name."""


def _augmentations(x: torch.Tensor, target: torch.Tensor, seen: _Seen) -> dict[str, str]:
    """What → its code; of pictures and texts what moves them only where a row has one label."""
    labels = not target.is_floating_point() and target.dim() == 1
    if x.is_floating_point() and x.dim() == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= SMALLEST_SIDE:
        most = min(x.shape[2:]) // 8
        moves = {
            "flips": "x: torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(-1), x)",
            "other colors": "x: x * (1 + 0.2 * torch.randn(len(x), x.shape[1], 1, 1, device=x.device))",
            "shifts": f"x: x.roll(torch.randint({-most}, {most + 1}, (2,)).tolist(), (-2, -1))",
        }
        return {**(moves if labels else {}), "noise": f"x: x + {NOISE} * x.std() * torch.randn_like(x)"}
    if x.is_floating_point() and x.dim() == 2 and x.shape[1] > 1 and len(x) > 1 and not torch.equal(x, x.round()):
        return {"noise": f"x: x + {NOISE} * x.std(0) * torch.randn_like(x)"}
    if x.is_floating_point() or x.dim() != 2 or x.shape[1] < FEWEST_TOKENS or x.shape not in seen.tokens:
        return {}
    other = f"{seen.padding[0]}" if seen.padding else "x.flatten()[torch.randint(x.numel(), x.shape, device=x.device)]"
    drop = f"x: torch.where(torch.rand(x.shape, device=x.device) < {DROPPED}, {other}, x)"
    moved = f"(torch.rand(x.shape, device=x.device) < {MOVED})"
    order = f"(torch.arange(x.shape[1], device=x.device) + 1.5 * {moved}).argsort(1)"
    return {"word dropout": drop} | ({"words moved": f"x: x.gather(1, {order})"} if labels else {})


NOISE, DROPPED, MOVED = 0.3, 0.1, 0.15
"""Deviations; shares of the words: the last two are those of this project's founding documents."""


class _Augmented(Sequence[Any]):
    """Batches, of which the inputs are augmented anew each time that one is read."""

    def __init__(self, batches: Sequence[Any], key: Any, augment: Callable[[torch.Tensor], torch.Tensor]):
        self.batches, self.key, self.augment = batches, key, augment

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: Any) -> Any:
        batch = self.batches[place]
        x = self.augment(batch[self.key])
        if isinstance(batch, (list, tuple)):
            return [x if place == self.key else part for place, part in enumerate(batch)]
        return {**batch, self.key: x}


# As the loss and the layers have them


def _smoothed(loss_fn: LossFn, share: float) -> LossFn:
    """The same loss with this label smoothing in each cross entropy of labels."""

    def replaced(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(**{**dict(zip(CROSS_ENTROPY, args)), **kwargs, "label_smoothing": share})

    return under(loss_fn, lambda: PatchedCalls(("cross_entropy",), NOWHERE, replaced))


def _hidden_activations(model: nn.Module) -> list[str]:
    """Activations that are modules, but for the last module, which gives the output."""
    modules = [(name, m) for name, m in model.named_modules() if not any(m.children())]
    known = [(n, m) for n, m in modules[:-1] if type(m).__module__ == "torch.nn.modules.activation"]
    return [n for n, m in known if "Softmax" not in type(m).__name__ and not isinstance(m, nn.MultiheadAttention)]


def without_flips(run: TrainingRunFacts, retrainer: Retrainer, steps: int, loader: Any) -> TrainingRunFacts:
    """The facts with the experiment of a run whose loader flips nothing, and with the line that flips. The losses are
    those of the last steps: the fixed batches were read with flips."""
    sites: list[Any] = []

    def keep(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name not in FLIPS or not args:
            return None
        sites.append(locate().site)
        return args[0].clone()

    with OtherCalls(keep):
        batches = batches_of(loader, len(retrainer.batches), passes=True)
    if not sites or len(batches) < len(retrainer.batches):
        return run
    as_is, still = retrainer.train(RetrainChange(), steps), retrainer.train(RetrainChange(batches=batches), steps)
    last = max(1, steps // LAST_OF)
    end, changed = (statistics.median(one.losses[-last:] or [math.inf]) for one in (as_is, still))
    tried = dataclasses.replace(still.against(as_is, NO_FLIPS), end_as_is=end, end_changed=changed)
    places = {**run.places, NO_FLIPS: at_site(Where(), sites[0])}
    return dataclasses.replace(run, experiments={**run.experiments, NO_FLIPS: tried}, places=places)


class EarlyStop:
    """Says when a training of your own should end.

        stop = nbdebug.EarlyStop(patience=5, min_delta=1e-3, model=model)
        for epoch in range(100):
            train_epoch()
            if stop(validate()):
                break
        stop.restore()  # the weights of the best validation

    patience: validations in a row without an improvement after which it stops; min_delta: what counts as one, in the
    value's own unit; better: "lower" (a loss) or "higher" (a score). model: a copy of its state dict is kept at each
    improvement. A value that is not finite is no improvement. Give it the unsmoothed validation loss in eval mode: one
    of a smoothed loss has a floor above zero. `state_dict` and `load_state_dict` let it go on from a checkpoint. Raises
    ValueError for a patience below 1 or a negative min_delta. Defaults: Keras and Lightning have no common ones;
    patience 5 and 0.001 are those of this project's founding documents.
    """

    def __init__(
        self, patience: int = 5, min_delta: float = 1e-3, *, better: str = "lower", model: torch.nn.Module | None = None
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ValueError(f"EarlyStop takes a patience from 1 and a min_delta from 0; got {patience}, {min_delta}")
        if better not in ("lower", "higher"):
            raise ValueError(f'better takes "lower" or "higher"; got {better!r}')
        self.patience, self.min_delta, self.better, self.model = patience, min_delta, better, model
        self.best: float | None = None
        self.best_at, self.count, self.stopped_at = 0, 0, None
        self._weights: dict[str, Any] | None = None

    best_at: int
    """The validation of the best value, from 0."""
    count: int
    """Validations so far."""
    stopped_at: int | None
    """The validation at which it said to stop, from 0; None: not yet."""

    def __call__(self, value: float | torch.Tensor) -> bool:
        """Take the value of one validation; True says: stop."""
        number = float(value)
        sign = 1.0 if self.better == "lower" else -1.0
        if math.isfinite(number) and (self.best is None or sign * (self.best - number) > self.min_delta):
            self.best, self.best_at = number, self.count
            if self.model is not None:
                self._weights = {name: _copy(part) for name, part in self.model.state_dict().items()}
        waited = self.count - self.best_at if self.best is not None else self.count + 1
        self.count += 1
        if waited >= self.patience and self.stopped_at is None:
            self.stopped_at = self.count - 1
        return waited >= self.patience

    def restore(self) -> None:
        """Load the weights of the best validation into the model. Raises RuntimeError where none were kept."""
        if self.model is None or self._weights is None:
            raise RuntimeError("no weights were kept: give EarlyStop the model, and a finite value")
        self.model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_at", "count", "stopped_at")
        return {**{name: getattr(self, name) for name in names}, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("best", "best_at", "count", "stopped_at"):
            setattr(self, name, state[name])
        self._weights = state["weights"]

    @classmethod
    def of(
        cls, values: Iterable[float], patience: int = 5, min_delta: float = 1e-3, better: str = "lower"
    ) -> EarlyStop:
        """What it would have said of validations that are over: `EarlyStop.of(history).stopped_at`."""
        stop = cls(patience, min_delta, better=better)
        for value in values:
            if stop(value):
                break
        return stop

    def __repr__(self) -> str:
        best = "no finite value yet" if self.best is None else f"best {self.best:.4g} at validation {self.best_at}"
        end = "" if self.stopped_at is None else f", stopped at {self.stopped_at}"
        return f"EarlyStop({best}{end}, patience {self.patience}, min_delta {self.min_delta:g})"


def _copy(part: Any) -> Any:
    return part.detach().clone() if isinstance(part, torch.Tensor) else part
