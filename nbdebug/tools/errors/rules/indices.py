"""What an error about an index needs: what was indexed, how large it is, which entry goes beyond it, and where."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.errors.facts import ArgumentFact, Raised, TriedFix, ValueOrigin, as_code, assigned, is_plain


@dataclasses.dataclass(frozen=True)
class OutOfRange:
    """The entries of an index that are out of range. value, place: of the first in memory; count of total entries;
    low, high: the least and the largest of all entries; values: the different bad ones, at most six. total is 0 where
    the index itself is not at hand (it stayed in a worker); value is then the first that would be too large."""

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
    "negative" (bincount, one_hot), "sequence" (list, tuple, array, data set), "random" (an empty range).

    table: what is indexed, as the user would write it; module: the path of the module that owns it; size: how many
    entries it has; dim: along which dimension; least: the lowest index that is allowed. index: the tensor of indices;
    key: the text of an index that is no tensor. head: the module that makes the scores of a loss, or what a data set's
    `__len__` returns; sample: which sample it was asked for, where that is not the key; data_set: its name; promised:
    how many samples its loader was told that it has; fits: what `__len__` should return. counted: the text of the
    `arange` that made the index (a position); along: the tensor whose length that counts. vocabulary: a dict of the
    user's that has more entries. grown, shifted, ignored: cures that were tried (a larger table, classes from 0, the
    label left out). late: the line that showed it, where a card said so only later than at the line of `raised`.
    """

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
    title="An index goes beyond what it points into.",
    symptom="index out of range in self; Target 7 is out of bounds; index 5 is out of bounds for dimension 0 with size "
    "5; list index out of range; on a card a device-side assert.",
    cause="Tokens were added to the vocabulary and the embedding was not made larger; a sequence is longer than the "
    'table of positions; classes are counted from 1, or a label such as 255 or -1 means "none"; the last layer '
    "gives fewer classes than the data has; a data set says that it is longer than its lists are.",
    confirm="`ids.min(), ids.max()` against `embedding.num_embeddings`; `target.unique()` against the classes.",
    fix="Make the table as large as the vocabulary, count classes from 0, name the label that is to be left out "
    "(`ignore_index`), cut sequences to the length of the position table.",
    reference=EMBEDDING,
)
def index_out_of_range(facts: IndexFacts) -> Finding | None:
    if facts.beyond is None:
        return None
    return Finding(
        "error/index-out-of-range",
        _TITLES[facts.kind](facts, facts.beyond),
        facts.raised.where,
        _evidence(facts, facts.beyond),
        _fixes(facts, facts.beyond),
        _chain(facts),
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
            "where the first is": list(bad.place),
            "values out of range": list(bad.values),
        }
    evidence |= {"samples promised": facts.promised} if facts.promised is not None else {}
    return evidence | ({"shape of the table": list(facts.shape)} if facts.shape else {})


def _entry(facts: IndexFacts, bad: OutOfRange) -> str:
    """`tokens[0, 3]` is 11."""
    if bad.total == 0:
        return f"`{facts.key}` goes beyond `{facts.table}`"
    if facts.index is None:
        sample = f" ({facts.sample})" if facts.sample else ""
        return f"`{facts.key}` is {bad.value}{sample}" if facts.key else f"the index is {bad.value}{sample}"
    place = f"[{', '.join(map(str, bad.place))}]" if bad.place else ""
    if facts.index.known and is_plain(facts.index.name):
        return f"`{facts.index.name}{place}` is {bad.value}"
    return f"entry {place or '[]'} of {facts.index.phrase} is {bad.value}"


def _more(bad: OutOfRange) -> str:
    return f" ({bad.count} of {bad.total} entries go beyond it)" if bad.count > 1 else ""


def _first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _embedding(facts: IndexFacts, bad: OutOfRange) -> str:
    rows = f"`{facts.table}` has {facts.size} rows, 0 to {(facts.size or 0) - 1}"
    if facts.counted and facts.index is not None:
        return (
            f"{_first(facts.index.phrase)} counts to {bad.high} (`{facts.counted}`), and {rows}: the sequence is "
            "longer than its table of positions"
        )
    if bad.value < 0:
        return f"{_first(_entry(facts, bad))}, and {rows}: no row is counted from the end{_more(bad)}"
    words = facts.vocabulary
    why = f"; `{words[0]}` has {words[1]} entries" if words is not None else ""
    return f"{_first(_entry(facts, bad))}, and {rows}{why}{_more(bad)}"


def _target(facts: IndexFacts, bad: OutOfRange) -> str:
    size = facts.size or 0
    scores = f"`{facts.head}` gives {size} classes" if facts.head else f"`{facts.table}` has {size} classes"
    title = f"{_first(_entry(facts, bad))}, and {scores}, 0 to {size - 1}{_more(bad)}"
    if facts.shifted is not None:
        return f"{title}: classes are counted from {bad.low}, and the loss counts from 0"
    if facts.ignored is not None:
        return f'{title}: a label that means "none" has to be named to the loss'
    return title


def _promised(facts: IndexFacts) -> str:
    if not facts.head:
        return ""
    promise = f", which promises {facts.promised} samples" if facts.promised is not None else ""
    whose = f"the length of `{facts.data_set}`" if facts.data_set else "the data set's length"
    return f": {whose} is `{facts.head}`{promise}"


def _tensor(facts: IndexFacts, bad: OutOfRange) -> str:
    along = f" along dimension {facts.dim}" if facts.dim is not None and len(facts.shape) != 1 else ""
    title = (
        f"{_first(_entry(facts, bad))}, and `{facts.table}` has {facts.size} entries{along}, 0 to "
        f"{(facts.size or 0) - 1}{_more(bad)}"
    )
    return title + _promised(facts)


def _one_hot(facts: IndexFacts, bad: OutOfRange) -> str:
    apart = len(bad.values) == 1 and (bad.value >= 255 or bad.value < 0)
    return (
        f"{_first(_entry(facts, bad))}, and one_hot is told that there are {facts.size} classes, 0 to "
        f"{(facts.size or 0) - 1}{_more(bad)}" + (f": {bad.value} marks what has none" if apart else "")
    )


def _negative(facts: IndexFacts, bad: OutOfRange) -> str:
    return f"{_first(_entry(facts, bad))}, and {facts.table or 'counting'} takes no negative numbers{_more(bad)}"


def _sequence(facts: IndexFacts, bad: OutOfRange) -> str:
    size = facts.size or 0
    along = f" along dimension {facts.dim}" if facts.dim is not None and len(facts.shape) > 1 else ""
    ends = f", the last of them {size - 1}" if size else ""
    has = "which has" if bad.total == 0 else f"and `{facts.table}` has"
    title = f"{_first(_entry(facts, bad))}, {has} {size} {'entry' if size == 1 else 'entries'}{along}{ends}"
    return title + _promised(facts)


def _random(facts: IndexFacts, bad: OutOfRange) -> str:
    return (
        f"There is no number to draw from {facts.least} up to {bad.value} (which is not included): what it is to "
        "be drawn from is too small"
    )


_TITLES = {
    "embedding": _embedding,
    "target": _target,
    "tensor": _tensor,
    "one_hot": _one_hot,
    "negative": _negative,
    "sequence": _sequence,
    "random": _random,
}


def _fixes(facts: IndexFacts, bad: OutOfRange) -> tuple[Fix, ...]:
    if facts.kind == "embedding":
        return _of_embedding(facts, bad)
    if facts.kind == "target":
        return _of_target(facts, bad)
    size, name = facts.size or 0, facts.index.name if facts.index is not None else facts.key
    if facts.kind == "one_hot" and len(bad.values) == 1 and (bad.value >= 255 or bad.value < 0):
        mask = f"known = {name} != {bad.value}\n"
        return (
            Fix(
                f"{bad.value} marks what has no class: leave it out.",
                f"{mask}hot = nn.functional.one_hot({name} * known, {size}) * known[..., None]",
            ),
        )
    if facts.kind == "one_hot":
        return (
            Fix(
                "Give it the number of classes that there are.",
                f"nn.functional.one_hot({name}, num_classes={(bad.high or bad.value) + 1})",
            ),
        )
    if facts.kind == "negative":
        return (Fix("Leave out what is negative.", f"{name} = {name}[{name} >= 0]"),)
    if facts.kind == "random":
        return (
            Fix(
                "Draw from one number more, and only where there is room.",
                "start = torch.randint(0, max(1, length - size + 1), ())",
            ),
        )
    if facts.kind in ("sequence", "tensor") and facts.head:
        code = f"def __len__(self):\n    return {facts.fits}"
        return (Fix("Let the length be the number of samples that there are.", code),) if facts.fits else ()
    if facts.index is not None and facts.index.known:
        return (
            Fix(
                f"The valid ones are 0 to {size - 1}: see where the others come from.",
                f"{name}[({name} < 0) | ({name} >= {size})]",
            ),
        )
    length = f"{facts.table}.shape[{facts.dim}]" if facts.dim is not None else f"len({facts.table})"
    return (
        Fix(
            f"The valid ones are 0 to {size - 1}: see where this one comes from.",
            f"assert {name or bad.value} < {length}" if size else f"assert len({facts.table})   # it is empty",
        ),
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
                "Give padding an id of its own.", f"{name} = {name}.masked_fill({name} < 0, 0)   # 0: the id of padding"
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
        fixes.insert(
            0 if not facts.counted else 1,
            Fix(
                "Make the table as large as the ids need, and keep the rows that are trained.",
                code,
                facts.grown.worked,
                facts.grown.after,
            ),
        )
    if not facts.counted:
        fixes.append(
            Fix(
                "Or give unknown ids one row that stands for all of them."
                if fixes
                else "Give ids that the table does not know one row that stands for all of them.",
                f"{name} = {name}.masked_fill({name} >= {size}, unknown_id)",
            )
        )
    return tuple(fixes)


def _of_target(facts: IndexFacts, bad: OutOfRange) -> tuple[Fix, ...]:
    name = facts.index.name if facts.index is not None and is_plain(facts.index.name) else "target"
    if facts.shifted is not None:
        cure = facts.shifted
        return (Fix("Count the classes from 0.", assigned(name, f"{name} - 1"), cure.worked, cure.after),)
    if facts.ignored is not None:
        return (
            Fix(
                "Leave these entries out of the loss.",
                f"nn.CrossEntropyLoss(ignore_index={facts.ignored.code})",
                facts.ignored.worked,
                facts.ignored.after,
            ),
        )
    needed = (bad.high or bad.value) + 1
    head = as_code(facts.head) if facts.head else "head"
    return (
        Fix(
            f"Give the last layer {needed} classes, or map the labels to 0 … {(facts.size or 1) - 1}.",
            f"{head} = nn.Linear({head}.in_features, {needed})",
        ),
        Fix("See which labels there are.", f"{name}.unique(return_counts=True)"),
    )


def _chain(facts: IndexFacts) -> tuple[Link, ...]:
    if facts.late is not None:
        return (
            Link("the kernel of this line failed on the card, while the program went on", facts.raised.where),
            Link("here the card's answer was waited for, and the error was shown", facts.late),
        )
    return facts.origin.way if facts.origin is not None else ()
