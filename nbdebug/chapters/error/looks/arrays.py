"""Arrays that are no tensors of numbers: NumPy's objects and strings, lists with a None, a NumPy array in a layer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nbdebug.chapters.error.asked import arguments, asked, is_a, raised, within
from nbdebug.chapters.error.facts import TensorFact
from nbdebug.chapters.error.facts_dtypes import DtypeFacts
from nbdebug.chapters.error.facts_parts import Cure, Part
from nbdebug.chapters.error.looks.dtype_origin import is_array
from nbdebug.chapters.error.operands import operands
from nbdebug.chapters.error.scene import Scene

LOOKED_AT = 100_000
"""Entries of an array or a list that are looked at for the first that is no number."""
_NUMBERS = (int, float, bool, complex)


def look(scene: Scene, default: str) -> DtypeFacts | None:
    """Which array it is, and which of its entries is no number: the type and the place, never the value."""
    message = scene.message
    if "ScalarType" in message:
        odd = next((p for p in asked(scene) if str(p.value.dtype) in ("torch.bfloat16", "torch.complex32")), None)
        part = Part(odd.fact(), odd.role, odd.owner, odd.known) if odd else None
        cure = Cure(f"{odd.name}.float()") if odd else None
        return DtypeFacts(
            raised(scene), "array", part, None, "float32", "numpy()", "ScalarType", default=default, cure=cure
        )
    said = _said(message)
    found = next(((text, value) for text, value in _values(scene) if _meant(value, said)), None)
    if found is None and said in ("list", "tuple", "int", "float"):
        return None  # an argument of the wrong class, and none at hand: not ours to name
    text, value = found or ("", None)
    part = Part(_fact(text, value)) if found else None
    entry = _entry(value) if said in ("object_", "str_", "str", "NoneType") else ""
    return DtypeFacts(
        raised(scene),
        "array",
        part,
        None,
        default,
        _called(message),
        said,
        default=default,
        entry=entry,
        cure=_cure(text, value, said),
    )


def _said(message: str) -> str:
    patterns = (
        r"np\.ndarray of type numpy\.(\w+)",
        r"infer dtype of (\w+)",
        r"too many dimensions '(\w+)'",
        r"must be Tensor, not (?:numpy\.)?(\w+)",
        r"byte (order)",
    )
    return next((m[1] for p in patterns if (m := re.search(p, message))), "")


def _called(message: str) -> str:
    found = re.match(r"(\w+)\(\): argument", message)
    return found[1] if found else ""


def _values(scene: Scene) -> list[tuple[str, Any]]:
    """What stands in the failing line, what torch was given there, what stands in the lines that led to it."""
    lines = [list(operands(frame)) for frame in scene.users[:6]]
    written = arguments(scene)
    given = [
        (written[id(value)], value) for frame in within(scene) for value in frame.names.values() if id(value) in written
    ]
    return [*(lines[0] if lines else []), *given, *(pair for line in lines[1:] for pair in line)]


def _meant(value: Any, said: str) -> bool:
    if said in ("object_", "str_", "order"):
        return is_array(value) and value.dtype.kind in {"object_": "O", "str_": "SU", "order": "fiuc"}[said]
    if said == "ndarray":
        return is_array(value)
    if said in ("Series", "DataFrame", "list", "tuple"):
        return type(value).__name__ == said
    return type(value) in (list, tuple) and bool(_entry(value))


def _entry(value: Any) -> str:
    """ "a NoneType at [3]": the first entry that is no number."""
    todo: list[tuple[str, Any]] = [("", value)]
    for _ in range(LOOKED_AT):
        if not todo:
            return ""
        place, one = todo.pop(0)
        if type(one) in (list, tuple) or is_array(one) and one.ndim:
            room = min(len(one), LOOKED_AT - len(todo))
            todo += [(f"{place}[{i}]", one[i]) for i in range(max(0, room))]
        elif type(one) not in _NUMBERS and not is_a(one, np.number):
            kind = "str" if is_a(one, str) else type(one).__name__
            return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} at {place or '[]'}"
    return ""


def _fact(text: str, value: Any) -> TensorFact:
    if is_array(value):
        return TensorFact(text, tuple(value.shape), str(value.dtype), "numpy", "array")
    shape = (len(value),) if type(value) in (list, tuple) else ()
    return TensorFact(text, shape, type(value).__name__, "Python", "list")


def _cure(text: str, value: Any, said: str) -> Cure | None:
    """What makes a tensor of it; of an array of objects only where all of its entries are numbers of one shape."""
    if said == "ndarray" and is_array(value) and value.dtype.kind in "fiub":
        import torch

        made = torch.as_tensor(value[:1] if value.ndim else value, dtype=torch.float32)
        return Cure(
            f"torch.as_tensor({text}, dtype=torch.float32)",
            True,
            {"result": f"{str(made.dtype).removeprefix('torch.')} {list(value.shape)}"},
        )
    if said in ("list", "tuple") and not _entry(value):
        return Cure(f"torch.tensor({text}, dtype=torch.float32)")
    if said == "object_" and is_array(value) and not _entry(value) and value.size <= LOOKED_AT:
        made = value.astype(np.float32)
        return Cure(f'{text}.astype("float32")', True, {"result": f"{made.dtype} {list(made.shape)}"})
    if said == "order":
        return Cure(f"{text}.astype({text}.dtype.newbyteorder('='))")
    return None
