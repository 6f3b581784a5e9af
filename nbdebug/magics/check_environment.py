"""%check_environment: whether this machine can do what a run asks of it. Its answer: `nbdebug.check_environment`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.magics._arguments import FULL, HELP, answer, evaluate, parse, unquote, usage_errors, variables
from nbdebug.report import Report


@magics_class
class CheckEnvironmentMagics(Magics):
    """%check_environment."""

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
