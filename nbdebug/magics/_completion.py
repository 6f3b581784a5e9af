"""What Tab offers after a magic; all of it is read from the magics' own parsers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from nbdebug import registry as catalogue
from nbdebug.magics._arguments import candidates


class Completion:
    """magics: the method of each magic by the magic's name."""

    def __init__(self, shell: Any, magics: Mapping[str, Any]) -> None:
        self.shell, self.magics = shell, magics
        self.called = re.compile(rf"(?:^|=)\s*%%?({'|'.join(magics)})\s(?:.*\s)?(\S*)$")

    @context_matcher()
    def complete(self, context: Any) -> Any:
        """Options after a dash, the values of an option, requests and codes; nothing where Python itself follows."""
        typed = self.called.search(context.text_until_cursor)
        if typed is None:
            return {"completions": []}
        magic, fragment = typed.groups()
        before = context.text_until_cursor[: typed.start(2)].split()[-1]
        offered = [choice for choice in self._choices(magic, before, fragment) if choice.startswith(fragment)]
        return {
            "completions": [SimpleCompletion(text=choice) for choice in offered],
            "matched_fragment": fragment,
            "suppress": bool(offered),
        }

    def _choices(self, magic: str, before: str, fragment: str) -> Iterable[str]:
        """What may follow the word `before` in a call of this magic."""
        actions = self.magics[magic].parser._actions
        option = next((action for action in actions if before in action.option_strings and action.nargs != 0), None)
        if option is not None:
            names = candidates(option.dest, self.shell.user_ns) if option.metavar == "NAME" else ()
            return option.choices or names
        if fragment.startswith("-"):
            return [option for action in actions for option in action.option_strings]
        words = getattr(self.magics[magic].__self__, "offered", None)  # a magic that takes several words
        if words is not None:
            return list(words(before))
        if not before.endswith(f"%{magic}"):
            return ()
        if magic == "explain":
            return [rule.code for rule in catalogue.rules()]
        return next((action.choices for action in actions if not action.option_strings and action.choices), ())
