"""What the field knows of a setting by its name, where there is no schema. It is silent of other names.

A relation holds between settings of one section.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdebug.tools.config import tables
from nbdebug.tools.config.document import Expectation, Setting


@functools.cache
def convention(name: str) -> Expectation | None:
    """What a setting of this name may be; None where nothing is known."""
    name = name.lower()
    usual = functools.partial(Expectation, lenient=True, null=True)
    for names, rules, source in tables.PAGES:
        if name in names.split():
            return usual(**rules, source=source)
    if re.fullmatch(tables.DROPOUT, name):
        return usual(type="float", min=0, max=1, source="torch.nn.Dropout: a probability")
    if name in tables.CHOICES:
        return usual(type="str", choices=tuple(tables.CHOICES[name][0].split()), source=tables.CHOICES[name][1])
    return None


def conventions(settings: Mapping[str, Setting]) -> dict[str, Expectation]:
    """What the settings of a file may be, by their names and by each other."""
    expected: dict[str, Expectation] = {}
    for key, setting in settings.items():
        usual = convention(setting.name)
        if usual is None or setting.section:
            continue
        counts = usual.type == "int" or "epoch" in setting.name or "step" in setting.name
        if setting.value != tables.OFF or not counts:
            expected[key] = usual
    for key, relation in _relations(settings):
        usual = expected.get(key, Expectation(lenient=True, null=True))
        expected[key] = dataclasses.replace(usual, **relation)
    return expected


def _relations(settings: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections: dict[str, dict[str, Setting]] = {}
    for setting in settings.values():
        sections.setdefault(setting.parent, {})[setting.name] = setting
    for here in sections.values():
        yield from _beside(here)
    for first, second in tables.EXCLUDING:
        for key in settings:
            other = key.removesuffix(first) + second
            if f".{key}".endswith(f".{first}") and other in settings:
                yield key, {"not_with": other, "source": "transformers and DeepSpeed refuse both"}
    warmups, totals = (
        [s for s in settings.values() if s.name in names.split()] for names in (tables.WARMUPS, tables.TOTALS)
    )
    if len(warmups) == len(totals) == 1 and _positive(totals):  # the file has one of each
        yield warmups[0].key, {"at_most": totals[0].key, "source": "the warm-up is a part of the training"}


def _beside(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    """In one section."""
    for names, relation, others, beside, source in tables.RELATIONS:
        one, two = (_positive(here.get(name) for name in group.split()) for group in (names, others))
        if relation == "multiple_of" and {type(s.value) for s in (*one, *two)} != {int}:
            continue
        needed, unless = beside.get("when", ""), [name for name in beside.get("unless", "").split() if name in here]
        clear = len(one) == 1 and len({s.value for s in two}) == 1 and (not needed or needed in here)
        if clear and all(here[name].value in (None, "steps") for name in unless):
            yield one[0].key, {relation: two[0].key, "source": source, "when": here[needed].key if needed else None}
    micro, steps = (here.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    for total in _positive([here.get("train_batch_size")]) if _positive([micro]) else ():
        factor = math.prod(s.value for s in _positive([micro, steps]))
        yield total.key, {"multiple_of": factor, "source": "DeepSpeed: micro batch x accumulation steps x GPUs"}
    for name, halves, place, asked, source in tables.DEVICES:
        if name in here and place in here and here[name].value in halves and here[place].value == asked:
            yield here[name].key, {"not_with": here[place].key, "source": source}


def _positive(settings: Iterable[Setting | None]) -> list[Setting]:
    return [s for s in settings if s is not None and type(s.value) in (int, float) and s.value > 0]


def misspelt(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Keys that differ from a long, usual one by two letters swapped, or one missing or too many. They are no usual key
    and no plural, and the usual one does not stand beside them."""
    near: dict[str, str] = {}
    siblings = {(setting.parent, setting.name) for setting in settings.values()}
    for key, setting in settings.items():
        name = setting.name
        if len(name) < 9 or name in tables.KNOWN or name in tables.USUAL or not re.fullmatch(r"[a-z_]+", name):
            continue
        for usual in difflib.get_close_matches(name, tables.KNOWN, n=1, cutoff=0.88):
            if len(usual) > 8 and (setting.parent, usual) not in siblings and _slip(name, usual):
                near[key] = usual
    return near


def _slip(name: str, usual: str) -> bool:
    """Whether a slip of the finger leads from one to the other; a plural or another word is none, and another letter
    may be another word: patch_size, batch_size."""
    if name.rstrip("s") == usual.rstrip("s") or name.count("_") != usual.count("_") or re.search(r"\d", usual):
        return False
    short, long = sorted((name, usual), key=len)
    swapped = (name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1))
    return usual in swapped or any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
