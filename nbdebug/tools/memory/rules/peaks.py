"""Rules for what a step needs at its peak: which use of memory is far larger than all the others."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import size
from nbdebug.tools.memory.facts import MemoryFacts, PeakPart, StepMemory
from nbdebug.tools.memory.rules.leaks import finding

TENFOLD = 10
"""Activations over weights, gradients and optimizer state: beyond that nothing else is worth a thought."""
MATTERS = 16 << 20
"""Bytes of activations; fewer fit everywhere."""
CARD = 0.05
"""Share of a card's memory; what is less is no reason to run out of it."""
STATE = 0.45
"""Share of the optimizer's state in what is not temporary. Adam's is twice the weights; gradients are once: with few
activations that is a half, and with activations as large as the weights 0.4."""
STATE_MATTERS = 24 << 20
INSIDE = 0.8
"""Share of the activations by which a module is the place where they are made."""


@rule(
    code="memory/activations-dominate",
    title="What the backward needs outweighs weights, gradients and optimizer state tenfold.",
    symptom="A small model runs out of memory. Half the batch, half the length or a smaller picture fits.",
    cause="Each op of the forward keeps what its derivative needs. Attention scores grow with the square of the "
    "length, feature maps with the area of the picture, all with the batch.",
    confirm="`%mem step()` lists what is alive at the peak by module and by line.",
    fix="Checkpoint the blocks (they are computed once more in backward), use fused attention "
    "(`scaled_dot_product_attention` keeps no scores), a smaller batch with accumulated gradients, or autocast to "
    "bfloat16.",
    reference="https://docs.pytorch.org/docs/stable/checkpoint.html",
)
def activations_dominate(facts: MemoryFacts) -> Finding | None:
    step = facts.step
    if step is None or not step.backwards:
        return None
    activations = step.at_peak.get("activations", 0)
    others = sum(step.at_peak.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    if activations < max(MATTERS, CARD * (step.total or 0)) or activations < TENFOLD * others:
        return None
    module, line = _most_activations(step)
    name = module.name if module is not None else ""
    share = "" if line is None else f"; {size(line.activations)} of it in one line"
    title = (
        f"Activations take {size(activations)} at the peak, {activations / max(1, others):.0f} times as much as "
        f"weights, gradients and optimizer state{f', in `{name}`' if name else ''}{share}"
    )
    source = line or module
    where = source.where if source is not None else step.place
    where = dataclasses.replace(where, module=name or where.module, phase="forward")
    return finding(
        "activations-dominate",
        title,
        where,
        [name, where.module or ""],
        _lighter(step, line),
        {"activations": activations, "weights, gradients and state": others, "peak": step.peak},
    )


def _most_activations(step: StepMemory) -> tuple[PeakPart | None, PeakPart | None]:
    """The smallest module in which nearly all of them are made (else the one that makes most), and the line."""
    named = [p for p in step.modules if p.name]
    whole = sum(p.activations for p in step.lines) or 1
    nearly = [p for p in named if p.activations >= INSIDE * whole]
    module = max(nearly, key=lambda p: p.name.count("."), default=None)
    module = module or max(named, key=lambda p: (p.activations, p.name.count(".")), default=None)
    line = max(step.lines, key=lambda p: p.activations, default=None)
    return module, line if line is not None and line.activations else None


def _lighter(step: StepMemory, line: PeakPart | None) -> list[Fix]:
    activations = step.at_peak.get("activations", 0)
    fixes = [
        Fix(
            "Checkpoint the blocks: backward recomputes their activations instead of keeping them.",
            "x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
            None,
            {"activations": size(activations)},
        ),
        Fix(
            "Use a smaller batch and accumulate gradients over several.",
            "(loss / 4).backward()  # four times, then optimizer.step()",
            None,
            {"activations": size(activations), "with a quarter": size(activations // 4)},
        ),
    ]
    if line is not None and line.where.op == "softmax" and line.activations > activations // 3:
        fixes.insert(
            0,
            Fix(
                "Use fused attention, which keeps no scores.",
                "F.scaled_dot_product_attention(q, k, v)",
                None,
                {"scores": size(line.activations)},
            ),
        )
    return fixes


def _state_fixes(optimizer: str, state: int) -> list[Fix]:
    """What fits the optimizer: 8 bits are for the moments of Adam, a shorter history for LBFGS."""
    fixes = []
    if optimizer == "LBFGS":
        code = "optimizer = torch.optim.LBFGS(parameters, history_size=5)"
        fixes.append(Fix("Keep fewer past steps: each takes two numbers for every weight, 100 steps by default.", code))
        code = "optimizer = torch.optim.Adam(parameters, lr=0.01)"
        fixes.append(Fix("Or use Adam, which keeps two numbers for every weight in all.", code))
        return fixes
    if optimizer.startswith(("Adam", "NAdam", "RAdam")) or not optimizer:
        code = "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())"
        after = {"state": size(state), "with it": size(state // 4)}
        fixes.append(Fix("Keep the state in 8 bits.", code, None, after))
    code = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    after = {"state": size(state), "with it": "none"}
    return [*fixes, Fix("Use an optimizer without state.", code, None, after)]


@rule(
    code="memory/optimizer-state-dominates",
    title="The optimizer's state takes more than all else.",
    symptom="Forward and backward fit; the first `optimizer.step()` runs out of memory. With SGD it fits.",
    cause="Adam keeps two numbers for every weight, in the weight's own precision: twice the model once more. LBFGS "
    "keeps two for every weight and each of its last 100 steps. For a large embedding of which a step touches a few "
    "rows, nearly all of that is never used.",
    confirm="`sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))`",
    fix="For a table: `nn.Embedding(..., sparse=True)` with `torch.optim.SparseAdam`. Else an 8-bit Adam, Adafactor, "
    "SGD, or frozen weights that get no state.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html",
)
def optimizer_state_dominates(facts: MemoryFacts) -> Finding | None:
    step = facts.step
    if step is None or not step.state:
        return None
    state = sum(count for _, count in step.state)
    lasting = sum(
        step.at_peak.get(name, 0)
        for name in ("parameters", "gradients", "optimizer state", "buffers", "activations", "inputs")
    )
    if state < max(STATE_MATTERS, CARD * (step.total or 0), STATE * lasting) or not step.at_peak["optimizer state"]:
        return None
    name, most = step.state[0]
    table = step.rows if step.rows is not None and step.rows[0] == name and step.rows[1] < step.rows[2] // 2 else None
    chain = [f"{table[1]:,} of the {table[2]:,} rows of `{name}` had a gradient in this step"] if table else []
    title = (
        f"The optimizer's state takes {size(state)}, {state / max(1, lasting):.0%} of what the step needs; "
        f"{size(most)} of it for `{name}`"
    )
    where = dataclasses.replace(step.place, module=name.rpartition(".")[0], phase="optimizer", op=None)
    fixes = _state_fixes(step.optimizer, state)
    if table:
        fixes.insert(
            0,
            Fix(
                "Use sparse gradients: state and gradients only for rows that are used.",
                "nn.Embedding(..., sparse=True)  # and for it: torch.optim.SparseAdam",
                None,
                {"gradients": size(step.at_peak["gradients"]), "rows with one": f"{table[1]:,}"},
            ),
        )
    return finding(
        "optimizer-state-dominates",
        title,
        where,
        [name, name.rpartition(".")[0]],
        fixes,
        {"optimizer state": state, "parameter": name, "its state": most, "peak": step.peak},
        chain,
    )
