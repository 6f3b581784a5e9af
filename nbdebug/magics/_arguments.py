"""What was typed after a magic: its options, its help, and the user's variables that it names.

Each magic declares its options with IPython's `@argument`; an option that several magics take is declared here, once.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic import needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split

from nbdebug import registry
from nbdebug.arguments import NOUNS, USUAL_NAMES, Subject, around, discover, is_source, part
from nbdebug.text import listed, refused, sentence, terminal_width

# -- options that several magics take ---------------------------------------------------------------------------------

HELP = argument("-h", "--help", action="store_true", help="show this help")
FULL = argument("--full", action="store_true", help="show all of the report (default: what fits on a screen)")
MODEL = argument("--model", action="append", metavar="NAME", help="the model (default: the one among your variables)")
MODELS = argument(
    "--model", action="append", metavar="NAME", help="a model; can be repeated (default: all your models)"
)
OPTIMIZERS = argument(
    "--optimizer", action="append", metavar="NAME", help="an optimizer; can be repeated (default: all of yours)"
)
LOSS_FN = argument(
    "--loss-fn",
    metavar="NAME",
    help="loss_fn(model, batch), or a criterion of (outputs, targets) (default: loss_fn, criterion or the like)",
)
TRAIN_LOADER = argument("--train-loader", metavar="NAME", help="the training batches (default: train_loader)")
VAL_LOADER = argument("--val-loader", metavar="NAME", help="the validation batches (default: val_loader)")
SCHEDULER = argument("--scheduler", metavar="NAME", help="the learning rate scheduler (default: scheduler)")
BATCH = argument(
    "--batch", metavar="EXPR", help="a batch (default: the variable batch, or the first batch of train_loader)"
)

MEANING = {
    "train_loader": "the training batches",
    "loss_fn": "a loss: loss_fn(model, batch), or a criterion of (outputs, targets)",
}


def report_magic(magic: Any) -> Any:
    """Decorates a magic that gives a report: it has --full and --help, `{x}` in its line stays, and it sees the
    variables of the function that it is called from."""
    return no_var_expand(needs_local_scope(magic_arguments()(FULL(HELP(magic)))))


# -- the line ---------------------------------------------------------------------------------------------------------


def parse(magic: Any, line: str) -> Any:
    """The arguments, or None when help was asked for and shown. Options may stand anywhere, but not behind a step (an
    argument that takes the rest of the line). Raises UsageError for a wrong argument."""
    try:
        words = arg_split(line.rstrip().rstrip(";"))
    except ValueError as error:  # "No closing quotation"
        raise UsageError(f"{error}: {line}") from None
    takes_step = any(action.nargs == argparse.REMAINDER for action in magic.parser._actions)
    if takes_step or not {"-h", "--help"} & set(words):  # help needs no other argument
        try:
            args = magic.parser.parse_args(words) if takes_step else magic.parser.parse_intermixed_args(words)
        except UsageError as error:
            raise UsageError(refused(str(error))) from None
        if not args.help:
            return args
    print(help_text(magic, terminal_width()))
    return None


def step_text(line: str, words: list[str]) -> str:
    """The step as it was typed, spaces and all: the end of the line that argparse split into these words."""
    start = len(line)
    for word in reversed(words[1:] if words[:1] == ["--"] else words):
        start = line.rindex(word, 0, start)
    return line[start:].strip().rstrip(";").strip()


def unquote(word: str) -> str:
    """A path or an expression without the quotes that hold its spaces together."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def ends_in_semicolon(text: str) -> bool:
    """Whether IPython would not show the result. Text that is no plain Python (`!ls`) does not end so."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(text))
    except (tokenize.TokenError, SyntaxError):
        return False


def answer(report: Any, args: Any, text: str) -> Any:
    """The value of a magic that gives a report: what IPython shows when it comes last, unless a semicolon ends the
    text. All of it where --full was typed."""
    if report is None or ends_in_semicolon(text):
        return None
    report = _placed(report)
    return report.full() if args.full else report


def _placed(report: Any) -> Any:
    """The report with what stands at the magic's own line, from which modules without a line of the user's were called,
    where its fix stands. Of a watch or a record, which have no findings of their own, the same."""
    known = getattr(report, "findings", ())
    if not any(finding.where.cell and MAGIC.match(finding.where.text or "") for finding in known):
        return report
    more = {"tool": _placed(report.tool)} if getattr(report, "tool", None) is not None else {}
    return dataclasses.replace(report, findings=tuple(map(_of_its_fix, known)), **more)


def _of_its_fix(finding: Any) -> Any:
    where, edit = finding.where, next((fix.edit for fix in finding.fixes if fix.edit is not None), None)
    if not (where.cell and MAGIC.match(where.text or "")):
        return finding
    new = {"file": None, "line": None, "text": None, "cell": None}
    if edit is not None:
        new = {"file": edit.file, "line": edit.line, "text": edit.old.split("\n")[0].strip(), "cell": edit.cell}
    there = dataclasses.replace(where, **new)
    title = finding.title.replace(f" ({where.place})", f" ({there.place})" if edit is not None else "")
    return dataclasses.replace(finding, title=title, where=there)


# -- help -------------------------------------------------------------------------------------------------------------

MAGIC = re.compile(r"\s*(?:[\w, ]+=\s*)?%\w")
REPORT = "The result is a report: report = %{name} ... keeps it, and a semicolon at the end of the line hides it."
"""What the help of each magic with a report says of it."""
LABEL = 22
"""Columns for an option and its value; a longer one stands on a line of its own."""


def summary(magic: Any) -> str:
    """The first sentence of a magic's help."""
    return str(magic.parser.description or "").partition("\n\n")[0].replace("\n", " ").strip()


def help_text(magic: Any, width: int = 80) -> str:
    """Usage, what the magic does, examples, arguments and options, in lines of at most `width` characters."""
    name, actions = magic.parser.prog, [a for a in magic.parser._actions if a.help != argparse.SUPPRESS]
    positional = [action for action in actions if not action.option_strings]
    options = sorted((a for a in actions if a.option_strings), key=lambda action: action.dest in ("full", "help"))
    needed = [a.nargs == argparse.REMAINDER and "(default" not in str(a.help) for a in positional]
    values = "".join(f" {_label(a)}" if need else f" [{_label(a)}]" for a, need in zip(positional, needed))
    usage = [f"%{name} [OPTIONS]{values}"]
    if name in magic.__self__.magics["cell"]:
        usage.append(f"%%{name} [OPTIONS]   (first line of a cell: runs the cell below it)")
    parts = ["\n".join(usage), *_paragraphs(magic.parser.description, width)]
    if "--full" in magic.parser._option_string_actions:
        parts += _paragraphs(REPORT.format(name=name), width)
    for title, rows in (("Arguments", positional), ("Options", options)):
        parts += ["\n".join([f"{title}:", *(line for row in rows for line in _row(row, width))])] * bool(rows)
    return "\n\n".join(parts) + "\n"


def _paragraphs(description: str, width: int) -> Iterator[str]:
    """The paragraphs of a docstring, filled; an indented one is an example, and stays as it is."""
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        yield paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, width, break_on_hyphens=False)


def _row(action: argparse.Action, width: int) -> list[str]:
    """An option and what it does; each line of its help begins a new one."""
    label = f"  {_label(action)}"
    lines = str(action.help).replace("%%", "%").splitlines()
    indent = "  " * (len(lines) > 1)
    text = [part for line in lines for part in textwrap.wrap(line, width - LABEL - 4, subsequent_indent=indent)]
    head = [label] if len(label) > LABEL + 2 else []
    rows = [" " * (LABEL + 4) + line for line in text]
    return head + rows if head else [f"{label:{LABEL + 4}}{text[0]}", *rows[1:]]


def _label(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"{value} ..." if action.nargs == "*" else str(value)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} [{value}]" if action.nargs == "?" else f"{names} {value}"


# -- the user's variables ---------------------------------------------------------------------------------------------


def variables(shell: Any, local_ns: dict[str, Any] | None) -> dict[str, Any]:
    """The user's variables, with those of the function that the magic was called in."""
    if local_ns and local_ns is not shell.user_ns:
        return {**shell.user_ns, **local_ns}
    return shell.user_ns


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of the user's expression. Raises UsageError where it has none."""
    try:
        return eval(unquote(expression), dict(names))
    except Exception as error:  # whatever it raises, there is no such thing
        raise UsageError(f"{expression!r} cannot be evaluated: {error}.") from None


def option_or_usual(kind: str, expression: str | None, names: Mapping[str, Any], model: Any = None) -> tuple[str, Any]:
    """(expression, value) of what the option names, or else of what the user's variables are, or hold, for this model;
    ("", None) for none."""
    if expression is not None:
        return expression, evaluate(expression, names)
    return part(kind, names if model is None else around(model, names))


def required(
    kind: str, expression: str | None, names: Mapping[str, Any], magic: str, how: str = "", model: Any = None
) -> tuple[str, Any]:
    """The same; raises UsageError where there is none. how: what to type, where that is no option of this name."""
    name, value = option_or_usual(kind, expression, names, model)
    if value is None:
        usual = listed(USUAL_NAMES[kind], most=9, quote="").replace(" and ", " or ")
        how = how or f"{magic} --{kind.replace('_', '-')} NAME"
        raise UsageError(f"{magic} needs {MEANING[kind]}. No variable of yours is called {usual}. Name yours: {how}")
    return name, value


def batch_of(
    expression: str | None, names: Mapping[str, Any], magic: str, how: str = "", usual: int = 3, model: Any = None
) -> tuple[str, Any]:
    """(expression, value) of the batch: what the user named, the first `usual` usual names of one, or the first batch
    of the training loader; the latter two go to the model's device, as the user's loop has them go. Raises UsageError
    where there is none; an iterator of the user's is not read. how: what to type, where that is not --batch EXPR."""
    if expression is not None:
        return expression, evaluate(expression, names)
    batches = USUAL_NAMES["batch"][:usual]
    for name in batches:
        if names.get(name) is not None and not is_source(names[name]):
            return name, _beside(names[name], model)
    name, loader = option_or_usual("train_loader", None, names, model)
    if loader is not None and not isinstance(loader, Iterator):
        return f"next(iter({name}))", _beside(next(iter(loader)), model)
    candidates = listed([*batches, "train_loader"], most=9, quote="").replace(" and ", " or ")
    how = how or f"{magic} --batch EXPR"
    raise UsageError(f"{magic} needs a batch. No variable of yours is called {candidates}. Name yours: {how}")


def _beside(batch: Any, model: Any) -> Any:
    """The batch on the device of the model, where there is one."""
    from nbdebug.trainers import on_device  # imports torch: %load_ext must stay quick

    return batch if model is None else on_device(batch, model)


def subject_of(models: list[str] | None, optimizers: list[str] | None, names: Mapping[str, Any]) -> Subject:
    """The models and optimizers that were named, or else all among `names`. Raises UsageError for a wrong name."""
    try:
        return Subject.chosen(models, optimizers, dict(names))
    except ValueError as error:
        raise UsageError(str(error)) from None


def one_model(
    models: list[str] | None,
    optimizers: list[str] | None,
    names: Mapping[str, Any],
    magic: str,
    loss_fn: Any = None,
    how: str = "--model NAME",
) -> Subject:
    """A subject of exactly one model; raises UsageError where there is none, or several. how: what to type."""
    try:
        subject = Subject.chosen(models, optimizers, dict(names))
        name, _ = subject.one_model(magic, loss_fn, how)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return subject.only(name, {**names, **dict.fromkeys(optimizers or ())})


class usage_errors:
    """Where nbdebug itself refuses an argument inside, a UsageError says so in one line. What the user's own code
    raises passes with its traceback. more: kinds of errors that are told so whoever raises them."""

    def __init__(self, *more: type[Exception]):
        self.more = more

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        __tracebackhide__ = True
        if isinstance(error, self.more) or isinstance(error, (TypeError, ValueError)) and _raised_by_nbdebug(error):
            raise UsageError(sentence(error)) from None
        if error is not None and not isinstance(error, UsageError):
            own = traceback
            while own is not None and _is_ours(own):
                own = own.tb_next
            raise error.with_traceback(own or traceback)  # our frames above the user's say nothing about the error


def _raised_by_nbdebug(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_ours(trace)


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("nbdebug.")


# -- what Tab offers ---------------------------------------------------------------------------------------------------


class Completion:
    """magics: the method of each magic by the magic's name."""

    def __init__(self, shell: Any, magics: Mapping[str, Any]) -> None:
        self.shell, self.magics = shell, magics
        self.call = re.compile(rf"(?:^|=)\s*%%?({'|'.join(magics)})\s(?:.*\s)?(\S*)$")

    @context_matcher()
    def complete(self, context: Any) -> Any:
        """Options after a dash, the values of an option, requests and codes; nothing where Python itself follows."""
        if (call := self.call.search(context.text_until_cursor)) is None:
            return {"completions": []}
        magic, fragment = call.groups()
        before = context.text_until_cursor[: call.start(2)].split()[-1]
        choices = [choice for choice in self._choices(magic, before, fragment) if choice.startswith(fragment)]
        return {
            "completions": [SimpleCompletion(text=choice) for choice in choices],
            "matched_fragment": fragment,
            "suppress": bool(choices),
        }

    def _choices(self, magic: str, before: str, fragment: str) -> Iterable[str]:
        """What may follow the word `before` in a call of this magic."""
        actions = [a for a in self.magics[magic].parser._actions if a.help != argparse.SUPPRESS]
        option = next((action for action in actions if before in action.option_strings and action.nargs != 0), None)
        if option is not None:
            return option.choices or (self._names(option.dest) if option.metavar == "NAME" else ())
        if fragment.startswith("-"):
            return [option for action in actions for option in action.option_strings]
        words = getattr(self.magics[magic].__self__, f"{magic}_words", None)  # a magic that takes several words
        if words is not None:
            return list(words())
        if not before.endswith(f"%{magic}"):
            return ()
        if magic == "explain":
            return [rule.code for rule in registry.rules()]
        return next((action.choices for action in actions if not action.option_strings and action.choices), ())

    def _names(self, kind: str) -> Iterable[str]:
        """The user's variables that may follow an option."""
        names = self.shell.user_ns
        if kind in USUAL_NAMES:
            return [name for name in USUAL_NAMES[kind] if name in names]
        return discover(kind, names) if kind in NOUNS else ()
