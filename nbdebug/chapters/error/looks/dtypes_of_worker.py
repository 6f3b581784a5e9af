"""A dtype error that came out of a loader's worker as text: of its frames the data set is left, and the sources."""

from __future__ import annotations

import ast
import dataclasses

from torch import nn

from nbdebug.chapters.error.asked import Names, is_a, weights
from nbdebug.chapters.error.facts import TensorFact
from nbdebug.chapters.error.facts_dtypes import DtypeFacts
from nbdebug.chapters.error.facts_parts import Origin, Part
from nbdebug.chapters.error.looks.dtype_origin import MAKERS
from nbdebug.chapters.error.looks.dtype_words import dtypes_in
from nbdebug.chapters.error.operands import expression, value_of
from nbdebug.chapters.error.scene import Scene, fact
from nbdebug.chapters.error.syntax import called, spine


def look(facts: DtypeFacts, scene: Scene) -> DtypeFacts | None:
    """`self.net(torch.from_numpy(row))`: the module still lies in the data set, the dtypes stand in the message."""
    said = dtypes_in(scene.message)
    if not scene.users:
        return None
    frame = scene.users[0]
    for call in ast.walk(expression(frame) or ast.Module([], [])):
        module = value_of(call.func, frame) if isinstance(call, ast.Call) and call.args else None
        if not isinstance(call, ast.Call) or not is_a(module, nn.Module):
            continue
        own = [w for w in weights(module) if w.dtype.is_floating_point]  # type: ignore[arg-type]
        dtype = str(own[0].dtype).removeprefix("torch.") if own else ""
        others = [word for word in said if word != dtype]
        if dtype not in said or not others:
            continue
        text, path = ast.unparse(call.args[0]), Names(scene).module(module)
        maker = next((called(n) for n in spine(call.args[0]) if called(n) in MAKERS.get(others[0], ())), "")
        met = Part(fact(f"{path}.weight", own[0]), "weight", path)
        return dataclasses.replace(
            facts,
            op=path,
            wanted=dtype,
            odd=Part(TensorFact(text, (), others[0], "cpu")),
            met=met,
            origin=Origin(text, text, maker, frame.where) if maker else None,
        )
    return None
