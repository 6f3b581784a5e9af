"""The names in a saved state beside those of a model: the change that makes the ones the others."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from nbdebug.text import listed

RENAMED = "error/state-dict-mismatch"
WRAPPERS = {
    "module": "checkpoint/prefix-module", "_orig_mod": "checkpoint/prefix-compiled",
    "_fsdp_wrapped_module": "checkpoint/prefix-wrapper", "_checkpoint_wrapped_module": "checkpoint/prefix-wrapper",
}  # fmt: skip
"""Parts of names that torch's own wrappers put in: DataParallel, torch.compile, FSDP, activation checkpointing."""
ENOUGH = 0.5
"""The share of unmatched names that a rename must explain to be one; the rest is told beside it."""
SAMPLES = 40
"""Unmatched names, about, from which changes are derived."""
Shapes = Mapping[str, tuple[int, ...]]
Pairs = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Rename:
    """How names of a file become names of a model. code: of the cause; old, new: beginnings, of which the second stands
    in place of the first, both "" where it is no such change; pairs: (file's, model's); text: the expression that gives
    the model's name of `name`."""

    code: str
    what: str
    old: str
    new: str
    pairs: tuple[tuple[str, str], ...]
    text: str


def rename(own: Shapes, model: Shapes, enough: float = ENOUGH) -> Rename | None:
    """The change of names under which most of the file's unmatched names are names of the model with the same shape.

    own, model: name → shape. None where no name is unmatched on both sides, or no single change explains enough."""
    unexpected, missing = [n for n in own if n not in model], [n for n in model if n not in own]
    if not unexpected or not missing:
        return None
    pairs = _shifted(unexpected, own, model)
    for option in [] if pairs else _options(unexpected, missing, own, model):
        free = [(old, new) for old, new in option if new in model and new not in own]
        pairs = max(pairs, [(old, new) for old, new in free if len(own[old]) == len(model[new])], key=len)
        if len(pairs) == len(unexpected):
            break
    return _described(pairs, own, model) if pairs and len(pairs) >= enough * len(unexpected) else None


def _options(unexpected: list[str], missing: list[str], own: Shapes, model: Shapes) -> Iterator[Pairs]:
    """(the file's, the model's) names: by parts of wrappers, by another beginning, by shapes in the same order."""
    whole = {_bare(name): name for name in missing}
    yield [(old, whole[_bare(old)]) for old in unexpected if _bare(old) in whole]
    changes: Counter[tuple[str, str]] = Counter()
    for old in unexpected[:: len(unexpected) // SAMPLES or 1]:
        changes.update({_change(old, new) for new in missing if _last(old) == _last(new) and own[old] == model[new]})
    for a, b in sorted(changes, key=lambda change: (-changes[change], len("".join(change))))[:40]:
        yield [(name, b + name[len(a) :]) for name in unexpected if name.startswith(a)]
    pairs = list(zip(unexpected, missing))
    if all(own[old] == model[new] and _last(old) == _last(new) for old, new in pairs):
        yield pairs if len(unexpected) == len(missing) else []


def _shifted(unexpected: list[str], own: Shapes, model: Shapes) -> Pairs:
    """Modules that are counted from another number: `layers.1.` to `layers.4.` for `layers.0.` to `layers.3.`."""
    stems = {re.split(r"\d+", name)[0] for name in unexpected}
    first = [(name, match) for name in own if (match := re.search(r"\d+", name)) and name[: match.start()] in stems]
    for by in (-1, 1):
        pairs = {n: f"{n[: match.start()]}{int(match[0]) + by}{n[match.end() :]}" for n, match in first}
        new = {pairs.get(name, name): shape for name, shape in own.items()}
        if pairs and new == {name: model.get(name) for name in new}:
            return list(pairs.items())
    return []


def _described(pairs: Pairs, own: Shapes, model: Shapes) -> Rename:
    """The change in words, and as an expression: short where it is one for all names."""
    (a, b), parts = _change(*pairs[0]), {part for pair in pairs for name in pair for part in name.split(".")}
    tokens = [f"{token}." for token in WRAPPERS if token in parts] if _bare(pairs[0][0]) == _bare(pairs[0][1]) else []
    code, text = RENAMED, f"{dict(pairs)!r}.get(name, name)"
    modules = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in pairs}
    what = ", ".join(f"`{old}` in place of `{new}`" for old, new in list(modules.items())[:3])
    if not all(old.startswith(a) and new == b + old[len(a) :] for old, new in pairs) or tokens and a and b:
        a = b = ""
        if tokens and all(_bare(old) == new for old, new in pairs):
            text = "name" + "".join(f".replace({token!r}, '')" for token in tokens)
    else:
        what = f"`{a}` in place of `{b}`" if a and b else f"`{a}` too many" if a else f"`{b}` too few"
        if a.startswith(b) or b.startswith(a) or a.count(".") != b.count("."):
            code = "checkpoint/prefix-wrapper"
        plain = (f"{b!r} + " if b else "") + (f"name.removeprefix({a!r})" if a else "name")
        others, names = own.keys() - dict(pairs), model.keys()  # these may change, but not into a name of the model
        if all(b + n.removeprefix(a) == n or names.isdisjoint({n, b + n.removeprefix(a)}) for n in others):
            text = plain
        elif a and not any(n.startswith(a) for n in others):
            text = f"{plain} if name.startswith({a!r}) else name"
    if tokens:
        code, many = WRAPPERS[tokens[0][:-1]], len(pairs[0][0]) > len(pairs[0][1])
        what = f"the part{'s' * (len(tokens) > 1)} {listed(tokens)} too {'many' if many else 'few'}"
    return Rename(code, what, a, b, tuple(pairs), text)


def _change(old: str, new: str) -> tuple[str, str]:
    """("a.", "b.") for a.x.w and b.x.w: what stands before the longest common end."""
    a, b = old.split("."), new.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return "".join(f"{part}." for part in a), "".join(f"{part}." for part in b)


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
