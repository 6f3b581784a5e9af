"""The lists of steps: for each symptom what to try, in which order, how long it takes, and what it is run on.

The order is that of the founding procedures (six steps for a NaN, six after a crash, five for poor quality) but for
this: one traced step says at once where a NaN comes from, whether the input was bad, and whether the loss had no
target, so it comes first; number types come last, and only where something of the user's uses half precision.

A step takes its subject among the user's variables (`Surroundings`). Where that is missing it raises `Missing`, with
what it needs; where the step has no sense here, `NotNeeded`, with why. It leaves models, optimizers and random numbers
as they were.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import pathlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import nbdebug
from nbdebug.arguments import USUAL_NAMES, Subject, around, discover, part
from nbdebug.report import Report
from nbdebug.text import listed, module_name, nearest

STEPS = ("train_step", "training_step", "step", "one_step", "train_one_step", "train_batch", "run_step")
"""Names by which a function of the user's is known to be one training step."""
LOOPS = ("train", "train_loop", "training_loop", "fit", "train_model", "run_training")
"""… and to be a whole training, where it takes a callback, or nothing."""
BATCHES = (*USUAL_NAMES["batch"], "b", "xb", "samples")
"""Names of a parameter that stands for a batch."""
OUTPUTS = ("generated", "outputs", "samples", "generations", "images", "texts")
TRAINED_ON = ("training", "train_data", "train_set", "train_images", "train_texts", "train_dataset", "dataset")
SETTINGS = (".json", ".yaml", ".yml", ".toml")
WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")
FOLDERS = ("checkpoints", "ckpt", "ckpts", "runs", "outputs", "output", "lightning_logs", "models", "weights")
"""Folders of the working directory in which checkpoints are looked for, where no variable names one."""
LOGS = ("train*.log", "logs/train*.log", "slurm-*.out")
HALF = ("autocast", "half", "float16", "bfloat16", "GradScaler", "fp16", "bf16")
"""Names in the code of a step that uses half precision."""
TRACED = 20
"""Batches, at most, of which a step is traced."""
TIMED = 10
"""Steps that are timed."""


OF_A_CELL = {"nan": "%%nan_trace", "memory": "%%mem", "slow": "%%bottleneck", "not-learning": "%%diagnose"}
"""What watches a cell as it stands, for a training that is no function."""


class Missing(Exception):
    """A step can't run: something is not among the user's variables. The text says what, and how to have it."""


class NotNeeded(Exception):
    """A step has no sense here. The text says why."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a procedure. what: to be done, in a few words; magic: that does it; minutes: that it takes at most
    with a small model; run: gives its report. always: also once the cause is known."""

    what: str
    magic: str
    minutes: float
    run: Callable[[Surroundings], Report]
    always: bool = False


@dataclasses.dataclass(frozen=True)
class Procedure:
    """A list of steps. title: "a NaN or an inf"; when: what is seen; also: other words for it."""

    title: str
    when: str
    steps: tuple[Step, ...]
    also: tuple[str, ...] = ()

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps)


# -- what is among the variables --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Surroundings:
    """The user's variables, the shell, and the last error; what a step needs is looked for when it is asked for. fresh:
    the last error ended the last cell, so that it is no old one; own_step: the user's own function that was run."""

    names: Mapping[str, Any]
    shell: Any = None
    error: BaseException | None = None
    fresh: bool = False
    own_step: Any = None

    @functools.cached_property
    def subject(self) -> Subject:
        """The one model and its optimizers."""
        try:
            subject = Subject.chosen(None, None, dict(self.names))
            name, _ = subject.one_model("this step", part("loss_fn", self.names)[1], "as `model`")
        except ValueError as error:
            count = len(Subject.chosen(None, None, dict(self.names)).models)
            raise Missing("a model among your variables" if not count else str(error)) from None
        return subject.only(name, self.names)

    def usual(self, kind: str, what: str = "") -> Any:
        """The loss, the loader, … for this model; None, or `Missing` where `what` says what it is."""
        value = part(kind, around(self.subject.model, self.names))[1]
        if value is None and what:
            raise Missing(f"{what}, as `{USUAL_NAMES[kind][0]}`")
        return value

    @property
    def loss_fn(self) -> Any:
        return self.usual("loss_fn", "a loss: loss_fn(model, batch), or a criterion")

    @property
    def loop_cell(self) -> str:
        """ "In [4]": the last cell with a backward of its own, where no function has it; "" without one."""
        cells = [n for n, text in enumerate(getattr(self.shell, "user_ns", {}).get("In", ())) if ".backward(" in text]
        return f"In [{cells[-1]}]" if cells else ""

    def first(self, *names: str) -> Any:
        """The first of these variables that there is."""
        return next((self.names[name] for name in names if self.names.get(name) is not None), None)

    @property
    def loader(self) -> Any:
        loader = self.usual("train_loader", "the training batches")
        if isinstance(loader, Iterator):
            raise Missing("batches that can be read again: `train_loader` is an iterator, which a look would advance")
        return loader

    def batches(self, most: int = 1) -> Iterator[Any]:
        """The first ones of the training loader, and, where these are not all, the variable `batch`, which may be the
        one at which a loop has stopped; alone where there is no loader."""
        from nbdebug.arguments import is_source

        own = self.first(*USUAL_NAMES["batch"])
        own = None if own is None or is_source(own) or isinstance(own, Iterator) else own
        if own is not None and (most == 1 or self.usual("train_loader") is None):
            yield own
            return
        source = iter(self.loader)
        yield from itertools.islice(source, most - (own is not None))
        if own is not None and next(source, None) is not None:
            yield own

    @functools.cached_property
    def function(self) -> tuple[str, Callable[[Any], Any], bool] | None:
        """(how it is called, function of a batch, whether it takes the batch) of the user's own training step: one of
        the usual names, whose parameters are a batch or stand among the variables."""
        for name in STEPS:
            function = self.names.get(name)
            if type(function) is not types.FunctionType:
                continue
            needed = _needed(function)
            own = [p for p in needed if p not in BATCHES]
            if len(needed) - len(own) > 1 or any(p not in self.names for p in own):
                continue
            values = {p: self.names[p] for p in own}
            words = [p for p in needed if p in BATCHES]
            self.own_step = function
            text = f"{name}({', '.join(needed)})"
            return text, functools.partial(_called, function, values, words), bool(words)
        return None

    def step(self) -> tuple[str, Callable[[Any], Any], bool]:
        """(its text, function of a batch, whether it takes a batch): the user's own step, or else one that is made of
        the model, the loss and the optimizers."""
        if self.function is not None:
            return self.function
        from nbdebug.observe.validation import loss_call

        model, optimizers = self.subject.model, list(self.subject.optimizers.values())
        loss_of, _ = loss_call(self.loss_fn)

        def step(batch: Any) -> Any:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss

        return "one step of your model, loss and optimizer", step, True

    def repeated(self, most: int) -> tuple[str, Callable[[], Any], int]:
        """(text, step of no arguments, steps): the step on one batch after the other, at most so many. A step that
        takes no batch has batches of its own, or is always the same."""
        text, of_batch, takes_batch = self.step()
        if not takes_batch:
            return text, lambda: of_batch(None), most
        batches = list(self.batches(most))
        if not batches:
            raise Missing("a batch: the training loader gives none")
        source = itertools.cycle(batches)
        return text, lambda: of_batch(next(source)), len(batches)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Afterwards all that the step uses is as it was: models, optimizers, schedulers, scalers, random numbers, the
        user's variables and iterators. Raises Missing where that can't be, as with an open file."""
        import torch

        from nbdebug.observe.snapshot import StepState

        kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
        others = [value for name, value in self.names.items() if name[:1] != "_" and issubclass(type(value), kinds)]
        models, optimizers = discover("model", self.names), discover("optimizer", self.names)
        text = self.step()[0]
        state = StepState.take(self.own_step or (lambda: None), models, optimizers, others)
        if state.why_not:
            raise Missing(f"a step that can be undone (yours can't: {state.why_not}). Run it yourself, on {text}")
        state.restore()  # its iterators are copies from here on
        try:
            yield
        finally:
            state.leave()

    def paths(self, *endings: str) -> list[pathlib.Path]:
        """The files with such an ending that variables name; of folders those that are there."""
        found = []
        for name, thing in self.names.items():
            if name.startswith("_") or not isinstance(thing, (str, pathlib.Path)) or len(str(thing)) > 300:
                continue
            path = pathlib.Path(thing)
            with contextlib.suppress(OSError, ValueError):
                if path.exists() and (path.name.endswith(endings) if endings else path.is_dir() and path.name):
                    found.append(path)
        return found


def _called(function: Callable[..., Any], values: Mapping[str, Any], words: list[str], batch: Any) -> Any:
    """The user's own step, with the variables that it takes, and the batch under its name."""
    return function(**values, **dict.fromkeys(words, batch))


def _needed(function: types.FunctionType) -> list[str]:
    """The parameters that a call must give."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]


# -- what the steps run -----------------------------------------------------------------------------------------------


def last_error(a: Surroundings) -> Report:
    if a.error is None:
        raise NotNeeded("there is no last error")
    if not a.fresh:
        raise NotNeeded(f"the last error ({type(a.error).__name__}) is of an earlier cell")
    usage = type(a.error).__name__ == "UsageError" and module_name(type(a.error)).startswith("IPython")
    if isinstance(a.error, (KeyboardInterrupt, SystemExit, SyntaxError)) or usage:
        raise NotNeeded(f"the last cell ended with {type(a.error).__name__}, which explains itself")
    return nbdebug.explain(a.error, names=dict(a.names), shell=a.shell)


def any_error(a: Surroundings) -> Report:
    return last_error(dataclasses.replace(a, fresh=True))


def memory_error(a: Surroundings) -> Report:
    if a.error is None or "memory" not in f"{type(a.error).__name__} {a.error}".lower():
        raise NotNeeded("memory did not run out in the last error")
    return any_error(a)


def traced_step(a: Surroundings) -> Report:
    model, optimizer = a.subject.model, a.subject.optimizer
    with a.put_back():
        text, step, most = a.repeated(TRACED)
        report = nbdebug.nan_trace(step, model=model, optimizer=optimizer, max_steps=most)
    return dataclasses.replace(report, question=f"%nan_trace {text}", subject=str(a.subject))


def before_training(a: Surroundings) -> Report:
    model, loss_fn = a.subject.model, a.loss_fn
    others = {kind: a.usual(kind) for kind in ("val_loader", "scheduler")}
    return nbdebug.preflight(model, a.loader, loss_fn, optimizer=a.subject.optimizer, **others)


def stream(a: Surroundings) -> Report:
    return nbdebug.check_loader(a.loader)


def data(a: Surroundings) -> Report:
    """Of the folder or the file that a variable names, or else of the loader's own set."""
    named = a.first("data_dir", "data_path", "dataset_path", "data_root", "train_dir")
    if named is not None and pathlib.Path(str(named)).exists():
        return nbdebug.check_data(str(named))
    loader = a.first(*USUAL_NAMES["train_loader"])
    rows = getattr(loader, "dataset", None) if loader is not None else a.first(*TRAINED_ON)
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise Missing("a folder (as `data_dir`), or a loader whose set has a length")
    return nbdebug.check_data(rows)


def half_precision(a: Surroundings) -> Report:
    import torch

    model, loss_fn = a.subject.model, a.loss_fn
    functions = [loss_fn, type(model).forward, *(a.names.get(name) for name in (*STEPS, *LOOPS))]
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    words = {word for code in codes for word in (*code.co_names, *code.co_consts) if isinstance(word, str)}
    types_of = {p.dtype for p in model.parameters()}
    if not words & set(HALF) and not types_of & {torch.float16, torch.bfloat16} and not discover("scaler", a.names):
        raise NotNeeded("nothing of yours uses half precision")
    dtype = "bfloat16" if "bfloat16" in words and "float16" not in words else "float16"
    return nbdebug.precision(model, next(iter(a.batches())), loss_fn, dtype, budget=60)


def environment(a: Surroundings) -> Report:
    return nbdebug.check_environment()


def notebook(a: Surroundings) -> Report:
    if a.shell is None:
        raise NotNeeded("this is no notebook")
    return nbdebug.check_notebook(a.names, shell=a.shell)


def kept(a: Surroundings) -> Report:
    """Of the notebook's findings those that are about memory."""
    report = notebook(a)
    findings = tuple(finding for finding in report if finding.chapter == "memory")
    headline = report.headline if findings or not report.findings else "The notebook itself keeps nothing large."
    return dataclasses.replace(report, findings=findings, headline=headline)


def memory_now(a: Surroundings) -> Report:
    return nbdebug.mem(names=dict(a.names))


def memory_of_steps(a: Surroundings) -> Report:
    with a.put_back():
        text, step, _ = a.repeated(1)
        report = nbdebug.mem(step, model=a.subject.models, optimizer=a.subject.optimizers, names=dict(a.names))
    return dataclasses.replace(report, question=f"%%mem {text}")


def memory_needed(a: Surroundings) -> Report:
    import torch

    if not torch.accelerator.is_available():
        raise Missing("a card, or its size: %fit --memory 24GiB")
    loss_fn = a.loss_fn
    optimizer = next(iter(a.subject.optimizers.values()), None)
    return nbdebug.fit(a.subject.model, next(iter(a.batches())), loss_fn, optimizer=optimizer)


def times(a: Surroundings) -> Report:
    text, of_batch, takes_batch = a.step()
    own: dict[str, Any] = {"model": a.subject.models, "optimizer": a.subject.optimizers, "names": dict(a.names)}
    step = of_batch if takes_batch else functools.partial(of_batch, None)
    with a.put_back():
        report = nbdebug.bottleneck(step, loader=a.loader if takes_batch else None, steps=TIMED, **own)
    return dataclasses.replace(report, question=f"%bottleneck {text}")


def loop(a: Surroundings) -> Report:
    for name in LOOPS:
        function = a.names.get(name)
        if type(function) is types.FunctionType and _needed(function) in ([], ["callback"]):
            try:
                subject = a.subject
            except Missing:  # none, or several: the loop tells
                return nbdebug.diagnose(function)
            parts = {kind: a.usual(kind) for kind in ("loss_fn", "train_loader", "val_loader", "scheduler")}
            return nbdebug.diagnose(function, model=subject.model, optimizer=subject.optimizer, **parts)
    raise Missing("your loop as a function `train()` or `train(callback)`, or type %%diagnose above its cell")


def ranks(a: Surroundings) -> Report:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise NotNeeded("there is one process")
    if torch.distributed.get_world_size() > 1:
        raise Missing("all ranks to ask together: python -m nbdebug ranks train.py")
    return nbdebug.check_ranks()


def hang(a: Surroundings) -> Report:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise Missing("the hanging run itself, in every rank, with hang_watch(after=60) around the loop")
    raise Missing(
        "the hanging run: interrupt it, and its traceback ends at the line that waits (a script: timeout -s INT 60 "
        "python train.py)"
    )


def settings(a: Surroundings) -> Report:
    paths = [path for path in a.paths(*SETTINGS) if not path.name.endswith(WEIGHTS)]
    thing = paths[0] if paths else a.first("config", "cfg", "args", "settings", "hparams", "training_args")
    if thing is None or isinstance(thing, types.ModuleType):
        raise Missing("your settings: a path among your variables, or `config`")
    return nbdebug.check_config(thing)


def checkpoint(a: Surroundings) -> Report:
    """Of the file or folder that a variable names, or a usual folder here."""
    files = a.paths(*WEIGHTS)
    folders = [f for f in a.paths() if any(c.name.endswith(WEIGHTS) for c in itertools.islice(f.iterdir(), 500))]
    folders += [f for name in FOLDERS if (f := pathlib.Path(name)).is_dir() and any(f.glob("*.*"))]
    for path in [*folders, *files]:
        with contextlib.suppress(FileNotFoundError, Missing):
            try:
                model = a.subject.model
            except Missing:
                model = None
            return nbdebug.check_checkpoint(path, model=None if isinstance(model, Mapping) else model)
    raise Missing("a checkpoint: its path, or its folder's, among your variables")


def proof(a: Surroundings) -> Report:
    build = a.first("build", "build_run", "make_run", "make_trainer")
    if not callable(build):
        raise Missing("a function `build()` that gives your run: %resume_proof build step")
    step = a.first(*STEPS)
    return nbdebug.resume_proof(build, step, at=3, steps=6)


def outputs(a: Surroundings) -> Report:
    generated = a.first(*OUTPUTS)
    if generated is None:
        raise Missing("what your model made, as `generated`")
    return nbdebug.check_outputs(generated, training=a.first(*TRAINED_ON))


def perplexity(a: Surroundings) -> Report:
    ids = a.first("val_ids", "val_tokens", "eval_ids", "test_ids")
    if ids is None:
        raise Missing("token ids of validation texts, as `val_ids`")
    return nbdebug.perplexity(a.subject.model, ids)


def comparison(a: Surroundings) -> Report:
    baseline, metric, inputs = a.first("baseline"), a.first("metric"), a.first("val_inputs", "inputs", "val_loader")
    if baseline is None or metric is None or inputs is None:
        raise Missing("`baseline`, `metric(output, input)` and `val_inputs`: %compare model baseline val_inputs metric")
    model = a.first("model", "net")
    return nbdebug.compare(a.subject.model if model is None else model, baseline, inputs, metric)


def logs(a: Surroundings) -> Report:
    """Of the path that a variable names, or of the one here that is called as a run's log is."""
    paths = a.paths(".log", ".jsonl", "trainer_state.json", ".out")
    here = [path for pattern in LOGS for path in pathlib.Path().glob(pattern)]
    if not paths and len(here) != 1:
        raise Missing("the run's log: its path among your variables")
    return nbdebug.read_log((paths or here)[0])


def losses(a: Surroundings) -> Report:
    """The losses among the variables, judged as a run's."""
    from nbdebug.verdict import of_losses

    name, values = recorded_losses(a.names)
    if len(values) < 2:
        raise Missing("the losses of your run, as a list `losses`")
    return Report(
        f"the losses in `{name}`",
        symptoms=of_losses(values),
        losses=values,
        headline="" if of_losses(values) else f"Nothing is wrong with the losses in `{name}`.",
    )


def values(a: Surroundings) -> Report:
    """Of a training that can't be traced what it has left: its losses, else the models' values."""
    with contextlib.suppress(Missing):
        a.repeated(1)
        raise NotNeeded("a step could be traced")
    models = discover("model", a.names)
    reports = [nbdebug.describe(model, name=name) for name, model in models.items()]
    with contextlib.suppress(Missing):
        reports.append(losses(a))
    if not reports:
        raise Missing("a model among your variables")
    return next((report for report in reports if not report.ok), reports[0])


def recorded_losses(names: Mapping[str, Any]) -> tuple[str, list[float]]:
    """(name, values) of the losses that a variable holds: a list, or a list in a dict; ("", []) where none does. A
    single loss counts where it is not finite."""
    import torch

    def number(value: Any) -> float | None:
        if type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta:
            return float(value.detach())
        return float(value) if type(value) in (int, float) else None

    for name, thing in names.items():
        inside = {f'{name}["{k}"]': v for k, v in thing.items() if isinstance(k, str)} if type(thing) is dict else {}
        for label, value in ({name: thing} | inside).items():
            if "loss" not in label.lower() or re.search("val|test|eval|best", label.lower()):
                continue
            if type(value) in (list, tuple, collections.deque) and len(value) > 1:
                values = [number(v) for v in value]
                if None not in values:
                    return label, values  # type: ignore[return-value]
            one = number(value)
            if one is not None and not math.isfinite(one):
                return label, [one]
    return "", []


def watched(a: Surroundings, kinds: tuple[str, ...], missing: str) -> Report:
    """The report of the first watch of these kinds that a magic, or a variable, holds."""
    registry = getattr(getattr(a.shell, "magics_manager", None), "registry", {})
    watches = [getattr(registry.get(f"{kind}Magics"), "running", None) for kind in kinds]
    own = [w for w in a.names.values() if module_name(type(w)).startswith("nbdebug.") and type(w).__name__ in kinds]
    for watch in (*watches, *own):
        if watch is not None:
            return watch.report()
    raise Missing(missing)


# -- the lists --------------------------------------------------------------------------------------------------------

STATE = Step("Cells: order, and what is stale", "%check_notebook", 0.2, notebook)
MACHINE = Step("Machine and versions", "%check_environment", 0.2, environment)
ERROR = Step("The last error and its values", "%explain", 0.2, last_error)
NOW = Step("What is held now", "%mem", 0.2, memory_now)
GRADIENTS = functools.partial(watched, kinds=("GradWatch", "Guard"), missing="a watch: %grad_watch on, before the run")
BESIDE = functools.partial(watched, kinds=("Monitor",), missing="a monitor: %monitor on, before the run")
SYMPTOMS: dict[str, Procedure] = {
    "nan": Procedure(
        "a NaN or an inf",
        "the loss is nan or inf",
        (
            ERROR,
            Step("Trace a step: input, ops, gradients", "%nan_trace", 1, traced_step),
            Step("Without a step: losses, weights", "%describe", 0.1, values),
            Step("Every batch: NaN, targets, shapes", "%check_loader", 1, stream),
            Step("Rate, frozen parameters, labels", "%preflight", 1, before_training),
            Step("Half precision or float32", "%precision", 2, half_precision),
            STATE,
        ),
        ("inf", "nans", "nonfinite", "overflow"),
    ),
    "memory": Procedure(
        "memory",
        "out of memory, or it grows",
        (
            Step("The error: who holds the memory", "%explain", 0.2, memory_error),
            Step("What the notebook keeps alive", "%check_notebook", 0.2, kept),
            Step("Three steps: peak, and what stays", "%%mem", 1, memory_of_steps),
            Step("Does a step fit, what would help", "%fit", 1, memory_needed),
            NOW,
        ),
        ("oom", "leak", "ram"),
    ),
    "slow": Procedure(
        "slow training",
        "few steps a second",
        (
            Step("Where a step's time goes; the cure", "%bottleneck", 2, times),
            Step("The stream of batches", "%check_loader", 1, stream),
            MACHINE,
            STATE,
        ),
        ("speed", "slowness", "performance"),
    ),
    "hang": Procedure(
        "a hang",
        "no step, no error",
        (
            ERROR,
            MACHINE,
            Step("Loader and workers, in a copy", "%check_loader", 1, stream),
            Step("Do the ranks agree", "check_ranks", 1, ranks),
            Step("Which line waits, and which rank", "hang_watch", 5, hang),
        ),
        ("deadlock", "stuck", "freeze", "timeout"),
    ),
    "crash": Procedure(
        "a crash",
        "the run ended with an error, or is gone",
        (
            Step("The message, with its values", "%explain", 0.2, any_error),
            Step("The log up to the end", "%read_log", 0.5, logs, always=True),
            Step("The newest checkpoint that loads", "%check_checkpoint", 0.5, checkpoint, always=True),
            MACHINE,
            Step("The settings, as they were", "%check_config", 0.5, settings),
            Step("Would a resumed run be the same", "%resume_proof", 2, proof),
        ),
        ("died", "killed", "resume", "segfault"),
    ),
    "not-learning": Procedure(
        "a loss that does not fall",
        "the loss stays, rises or jumps",
        (
            Step("Model, loss, data, before training", "%preflight", 1, before_training),
            Step("Every batch, two passes", "%check_loader", 1, stream),
            Step("The losses so far", "losses", 0.1, losses),
            Step("Your loop, watched; fixes tried", "%diagnose", 5, loop),
            Step("Data: labels, copies, leaks", "%check_data", 2, data),
            STATE,
        ),
        ("learning", "underfit", "overfit", "plateau", "diverge", "loss"),
    ),
    "error": Procedure(
        "an error",
        "a traceback",
        (Step("The last error and its values", "%explain", 0.2, any_error), STATE, MACHINE),
        ("exception", "traceback", "shape"),
    ),
    "quality": Procedure(
        "poor outputs",
        "good loss, bad outputs",
        (
            Step("Outputs: copies, colour, repeats", "%check_outputs", 1, outputs),
            Step("Perplexity, with an interval", "%perplexity", 1, perplexity),
            Step("Was every weight loaded", "%check_checkpoint", 0.5, checkpoint),
            Step("Data: files, captions, labels", "%check_data", 2, data),
            Step("Training beside validation", "%preflight", 1, before_training),
            Step("Better than before, beyond noise", "%compare", 1, comparison),
        ),
        ("outputs", "bad-outputs", "poor"),
    ),
}
CHECKLISTS: dict[str, Procedure] = {
    "before": Procedure(
        "before training",
        "nothing has run yet",
        (
            MACHINE,
            Step("The settings", "%check_config", 0.5, settings),
            Step("Data: files, captions, labels", "%check_data", 2, data),
            Step("The stream of batches, twice", "%check_loader", 1, stream),
            Step("Model, loss, one batch memorized", "%preflight", 1, before_training),
            Step("Does a step fit in memory", "%fit", 1, memory_needed),
            Step("The checkpoint it starts from", "%check_checkpoint", 0.5, checkpoint),
            Step("Would a resumed run be the same", "%resume_proof", 2, proof),
        ),
    ),
    "during": Procedure(
        "during training",
        "a run is going on, or has just been interrupted",
        (
            Step("Gradients and losses, watched", "%grad_watch", 0.1, GRADIENTS),
            Step("The losses so far", "losses", 0.1, losses),
            Step("Card, memory, disk, beside steps", "%monitor", 0.1, BESIDE),
            dataclasses.replace(NOW, what="Memory, by owner"),
            Step("The speed of a step", "%bottleneck", 2, times),
            Step("A sample of the outputs", "%check_outputs", 1, outputs),
            Step("Newest checkpoint: does it load", "%check_checkpoint", 0.5, checkpoint),
        ),
    ),
    "after": Procedure(
        "after training",
        "the run has ended",
        (
            Step("The file: whole, finite, fitting", "%check_checkpoint", 0.5, checkpoint),
            Step("The losses of the run", "losses", 0.1, losses),
            Step("Outputs beside the training set", "%check_outputs", 1, outputs),
            Step("Perplexity, with an interval", "%perplexity", 1, perplexity),
            Step("Better than the baseline", "%compare", 1, comparison),
            Step("Would the notebook run again", "%check_notebook", 0.2, notebook),
        ),
    ),
}


def named(word: str, lists: Mapping[str, Procedure]) -> str:
    """The list of this name, or of another word for it. Raises ValueError, with the names that there are."""
    wanted = word.strip().lower().replace("_", "-").replace(" ", "-")
    for name, procedure in lists.items():
        if wanted == name or wanted in procedure.also:
            return name
    there = listed(lists, most=len(lists), quote="")
    raise ValueError(f"There is no list {word!r}.{nearest(wanted, lists)} There are {there}.")
