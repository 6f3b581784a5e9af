"""How the text of a random program is put together from blocks and one fault.

A plan says which units there are and how they are nested; the writer turns it into Python source: a class for each
unit and each group. `training` adds `build()`, and in it `step()`, one training step over a stateful iterator.
"""

from __future__ import annotations

import dataclasses
import random
import textwrap

from tests.nan.blocks import DECOYS, LAYERS, Block
from tests.nan.faults import Fault

HEAD = """import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""


@dataclasses.dataclass
class Unit:
    """A leaf of the plan: a block or the fault, with the column of `side` that it reads."""

    number: int
    what: Block | Fault
    column: int | None = None

    @property
    def name(self) -> str:
        return f"Unit{self.number}"


@dataclasses.dataclass
class Group:
    """A module that holds others. way: how its forward calls them."""

    number: int
    way: str
    children: list[Unit | Group]
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"Group{self.number}"


WAYS = [
    "list",
    "list",
    "names",
    "dict",
    "residual",
    "mean",
    "cat",
    "reentrant",
    "recompute",
    "recompute method",
    "twice",
    "alias",
]
WORDS = ["encoder", "body", "stage", "tower", "mixer", "branch", "core", "neck", "cell", "trunk", "lift", "tail"]


def group(rng: random.Random, number: int, way: str, children: list[Unit | Group]) -> Group:
    """A group, with the attribute names by which its children are reached."""
    words = rng.sample(WORDS, len(children))
    if way in ("list", "mean", "recompute", "reentrant"):
        words = [f"{words[0]}.{i}" for i in range(len(children))]
    elif way == "dict":
        words = [f"parts.{word}" for word in words]
    return Group(number, way, children, words)


def dotted(tree: Unit | Group, unit: Unit, prefix: str = "") -> str | None:
    """The name by which `named_modules()` knows the unit."""
    if tree is unit:
        return prefix
    for name, child in zip(tree.names, tree.children) if isinstance(tree, Group) else ():
        found = dotted(child, unit, f"{prefix}.{name}" if prefix else name)
        if found is not None:
            return found
    return None


def indent(text: str, by: int) -> str:
    return textwrap.indent(text, " " * by)


def plain(text: str) -> str:
    """The text without the marks of the line at fault."""
    return "\n".join(
        line.replace("! ", "", 1) if line.lstrip().startswith("!") else line for line in text.strip("\n").splitlines()
    )


class Writer:
    """Writes the classes. style: how side and pad travel: "plain" arguments, one "dict", "tuple" or "dataclass", or
    "packed": side comes as further features of x, and the root takes it out."""

    def __init__(self, width: int, style: str) -> None:
        self.width, self.style = width, style

    @property
    def given(self) -> str:
        return "side, pad" if self.style in ("plain", "packed") else "extra"

    @property
    def unpack(self) -> str:
        return {
            "plain": "",
            "dict": 'side, pad = extra["side"], extra["pad"]\n',
            "packed": "",
            "tuple": "side, pad = extra\n",
            "dataclass": "side, pad = extra.side, extra.pad\n",
        }[self.style]

    @property
    def packed(self) -> str:
        return {
            "plain": "side, pad",
            "packed": "pad",
            "dict": '{"side": side, "pad": pad}',
            "tuple": "(side, pad)",
            "dataclass": "Extra(side, pad)",
        }[self.style]

    def unit(self, unit: Unit) -> str:
        """The class of one unit; a fault works on a linear layer of its own, so that there is always a gradient."""
        what, lines = unit.what, []
        if what.top:
            lines.append(plain(what.top))
        init = what.init + ("\nself.lin = nn.Linear(WIDTH, WIDTH)" if isinstance(what, Fault) else "")
        lines += [f"class {unit.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines.append(indent(init.strip("\n"), 8))
        lines.append(f"\n    def forward(self, x, {self.given}):")
        lines.append(indent(self.unpack + self.body(unit), 8))
        return "\n".join(line for line in lines if line.strip()).replace("WIDTH", str(self.width)) + "\n"

    def body(self, unit: Unit, linear: str = "self.lin(x)", out: str = "return") -> str:
        what, column = unit.what, "" if unit.column is None else f"s = side[:, {unit.column}]\n"
        if isinstance(what, Fault):
            return f"h = {linear}\n{column}{plain(what.text)}\n{out} x + 0.5 * y"
        return f"{column}{plain(what.text)}\n{out} y"

    def group(self, group: Group) -> str:
        """The class of one group."""
        made = [f"{child.name}()" for child in group.children]
        names, call = group.names, f"(x, {self.given})"
        if names[0].endswith(".0"):
            init = [f"self.{names[0][:-2]} = nn.ModuleList([{', '.join(made)}])"]
        elif names[0].startswith("parts."):
            init = ["self.parts = nn.ModuleDict({" + ", ".join(f'"{n[6:]}": {m}' for n, m in zip(names, made)) + "})"]
        else:
            init = [f"self.{n} = {m}" for n, m in zip(names, made)]
        if group.way == "cat":
            init.append(f"self.join = nn.Linear({len(made)} * {self.width}, {self.width})")
        if group.way == "alias":
            init.append(f"self.again = self.{names[-1]}")
        forward = self.calls(group, call)
        return (
            f"class {group.name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            + indent("\n".join(init), 8)
            + f"\n\n    def forward(self, x, {self.given}):\n"
            + indent(forward, 8)
            + "\n"
        )

    def calls(self, group: Group, call: str) -> str:
        each = [f"self.{n}" for n in group.names]
        loop = f"for layer in self.{group.names[0][:-2]}:\n    "
        if group.way == "list":
            return loop + f"x = layer{call}\nreturn x"
        if group.way == "mean":
            return f"return torch.stack([layer{call} for layer in self.{group.names[0][:-2]}]).mean(0)"
        if group.way in ("recompute", "reentrant"):
            return loop + f"x = checkpoint(layer, x, {self.given}, use_reentrant={group.way == 'reentrant'})\nreturn x"
        if group.way == "dict":
            return f"for layer in self.parts.values():\n    x = layer{call}\nreturn x"
        if group.way == "cat":
            return "return x + self.join(torch.cat([" + ", ".join(f"{e}{call}" for e in each) + "], -1))"
        if group.way == "recompute method":
            inner = "".join(f"    x = {e}{call}\n" for e in each)
            last = f"return x + 0.5 * checkpoint(inner, x, {self.given}, use_reentrant=False)"
            return f"def inner(x, {self.given}):\n{inner}    return x\n{last}"
        lines = [f"x = {e}{call}" for e in each]
        if group.way == "residual":
            lines = [f"x = x + 0.5 * {e}{call}" for e in each]
        if group.way in ("twice", "alias"):
            lines.append(f"x = {'self.again' if group.way == 'alias' else each[-1]}{call}")
        return "\n".join([*lines, "return x"])


def random_units(rng: random.Random, count: int, plain_only: bool = False) -> list[Block]:
    """About one in three is a decoy."""
    pools = [[b for b in pool if b.plain or not plain_only] for pool in (DECOYS, LAYERS)]
    return [rng.choice(pools[0] if rng.random() < 0.34 else pools[1]) for _ in range(count)]


def nest(rng: random.Random, units: list[Unit], depth: int, numbers: list[int]) -> Group:
    """Split the units into up to three groups, each split again, `depth` levels deep."""
    children: list[Unit | Group] = []
    if depth <= 1 or len(units) < 2:
        children = list(units)
    else:
        while units:
            part, units = units[: (size := rng.randint(1, 3))], units[size:]
            children.append(
                nest(rng, part, rng.randint(1, depth - 1), numbers) if len(part) > 1 or rng.random() < 0.6 else part[0]
            )
    numbers[0] += 1
    return group(rng, numbers[0], rng.choice(WAYS), children)
