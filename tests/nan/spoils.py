"""How a program is spoiled: the lines that put a bad value into a batch, a parameter or a buffer."""

from __future__ import annotations

import dataclasses
import math
import random

from tests.nan.assemble import Unit
from tests.nan.blocks import Block
from tests.nan.faults import Fault
from tests.nan.training import Setup


@dataclasses.dataclass
class Draft:
    """What is decided, before it is written."""

    setup: Setup
    kind: str
    fault: Fault | None = None
    place: str = "module"
    spoil: list[str] = dataclasses.field(default_factory=list)
    rows: tuple[int, ...] | None = None
    probe: bool = False


def choose_rows(rng: random.Random, draft: Draft) -> None:
    """Which rows of the failing batch are at fault: one, a few, or all."""
    batch, fault = draft.setup.batch, draft.fault
    most = batch - 1 if fault and fault.wide else batch
    count = 1 if rng.random() < 0.5 else rng.randint(1, most)
    if fault and fault.rows == "one":
        count = 1
    if fault and fault.rows == "all":
        count = batch
    draft.rows = tuple(sorted(rng.sample(range(batch), count)))
    if fault and fault.learnt:
        draft.setup.bad_step = draft.setup.micro = 0


def spoil_learnt(fault: Fault, path: str) -> str:
    """The line of `build()` that gives the fault's own parameter its bad value."""
    return f'with torch.no_grad():\n    model.get_submodule("{path}").{fault.learnt}.fill_({number(fault.bad[0])})'


AFFINE = Block("affine", "y = x * s[:, None, None]", plain=True)


OWNERS = {  # what may hold a bad parameter: block, its name below the unit, may it be infinite, is it a buffer
    "weight": (Block("linear", "y = x + self.lin(x)", "self.lin = nn.Linear(WIDTH, WIDTH)"), "lin.weight", True),
    "bias": (Block("linear", "y = x + self.lin(x)", "self.lin = nn.Linear(WIDTH, WIDTH)"), "lin.bias", True),
    "norm": (Block("norm", "y = x + self.norm(x)", "self.norm = nn.LayerNorm(WIDTH)"), "norm.weight", False),
    "own parameter": (
        Block("scale", "y = x + x * self.gain", "self.gain = nn.Parameter(torch.ones(WIDTH))"),
        "gain",
        True,
    ),
    "gru": (
        Block("gru", "states, _ = self.gru(x)\ny = x + states", "self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)"),
        "gru.weight_ih_l0",
        False,
    ),
    "buffer": (Block("grid", "y = x + x * self.grid", 'self.register_buffer("grid", torch.ones(WIDTH))'), "grid", True),
    "running": (
        Block(
            "frozen",
            "y = x + self.norm(x.reshape(-1, x.size(-1))).view(x.shape)",
            "self.norm = nn.BatchNorm1d(WIDTH).eval()",
        ),
        "norm.running_var",
        False,
    ),
}


def number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"math.{value}"


def spoil_column(draft: Draft, rng: random.Random, column: int) -> str:
    """The line of `build()` that puts the bad value into the batch."""
    fault, setup = draft.fault, draft.setup
    values = (fault.bad64 if setup.double else ()) or fault.bad
    return f"side[{setup.bad_batch}][{list(draft.rows)}, {column}] = {number(rng.choice(values))}"


def spoil_input(rng: random.Random, draft: Draft, guilty: Unit | None) -> dict:
    """A bad value in the inputs, in a column that a unit multiplies by, or in the target."""
    setup, value = draft.setup, rng.choice(["nan", "nan", "inf"])
    bad, rows = setup.bad_batch, list(draft.rows)
    moment = (
        0 if setup.loss == "tokens" else rng.randrange(setup.time)
    )  # later moments may be padding that no loss looks at
    call = "model(x, "
    if guilty is not None:
        draft.spoil.append(f"side[{bad}][{rows}, {guilty.column}] = math.{value}")
    elif setup.tokens or (setup.real_target and rng.random() < 0.3):
        setup.real_target, setup.loss = True, "mse"
        draft.spoil.append(f"target[{bad}][{rows}] = math.{value}")
        return {"modules": ("",), "ops": None, "line": ("loss = F.",), "about": "target"}
    else:
        draft.spoil.append(f"x[{bad}][{rows}, {moment}, {rng.randrange(setup.features)}] = math.{value}")
    return {"modules": ("",), "ops": ("",), "line": (call,), "about": "side" if guilty else "x"}


def spoil_parameter(rng: random.Random, draft: Draft, owner: str, modules: tuple[str, ...]) -> dict:
    """NaN in a part or the whole of a parameter or buffer, before the first step."""
    if owner in ("stem", "head"):
        path, name, infinite = owner, "weight", owner == "stem" and not draft.setup.tokens
    else:
        below, name = OWNERS[owner][1].rpartition(".")[::2]
        path, infinite = ".".join(p for p in (modules[0], below) if p), OWNERS[owner][2]
    value = "inf" if infinite and rng.random() < 0.3 else "nan"
    whole = rng.random() < 0.4
    reach = f'model.get_submodule("{path}").{name}'
    part = "[:]" if whole else ("[..., 0]" if owner in ("stem", "head") else "[-1]")
    draft.spoil.append(f"with torch.no_grad():\n    {reach}{part} = math.{value}")
    codes = (
        ["nan/parameter-nonfinite"]
        + ["nan/uninitialized-memory"] * whole
        + ["nan/running-stats-nonfinite"] * (owner == "running")
    )
    return {
        "codes": tuple(codes),
        "modules": (path,),
        "ops": ("", "empty"),
        "line": None,
        "rows": None,
        "step": (0,),
        "about": owner,
    }
