"""Draws a random program: its units, where the fault sits, how it trains; and writes it, with the truth about it."""

from __future__ import annotations

import dataclasses
import random
import re

from tests.nan import faults
from tests.nan.assemble import HEAD, Group, Unit, Writer, dotted, indent, nest, plain, random_units
from tests.nan.blocks import LAYERS, MASKED, NOT_CAST, Block
from tests.nan.faults import Fault, all_faults
from tests.nan.judge import Truth
from tests.nan.spoils import (
    AFFINE,
    OWNERS,
    Draft,
    choose_rows,
    number,
    spoil_column,
    spoil_input,
    spoil_learnt,
    spoil_parameter,
)
from tests.nan.training import OPTIMIZERS, Setup, build_text, draw_setup


@dataclasses.dataclass(frozen=True)
class Program:
    """source: the whole file. truth: None for a healthy one. about: the kind of fault and where, for a person.
    fault: the template, where there is one, for whoever wants to prove the truth."""

    source: str
    truth: Truth | None
    about: str
    fault: Fault | None = None
    setup: Setup | None = None


def draw(rng: random.Random, healthy: bool, probe: bool) -> Program:
    """One program."""
    setup = draw_setup(rng)
    kinds = ["none", "forward", "backward"] if healthy else ["forward", "backward", "input", "parameter"]
    draft = Draft(setup, rng.choices(kinds, [40, 32, 28] if healthy else [40, 32, 16, 12])[0], probe=probe)
    if draft.kind in ("forward", "backward"):
        draft.fault = rng.choice([f for f in all_faults() if f.phase == draft.kind and not f.rare])
        draft.place = rng.choices(["module", "root", "loss", "none"], [62, 8, 16, 14])[0]
    elif rng.random() < 0.15:
        draft.place = "none"
    _draw_rare(draft)
    if draft.place in ("root", "loss", "none") and draft.fault and draft.fault.init:
        draft.place = "module"
    if draft.place == "loss" and setup.style == "packed":
        setup.style = "plain"  # else the column is no input of the model, and a bad one might be called a bad target
    choose_rows(rng, draft)
    written = write_without_model(rng, draft) if draft.place == "none" else write_with_model(rng, draft)
    return finish(draft, healthy, *written)


SHARE = 0.12
"""Of the programs that have a rare fault, of those with a block of MASKED, and of those whose model is cast to half."""


def _draw_rare(draft: Draft) -> None:
    """What was added later, drawn apart: the other programs stay what their seeds have always been."""
    setup, rng = draft.setup, random.Random(f"{draft.setup.seed}/rare")
    rare = [f for f in all_faults() if f.phase == draft.kind and f.rare]
    if draft.fault and rare and rng.random() < SHARE:
        draft.fault = rng.choice(rare)
    setup.masked = rng.random() < SHARE
    free = not (setup.autocast or setup.double or draft.place == "none")
    if free and rng.random() < SHARE and (draft.fault is None or draft.fault.name not in faults.NOT_CAST):
        setup.cast, setup.closure, setup.optimizer = True, "", OPTIMIZERS[0]  # Adam's eps is zero in half precision


def give_columns(rng: random.Random, draft: Draft, units: list[Unit]) -> list[str]:
    """Give each unit that reads `side` a column; the lines that put the decoys' bad values there, in every batch."""
    lines = []
    for unit in units:
        if not re.search(r"\bs\b", unit.what.text):
            continue
        unit.column = draft.setup.columns
        draft.setup.columns += 1
        bad = getattr(unit.what, "bad", None)
        if isinstance(unit.what, Block) and bad is not None:
            rows = sorted(rng.sample(range(draft.setup.batch), rng.randint(1, draft.setup.batch - 1)))
            lines.append(f"for each in side:\n    each[{rows}, {unit.column}] = {number(bad)}")
        elif isinstance(unit.what, Fault):
            draft.spoil.append(spoil_column(draft, rng, unit.column))
    return lines


def probed(draft: Draft, unit: Unit) -> Unit:
    """The unit with its fault's line between two calls of PROBE, if that is wanted."""
    fault = unit.what
    if not (draft.probe and isinstance(fault, Fault)):
        return unit

    def around(text: str) -> str:
        out = []
        for line in text.splitlines():
            gap = line[: len(line) - len(line.lstrip())]
            marked = line.lstrip().startswith("!")
            if marked and fault.operand:
                out.append(f'{gap}PROBE("in", {fault.operand})')
            out.append(line)
            if marked:
                out.append(f'{gap}PROBE("out", {fault.result})')
        return "\n".join(out)

    return dataclasses.replace(unit, what=dataclasses.replace(fault, text=around(fault.text), top=around(fault.top)))


def write_with_model(rng: random.Random, draft: Draft) -> tuple[str, dict]:
    """Source and truth of a program whose model is nested."""
    setup = draft.setup
    blocks: list = _with_rare(setup, random_units(rng, rng.randint(1, 6)))
    special, owner = None, None
    if draft.place == "module":
        if draft.fault:
            special = draft.fault
        elif draft.kind == "parameter":
            owner = rng.choice([*OWNERS, "stem", "head"])
            special = OWNERS[owner][0] if owner in OWNERS else None
        elif rng.random() < 0.3:
            owner, special = "side", AFFINE
    if special:
        blocks.insert(rng.randint(0, len(blocks)), special)
    units = [Unit(number, block) for number, block in enumerate(blocks)]
    guilty = next((u for u in units if u.what is special), None) if special else None
    outside = Unit(90, draft.fault) if draft.place in ("root", "loss") and draft.fault else None
    lines = give_columns(rng, draft, [*units, *([outside] if outside else [])])
    tree = nest(rng, list(units), rng.randint(1, 4), [0])
    writer = Writer(setup.width, setup.style)
    modules = _modules(tree, guilty, draft)
    truth: dict = {"modules": modules}
    if draft.kind == "input":
        truth |= spoil_input(rng, draft, guilty)
    if draft.kind == "parameter":
        truth |= spoil_parameter(rng, draft, owner, modules)
    if draft.fault and draft.fault.learnt:
        draft.spoil.append(spoil_learnt(draft.fault, modules[0]))
    if draft.place == "loss":
        setup.scored, setup.classes = True, setup.width
    classes = _classes(writer, draft, tree, units, outside)
    source = (
        HEAD
        + _extra(setup)
        + classes
        + build_text(setup, writer, outside=_outside(writer, draft, outside), decoys=lines, spoil=draft.spoil)
    )
    return source, truth


def _with_rare(setup: Setup, blocks: list[Block]) -> list[Block]:
    """With attention masks in one place, without what the precision has no kernels for."""
    if setup.masked:
        more = random.Random(f"{setup.seed}/masked")
        blocks[more.randrange(len(blocks))] = more.choice(MASKED)
    return [block if not (setup.cast and block.name in NOT_CAST) else LAYERS[0] for block in blocks]


def _extra(setup: Setup) -> str:
    fields = (
        "\n@dataclass\nclass Extra:\n    side: torch.Tensor\n    pad: torch.Tensor\n\n"
        if setup.style == "dataclass"
        else ""
    )
    out = (
        "\n@dataclass\nclass Output:\n    logits: torch.Tensor\n    spare: torch.Tensor\n\n"
        if setup.output == "dataclass"
        else ""
    )
    return fields + out


def _outside(writer: Writer, draft: Draft, unit: Unit | None) -> str:
    """The fault as loss code."""
    if unit is None or draft.place != "loss":
        return ""
    return writer.body(probed(draft, unit), "out", "score =").replace("x + 0.5 * y", "y")


def _classes(writer: Writer, draft: Draft, tree: Group, units: list[Unit], outside: Unit | None) -> str:
    """All classes of the model, leaves first, the root last."""
    parts, tops = [], set()
    for unit in units:
        text = writer.unit(probed(draft, unit))
        if unit.what.top and unit.what.top in tops:
            text = text.replace(plain(unit.what.top), "")
        tops.add(unit.what.top)
        parts.append(text)

    def walk(node: Unit | Group) -> None:
        if isinstance(node, Group):
            for child in node.children:
                walk(child)
            parts.append(writer.group(node))

    walk(tree)
    if outside is not None and outside.what.top:
        parts.append(plain(probed(draft, outside).what.top) + "\n")
    own = (
        writer.body(probed(draft, outside), "self.stem(x)", "x =").replace("x + 0.5 * y", "y")
        if draft.place == "root" and outside
        else ""
    )
    parts.append(draft.setup.root(writer, tree.name, own))
    return "\n\n" + "\n\n".join(parts)


def _modules(tree: Group, guilty: Unit | None, draft: Draft) -> tuple[str, ...]:
    """The names under which the guilty unit may be known."""
    if guilty is None or draft.place != "module":
        return ("",)
    name = f"body.{dotted(tree, guilty)}"
    child = getattr(guilty.what, "child", "")
    return (name, f"{name}.{child}") if child else (name,)


def write_without_model(rng: random.Random, draft: Draft) -> tuple[str, dict]:
    """Source and truth of a program of plain tensors and functions."""
    setup = draft.setup
    setup.model, setup.tokens, setup.style, setup.output = False, False, "plain", "tensor"
    units = [Unit(n, b) for n, b in enumerate(random_units(rng, rng.randint(0, 3), plain_only=True))]
    if draft.fault:
        units.insert(rng.randint(0, len(units)), Unit(90, draft.fault))
    lines = give_columns(rng, draft, units)
    writer = Writer(setup.width, "plain")
    functions, calls = [], []
    for unit in units:
        unit = probed(draft, unit)
        if unit.what.top and plain(unit.what.top) not in functions:
            functions.append(plain(unit.what.top))
        body = writer.body(unit, "torch.tanh(x @ weight)").replace("WIDTH", str(setup.width))
        functions.append(f"def unit{unit.number}(x, side, pad, weight):\n{indent(body, 4)}\n")
        calls.append(f"x = unit{unit.number}(x, side, pad, weights[{len(calls) + 1}])")
    setup.calls = calls
    truth: dict = {"modules": ("",)}
    if draft.kind == "input":
        draft.spoil.append(f"x[{setup.bad_batch}][{list(draft.rows)}, 0, {rng.randrange(setup.features)}] = math.nan")
        truth |= {"ops": None, "line": ("x = x @ weights[0]",), "about": "x"}
    if draft.kind == "parameter":
        draft.spoil.append("with torch.no_grad():\n    weights[0][0, -1] = math.nan")
        truth |= {
            "codes": ("nan/parameter-nonfinite",),
            "ops": ("", "empty"),
            "line": None,
            "rows": None,
            "step": (0,),
            "about": "tensor",
        }
    return HEAD + "\n\n" + "\n\n".join(functions) + build_text(setup, writer, decoys=lines, spoil=draft.spoil), truth


def finish(draft: Draft, healthy: bool, source: str, parts: dict) -> Program:
    """Take the fault out of a healthy program, and say the truth about a faulty one."""
    setup, fault = draft.setup, draft.fault
    about = f"{draft.kind}: {fault.name if fault else parts.get('about', '')}; {draft.place}; {setup.about}"
    if healthy:
        for line in draft.spoil:
            source = source.replace(indent(line, 4) + "\n", "")
        return Program(source, None, about, fault, setup)
    if fault:
        mark = fault.mark
        unclear = {"1": setup.time, "folded": setup.width}.get(fault.rows) == setup.batch  # two dimensions alike
        rows = None if unclear or fault.rows in ("one", "all") else draft.rows
        truth = {"codes": fault.codes, "ops": fault.ops, "line": (mark,), "rows": rows, **parts}
    else:
        truth = {"codes": ("nan/input-nonfinite",), "rows": draft.rows, **parts}
    truth.pop("about", None)
    for line in truth["line"] or ():
        if source.count(line) != 1:
            raise AssertionError(f"{line!r} stands {source.count(line)} times in the program ({about})")
    return Program(
        source,
        Truth(**{"step": (setup.bad_step,), "phase": (draft.kind,), "batch": setup.batch, **truth}),
        about,
        fault,
        setup,
    )
