"""The causes of a failing `load_state_dict`: which keys and shapes do not match, and which change makes them match."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, listed
from nbdebug.tools.errors.facts import Raised


@dataclasses.dataclass(frozen=True)
class Resized:
    """One key with two shapes. argument: the layer's constructor argument for this size ("out_features"), with its two
    values; kind: the layer's class. transposed: the same sizes in reverse."""

    key: str
    saved: tuple[int, ...]
    model: tuple[int, ...]
    kind: str | None = None
    argument: str | None = None
    saved_size: int | None = None
    model_size: int | None = None

    @property
    def transposed(self) -> bool:
        return len(self.saved) > 1 and self.saved == self.model[::-1]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A change of keys that was tried: see KeyChange."""

    old: str
    new: str
    anywhere: bool
    fits: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class StateMismatch:
    """model, source: as the user wrote them ("model", "checkpoint['model']"); kind: the model's class. expression: the
    argument where that is not a name: `source` is then "state".

    missing, unexpected: keys, as torch lists them. resized: keys with two shapes. saved, expected: how many keys the
    saved state and the model have; both: keys in both, fitting: those with the same shape, too. inside: the entry of
    the argument that contains the state. renamed: the change of keys that fits best. unmatched: saved keys that still
    do not match after it; lacking: keys of the model that then get no value. argument: the model's own constructor
    argument for the size, with the size of the saved state. whole_model: a module was passed instead of its state;
    no_dict: the class of the argument, where that is neither a dict nor a module."""

    raised: Raised
    model: str
    kind: str
    source: str
    strict: bool = True
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    resized: tuple[Resized, ...] = ()
    saved: int | None = None
    expected: int | None = None
    both: int = 0
    fitting: int = 0
    inside: str | None = None
    renamed: Renamed | None = None
    unmatched: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    argument: tuple[str, int] | None = None
    whole_model: bool = False
    no_dict: str = ""
    expression: str | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerMismatch:
    """The state of another optimizer. saved, expected: how many parameters each group has; None: not a state at all,
    and keys are its keys."""

    raised: Raised
    optimizer: str
    kind: str
    source: str
    saved: tuple[int, ...] | None = None
    expected: tuple[int, ...] = ()
    inside: str | None = None
    keys: tuple[str, ...] = ()
    expression: str | None = None


STRANGE = 0.25
"""Share of the keys (of the file's or the model's, whichever has fewer) that must match for the file to be of a related
model. Our choice: two unrelated networks share names such as `conv1.weight`, seldom a quarter of them."""
SHOWN = 6
PATHS = ("str", "PosixPath", "WindowsPath", "Path")


@rule(
    code="error/state-dict-mismatch",
    title="The saved state does not match the model.",
    symptom="Error(s) in loading state_dict for …: missing keys, unexpected keys, or a size mismatch; of an optimizer: "
    "a different number of parameter groups.",
    cause="The file was saved from a wrapped model (DataParallel puts `module.` before each key, torch.compile "
    "`_orig_mod.`, a trainer `model.`), from one with other sizes (classes, vocabulary, width), or contains more "
    "than the state (`{'model': …, 'optimizer': …}`). `strict=False` ignores missing and unexpected keys, never sizes.",
    confirm="`sorted(state)[:5]` beside `sorted(model.state_dict())[:5]`; the shapes of the keys that both have.",
    fix="Remove the prefix, load the entry that contains the state, build the model with the sizes in the file, or "
    "leave out the entries that do not match and train these layers from scratch.",
    reference="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)
def state_dict_mismatch(facts: Any) -> Finding | None:
    if isinstance(facts, OptimizerMismatch):
        return _optimizers(facts)
    if not isinstance(facts, StateMismatch):
        return None
    return Finding(
        "error/state-dict-mismatch", _title(facts), at(facts), _evidence(facts), tuple(_fixes(facts)), _chain(facts)
    )


def at(facts: Any) -> Where:
    """The user's line; a load is no phase of a training step."""
    return dataclasses.replace(facts.raised.where, phase=None)


def _title(facts: StateMismatch) -> str:
    source, model = f"`{facts.source}`", f"`{facts.model}`"
    if facts.no_dict or facts.whole_model or facts.inside is not None:
        return _place_title(facts, source, model)
    if _strange(facts):
        return (
            f"{source} is the state of another model: {model} ({facts.kind}, {count(facts.expected or 0, 'key')}) has "
            f"{facts.both} of its {count(facts.saved or 0, 'key')}."
        )
    if facts.renamed is not None:
        return _prefix_title(facts, source, model)
    if facts.resized:
        return _sizes_title(facts, source, model)
    if facts.missing and not facts.unexpected:
        return f"{model} has {count(len(facts.missing), 'key')} that {source} lacks: {listed(facts.missing)}."
    if facts.unexpected and not facts.missing:
        keys = count(len(facts.unexpected), "key")
        return f"{source} has {keys} that {model} does not have: {listed(facts.unexpected)}."
    return (
        f"The keys of {source} and {model} differ: {listed(facts.missing)} missing, {listed(facts.unexpected)} "
        "unexpected."
    )


def _place_title(facts: StateMismatch, source: str, model: str) -> str:
    """The argument is not the state; it may contain it."""
    if facts.no_dict in PATHS:
        return "`load_state_dict` got the path of a file, but takes the state that is in the file."
    if facts.no_dict:
        return f"`load_state_dict` got a `{facts.no_dict}`, but takes a dict of tensors."
    if facts.inside is None:
        return f"{source} is a whole model, but `load_state_dict` takes the state of a model."
    if facts.inside.endswith("state_dict()"):
        entry = facts.inside.partition(".")[0]
        return f"{source} holds the model itself, under `{entry}`, not its state."
    return f"{source} is the whole checkpoint: the state of {model} is its entry `{facts.inside}`."


def _prefix_title(facts: StateMismatch, source: str, model: str) -> str:
    change = facts.renamed
    assert change is not None
    if change.new and change.old:
        difference = f"begin with `{change.old}` where {model} has `{change.new}`"
    elif change.new:
        difference = f"lack the prefix `{change.new}` that the keys of {model} have"
    else:
        difference = f"have `{change.old}` {'in' if change.anywhere else 'before'} the names that {model} uses"
    rest = "" if change.whole else f"; after that change, {change.fits} of {facts.saved} match"
    return f"The keys of {source} {difference}{rest}."


def _sizes_title(facts: StateMismatch, source: str, model: str) -> str:
    sizes = ", ".join(
        f"`{r.key}` is {list(r.saved)} in {source} and {list(r.model)} in {model}" for r in facts.resized[:2]
    )
    more = f" (and {len(facts.resized) - 2} more)" if len(facts.resized) > 2 else ""
    why = next(
        (
            f": saved with `{r.argument}={r.saved_size}`, built with {r.model_size}"
            for r in facts.resized
            if r.argument and not r.transposed
        ),
        "",
    )
    turned = "; the file has it transposed" if facts.resized[0].transposed and not why else ""
    return f"{sizes}{more}{why}{turned}."


def _strange(facts: StateMismatch) -> bool:
    fits = max(facts.both, facts.renamed.fits if facts.renamed else 0)
    return bool(facts.saved and facts.expected) and fits < STRANGE * min(facts.saved or 0, facts.expected or 0)


def _evidence(facts: StateMismatch) -> dict[str, Any]:
    evidence: dict[str, Any] = {"model": f"{facts.model} ({facts.kind})", "state": facts.source}
    if facts.saved is not None:
        evidence |= {
            "keys in the file": facts.saved,
            "keys in the model": facts.expected,
            "the same key and shape": facts.fitting,
        }
    evidence |= {"missing keys": _keys(facts.missing), "unexpected keys": _keys(facts.unexpected)}
    if facts.resized:
        evidence["sizes"] = [
            {
                "key": r.key,
                "in the file": str(list(r.saved)),
                "in the model": str(list(r.model)),
                "argument": f"{r.kind}({r.argument}={r.saved_size})" if r.argument else "",
            }
            for r in facts.resized[:30]
        ]
    return {key: value for key, value in evidence.items() if value not in (None, "")}


def _chain(facts: StateMismatch) -> tuple[Link, ...]:
    links = []
    if facts.resized and (facts.inside or facts.renamed):
        links += [Link(_sizes_title(facts, f"`{facts.source}`", f"`{facts.model}`").rstrip("."))]
    if facts.renamed and facts.inside:
        links += [Link(_prefix_title(facts, f"`{_source(facts)}`", f"`{facts.model}`").rstrip("."))]
    if not facts.strict and facts.resized:
        links += [Link("strict=False ignores missing and unexpected keys, but a different size is still an error")]
    return tuple(links)


# -- fixes -------------------------------------------------------------------------------------------------------


def _fixes(facts: StateMismatch) -> list[Fix]:
    if facts.no_dict:
        source = facts.expression or facts.source
        return [
            Fix(
                "Read the file first." if facts.no_dict in PATHS else "Pass the state of a model.",
                f"{facts.model}.load_state_dict(torch.load({source if facts.no_dict in PATHS else 'path'}))",
            )
        ]
    if _strange(facts):
        source = f"sorted({facts.expression or _source(facts)})[:10]"
        return [
            Fix(
                "Build the model that the file was saved from: its keys show which one.",
                f"print({source}, sorted({facts.model}.state_dict())[:10])",
            )
        ]
    if facts.resized:
        return _for_sizes(facts)
    if facts.whole_model or facts.inside or facts.renamed:
        return [_placed(facts)]
    return [_not_strict(facts)]


def _source(facts: StateMismatch) -> str:
    return facts.source + (facts.inside or "") + (".state_dict()" if facts.whole_model else "")


def _prepared(facts: StateMismatch) -> tuple[list[str], str]:
    """(lines that select the entry and change the keys, the expression for the state after them)."""
    lines = [f"{facts.source} = {facts.expression}"] if facts.expression else []
    state, change = _source(facts), facts.renamed
    if change is None:
        return lines, state
    if change.anywhere:
        key = f"key.replace({change.old!r}, '')"
    elif not change.old:
        key = f"{change.new!r} + key"
    else:
        key = f"key.removeprefix({change.old!r})"
        if change.new:
            key = f"{change.new!r} + {key} if key.startswith({change.old!r}) else key"
    return [*lines, f"state = {{{key}: value for key, value in {state}.items()}}"], "state"


def _placed(facts: StateMismatch) -> Fix:
    """Load the right entry under the right keys, or into the part of the model that has them."""
    change = facts.renamed
    if (
        change is not None
        and change.new
        and not (change.old or facts.unmatched)
        and not any(key.startswith(change.new) for key in facts.lacking)
    ):
        part = "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in change.new.rstrip(".").split("."))
        lines = [f"{facts.source} = {facts.expression}"] if facts.expression else []
        return Fix(
            f"Load it into the part of the model that it belongs to: `{change.new.rstrip('.')}`.",
            "\n".join([*lines, f"{facts.model}{part}.load_state_dict({_source(facts)})"]),
            True,
            _after(facts),
        )
    lines, state = _prepared(facts)
    whole = facts.whole_model or (facts.saved is not None and not facts.unmatched and not facts.lacking)
    lines = [*lines, f"{facts.model}.load_state_dict({state}{'' if whole else ', strict=False'})"]
    title = "Load the state itself." if facts.renamed is None else "Change the keys before loading."
    verified = None if facts.saved is None else bool(facts.saved - len(facts.unmatched))
    return Fix(title, "\n".join(lines), verified, _after(facts))


def _after(facts: StateMismatch) -> dict[str, Any]:
    if facts.saved is None:
        return {}
    fits = facts.saved - len(facts.unmatched)
    result: dict[str, Any] = {"keys that then match, by name and shape": f"{fits} of {facts.saved}"}
    if facts.lacking:
        result["keys that keep their initial values"] = f"{len(facts.lacking)} of {facts.expected}"
    return result


def _for_sizes(facts: StateMismatch) -> list[Fix]:
    fixes = []
    lines, state = _prepared(facts)
    argued = next((r for r in facts.resized if r.argument and not r.transposed), None)
    if facts.argument is not None:
        name, size = facts.argument
        code = [f"{facts.model} = {facts.kind}({name}={size})", *lines, f"{facts.model}.load_state_dict({state})"]
        fixes.append(Fix("Build the model with the size in the file.", "\n".join(code)))
    elif argued is not None:
        fixes.append(
            Fix(
                f"Build the layer `{argued.key.rpartition('.')[0] or facts.model}` with the size in the file.",
                f"{argued.kind}(..., {argued.argument}={argued.saved_size}, ...)",
            )
        )
    turned = tuple(r.key for r in facts.resized if r.transposed)
    if len(turned) == len(facts.resized):
        code = [
            *lines,
            f"transposed = {turned!r}",
            f"state = {{key: value.t() if key in transposed else value for key, value in {state}.items()}}",
            f"{facts.model}.load_state_dict(state)",
        ]
        fixes.append(
            Fix("Transpose the matrices while loading.", "\n".join(code), True, {"keys that match": len(turned)})
        )
    fits = None if facts.saved is None else facts.saved - len(facts.unmatched)
    if fits != 0:
        fixes.append(_skipping(facts, lines, state, fits))
    return fixes or [
        Fix(
            "Build the model with the sizes in the file.",
            "\n".join([*lines, f"print({{key: tuple(value.shape) for key, value in {state}.items()}})"]),
        )
    ]


def _skipping(facts: StateMismatch, lines: Sequence[str], state: str, fits: int | None) -> Fix:
    """Load the entries that match."""
    keys = tuple(r.key for r in facts.resized)
    code = [
        *lines,
        f"skipped = {keys!r}",
        f"fitting = {{key: value for key, value in {state}.items() if key not in skipped}}",
        f"{facts.model}.load_state_dict(fitting, strict=False)",
    ]
    after = (
        {}
        if fits is None
        else {"keys that then load": f"{fits} of {facts.saved}", "keys that keep their initial values": len(keys)}
    )
    return Fix(
        "Or leave out what does not match, and train these layers from scratch.",
        "\n".join(code),
        None if fits is None else True,
        after,
    )


def _not_strict(facts: StateMismatch) -> Fix:
    lines, state = _prepared(facts)
    if facts.missing:
        title = f"Load the rest, if {listed(facts.missing)} may keep the initial values."
    else:
        title = "Load the rest, if the unexpected entries of the file are not needed."
    fits = {} if facts.saved is None else {"keys that then load": f"{facts.fitting} of {facts.saved}"}
    return Fix(
        title,
        "\n".join([*lines, f"{facts.model}.load_state_dict({state}, strict=False)"]),
        bool(facts.fitting) if fits else None,
        fits,
    )


# -- the optimizer's -----------------------------------------------------------------------------------------------


def _optimizers(facts: OptimizerMismatch) -> Finding:
    call = f"{facts.optimizer}.load_state_dict"
    assignment = f"{facts.source} = {facts.expression}\n" if facts.expression else ""
    if facts.saved is None:
        title = f"`{facts.source}` is not the state of an optimizer"
        title += f"; that is its entry `{facts.inside}`." if facts.inside else "."
        fix = Fix(
            "Load the optimizer's own entry.",
            f"{assignment}{call}({facts.source}{facts.inside or '[...]'})",
            True if facts.inside else None,
            {"entries": len(facts.keys)} if facts.inside else {},
        )
    else:
        title = (
            f"`{facts.source}` is the state of an optimizer with {_groups(facts.saved)}; `{facts.optimizer}` "
            f"({facts.kind}) has {_groups(facts.expected)}."
        )
        fix = Fix(
            "Build the optimizer as it was when the state was saved: the same parameters in the same groups and order, "
            "frozen ones included. Or load only the model, and start with a new optimizer state.",
            f"{assignment}{facts.optimizer} = torch.optim.{facts.kind}(model.parameters())   # as when it was saved\n"
            f"{call}({facts.source})",
        )
    evidence = {
        "optimizer": f"{facts.optimizer} ({facts.kind})",
        "parameters by group, saved": facts.saved,
        "parameters by group, here": facts.expected,
        "entries": ", ".join(facts.keys),
    }
    return Finding(
        "error/state-dict-mismatch", title, at(facts), {key: value for key, value in evidence.items() if value}, (fix,)
    )


def _groups(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return count(sizes[0], "parameter")
    return f"{len(sizes)} groups of {', '.join(map(str, sizes[:6]))} parameters"


def _keys(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
