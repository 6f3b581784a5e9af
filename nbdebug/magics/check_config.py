"""%check_config, %check_data, %check_loader, %check_environment, %check_checkpoint, %resume_proof: what can be known
before anything runs. Their answers: the functions of these names."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument

import nbdebug
from nbdebug.magics._arguments import (
    answer,
    evaluate,
    parse,
    report_magic,
    required,
    unquote,
    usage_errors,
    variables,
)
from nbdebug.report import Report


@magics_class
class BeforeRunMagics(Magics):
    """%check_config, %check_data, %check_loader, %check_environment, %check_checkpoint and %resume_proof."""

    @report_magic
    @argument("config", metavar="FILE", nargs="?", help="a JSON, YAML or TOML file, or a variable with settings")
    @argument("--schema", metavar="NAME", help="what each key may be: a variable, or a file (default: the usual names)")
    @argument("--model", metavar="NAME", help="a model whose config is compared")
    @argument("--optimizer", metavar="NAME", help="an optimizer whose learning rate and weight decay are compared")
    @argument("--loader", metavar="NAME", help="a loader whose batch size is compared")
    @argument("--checkpoint", metavar="FILE", help="settings that were saved with a checkpoint: a file, or a variable")
    @line_magic
    def check_config(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong with a file of settings, before anything runs.

            %check_config run.yaml
            %check_config run.json --schema TrainConfig
            report = %check_config args --optimizer optimizer

        Where the file can't be read: the line, the lines around it and the mended line, several faults at once. Else
        values that can't be meant: keys that stand twice or are misspelt, text in a number's place (1e-4 is text to
        PyYAML), numbers out of range, heads that don't divide a width, settings that exclude each other. It runs
        nothing that stands in the file. In a script: nbdebug.check_config(path); in CI: python -m nbdebug check-config
        FILE.
        """
        __tracebackhide__ = True
        if (args := parse(self.check_config, line)) is None:
            return None
        if args.config is None:
            raise UsageError("%check_config needs a file, or a variable with settings: %check_config run.yaml")
        from nbdebug.tools.config.check_config import check_config

        names = variables(self.shell, local_ns)

        def thing(word: str | None) -> Any:
            """A variable, or else a path."""
            if word is None:
                return None
            bare = pathlib.Path(unquote(word))
            return str(bare) if bare.suffix in ENDINGS or bare.is_file() else evaluate(word, names)

        options = {key: thing(getattr(args, key)) for key in ("schema", "model", "optimizer", "loader", "checkpoint")}
        with usage_errors(OSError, ImportError):
            report = check_config(thing(args.config), **options)
        return answer(dataclasses.replace(report, question="%check_config"), args, line)

    @report_magic
    @argument("loader", metavar="NAME", nargs="?", help="a loader (default: train_loader, or the one that you have)")
    @argument("--epochs", type=int, metavar="N", help="of the planned training")
    @argument("--max-steps", type=int, metavar="N", help="of the planned training")
    @argument(
        "--resume-at", type=int, metavar="STEP", help="try to go on there, with the set's skip_samples or the like"
    )
    @argument("--ranks", type=int, default=1, metavar="N", help="read it as each of N processes would")
    @argument("--seconds", type=float, default=60.0, metavar="S", help="for all of it (default: 60)")
    @line_magic
    def check_loader(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong with the batches of a loader, in two passes that are read in a copy of the process.

            %check_loader
            %check_loader stream --max-steps 10000 --ranks 2
            %check_loader train_loader --resume-at 500

        Streams that can be read once or end too early, a drop_last that leaves nothing, rows that come from each worker
        or rank, the same random numbers in all workers, a frozen shuffle, skip_samples that reaches no worker or stays,
        batches without labels, NaN rows with their item. Your iterators, workers and random numbers stay as they are.
        In a script: nbdebug.check_loader(loader).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_loader, line)) is None:
            return None
        from nbdebug.tools.data.check_loader import check_loader

        how = "%check_loader NAME"
        name, loader = required("train_loader", args.loader, variables(self.shell, local_ns), "%check_loader", how)
        plan = {key: getattr(args, key) for key in ("epochs", "max_steps", "resume_at", "ranks", "seconds")}
        with usage_errors():
            report = check_loader(loader, **plan)
        return answer(dataclasses.replace(report, question=f"%check_loader {name}"), args, line)

    @report_magic
    @argument("--requirements", metavar="FILE", help="a requirements file, to be compared with what is installed")
    @argument("--facts", metavar="NAME", help="a variable with another machine's facts (default: this machine)")
    @argument("--save", metavar="FILE", help="write the report to FILE (.txt, .html or .json), for a bug report")
    @line_magic
    def check_environment(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what in this machine, its packages and its variables will stop a run, or slow it down.

            %check_environment
            %check_environment --save env.txt
            %check_environment --requirements requirements.txt

        It compares torch's build with the card and the driver, torchvision, torchaudio, NumPy, tokenizers with torch
        and transformers, and knows variables that hide cards, name a missing interface or have a new name. The text
        names no person, host or token. For another machine: python -m nbdebug facts > facts.json there.
        """
        __tracebackhide__ = True
        if (args := parse(self.check_environment, line)) is None:
            return None
        from nbdebug.tools.environment.check_environment import check_environment

        facts = evaluate(args.facts, variables(self.shell, local_ns)) if args.facts else None
        with usage_errors(OSError):
            report = check_environment(requirements=args.requirements and unquote(args.requirements), facts=facts)
            if args.save:
                print(report.save(unquote(args.save)))
        return answer(dataclasses.replace(report, question="%check_environment"), args, line)

    @report_magic
    @argument(
        "data", metavar="PATH", nargs="?", help="a folder, a file, or a variable: a path, a data set, a DataFrame"
    )
    @argument(
        "--expected", metavar="NAME", help="a variable: a dict of the fields below, a processor, a tokenizer, a model"
    )
    @argument("--size", metavar="WxH", help="of pictures, such as 512x512")
    @argument("--mode", help="of pictures, such as RGB")
    @argument("--min-size", type=int, metavar="PIXELS", help="of the shorter side of pictures")
    @argument("--caption-extension", metavar="ENDING", help="of the file beside each picture, such as .txt")
    @argument("--trigger", metavar="WORD", help="a word that each caption holds")
    @argument("--min-words", type=int, metavar="N", help="of each caption")
    @argument("--masks", metavar="FOLDER", help="the name of the folder with masks")
    @argument("--sample-rate", type=int, metavar="HZ", help="of sounds")
    @argument("--label", metavar="NAME", help="the column, or the key, of the label")
    @argument("--text", metavar="NAME", help="the column of the text")
    @argument("--num-classes", type=int, metavar="N", help="labels are 0 to N - 1")
    @argument("--vocab-size", type=int, metavar="N", help="token ids are below N")
    @argument("--max-length", type=int, metavar="N", help="positions of the model")
    @argument("--pad-id", type=int, metavar="ID", help="the token of padding")
    @argument("--eos-id", type=int, metavar="ID", help="the token that ends a text")
    @argument("--kind", choices=["images", "audio", "text", "tables", "rows"], help="look at this kind alone")
    @argument("--sample", type=int, metavar="N", help="look at N items of each kind")
    @argument(
        "--workers", type=int, metavar="N", help="processes that decode pictures (default: as many as processors)"
    )
    @argument("--save", metavar="FILE", help="write the report to FILE: .csv (each item), .html, .json or .txt")
    @line_magic
    def check_data(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong with a data set, before anything is trained on it.

            %check_data photos --caption-extension .txt --trigger sks
            report = %check_data train_set --expected tokenizer --num-classes 5
            %check_data table.csv --label churn --save problems.csv

        Pictures that do not open, end early, lie on their side or are copies of others; captions, masks, boxes, sounds;
        labels and tokens out of range; columns that give the label away. What you do not say is judged against the
        set's own majority, or not at all. Nothing is changed, and no pickle is opened. report.frame() has a row for
        each problem. In a script: nbdebug.check_data(path, mode="RGB"); in a shell: python -m nbdebug check-data PATH.
        """
        __tracebackhide__ = True
        if (args := parse(self.check_data, line)) is None:
            return None
        if args.data is None:
            raise UsageError("%check_data needs a folder, a file, or a variable: %check_data photos")
        from nbdebug.tools.data.check_data import check_data

        names = variables(self.shell, local_ns)
        path = pathlib.Path(unquote(args.data)).expanduser()
        subject = names.get(args.data, path if path.exists() else None)
        if subject is None:
            subject = str(path) if os.sep in str(path) or path.suffix else evaluate(args.data, names)
        expected = evaluate(args.expected, names) if args.expected else None
        fields: dict[str, Any] = {key: getattr(args, key) for key in (*WORDS, *NUMBERS)}
        with usage_errors(OSError):
            if args.size:
                fields["size"] = sides(args.size)
            report = check_data(
                subject, expected=expected, kind=args.kind, sample=args.sample, workers=args.workers, **fields
            )
            if args.save:
                print(report.save(unquote(args.save)))
        return answer(dataclasses.replace(report, question=f"%check_data {args.data}"), args, line)

    @report_magic
    @argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=".",
        help="a file, a folder, or a variable that holds the path of one (default: .)",
    )
    @argument("--model", metavar="NAME", help="the model that it is loaded into")
    @argument("--optimizer", metavar="NAME", help="the optimizer that goes on from it")
    @argument("--scheduler", metavar="NAME", help="the learning rate scheduler that goes on from it")
    @argument("--scaler", metavar="NAME", help="the GradScaler that goes on from it")
    @argument("--ema", metavar="NAME", help="the averaged weights that go on from it")
    @argument("--sampler", metavar="NAME", help="the sampler or loader whose position is to be saved")
    @argument(
        "--load", metavar="NAME", help="your own function load(path); its lines are mended, and the edit is tried"
    )
    @line_magic
    def check_checkpoint(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Look at a checkpoint, or the newest of a folder by its step, without loading it.

            %check_checkpoint runs/step_1000.pt --model net
            report = %check_checkpoint runs --model net --optimizer opt

        It finds files that end early or changed since, classes and functions that loading would call, weights with
        other names, shapes or types than the model's, weights that are not finite, and an optimizer of other groups.
        Nothing of the file is executed. In a script: nbdebug.check_checkpoint(path, model=net).
        """
        __tracebackhide__ = True
        if (args := parse(self.check_checkpoint, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        parts = {part: evaluate(getattr(args, part), names) for part in PARTS if getattr(args, part) is not None}
        path = unquote(args.path)
        with usage_errors(FileNotFoundError):
            report = nbdebug.check_checkpoint(names.get(path, path), **parts)
        return answer(dataclasses.replace(report, question=f"%check_checkpoint {args.path}"), args, line)

    @report_magic
    @argument(
        "build", metavar="BUILD", nargs="?", help="your function build() that gives a run, or a trainer, ready to train"
    )
    @argument(
        "step", metavar="STEP", nargs="?", help="your function step(run) that trains one step; a trainer needs none"
    )
    @argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a file that is there; BUILD is resumed(path), STEP trains without a stop",
    )
    @argument("--at", type=int, default=10, metavar="N", help="the step of the stop (default: 10)")
    @argument("--steps", type=int, default=20, metavar="N", help="the last step (default: 20)")
    @argument("--save", metavar="NAME", help="your function save(run, path) (default: the run's own way)")
    @argument("--load", metavar="NAME", help="your function load(run, path) (default: the run's own way)")
    @line_magic
    def resume_proof(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Is a run that was stopped, saved and loaded the run that never stopped? And if not, what was not saved?

            %resume_proof build step --at 10 --steps 20 --save save --load load
            %resume_proof make_trainer
            report = %resume_proof resumed uninterrupted runs/step_1000.pt

        The run is trained with and without a stop, in copies of the process: nothing here changes. Losses, rows and
        weights are compared bit for bit. A Trainer of transformers, or (Trainer, module, loader) of Lightning, saves by
        itself. With a file both functions give a list of the same steps, such as the losses. In a script:
        nbdebug.resume_proof(build, step).
        """
        __tracebackhide__ = True
        if (args := parse(self.resume_proof, line)) is None:
            return None
        if args.build is None:
            raise UsageError("%resume_proof needs a function that builds your run: %resume_proof build step")
        names = variables(self.shell, local_ns)
        build, step, save, load = (
            None if word is None else evaluate(word, names) for word in (args.build, args.step, args.save, args.load)
        )
        path = None if args.path is None else names.get(unquote(args.path), unquote(args.path))
        with usage_errors(FileNotFoundError):
            report = nbdebug.resume_proof(build, step, path, at=args.at, steps=args.steps, save=save, load=load)
        return answer(dataclasses.replace(report, question=f"%resume_proof {line.strip()}"), args, line)


PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "sampler", "load")
ENDINGS = {".json", ".yaml", ".yml", ".toml"}
WORDS = ("mode", "trigger", "label", "text", "caption_extension", "masks")
NUMBERS = ("min_size", "min_words", "sample_rate", "num_classes", "vocab_size", "max_length", "pad_id", "eos_id")


def sides(word: str) -> tuple[int, ...]:
    """(512, 512) of "512x512". Raises ValueError for anything else."""
    parts = word.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f'a size is written as "512x512"; got {word!r}')
    return tuple(map(int, parts))
