"""%check: looks at what a thing is and asks the function that knows it; %check_notebook: what cells that ran again or
out of order have left; %check_outputs: what is wrong with what a model made; %check_adapter: what its LoRA does;
%check_diffusion: what a denoiser predicts; %perplexity and %compare: how good a model is, beside another. Their
answers: `nbdebug.check_notebook` and so on."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

import nbdebug
from nbdebug.arguments import discover
from nbdebug.magics._arguments import (
    answer,
    evaluate,
    one_model,
    parse,
    report_magic,
    unquote,
    usage_errors,
    variables,
)
from nbdebug.report import Report, RuledOut
from nbdebug.text import count, module_name
from nbdebug.tools.monitor.formats import is_log, sources

SETTINGS = (".json", ".yaml", ".yml", ".toml")
WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")
BESIDE = ("training", "reference", "evaluation", "prompts", "embed")
"""What outputs are laid beside."""


@magics_class
class CheckMagics(Magics):
    """%check, %check_notebook, %check_outputs, %check_adapter, %check_diffusion, %perplexity and %compare."""

    @report_magic
    @argument("thing", metavar="THING", nargs="?", help="a file, a folder or a variable (default: all that is here)")
    @line_magic
    def check(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Look at a thing, whatever it is, before anything runs.

            %check
            %check run.yaml
            %check runs/step_1000.pt
            report = %check train_loader

        Settings go to check_config, checkpoints and folders of them to check_checkpoint, logs to read_log, data sets
        and folders of files to check_data, a DataLoader to check_loader, a trainer to preflight, an exception to
        explain. Alone it looks at the environment, the notebook, the values of your models, and settings and paths
        among your variables, and says what was well.
        """
        __tracebackhide__ = True
        if (args := parse(self.check, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        if args.thing is None:
            return answer(everything(names, self.shell), args, line)
        word = unquote(args.thing)
        thing = pathlib.Path(word).expanduser()
        if word not in names and thing.exists():
            question, ask = check_of(thing)
        else:
            question, ask = check_of(evaluate(word, names))
        with usage_errors(OSError, ImportError):
            report = ask()
        return answer(dataclasses.replace(report, question=f"%check {args.thing}, by {question}"), args, line)

    @report_magic
    @line_magic
    def check_notebook(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong because of the order in which cells ran, and the cell that caused it.

            %check_notebook
            report = %check_notebook

        It finds files that were edited after their import; a model created again while the optimizer holds the old
        parameters; hooks that a cell registered again; objects whose class was defined again; loaders, schedulers and
        trainers made from objects that were replaced; memory that only Out or a traceback holds. It changes nothing
        and runs none of your code. In a script: nbdebug.check_notebook(globals()).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_notebook, line)) is None:
            return None
        from nbdebug.tools.notebook.check_notebook import check_notebook  # imports torch: %load_ext must stay quick

        report = check_notebook(variables(self.shell, local_ns), shell=self.shell)
        return answer(dataclasses.replace(report, question="%check_notebook"), args, line)

    @report_magic
    @argument("generated", metavar="SAMPLES", nargs="?", help="pictures, texts, sounds or vectors that a model made")
    @argument("--training", metavar="NAME", help="what the model learnt from, in the same form")
    @argument("--reference", metavar="NAME", help="pictures whose colours and sharpness are wanted (default: training)")
    @argument("--evaluation", metavar="NAME", help="rows of an evaluation set, which training should not have")
    @argument("--prompts", metavar="NAME", help="the prompt of each text, which is cut off its beginning")
    @argument("--sample-rate", type=int, metavar="N", help="these are sounds, with so many values a second")
    @argument("--embed", metavar="NAME", help="your function from all items to vectors (N, D), for other things")
    @line_magic
    def check_outputs(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong with what a model made: copies, collapse, tints, loops, cut ends.

            %check_outputs samples --training train_pictures
            %check_outputs replies --prompts prompts
            report = %check_outputs --evaluation test_texts --training train_texts

        Samples that repeat the training set are named and shown beside it, also where they are flipped, moved, noisy
        or saved anew; copies of one sample; a tint, blur or grain beside the reference; texts that loop or end at a
        limit; evaluation rows that stand in training. In a script: nbdebug.check_outputs(samples, training=train).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_outputs, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        if args.generated is None and args.evaluation is None:
            raise UsageError("%check_outputs needs what a model made: %check_outputs samples --training train")
        parts = {part: evaluate(getattr(args, part), names) for part in BESIDE if getattr(args, part) is not None}
        generated = None if args.generated is None else evaluate(args.generated, names)
        with usage_errors():
            report = nbdebug.check_outputs(generated, **parts, sample_rate=args.sample_rate)
        return answer(dataclasses.replace(report, question=f"%check_outputs {line.strip()}"), args, line)

    @report_magic
    @argument("model", metavar="MODEL", nargs="?", help="the model with its adapter (default: the one of yours)")
    @argument("--base", metavar="NAME", help="the model without it, or its state dict")
    @argument("--saved", metavar="PATH", help="the adapter's file or folder, or a variable that holds it")
    @argument("--optimizer", metavar="NAME", help="the optimizer that trains it")
    @argument("--inputs", metavar="EXPR", help="inputs of one forward pass: its outputs with ten times the scale")
    @line_magic
    def check_adapter(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say what the adapter of a model (LoRA and its kin) changes, layer by layer, and what keeps it from doing so.

            %check_adapter model --base base_model --inputs batch
            report = %check_adapter --saved runs/adapter.safetensors

        Layers of peft and of your own: rank, scale (measured), the size of the change beside the weight, factors that
        are zero, frozen or without an optimizer; whether the adapter stands in the weights already, and whether a
        saved file fits and was loaded. Nothing of the model changes. In a script: nbdebug.check_adapter(model).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_adapter, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        models = None if args.model is None else [args.model]
        others = {name: value for name, value in names.items() if name != args.base}
        subject = one_model(models, None, others, "%check_adapter", how="%check_adapter MODEL")
        parts = {part: evaluate(getattr(args, part), names) for part in ("base", "inputs") if getattr(args, part)}
        parts["optimizer"] = subject.optimizer if args.optimizer is None else evaluate(args.optimizer, names)
        if args.saved is not None:
            parts["saved"] = names.get(unquote(args.saved), unquote(args.saved))
        with usage_errors(FileNotFoundError):
            report = nbdebug.check_adapter(subject.model, **parts)
        return answer(dataclasses.replace(report, question=f"%check_adapter {line.strip()}".rstrip()), args, line)

    @report_magic
    @argument("model", metavar="MODEL", help="the denoiser, called as model(noisy, steps)")
    @argument("schedule", metavar="SCHEDULE", help="the scheduler, its alphas_cumprod or its betas")
    @argument("clean", metavar="CLEAN", help="training items (N, …), as training uses them")
    @argument(
        "--prediction", metavar="TYPE", help="what the sampler takes the output for: epsilon, sample, v_prediction"
    )
    @argument("--call", metavar="NAME", help="your function call(model, noisy, steps), for other inputs")
    @argument("--step", metavar="NAME", help="your function step(clean), a training step without backward: its noise")
    @line_magic
    def check_diffusion(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say what a diffusion model predicts, and whether its sampler takes it for that.

            %check_diffusion unet scheduler latents
            report = %check_diffusion net alphas clean --step loss_of

        The noise, the clean data or v; whether the schedule is one; the loss by time step beside min-SNR weights; with
        --step the noise that training adds, and its offset. In a script: nbdebug.check_diffusion(net, alphas, clean).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_diffusion, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        subject = [evaluate(part, names) for part in (args.model, args.schedule, args.clean)]
        parts = {part: evaluate(getattr(args, part), names) for part in ("call", "step") if getattr(args, part)}
        with usage_errors():
            report = nbdebug.check_diffusion(*subject, prediction=args.prediction, **parts)
        return answer(dataclasses.replace(report, question=f"%check_diffusion {line.strip()}"), args, line)

    @report_magic
    @argument("model", metavar="MODEL", help="a causal language model, or logits (N, T, V)")
    @argument("data", metavar="DATA", help="token ids (N, T), or batches of them")
    @argument("--pad-id", type=int, metavar="N", help="the padding token, which is no target")
    @argument("--baseline", metavar="NAME", help="another model, or its logits, on the same data")
    @argument("--reported", metavar="EXPR", help="your own number, or your function that computes it")
    @argument("--batch-size", type=int, metavar="N", help="of your own evaluation")
    @argument("--window", type=int, metavar="N", help="tokens of its windows, where it cuts texts")
    @line_magic
    def perplexity(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """The perplexity per real next token, with an interval, and the mistake that gives another number.

            %perplexity model ids --pad-id 0
            report = %perplexity logits ids --pad-id 0 --reported evaluate

        In a script: nbdebug.perplexity(model, ids, pad_id=0, reported=evaluate).
        """
        __tracebackhide__ = True
        if (args := parse(self.perplexity, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        parts = {part: evaluate(getattr(args, part), names) for part in ("baseline", "reported") if getattr(args, part)}
        subject = [evaluate(part, names) for part in (args.model, args.data)]
        with usage_errors():
            report = nbdebug.perplexity(
                *subject, pad_id=args.pad_id, batch_size=args.batch_size, window=args.window, **parts
            )
        return answer(dataclasses.replace(report, question=f"%perplexity {line.strip()}"), args, line)

    @report_magic
    @argument("a", metavar="A", help="a model, a function, runs of it, or its outputs")
    @argument("b", metavar="B", help="the other")
    @argument("inputs", metavar="INPUTS", help="a list or a loader, read once")
    @argument("metric", metavar="METRIC", help="your function from (output, input) to a number, or one for each row")
    @argument("--seeds", type=int, default=1, metavar="N", help="passes, each with a seed of its own (default: 1)")
    @argument("--lower", action="store_true", help="lower is better: the metric is a loss")
    @line_magic
    def compare(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say which of two models is better on the same inputs and seeds, where noise does not explain it.

            %compare old new val_batches accuracy
            report = %compare old new val_batches loss --lower --seeds 3

        In a script: nbdebug.compare(old, new, val_batches, accuracy, seeds=range(3)).
        """
        __tracebackhide__ = True
        if (args := parse(self.compare, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        subject = [evaluate(part, names) for part in (args.a, args.b, args.inputs, args.metric)]
        with usage_errors():
            report = nbdebug.compare(*subject, seeds=range(args.seeds), better="lower" if args.lower else "higher")
        return answer(dataclasses.replace(report, question=f"%compare {line.strip()}"), args, line)


def check_of(thing: Any) -> tuple[str, Callable[[], Report]]:
    """(name of the function that knows this thing, what asks it). Raises UsageError where none does."""
    if isinstance(thing, (str, pathlib.PurePath)):
        return _of_path(pathlib.Path(thing))
    name = kind_of(thing)
    if not name:
        what = "a file, a folder, settings, a data set, a loader, a trainer or an exception"
        raise UsageError(f"%check takes {what}; a {type(thing).__name__} is none. For a model: %preflight, %diagnose.")
    return name, lambda: getattr(nbdebug, name)(thing)


def _of_path(path: pathlib.Path) -> tuple[str, Callable[[], Report]]:
    if path.is_dir():
        return "check_checkpoint, read_log or check_data", lambda: _of_folder(path)
    name = _by_name(path)
    return name, lambda: getattr(nbdebug, name)(str(path))


def _by_name(path: pathlib.Path) -> str:
    if path.suffix == ".py":
        raise UsageError(f"{path.name} is a program: `python -m nbdebug run {path.name}` runs it, and watches.")
    if path.is_file() and is_log(path):
        return "read_log"
    if path.name.endswith(WEIGHTS):
        return "check_checkpoint"
    if path.name.endswith(SETTINGS):
        return "check_config"
    return "check_data" if path.exists() else "check_checkpoint"


def _of_folder(path: pathlib.Path) -> Report:
    with contextlib.suppress(FileNotFoundError):
        return nbdebug.check_checkpoint(path)
    if not any(path.iterdir()):
        raise ValueError(f"{path} is empty.")
    logs = any(is_log(file) for file in sources(path, 20))
    return nbdebug.read_log(path) if logs else nbdebug.check_data(str(path))


def kind_of(thing: Any) -> str:
    """The function that knows an object: by its class alone, no attribute is asked. "" where none does."""
    module, own = module_name(type(thing)).partition(".")[0], [kind.__name__ for kind in type(thing).__mro__]
    if isinstance(thing, BaseException):
        return "explain"
    if "DataLoader" in own:
        return "check_loader"
    if "Trainer" in own:
        return "preflight"
    if isinstance(thing, argparse.Namespace) or module == "omegaconf" or "BaseModel" in own:
        return "check_config"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return "check_config"
    if isinstance(thing, Mapping):
        plain = thing and all(isinstance(v, (int, float, str, bool, type(None), list, dict)) for v in thing.values())
        return "check_config" if plain else ""
    return "check_data" if {"Dataset", "IterableDataset", "DataFrame", "DatasetDict"} & set(own) else ""


def everything(names: Mapping[str, Any], shell: Any) -> Report:
    """The environment, the notebook, and settings and paths among the variables, in one report."""
    asked = dict(_questions(names, shell))
    reports: dict[str, Report] = {}
    unchecked = []
    for name, ask in asked.items():
        try:
            reports[name] = ask()
        except Exception as error:  # one that fails hides no other: it is told
            unchecked.append(f"{name}: {type(error).__name__}: {error}")
    loaders = [name for name, thing in names.items() if kind_of(thing) == "check_loader" and not name.startswith("_")]
    unchecked += [f"`{name}`: %check {name} reads a pass of it" for name in loaders[:3]]
    findings = tuple(finding for report in reports.values() for finding in report)
    symptoms = [symptom for report in reports.values() for symptom in report.symptoms]
    well = [RuledOut(name, r.headline) for name, r in reports.items() if not (r.findings or r.symptoms)]
    headline = "" if findings or symptoms else f"No problem was found in {count(len(reports), 'check')}."
    return Report(
        "%check", findings, tuple(well), tuple(unchecked), symptoms=symptoms, headline=headline, independent=True
    )


def _questions(names: Mapping[str, Any], shell: Any) -> Iterator[tuple[str, Callable[[], Report]]]:
    yield "the environment", nbdebug.check_environment
    yield "the notebook", lambda: nbdebug.check_notebook(names, shell=shell)
    for name, model in [*discover("model", names).items()][:12] if "torch" in sys.modules else ():
        yield f"`{name}`", functools.partial(nbdebug.describe, model, name=name)
    paths = [(name, thing) for name, thing in names.items() if isinstance(thing, pathlib.Path)]
    settings = [(name, thing) for name, thing in names.items() if kind_of(thing) == "check_config"]
    for name, thing in [*settings, *((n, path) for n, path in paths if path.name.endswith(SETTINGS + WEIGHTS))][:12]:
        if not name.startswith("_") and (not isinstance(thing, pathlib.Path) or thing.is_file()):
            yield f"`{name}`", check_of(thing)[1]
