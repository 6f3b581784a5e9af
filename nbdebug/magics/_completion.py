"""What Tab offers after a magic, read from the magics' own parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from nbdebug import registry
from nbdebug.arguments import NOUNS, USUAL_NAMES, discover


class Completion:
    """magics: the method of each magic by the magic's name."""

    def __init__(self, shell: Any, magics: Mapping[str, Any]) -> None:
        self.shell, self.magics = shell, magics
        self.call = re.compile(rf"(?:^|=)\s*%%?({'|'.join(magics)})\s(?:.*\s)?(\S*)$")

    @context_matcher()
    def complete(self, context: Any) -> Any:
        """Options after a dash, the values of an option, requests and codes; nothing where Python itself follows."""
        call = self.call.search(context.text_until_cursor)
        if call is None:
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
