"""Which kinds of error are asked about an exception: the words of a kind are wider than its detector's patterns."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nbdebug.tools import explain as first
from nbdebug.tools.errors.autograd import backward_twice, in_place, no_grad
from nbdebug.tools.errors.dispatch import KINDS
from nbdebug.tools.errors.kinds import (
    backends,
    calls,
    dataloader,
    devices,
    dtypes,
    files,
    indices,
    objects,
    state_dict,
)
from nbdebug.tools.errors.shapes import call
from nbdebug.tools.memory import oom

parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
MAX_EXAMPLES = 400
"""Of one pattern: the alternatives of nested groups multiply."""


def examples(items: Any) -> list[str]:
    """Texts that a parsed pattern matches, one for each way through its alternatives."""
    texts = [""]
    for op, value in items:
        texts = [a + b for a, b in itertools.islice(itertools.product(texts, list(_one(str(op), value))), MAX_EXAMPLES)]
    return texts


def _one(op: str, value: Any) -> Iterator[str]:
    if op == "BRANCH":
        for branch in value[1]:
            yield from examples(branch)
    elif op == "SUBPATTERN":
        yield from examples(value[3])
    elif op in ("MAX_REPEAT", "MIN_REPEAT"):
        yield from (text * max(value[0], 1) for text in examples(value[2]))
        yield from [""] * (value[0] == 0)
    elif op == "IN":
        yield _of_set(value)
    elif op in ("LITERAL", "NOT_LITERAL"):
        yield chr(value) if op == "LITERAL" else "_"
    elif op == "ANY":
        yield "_"
    else:
        yield ""  # AT, ASSERT: no text of their own


def _of_set(value: Any) -> str:
    for op, inner in value:
        if str(op) == "LITERAL":
            return chr(inner)
        if str(op) == "RANGE":
            return chr(inner[0])
        if str(op) == "CATEGORY":
            return {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " "}.get(str(inner), "q")
    return "_"


def patterns(found: Any) -> list[Any]:
    """The patterns in a table (kind → pattern, or rows of both), or the one given."""
    if isinstance(found, re.Pattern):
        return [found]
    if isinstance(found, dict):
        return list(found.values())
    if all(isinstance(row, re.Pattern) for row in found):
        return list(found)
    return [max(row, key=lambda part: (isinstance(part, re.Pattern), len(str(part)))) for row in found]


def matching(pattern: str | re.Pattern[str]) -> list[str]:
    return examples(parser.parse(pattern if isinstance(pattern, str) else pattern.pattern))


DETECTORS: dict[str, tuple[Any, ...]] = {
    "kinds.dataloader.detect_dead_worker": (dataloader.SIGNAL, dataloader.ENDS),
    "kinds.backends.detect_collective": (backends.ABOUT,),
    "kinds.backends.detect_unavailable": (backends.PATTERNS,),
    "kinds.backends.detect_index": (backends.ASSERT_WORDS,),
    "kinds.backends.detect_assert": (backends.ASSERT_WORDS,),
    "kinds.backends.detect_cudnn": (backends.CUDNN,),
    "kinds.devices.detect": (devices.PATTERNS,),
    "kinds.dtypes.detect": (dtypes.PATTERNS,),
    "kinds.indices.detect": tuple(v for v in vars(indices).values() if isinstance(v, re.Pattern)),
    "autograd.backward_twice.detect": (backward_twice.SECOND,),
    "autograd.in_place.detect": (in_place.SAVED, in_place.AT_ONCE),
    "autograd.no_grad.detect": (no_grad.NOT_A_TENSOR, no_grad.GRAD_IS_NONE, no_grad.MESSAGES),
    "kinds.state_dict.detect_model": (state_dict.MODEL,),
    "kinds.state_dict.detect_optimizer": (state_dict.OPTIMIZER,),
    "kinds.files.detect_image": (files.IMAGE,),
    "kinds.files.detect_cut_image": (files.CUT_IMAGE,),
    "kinds.files.detect_syntax": (files.SYNTAX,),
    "kinds.files.detect_missing": (files.HUB,),
    "kinds.objects.detect_attached": (objects.ATTACHED,),
    "kinds.objects.detect": (objects.MESSAGES,),
    "kinds.objects.detect_pickle": (objects.REFUSED,),
    "kinds.objects.detect_unpacking": (objects.UNPACK,),
    "kinds.objects.detect_copy": (re.compile("leaves\\) support the deepcopy protocol at"),),
    "kinds.objects.detect_no_iterator": (
        re.compile("is not an iterator|has no attribute 'next'|is not subscriptable"),
    ),
    "kinds.objects.detect_wrapped": (re.compile("'Subset' object has no attribute 'targets'"),),
    "kinds.calls.detect": (calls.MISSING, calls.UNEXPECTED, calls.TOO_MANY, calls.FLOAT),
    "kinds.calls.detect_module": (calls.NO_FORWARD, calls.NO_INIT),
    "kinds.calls.detect_name": (calls.NAMES,),
    "kinds.calls.detect_order": (
        calls.STEPS,
        re.compile("initial_lr' is not specified|_scale is None|No inf checks were|has already been called"),
    ),
    "kinds.calls.detect_chances": (calls.CHANCES,),
    "kinds.calls.detect_length": (re.compile("got num_samples=0|Sum of input lengths does|has no len\\("),),
    "kinds.backends.detect_not_started": (backends.NOT_STARTED,),
    "kinds.backends.detect_attention": (backends.ATTENTION,),
    "kinds.files.detect_module": tuple(
        getattr(files, name) for name in "MODULE NAME PARTIAL RELATIVE CLASS REFUSED".split()
    ),
    "shapes": (call.PATTERNS,),
}


@pytest.mark.parametrize("name", DETECTORS)
def test_the_words_are_wider_than_the_detector(name: str) -> None:
    kind = next((kind for kind in KINDS if kind.detect == name), KINDS[-1])
    tried = [text for table in DETECTORS[name] for one in patterns(table) for text in matching(one)]
    assert tried
    kept = re.compile(kind.words, re.IGNORECASE)
    assert [text for text in tried if not kept.search(f"XError: {text}")] == []


def test_every_kind_says_where_it_may_apply() -> None:
    assert all(kind.words or kind.files for kind in KINDS)
    assert {kind.detect for kind in KINDS if kind.words} - set(DETECTORS) <= {
        "shapes.detect.look",
        "shapes.detect.detect",
        "kinds.objects.detect_exhausted",  # known by its class alone
    }
    assert all(first.MEMORY.search(text) for text in matching(oom.MESSAGES))


def test_only_what_may_apply_is_imported() -> None:
    program = (
        "import sys, torch, nbdebug\n"
        "try: torch.zeros(2, 3) @ torch.zeros(2, 3)\n"
        "except RuntimeError as error: assert nbdebug.explain(error).findings\n"
        "ours = [name for name in sys.modules if name.startswith('nbdebug.tools.')]\n"
        "print(*(name for name in ours if not name.startswith('nbdebug.tools.errors')))\n"
        "print(*(name for name in ours if name.startswith('nbdebug.tools.errors.') and name.count('.') > 3))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    other, errors = done.stdout.splitlines()
    assert other.split() == ["nbdebug.tools.explain"]
    assert all(name.startswith("nbdebug.tools.errors.shapes.") for name in errors.split()), errors
