"""What was typed after a magic: its arguments, its help, its step, its semicolon."""

from __future__ import annotations

import tokenize
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, parse_argstring
from IPython.utils.process import arg_split

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
