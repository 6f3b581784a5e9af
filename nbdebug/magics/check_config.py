"""%check_config and %check_environment: what can be known before anything runs. Their answers: the functions of these
names."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.magics._arguments import FULL, HELP, answer, evaluate, parse, unquote, usage_errors, variables
from nbdebug.report import Report


@magics_class
class BeforeRunMagics(Magics):
    """%check_config and %check_environment."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @argument("config", metavar="FILE", nargs="?", help="a JSON, YAML or TOML file, or a variable with settings")
    @argument("--schema", metavar="NAME", help="what each key may be: a variable, or a file (default: the usual names)")
    @argument("--model", metavar="NAME", help="a model whose config is compared")
    @argument("--optimizer", metavar="NAME", help="an optimizer whose learning rate and weight decay are compared")
    @argument("--loader", metavar="NAME", help="a loader whose batch size is compared")
    @argument("--checkpoint", metavar="FILE", help="settings that were saved with a checkpoint: a file, or a variable")
    @FULL
    @HELP
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
        args = parse(self.check_config, line)
        if args is None:
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
        try:
            with usage_errors():
                report = check_config(thing(args.config), **options)
        except (OSError, ImportError) as error:
            raise UsageError(str(error)) from None
        return answer(dataclasses.replace(report, question="%check_config"), args, line)

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @argument("--requirements", metavar="FILE", help="a requirements file, to be compared with what is installed")
    @argument("--facts", metavar="NAME", help="a variable with another machine's facts (default: this machine)")
    @argument("--save", metavar="FILE", help="write the report to FILE (.txt, .html or .json), for a bug report")
    @FULL
    @HELP
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
        args = parse(self.check_environment, line)
        if args is None:
            return None
        from nbdebug.tools.environment.check_environment import check_environment

        facts = evaluate(args.facts, variables(self.shell, local_ns)) if args.facts else None
        try:
            with usage_errors():
                report = check_environment(requirements=args.requirements and unquote(args.requirements), facts=facts)
                if args.save:
                    print(report.save(unquote(args.save)))
        except OSError as error:
            raise UsageError(str(error)) from None
        return answer(dataclasses.replace(report, question="%check_environment"), args, line)


ENDINGS = {".json", ".yaml", ".yml", ".toml"}
