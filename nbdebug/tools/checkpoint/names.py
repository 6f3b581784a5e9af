"""Which name of the file is which name of the model: wrappers, prefixes in front or in the middle, renamed modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nbdebug.tools.checkpoint.facts import Rename

PREFIX, RENAMED = "checkpoint/prefix-", "error/state-dict-mismatch"
WRAPPERS = {
    "module": f"{PREFIX}module",
    "_orig_mod": f"{PREFIX}compiled",
    "_fsdp_wrapped_module": f"{PREFIX}wrapper",
    "_checkpoint_wrapped_module": f"{PREFIX}wrapper",
}
"""Parts of names that torch's own wrappers put in: DataParallel, torch.compile, FSDP, activation checkpointing."""
ENOUGH = 0.5
"""The share of unmatched names that a rename must explain to be one; the rest is told beside it."""
Shapes = Mapping[str, tuple[int, ...]]


def rename(own: Shapes, model: Shapes) -> Rename | None:
    """The change of names under which most of the file's unmatched names are names of the model with the same shape.

    own, model: name → shape. None where no name is unmatched on both sides, or no single change explains half of them.
    """
    unexpected, missing = [n for n in own if n not in model], [n for n in model if n not in own]
    if not unexpected or not missing:
        return None
    options = [*_wrappers(unexpected, missing), *_prefixes(unexpected, missing, own, model)]
    scored = [(len(_fitting(option, own, model)), -place, option) for place, option in enumerate(options)]
    best = max(scored, key=lambda one: one[:2], default=None)
    by_order = None if best is not None and best[0] == len(unexpected) else _by_order(unexpected, missing, own, model)
    if by_order is None and best is not None and best[0] >= ENOUGH * len(unexpected):
        option = best[2]
        return Rename(option.code, option.what, tuple(_fitting(option, own, model)), option.text)
    return by_order


def _fitting(option: Rename, own: Shapes, model: Shapes) -> list[tuple[str, str]]:
    return [
        (old, new) for old, new in option.pairs if new in model and new not in own and len(own[old]) == len(model[new])
    ]


def _wrappers(unexpected: Sequence[str], missing: Sequence[str]) -> list[Rename]:
    """Parts that wrappers of torch put into names, wherever they stand: those of the file too many, or too few."""
    whole = {_bare(name): name for name in missing}
    pairs = [(old, whole[_bare(old)]) for old in unexpected if _bare(old) in whole]
    for many in (True, False):
        chosen = [(old, new) for old, new in pairs if (len(old) > len(new)) is many]
        longer = [name for pair in chosen for name in [pair[0] if many else pair[1]]]
        tokens = [token for token in WRAPPERS if any(token in name.split(".") for name in longer)]
        if tokens:
            first, text = f"{tokens[0]}.", f"{dict(chosen)!r}.get(name, name)"
            if all(old == first + new for old, new in chosen):
                text = f"name.removeprefix({first!r})"
            elif all(new == first + old for old, new in chosen):
                text = f"{first!r} + name"
            elif many and all(_bare(old) == new for old, new in chosen):
                text = "name" + "".join(f".replace({token + '.'!r}, '')" for token in tokens)
            parts = f"the part{'s' * (len(tokens) > 1)} {' and '.join(f'`{token}.`' for token in tokens)}"
            return [Rename(WRAPPERS[tokens[0]], f"{parts} too {'many' if many else 'few'}", tuple(chosen), text)]
    return []


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefixes(unexpected: Sequence[str], missing: Sequence[str], own: Shapes, model: Shapes) -> list[Rename]:
    """Beginnings that differ: `a.` in the file where the model has `b.`, after the longest common end."""
    ends: dict[str, list[str]] = {}
    for name in missing:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    changes: Counter[tuple[str, str]] = Counter()
    for old in unexpected[:200]:
        changes.update({_change(old, new) for new in ends.get(old.rpartition(".")[2], ()) if own[old] == model[new]})
    options = []
    for (a, b), _ in sorted(changes.items(), key=lambda item: (-item[1], len(item[0][0]) + len(item[0][1])))[:40]:
        pairs = [(n, b + n[len(a) :]) for n in unexpected if n.startswith(a)]
        inner = a if a and b and not a.startswith(b) and not b.startswith(a) else ""
        kind = RENAMED if inner and a.count(".") == b.count(".") else f"{PREFIX}wrapper"
        what = f"`{a}` in place of `{b}`" if a and b else f"`{a}` too many" if a else f"`{b}` too few"
        code = (
            (f"name.removeprefix({a!r})" if a else "name")
            if not b
            else f"{b!r} + name.removeprefix({a!r})"
            if a
            else f"{b!r} + name"
        )
        options.append(Rename(kind, what, tuple(pairs), code))
    return options


def _change(old: str, new: str) -> tuple[str, str]:
    """("a.", "b.") for a.x.w and b.x.w: what stands before the longest common end, with a common beginning."""
    a, b = old.split("."), new.split(".")
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a.pop()
        b.pop()
    if a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return "".join(f"{part}." for part in a), "".join(f"{part}." for part in b)


def _by_order(unexpected: Sequence[str], missing: Sequence[str], own: Shapes, model: Shapes) -> Rename | None:
    """Renamed modules: as many names on both sides, with the same shapes and last parts in the same order."""
    if len(unexpected) != len(missing):
        return None
    pairs = list(zip(unexpected, missing))
    if any(own[old] != model[new] or old.rpartition(".")[2] != new.rpartition(".")[2] for old, new in pairs):
        return None
    modules = dict(dict.fromkeys((old.rpartition(".")[0], new.rpartition(".")[0]) for old, new in pairs))
    code = f"{dict(pairs)!r}.get(name, name)"
    what = ", ".join(f"`{old}` in place of `{new}`" for old, new in list(modules.items())[:3])
    return Rename(RENAMED, what, tuple(pairs), code)
