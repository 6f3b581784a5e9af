"""Rules for memory that every step adds and never frees: who holds it, and why it should not."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, size
from nbdebug.tools.memory.facts import SMALL, Leak, MemoryFacts
from nbdebug.tools.memory.rules.wording import detached, finding, grew, holder, pace, saving, small

COLLECTED = 1 << 20
"""Bytes that a step adds to a list. Predictions are collected on purpose; more than this in each step is 1 GiB after a
thousand of them."""

GRAPH = 16 << 20
"""Bytes that an evaluation's batch keeps for a backward; less than this fits wherever the model fits."""


def _first(facts: MemoryFacts, *kinds: str) -> Leak | None:
    return next((g for g in facts.growth if g.kind in kinds), None)


@rule(
    code="memory/traceback-held",
    title="An exception that was caught is kept, and with it all variables of the failed calls.",
    symptom="After each failed try (a batch that was too large, a sample that could not be read) the memory of that "
    "try stays in use. Its variables are out of scope, and `gc.collect()` frees nothing.",
    cause="An exception holds its traceback, the traceback holds the frames of all calls down to the error, and the "
    "frames hold their local variables: the batch, the activations, the graph.",
    confirm="`error.__traceback__.tb_next.tb_frame.f_locals` shows the tensors. In a notebook the last exception is "
    "kept as `sys.last_value`: `%mem` lists it.",
    fix="Keep what the exception says (`str(error)`), not the exception; or call "
    "`traceback.clear_frames(error.__traceback__)`. `%free` frees what a notebook keeps.",
    reference="https://docs.python.org/3/library/traceback.html#traceback.clear_frames",
)
def traceback_held(facts: MemoryFacts) -> Finding | None:
    growth = _first(facts, "exception")
    if growth is None or small(growth, SMALL):
        return None
    title = f"{holder(growth)} keeps exceptions, and with them the variables of the failed calls: {pace(growth)}"
    name = growth.holder.split("[")[0] or "errors"
    fixes = [
        Fix(
            "Keep what the exception says, not the exception.", f"{name}.append(str(error))", None, saving(growth.bytes)
        ),
        Fix("Or clear the variables of its frames.", "traceback.clear_frames(error.__traceback__)"),
    ]
    return grew(
        "traceback-held",
        growth,
        title,
        fixes,
        ["each exception holds its traceback, its frames and their local variables"],
    )


@rule(
    code="memory/cell-output-held",
    title="The notebook keeps every result that a cell has shown.",
    symptom="A tensor was the last line of a cell. It is deleted, the garbage collector is called, and its memory "
    "stays in use.",
    cause="IPython files what a cell shows in `Out` and in `_`, `__`, `___`, `_7`, so that it can be used again. `del` "
    "takes away the variable alone.",
    confirm="`Out` has an entry for the cell; `%mem` lists its bytes.",
    fix="End the line with a semicolon or print a summary (`scores.shape`). `%free outputs` frees what is kept "
    "already; `%xdel name` deletes a variable and its traces in `Out`.",
    reference="https://ipython.readthedocs.io/en/stable/interactive/reference.html#output-caching-system",
)
def cell_output_held(facts: MemoryFacts) -> Finding | None:
    growth = _first(facts, "output")
    if growth is None or small(growth, SMALL):
        return None
    title = f"`{growth.holder}` keeps what cells have shown: {pace(growth)}"
    fixes = [
        Fix(
            "Show a summary, or end the line with a semicolon.",
            "scores.shape  # or: scores;",
            None,
            saving(growth.bytes),
        ),
        Fix("Free what is kept already.", "%free outputs"),
    ]
    return grew("cell-output-held", growth, title, fixes)


@rule(
    code="memory/hook-held",
    title="A hook keeps what passes through it, or is registered again with every step.",
    symptom="Memory rises steadily while a hook is in place (activations for a plot, features for a probe); without "
    "the hook it is flat.",
    cause="A forward hook gets the output itself, with its graph. Put into a list it stays, and with it all that its "
    "backward would need. A hook that is registered inside the loop is "
    "added again in each step, and each one keeps its own tensors.",
    confirm="`len()` of the list rises with every call of the model; or `len(module._forward_hooks)` does.",
    fix="Keep numbers, not tensors (`output.detach().mean().item()`), or the last output only. Keep the handle that "
    "`register_forward_hook` returns and call `handle.remove()`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
)
def hook_held(facts: MemoryFacts) -> Finding | None:
    growth = _first(facts, "hook")
    if growth is None:
        return None
    again = growth.holder.endswith("_hooks")
    if again:
        owner = growth.holder.rpartition(".")[0]
        title = f"Hooks of `{owner}` are registered with every step and never removed: {growth.items} more each time"
        fixes = [
            Fix(
                "Keep the handle, and remove the hook when it is no longer needed.",
                "handle = module.register_forward_hook(hook)\n...\nhandle.remove()",
            )
        ]
        return grew("hook-held", growth, title, fixes)
    if small(growth, SMALL) and not growth.grad:
        return None
    with_graph = ", with its graph" if growth.grad else ""
    title = f"A hook keeps what passes through it in {holder(growth)}{with_graph}: {pace(growth)}"
    fixes = [
        Fix(
            "Keep a number, or detach the tensor and keep only the last one.",
            detached(growth, ".detach().mean().item()"),
            None,
            saving(growth.bytes, 0),
        )
    ]
    return grew("hook-held", growth, title, fixes)


@rule(
    code="memory/eval-without-no-grad",
    title="An evaluation records graphs that nobody runs backward through.",
    symptom="Training fits and validation does not, although its batches are no larger; or memory rises with each "
    "batch of the evaluation.",
    cause="`model.eval()` changes what dropout and batch normalisation do; it does not turn autograd off. Each forward "
    "saves what its backward would need, and an output that is kept keeps all of it.",
    confirm="`logits.requires_grad` is True in the evaluation.",
    fix="Run the evaluation under `torch.no_grad()` or `torch.inference_mode()`.",
    reference="https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval",
)
def eval_without_no_grad(facts: MemoryFacts) -> Finding | None:
    growth = next((g for g in facts.growth if g.evaluation), None)
    if growth is not None:
        title = (
            f"The evaluation runs without `torch.no_grad()`, and {holder(growth)} keeps the graph of every batch: "
            f"{pace(growth)}"
        )
        return grew("eval-without-no-grad", growth, title, [_no_grad(growth.bytes, growth.after)])
    step = facts.step
    if step is None or not step.evaluated or step.backwards or step.optimizers:
        return None
    activations = step.at_peak.get("activations", 0)
    if activations < GRAPH or 2 * activations < step.peak - step.base:
        return None
    title = (
        f"The evaluation runs without `torch.no_grad()`: {size(activations)} of its peak are kept for a backward that "
        "nobody runs"
    )
    where = dataclasses.replace(step.place, phase="forward")
    module = next((p.name for p in step.modules if p.name), "")
    return finding(
        "eval-without-no-grad",
        title,
        where,
        [module or "the model"],
        [_no_grad(activations, None)],
        {"activations": activations, "peak": step.peak, "calls in eval mode": step.evaluated},
    )


def _no_grad(as_it_is: int, after: int | None) -> Fix:
    title, code = "Evaluate without gradients.", "with torch.no_grad():\n    logits = model(batch)"
    if after is None:
        return Fix(title, code, None, {"kept for a backward": size(as_it_is)})
    return Fix(title, code, after < as_it_is, {"a step adds": size(as_it_is), "with the fix": size(after)})


@rule(
    code="memory/graph-retained",
    title="Something that is kept from step to step keeps autograd's graph.",
    symptom="Memory rises by the same amount with each step, until it runs out; the training itself is fine.",
    cause="A tensor that came from parameters carries the graph that made it, and the graph holds what its backward "
    "would need. Kept in a list, summed up for a report, handed on as a state, it keeps all of it; a running sum "
    "holds the graphs of all steps so far.",
    confirm="The kept tensor's `grad_fn` is not None. `torch.cuda.memory_allocated()` after each step rises steadily.",
    fix="Keep `loss.item()` or `loss.detach()`. Detach a state before it is handed on to the next step.",
    reference="https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
)
def graph_retained(facts: MemoryFacts) -> Finding | None:
    growth = next((g for g in facts.growth if g.kind == "graph" and not g.evaluation), None)
    if growth is None or (growth.emptied and not growth.backward):  # collected for a backward that is still to come
        return None
    if growth.chained:
        title = (
            f"{holder(growth)} is computed from its own value of the step before, so its graph grows: {pace(growth)}"
        )
    else:
        title = f"{holder(growth)} keeps tensors with their graphs: {pace(growth)}"
    fixes = [Fix("Detach the tensor before it is kept.", detached(growth), None, saving(growth.bytes, growth.own))]
    chain = [f"the step never calls backward on what `{growth.holder}` keeps"] if not growth.backward else []
    return grew("graph-retained", growth, title, fixes, chain)


VIEW = 4
"""How many times the memory of what is kept is larger than what that shows: three quarters of it are then waste."""


@rule(
    code="memory/view-keeps-storage",
    title="Small views that are kept keep the whole memory of large tensors.",
    symptom="Memory rises by much more with each step than what is kept: a row, a token or a crop of each batch.",
    cause="Slicing, indexing with numbers, `chunk` and `view` make no copy: the result shares the storage of the "
    "tensor that it comes from, and as long as one view lives, all of that stays.",
    confirm="`x.untyped_storage().nbytes()` against `x.numel() * x.element_size()`.",
    fix="Keep a copy of the part: `x[:, 0].clone()`. The large tensor is then freed.",
    reference="https://docs.pytorch.org/docs/stable/tensor_view.html",
)
def view_keeps_storage(facts: MemoryFacts) -> Finding | None:
    growth = next((g for g in facts.growth if _is_view(g) and not g.emptied and g.kind not in ("graph", "hook")), None)
    if growth is None or small(growth, SMALL):
        return None
    shows = f"of which the views show {size(growth.shown)}"
    title = f"{holder(growth)} keeps views of larger tensors: {pace(growth)}, {shows}"
    code = detached(growth, ".clone()")
    fixes = [Fix("Keep a copy of the part, so that the rest is freed.", code, None, saving(growth.bytes, growth.shown))]
    return grew("view-keeps-storage", growth, title, fixes, [])


def _is_view(growth: Leak) -> bool:
    return 0 < VIEW * growth.shown <= growth.own


@rule(
    code="memory/cache-unbounded",
    title="A cache or a record grows with every step, and nothing is ever removed.",
    symptom="Host memory rises for hours or days, at a steady pace, until the process is killed.",
    cause="`@lru_cache(maxsize=None)` and `@cache` keep every result for good; so does a dict that is filled by key. "
    "With keys that hardly ever repeat (random crops, step numbers) every call adds an entry.",
    confirm="`function.cache_info()`: currsize rises with each step, hits stay few. Or `len()` of the dict rises.",
    fix="Give the cache a size (`lru_cache(maxsize=1024)`), or don't cache what is never asked for again. "
    "Keep summaries, "
    "or write to disk.",
    reference="https://docs.python.org/3/library/functools.html#functools.lru_cache",
)
def cache_unbounded(facts: MemoryFacts) -> Finding | None:
    growth = next(
        (
            g
            for g in facts.growth
            if not g.emptied and not _is_view(g) and g.kind in ("cache", "dict", "list", "deque", "set", "object")
        ),
        None,
    )
    if growth is None or small(growth, COLLECTED if growth.kind in ("list", "deque") else SMALL):
        return None
    by = max(growth.bytes, growth.plain)
    if growth.kind == "cache":
        title = f"The cache of `{growth.holder}` has no limit and keeps every result: {pace(growth)}"
        most = 256 * by // max(1, growth.items)
        fix = Fix("Give the cache a size.", "@lru_cache(maxsize=256)", None, {**saving(by), "at most": size(most)})
    else:
        title = f"{holder(growth)} grows with every step, and nothing is removed from it: {pace(growth)}"
        name = growth.holder or "kept"
        cure = f"{name}.pop(next(iter({name})))" if growth.kind == "dict" else f"del {name}[:-256]"
        fix = Fix("Keep a fixed number.", f"if len({name}) > 256:\n    {cure}", None, saving(by))
    what = f"{count(growth.items, 'new entry', 'new entries')} a step, {size(by)} in total"
    return grew("cache-unbounded", growth, title, [fix], [what])
