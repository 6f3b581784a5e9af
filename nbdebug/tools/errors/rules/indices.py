"""The causes of index errors: what was indexed, its size, and which entry of the index is out of range."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count
from nbdebug.tools.errors.rules import ArgumentFact, Raised, TriedFix, ValueOrigin, as_code, assigned, is_plain


@dataclasses.dataclass(frozen=True)
class OutOfRange:
    """The entries of an index that are out of range. value, place: of the first in memory; count of total entries;
    low, high: the least and the largest of all entries; values: the different bad ones, at most six. total is 0 where
    the index itself is not available (it is in a worker); value is then the first that would be too large."""

    value: int
    place: tuple[int, ...] = ()
    count: int = 1
    total: int = 1
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class IndexFacts:
    """kind: "embedding", "target" (class numbers of a loss), "tensor" (x[i], gather, index_select …), "one_hot",
    "negative" (bincount, one_hot), "label" (of a pandas table), "sequence" (list, tuple, array, data set), "random" (an
    empty range).

    table: what is indexed, as the user would write it; module: the path of the module that owns it; size: its number of
    entries; dim: along which dimension; least: the lowest valid index. index: the tensor of indices; key: the text of
    an index that is not a tensor. head: the module that computes the scores of a loss, or the expression that a data
    set's `__len__` returns; sizes_kept: where its model keeps the number of classes; sample: the requested sample,
    where that is not the key; data_set: its name; promised: the length that its loader got; fits: what `__len__` should
    return. counted: the text of the `arange` that created the index (a position); along: the tensor whose length it
    counts. vocabulary: a dict of the user's that has more entries. grown, shifted, ignored: fixes that were tried (a
    larger table or last layer, classes from 0, an ignored label). late:
    the line that raised the error, where a GPU reported it later than at the line of `raised`."""

    raised: Raised
    kind: str
    table: str = ""
    module: str = ""
    size: int | None = None
    dim: int | None = None
    least: int = 0
    shape: tuple[int, ...] = ()
    index: ArgumentFact | None = None
    key: str = ""
    beyond: OutOfRange | None = None
    head: str = ""
    sizes_kept: tuple[str, ...] = ()
    sample: str = ""
    data_set: str = ""
    promised: int | None = None
    fits: str = ""
    counted: str = ""
    along: str = ""
    vocabulary: tuple[str, int] | None = None
    width: int | None = None
    origin: ValueOrigin | None = None
    grown: TriedFix | None = None
    shifted: TriedFix | None = None
    ignored: TriedFix | None = None
    late: Where | None = None


EMBEDDING = "https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html"


@rule(
    code="error/index-out-of-range",
    title="An index is outside the range of what it indexes.",
    symptom="index out of range in self; Target 7 is out of bounds; index 5 is out of bounds for dimension 0 with size "
    "5; list index out of range; on a GPU a device-side assert.",
    cause="Tokens were added to the vocabulary, but the embedding was not enlarged; a sequence is longer than the "
    "table of "
    'positions; classes are counted from 1, or a label such as 255 or -1 means "none"; the last layer has fewer '
    "classes than the data; the `__len__` of a data set is larger than its lists.",
    confirm="`ids.min(), ids.max()` against `embedding.num_embeddings`; `target.unique()` against the classes.",
    fix="Make the table as large as the vocabulary, count classes from 0, set `ignore_index` to the label "
    "to ignore, cut sequences to the length of the position table.",
    reference=EMBEDDING,
)
def index_out_of_range(facts: IndexFacts) -> Finding | None:
    if facts.beyond is None:
        return None
    title = _TITLES[facts.kind](facts, facts.beyond)
    evidence = _evidence(facts, facts.beyond)
    return Finding(
        "error/index-out-of-range", title, facts.raised.where, evidence, _fixes(facts, facts.beyond), _chain(facts)
    )


def _evidence(facts: IndexFacts, bad: OutOfRange) -> dict[str, object]:
    evidence: dict[str, object] = {"index": bad.value, "table": facts.table, "entries": facts.size}
    if facts.index is not None:
        evidence |= {
            "tensor of indices": facts.index.name,
            "shape": list(facts.index.fact.shape),
            "out of range": f"{bad.count} of {bad.total}",
            "least": bad.low,
            "largest": bad.high,
            "position of the first": list(bad.place),
            "values out of range": list(bad.values),
        }
    evidence |= {"samples promised": facts.promised} if facts.promised is not None else {}
    return evidence | ({"shape of the table": list(facts.shape)} if facts.shape else {})


def _entry(facts: IndexFacts, bad: OutOfRange) -> str:
    """`tokens[0, 3]` is 11."""
    if bad.total == 0:
        return f"`{facts.key}` is out of range for `{facts.table}`"
    if facts.index is None:
        sample = f" ({facts.sample})" if facts.sample else ""
        return f"`{facts.key}` is {bad.value}{sample}" if facts.key else f"the index is {bad.value}{sample}"
    place = f"[{', '.join(map(str, bad.place))}]" if bad.place else ""
    if facts.index.known and is_plain(facts.index.name):
        return f"`{facts.index.name}{place}` is {bad.value}"
    return f"entry {place or '[]'} of {facts.index.phrase} is {bad.value}"


def _more(bad: OutOfRange) -> str:
    return f" ({bad.count} of {bad.total} entries are out of range)" if bad.count > 1 else ""


def _entries(facts: IndexFacts) -> str:
    return count(facts.size or 0, "entry", "entries")


def _first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _embedding(facts: IndexFacts, bad: OutOfRange) -> str:
    rows = f"`{facts.table}` has {facts.size} rows, 0 to {(facts.size or 0) - 1}"
    if facts.counted and facts.index is not None:
        return (
            f"{_first(facts.index.phrase)} counts to {bad.high} (`{facts.counted}`), but {rows}: the sequence is "
            "longer than the table of positions"
        )
    if bad.value < 0:
        return f"{_first(_entry(facts, bad))}, but {rows}: an embedding takes no negative index{_more(bad)}"
    words = facts.vocabulary
    why = f"; `{words[0]}` has {words[1]} entries" if words is not None else ""
    return f"{_first(_entry(facts, bad))}, but {rows}{why}{_more(bad)}"


def _target(facts: IndexFacts, bad: OutOfRange) -> str:
    size = facts.size or 0
    scores = f"`{facts.head}` gives {size} classes" if facts.head else f"`{facts.table}` has {size} classes"
    title = f"{_first(_entry(facts, bad))}, but {scores}, 0 to {size - 1}{_more(bad)}"
    if facts.shifted is not None and facts.shifted.code == "-1":
        return (
            f"{title}: the labels go from -1 to {size - 2}, as if 1 had been taken off once too often (by a cell that "
            'ran twice, perhaps); or -1 means "none"'
        )
    if facts.shifted is not None:
        return f"{title}: classes are counted from {bad.low}, and the loss counts from 0"
    if facts.ignored is not None:
        return f'{title}: a label that means "none" must be the loss\'s `ignore_index`'
    return title


def _promised(facts: IndexFacts) -> str:
    if not facts.head:
        return ""
    promise = f", which gives {count(facts.promised, 'sample')}" if facts.promised is not None else ""
    whose = f"the length of `{facts.data_set}`" if facts.data_set else "the data set's length"
    return f": {whose} is `{facts.head}`{promise}"


def _tensor(facts: IndexFacts, bad: OutOfRange) -> str:
    along = f" along dimension {facts.dim}" if facts.dim is not None and len(facts.shape) != 1 else ""
    title = (
        f"{_first(_entry(facts, bad))}, but `{facts.table}` has {_entries(facts)}{along}, 0 to "
        f"{(facts.size or 0) - 1}{_more(bad)}"
    )
    return title + _promised(facts)


def _one_hot(facts: IndexFacts, bad: OutOfRange) -> str:
    apart = len(bad.values) == 1 and (bad.value >= 255 or bad.value < 0)
    return (
        f"{_first(_entry(facts, bad))}, but one_hot has {facts.size} classes, 0 to "
        f"{(facts.size or 0) - 1}{_more(bad)}" + (f": {bad.value} marks entries without a class" if apart else "")
    )


def _sequence(facts: IndexFacts, bad: OutOfRange) -> str:
    size = facts.size or 0
    along = f" along dimension {facts.dim}" if facts.dim is not None and len(facts.shape) > 1 else ""
    ends = f", the last of them {size - 1}" if size else ""
    has = "which has" if bad.total == 0 else f"but `{facts.table}` has"
    title = f"{_first(_entry(facts, bad))}, {has} {_entries(facts)}{along}{ends}"
    return title + _promised(facts)


_TITLES: dict[str, Callable[[IndexFacts, OutOfRange], str]] = {
    "label": lambda facts, bad: (
        f"{_first(_entry(facts, bad))}, which is no label of `{facts.table}`: rows were taken out, and the labels of "
        f"the {facts.size} that are left go from {bad.low} to {bad.high}"
    ),
    "embedding": _embedding,
    "target": _target,
    "tensor": _tensor,
    "one_hot": _one_hot,
    "negative": lambda facts, bad: (
        f"{_first(_entry(facts, bad))}, but {facts.table or 'counting'} takes no negative numbers{_more(bad)}"
    ),
    "sequence": _sequence,
    "random": lambda facts, bad: (
        f"The range of the random number, from {facts.least} up to but not including {bad.value}, is empty: the length "
        "that it is computed from is too small"
    ),
}


def _fixes(facts: IndexFacts, bad: OutOfRange) -> tuple[Fix, ...]:
    if facts.kind == "embedding":
        return _of_embedding(facts, bad)
    if facts.kind == "target":
        return _of_target(facts, bad)
    if facts.kind == "label":
        code = f"{facts.table} = {facts.table}.reset_index(drop=True)"
        return (Fix("Number the rows anew after taking some out, or read them by place with `.iloc`.", code),)
    size, name = facts.size or 0, facts.index.name if facts.index is not None else facts.key
    if facts.kind == "one_hot" and len(bad.values) == 1 and (bad.value >= 255 or bad.value < 0):
        mask = f"known = {name} != {bad.value}\n"
        title = f"{bad.value} marks entries without a class: mask them."
        return (Fix(title, f"{mask}hot = nn.functional.one_hot({name} * known, {size}) * known[..., None]"),)
    if facts.kind == "one_hot":
        title = "Pass the real number of classes."
        return (Fix(title, f"nn.functional.one_hot({name}, num_classes={(bad.high or bad.value) + 1})"),)
    if facts.kind == "negative":
        return (Fix("Remove the negative numbers.", f"{name} = {name}[{name} >= 0]"),)
    if facts.kind == "random":
        title = "Include the last start, and guard against a length that is too small."
        return (Fix(title, "start = torch.randint(0, max(1, length - size + 1), ())"),)
    if facts.kind in ("sequence", "tensor") and facts.head:
        code = f"def __len__(self):\n    return {facts.fits}"
        return (Fix("Return the real number of samples.", code),) if facts.fits else ()
    if facts.index is not None and facts.index.known:
        title = f"Valid are 0 to {size - 1}: find out where the others come from."
        return (Fix(title, f"{name}[({name} < 0) | ({name} >= {size})]"),)
    length = f"{facts.table}.shape[{facts.dim}]" if facts.dim is not None else f"len({facts.table})"
    title = f"Valid are 0 to {size - 1}: find out where this index comes from."
    return (
        Fix(title, f"assert {name or bad.value} < {length}" if size else f"assert len({facts.table})   # it is empty"),
    )


def _of_embedding(facts: IndexFacts, bad: OutOfRange) -> tuple[Fix, ...]:
    table, size, width = as_code(facts.table), facts.size or 0, facts.width
    name = facts.index.name if facts.index is not None and is_plain(facts.index.name) else "ids"
    fixes = []
    if facts.counted:
        long = facts.along
        fixes.append(
            Fix(
                "Cut the sequence to the length of the table.",
                f"{long} = {long}[:, -{size}:]"
                if facts.along
                else f"ids = ids[:, -{size}:]   # before the positions are counted",
            )
        )
    if bad.low is not None and bad.low < 0:
        return (
            Fix(
                "Use a separate id for padding.", f"{name} = {name}.masked_fill({name} < 0, 0)   # 0: the id of padding"
            ),
        )
    if facts.grown is not None:
        rows = max(int(facts.grown.code), facts.vocabulary[1] if facts.vocabulary else 0)
        code = (
            (
                f"grown = nn.Embedding({rows}, {width})\nwith torch.no_grad():\n"
                f"    grown.weight[:{size}] = {table}.weight\n{table} = grown"
            )
            if facts.module
            else (f"nn.Embedding({rows}, {width})")
        )
        verified = facts.grown.worked
        keep = Fix("Enlarge the table to the largest id, and keep the trained rows.", code, verified, facts.grown.after)
        if facts.grown.edit is not None:
            title = "Make the table large enough. (Rows that are trained already are kept by the next one.)"
            fixes.append(Fix.of(title, facts.grown.edit, facts.grown.worked, facts.grown.after))
            keep = dataclasses.replace(keep, verified=None, after={})
        fixes.insert(1 if facts.counted or facts.grown.edit is not None else 0, keep)
    if not facts.counted:
        fixes.append(
            Fix(
                "Or map all unknown ids to one row." if fixes else "Map all unknown ids to one row.",
                f"{name} = {name}.masked_fill({name} >= {size}, unknown_id)",
            )
        )
    return tuple(fixes)


def _of_target(facts: IndexFacts, bad: OutOfRange) -> tuple[Fix, ...]:
    name = facts.index.name if facts.index is not None and is_plain(facts.index.name) else "target"
    fixes = []
    if facts.shifted is not None:
        back = "-" if facts.shifted.code == "1" else "+"
        fixes.append(facts.shifted.fix("Count the classes from 0.", assigned(name, f"{name} {back} 1")))
    if facts.ignored is not None and (facts.shifted is None or facts.shifted.code == "-1"):
        title = "If -1 stands for no class, ignore" if fixes else "Ignore"
        code = f"nn.CrossEntropyLoss(ignore_index={facts.ignored.code})"
        fixes.append(facts.ignored.fix(f"{title} these entries in the loss.", code))
    if fixes:
        return tuple(fixes)
    needed = int(facts.grown.code) if facts.grown is not None else (bad.high or bad.value) + 1
    head = as_code(facts.head) if facts.head else "head"
    title = f"Give the last layer {needed} classes, or map the labels to 0 … {(facts.size or 1) - 1}."
    code = f"{head} = nn.Linear({head}.in_features, {needed})"
    if facts.sizes_kept:
        code += f"\n{' = '.join(facts.sizes_kept)} = {needed}"
    first = Fix(title, code) if facts.grown is None else facts.grown.fix(title)
    return (first, Fix("Print the labels and their counts.", f"{name}.unique(return_counts=True)"))


def _chain(facts: IndexFacts) -> tuple[Link, ...]:
    if facts.late is not None:
        return (
            Link("the kernel of this line failed on the GPU, while the program continued", facts.raised.where),
            Link("this line waited for the GPU and raised the error", facts.late),
        )
    return facts.origin.way if facts.origin is not None else ()
