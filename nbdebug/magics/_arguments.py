"""What was typed after a magic: its arguments, its help, its step, its semicolon."""

from __future__ import annotations

import dataclasses
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, parse_argstring
from IPython.utils.process import arg_split

from nbdebug.arguments import Subject, discover, evaluated

HELP = argument("-h", "--help", action="store_true", help="show this text")


def parsed(magic: Any, line: str) -> Any:
    """The arguments, or None when help was asked for and shown. Raises UsageError for a wrong one."""
    return _told(magic, line, lambda: parse_argstring(magic, line))


def parsed_in_any_order(magic: Any, line: str) -> Any:
    """The same for a magic whose words may stand before, between or behind its options; not for one with a step."""
    return _told(magic, line, lambda: magic.parser.parse_intermixed_args(arg_split(line)))


def _told(magic: Any, line: str, parse: Any) -> Any:
    try:
        args = parse()
    except ValueError as wrong:  # "No closing quotation"
        raise UsageError(f"{wrong}: {line}") from None
    if not args.help:
        return args
    print(magic.__doc__)
    return None


def as_typed(line: str, words: list[str]) -> str:
    """The step as it was typed, spaces and all: the end of the line that argparse saw as these words."""
    start = len(line)
    for word in reversed(words[1:] if words[:1] == ["--"] else words):
        start = line.rindex(word, 0, start)
    return line[start:].strip().rstrip(";").strip()


def unquoted(word: str) -> str:
    """A path without the quotes that held its spaces together."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def silenced(text: str) -> bool:
    """Does it end in a semicolon? Text that is no plain Python (`!ls`) does not."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(text))
    except (tokenize.TokenError, SyntaxError):
        return False


def visible(shell: Any, local_ns: dict[str, Any] | None) -> dict[str, Any]:
    """The user's variables, and those of the function that the magic was called in."""
    if local_ns and local_ns is not shell.user_ns:
        return {**shell.user_ns, **local_ns}
    return shell.user_ns


USUAL = {
    "loss_fn": ("loss_fn", "compute_loss", "criterion"),
    "train_loader": ("train_loader", "train_dl", "train_dataloader", "trainloader", "loader"),
    "val_loader": ("val_loader", "val_dl", "val_dataloader", "valid_loader", "valloader", "test_loader"),
    "scheduler": ("scheduler", "lr_scheduler", "sched"),
}
"""Names by which these are found among the user's variables where no option names them, in this order."""


def found(kind: str, name: str | None, names: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, value) of what the option names, or of the first usual name that the user has; ("", None) for none."""
    if name is None:
        usual = next((n for n in USUAL[kind] if names.get(n) is not None), "")
        return usual, names.get(usual)
    try:
        return name, eval(name, dict(names))
    except Exception as wrong:  # whatever it raises, it names nothing
        raise UsageError(f"--{kind.replace('_', '-')} {name!r} names nothing: {wrong}") from None


def refused(wrong: BaseException) -> bool:
    """Whether nbdebug itself refused its arguments, with none of the user's code to blame."""
    trace = wrong.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("nbdebug.")


@dataclasses.dataclass(frozen=True)
class WatchSubject:
    """Models, optimizers and at most one gradient scaler. names: those of them that the notebook's variables hold.
    magic: what turns it on."""

    subject: Subject
    scalers: dict[str, Any]
    names: dict[str, Any]
    magic: str = "%guard on"

    @classmethod
    def chosen(
        cls, args: Any, names: dict[str, Any], variables: dict[str, Any], magic: str = "%guard on"
    ) -> WatchSubject:
        """Those that `args` names, or else all among `names`. Raises ValueError where that is none, or not clear."""
        subject = Subject.chosen(args.model, args.optimizer, names)
        missing = [kind for kind, taken in (("model", subject.models), ("optimizer", subject.optimizers)) if not taken]
        if missing:
            wanted = " ".join(f"--{kind} NAME" for kind in missing)
            raise ValueError(
                f"There is no {' and no '.join(missing)} among your variables. Make it first, or name it: "
                f"{magic} {wanted} (NAME may be an expression, such as trainer.{missing[0]})."
            )
        scalers = (
            {}
            if not hasattr(args, "scaler")
            else (evaluated("scaler", [args.scaler], names) if args.scaler else _found_scaler(names))
        )
        taken = {**subject.models, **subject.optimizers, **scalers}
        held = {
            name: thing for name, thing in taken.items() if "(" not in name and _value(name, variables) is thing
        }  # a call makes it anew
        return cls(subject, scalers, held, magic)

    @property
    def scaler(self) -> Any:
        return next(iter(self.scalers.values()), None)

    @property
    def things(self) -> str:
        """ "model `net` and optimizer `opt`, with the GradScaler `scaler`"."""
        scalers = "".join(f", with the GradScaler `{name}`" for name in self.scalers)
        return f"{dataclasses.replace(self.subject, named=True)}{scalers}"

    def __str__(self) -> str:
        return self.things + ("" if self.subject.named else " (found among your variables)")

    def outdated(self, variables: dict[str, Any]) -> str:
        """What to say where names stand for other objects than those that are watched; "" where all is well."""
        lost = ", ".join(f"`{name}`" for name in self._lost(variables))
        who = "The guard" if self.magic == "%guard on" else "It"
        return lost and (
            f"{lost}: made anew or deleted since {self.magic}. {who} still watches what was there before "
            f"and sees nothing of a training with what is there now. Type {self.magic} again."
        )

    def _lost(self, variables: dict[str, Any]) -> Iterator[str]:
        for name, thing in self.names.items():
            now = _value(name, variables)
            renamed = now is None and any(value is thing for value in variables.values())
            if now is not thing and not renamed and not _wraps(now, thing):
                yield name


def _value(name: str, variables: dict[str, Any]) -> Any:
    """What the user's expression stands for; None where it stands for nothing."""
    try:
        return eval(name, variables)
    except Exception:  # whatever it raises, it is not the thing that is looked for
        return None


def _wraps(new: Any, old: Any) -> bool:
    """`net = torch.compile(net)` and `opt = accelerator.prepare(opt)` still train what is watched."""
    parts = [*new.modules()] if callable(getattr(new, "modules", None)) else []
    return any(part is old for part in [*parts, *getattr(new, "__dict__", {}).values()])


def _found_scaler(names: dict[str, Any]) -> dict[str, Any]:
    """The one that is enabled. One that is not enabled does nothing, with the guard or without."""
    enabled = {name: scaler for name, scaler in discover("scaler", names).items() if scaler.is_enabled()}
    if len(enabled) > 1:
        raise ValueError(
            f"There are several gradient scalers among your variables: {', '.join(enabled)}. "
            f"Say which one this training uses: %guard on --scaler {next(iter(enabled))}"
        )
    return enabled


def candidates(kind: str, names: dict[str, Any]) -> list[str]:
    """The names that may follow --model, --optimizer or --scaler."""
    return list(discover(kind, names))
