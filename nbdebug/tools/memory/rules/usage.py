"""Rules for memory in use: what every step adds and never frees; what is held at this moment, without a step (`CHECKS`
find the same causes there); and which use is far larger than all others at the peak of a step."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, size
from nbdebug.tools.memory.facts import SMALL, Device, Leak, LoaderWorkers, MemoryFacts, PeakPart, StepMemory

# -- how a finding is built --------------------------------------------------------------------------------------------


def finding(
    slug: str,
    title: str,
    where: Where,
    holder: Iterable[str],
    fixes: Iterable[Fix],
    evidence: Mapping[str, Any] | None = None,
    chain: Iterable[str | Link] = (),
) -> Finding:
    """holder: who keeps the memory, by the names under which it can be found, the plainest first."""
    links = tuple(Link(link) if isinstance(link, str) else link for link in chain)
    names = [name for name in dict.fromkeys(holder) if name]
    return Finding(f"memory/{slug}", title, where, {"holder": names, **(evidence or {})}, tuple(fixes), links)


def grew(slug: str, growth: Leak, title: str, fixes: Iterable[Fix], chain: Iterable[str | Link] = ()) -> Finding:
    """A finding on what each step leaves behind."""
    evidence: dict[str, Any] = {"steps": growth.steps, "bytes a step": growth.bytes}
    evidence |= {"items a step": growth.items} if growth.items else {}
    evidence |= {"graph nodes a step": growth.nodes} if growth.nodes else {}
    evidence |= {"bytes a step in other Python objects": growth.plain} if growth.plain > growth.bytes // 10 else {}
    where = dataclasses.replace(growth.where, module=growth.where.module or growth.module)
    return finding(slug, title, where, growth.names or (growth.holder,), fixes, evidence, chain)


def pace(growth: Leak) -> str:
    """ "12.0 MiB more after each step"; where it is little memory, what else grows."""
    by = max(growth.bytes, growth.plain)
    if by < 1024 and growth.nodes:
        return f"{count(growth.nodes, 'more node')} of autograd's graph after each step"
    if by < 1024 and growth.chained:
        return "a longer graph after each step"
    if by < 1024 and growth.items:
        return f"{count(growth.items, 'more entry', 'more entries')} after each step"
    return f"{size(by)} more after each step"


def saving(growth_bytes: int, after: int | None = None) -> dict[str, Any]:
    """What a step adds, and would add with the fix; in words, as it was not tried."""
    if after is not None and 2 * after >= growth_bytes:
        return {"with the fix": "the tensor is kept, its graph is freed"}
    note = {"a step adds": size(growth_bytes)}
    return note if after is None else {**note, "with the fix, computed": size(after)}


def holder(growth: Leak) -> str:
    """ "`report['loss']`", or a phrase for one that has no name."""
    return f"`{growth.holder}`" if growth.holder else "An object that no variable refers to"


def small(growth: Leak, least: int) -> bool:
    """Whether a step adds less than `least` bytes, in tensors, arrays and other objects."""
    return max(growth.bytes, growth.plain) < least


def detached(growth: Leak, to: str = ".detach()") -> str:
    """The user's own line with the graph cut off; a line of the same form where theirs can't be read."""
    text = growth.where.text or ""
    parts = any(name.endswith("[0]") for name in growth.names) and growth.chained
    try:
        node = ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return f"kept = value{to}"
    value = _stored_value(node)
    if value is None:
        return f"kept = value{to}"
    source = ast.get_source_segment(text, value) or "value"
    wrapped = source if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({source})"
    new = f"tuple(part{to} for part in {source})" if parts else f"{wrapped}{to}"
    if isinstance(value, (ast.Tuple, ast.List)):
        new = f"tuple(part{to} if torch.is_tensor(part) else part for part in {source})"
    return text[: value.col_offset] + new + text[value.end_col_offset :]


def _stored_value(node: ast.stmt) -> Any:
    """The expression whose value a statement keeps."""
    if isinstance(node, ast.AugAssign):
        return node.value
    if isinstance(node, ast.Assign):
        value = node.value
        if isinstance(value, ast.BinOp) and isinstance(value.right, (ast.Name, ast.Attribute, ast.Call)):
            return value.right
        return value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        value = node.value.args[-1]
        return _stored_value(ast.Expr(value.body)) if isinstance(value, ast.Lambda) else value
    return None


# -- what every step adds ----------------------------------------------------------------------------------------------


COLLECTED = 1 << 20
"""Bytes that a step adds to a list. Predictions are collected on purpose (a deque is for the newest ones); more than
this in each step is 1 GiB after a thousand of them."""

GRAPH = 16 << 20
"""Bytes that an evaluation's batch keeps for a backward; less than this fits wherever the model fits. In a step
that trains too it is COLLECTED: there the peak, in the evaluation, shows that it is more than training needs."""
UNTRAINED = 0.1
"""Of what a step needs at its peak; what a model that nobody trains keeps for its backward is waste, however little."""


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
    "saves what its backward would need, and an output that is kept keeps all of it. A teacher of which the loss uses "
    "the output even gets gradients, though no optimizer has its weights.",
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
    if step is None or not step.evaluated:
        return None
    trains = step.backwards or step.optimizers
    activations = step.unused if trains else step.at_peak.get("activations", 0)
    share = UNTRAINED if step.untrained else 0.5
    if activations < (COLLECTED if trains else GRAPH) or activations < share * (step.peak - step.base):
        return None
    title = (
        f"The evaluation runs without `torch.no_grad()`: {size(activations)} of its peak are kept for a backward that "
        "nobody runs"
    )
    if step.kept:
        title += f", held by `{step.kept}`"
    if step.untrained:
        title = (
            f"`{step.untrained}` is in eval mode and no optimizer trains it, but it runs without `torch.no_grad()`: "
            f"{size(activations)} are kept for its backward, which computes gradients that nobody uses"
        )
    where = dataclasses.replace(step.kept_at if step.kept or step.untrained else step.place, phase="forward")
    module = step.untrained or next((p.name for p in step.modules if p.name), "")
    return finding(
        "eval-without-no-grad",
        title,
        where,
        [step.kept, module or "the model"],
        [_no_grad(activations, None, where.text if step.untrained else None)],
        {"activations": activations, "peak": step.peak, "calls in eval mode": step.evaluated},
    )


def _no_grad(as_it_is: int, after: int | None, line: str | None = None) -> Fix:
    title, code = "Evaluate without gradients.", f"with torch.no_grad():\n    {line or 'logits = model(batch)'}"
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
    if growth.holder == "grad":
        title = f"Each weight keeps its gradient, whose graph keeps the weight: {pace(growth)}"
        code = "grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)"
        fixes = [Fix("Take the gradients without leaving them in `.grad`; or set these to None.", code)]
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
    code = detached(growth, ".copy()" if growth.arrays else ".clone()")
    fixes = [Fix("Keep a copy of the part, so that the rest is freed.", code, None, saving(growth.bytes, growth.shown))]
    return grew("view-keeps-storage", growth, title, fixes, [])


def _is_view(growth: Leak) -> bool:
    return 0 < VIEW * growth.shown <= growth.own


@rule(
    code="memory/cache-unbounded",
    title="A cache or a record grows with every step, and nothing is ever removed.",
    symptom="Host memory rises for hours or days, at a steady pace, until the process is killed.",
    cause="`@lru_cache(maxsize=None)` and `@cache` keep every result for good; so does a dict that is filled by key. "
    "With keys that hardly ever repeat (random crops, step numbers) every call adds an entry. "
    "`itertools.cycle(loader)` keeps the first round; a key-value cache or `torch.cat([kept, new])` gets longer.",
    confirm="`function.cache_info()`: currsize rises with each step, hits stay few. Or `len()` of the dict rises.",
    fix="Give the cache a size (`lru_cache(maxsize=1024)`), or don't cache what is never asked for again. "
    "Keep summaries, "
    "or write to disk.",
    reference="https://docs.python.org/3/library/functools.html#functools.lru_cache",
)
def cache_unbounded(facts: MemoryFacts) -> Finding | None:
    growth = next(
        (g for g in facts.growth if not g.emptied and not _is_view(g) and g.kind in GROWING),
        None,
    )
    if growth is None or small(growth, COLLECTED if growth.kind in ("list", "tensor") else SMALL):
        return None
    by = max(growth.bytes, growth.plain)
    if growth.kind == "cache":
        title = f"The cache of `{growth.holder}` has no limit and keeps every result: {pace(growth)}"
        most = 256 * by // max(1, growth.items)
        fix = Fix("Give the cache a size.", "@lru_cache(maxsize=256)", None, {**saving(by), "at most": size(most)})
    elif growth.kind == "cycle":
        title = f"{holder(growth)} is an `itertools.cycle`, which keeps every batch that it has given: {pace(growth)}"
        code = "def forever(loader):\n    while True:\n        yield from loader"
        fix = Fix("Begin the loader again instead; that also shuffles anew.", code, None, saving(by))
    else:
        title = f"{holder(growth)} grows with every step, and nothing is removed from it: {pace(growth)}"
        name = growth.holder or "kept"
        cure = f"{name}.pop(next(iter({name})))" if growth.kind == "dict" else f"del {name}[:-256]"
        fix = Fix("Keep a fixed number.", f"if len({name}) > 256:\n    {cure}", None, saving(by))
        if growth.kind == "deque":
            fix = Fix("Give it a length: the oldest are then dropped.", f"{name} = deque(maxlen=256)", None, saving(by))
        if growth.kind == "parts":
            code = f"{name} = ...  # made again, with the parameters that are needed"
            fix = Fix("Make it again, or take out what is no longer used.", code, None, saving(by))
        if growth.kind == "linked":
            fix = Fix("Let go of the one before as soon as it is used.", f"{name} = None", None, saving(by))
        if growth.kind == "tensor":
            code = f"{name} = {name}[-256:]" if len(growth.names) == 1 else f"# where a sequence begins: a new {name}"
            fix = Fix("Begin it anew, or keep only its newest part.", code, None, saving(by))
    new = count(growth.items, "new entry", "new entries") if growth.items else "the same tensors, longer after"
    what = f"{new} {'a' if growth.items else 'each'} step, {size(by)} in total"
    by_lines = [BY_LINES] if growth.kind in ("list", "deque") and growth.plain > growth.bytes // 2 else []
    return grew("cache-unbounded", growth, title, [fix, *by_lines], [what])


GROWING = ("cache", "cycle", "dict", "list", "deque", "set", "object", "tensor", "parts", "linked")
BY_LINES = Fix(
    "Where these come from a file: read it line by line, and keep the place to go on from.",
    "with open(path) as file:\n    file.seek(place)  # 0, or what was saved\n"
    "    while line := file.readline():\n        use(line)\n        place = file.tell()",
)
"""For text and other plain objects, which are there again whenever they are needed."""


# -- what is held at this moment, without a step -----------------------------------------------------------------------


MATTERS = 32 << 20
"""Bytes; what a notebook keeps of less than this is a convenience, and no fault."""
SHARE = 0.02
"""Of all that is held: 32 MiB beside 10 GiB are not worth naming."""
CODES = {
    "output": "cell-output-held",
    "displayed": "cell-output-held",
    "traceback": "traceback-held",
    "exception": "traceback-held",
    "hook": "hook-held",
    "loss": "graph-retained",
}
TITLES = {
    "cell-output-held": "The notebook keeps {bytes} of results that cells have shown",
    "traceback-held": "The last exception keeps {bytes}: the variables of the failed calls",
    "hook-held": "Hooks that are registered more than once keep {bytes}",
    "graph-retained": "Tensors that are kept hold {bytes} with their graphs",
}


def _of(slug: str) -> Callable[[MemoryFacts], Finding | None]:
    def check(facts: MemoryFacts) -> Finding | None:
        there = [k for k in facts.notebook if CODES.get(k.how) == slug]
        count = sum(k.bytes for k in there)
        held = sum(h.bytes for h in facts.now.holdings) if facts.now is not None else 0
        if count < MATTERS or count < SHARE * held:
            return None
        largest = max(there, key=lambda k: k.bytes)
        title = TITLES[slug].format(bytes=size(count)) + f": `{largest.name}`"
        title += f" and {len(there) - 1} more" if len(there) > 1 else ""
        words = " ".join(dict.fromkeys(k.release for k in there if k.release)) or "outputs"
        return finding(
            slug,
            title,
            largest.where or Where(),
            [k.name for k in there],
            [Fix("Free it.", f"%free {words}", None, {"would be freed": size(count)})],
            {"bytes": count, "kept": len(there)},
        )

    return check


CHECKS = tuple(_of(slug) for slug in TITLES)


RESERVED_SHARE = 0.30
"""Of what is reserved, not allocated. CUDA's allocator keeps freed memory for later; a third that no request fits into
is more than its rounding costs."""
RESERVED_MATTERS = 1 << 30
"""Bytes that lie idle; on a card with less than 20 GiB, a twentieth of it."""
PIECES = 0.5
"""Where the largest free piece is more than this share of what lies idle, a large request still fits."""


@rule(
    code="memory/fragmentation",
    title="Much of what the allocator has reserved lies in pieces that fit no request.",
    symptom='Out of memory, while the message says that much is "reserved by PyTorch but unallocated".',
    cause="The allocator keeps freed blocks and hands them out again. With sizes that change from step to step (texts "
    "of every length, pictures of every size) freed blocks lie between live ones, and none is large enough.",
    confirm='`torch.cuda.memory_summary()`: "inactive_split" bytes are large, and the largest free block is small.',
    fix="Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before torch starts. Pad batches to a few fixed sizes; "
    "run the largest batch first. `torch.cuda.empty_cache()` helps once, between phases.",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
)
def fragmentation(facts: MemoryFacts) -> Finding | None:
    devices = [
        (share, d)
        for d in (facts.now.devices if facts.now is not None else ())
        if (share := split_share(d)) is not None
    ]
    if not devices:
        return None
    share, device = max(devices, key=lambda pair: pair[0])
    idle = (device.reserved or 0) - (device.allocated or 0)
    title = (
        f"{share:.0%} of the memory reserved on {device.name} is unused and fragmented: {size(idle)} of "
        f"{size(device.reserved or 0)}"
        + (f", the largest free piece is {size(device.largest)}" if device.largest is not None else "")
    )
    fixes = [
        Fix(
            "Let reserved memory grow and shrink in place. Set it before torch starts.",
            'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before import torch',
            None,
            {"idle": size(idle)},
        ),
        Fix("Release the segments that are wholly free; this helps once, between phases.", "torch.cuda.empty_cache()"),
    ]
    return finding(
        "fragmentation",
        title,
        Where(),
        [device.name],
        fixes,
        {"reserved": device.reserved, "allocated": device.allocated, "largest free piece": device.largest},
    )


def split_share(device: Device) -> float | None:
    """The share of reserved memory that lies idle in pieces; None where it is no fault: little, or in one piece, or
    needed at the peak of the last step, or where the device has more than that to give yet: between two steps what the
    activations of one took always lies idle."""
    share = device.fragmentation
    if share is None or share <= RESERVED_SHARE:
        return None
    idle = (device.reserved or 0) - (device.allocated or 0)
    if idle < min(RESERVED_MATTERS, (device.total or RESERVED_MATTERS * 20) // 20):
        return None
    if device.largest is not None and device.largest > PIECES * idle or (device.free or 0) > idle:
        return None
    if device.largest is None and (device.peak_allocated or 0) > (1 - RESERVED_SHARE) * (device.reserved or 0):
        return None  # the last step needed nearly all of it
    return share


WORKERS_MATTER = 8 << 20
"""Bytes for each worker; 16 workers then copy 128 MiB."""
CONFIRMED = 0.25
"""Share of the estimate that a child process must really have gained, where it was measured."""


@rule(
    code="memory/loader-workers-copy",
    title="Every worker of the loader copies the data set's Python objects.",
    symptom="With `num_workers` above zero the machine's memory fills up during the first epoch, once for every "
    "worker; with `num_workers=0` it stays flat.",
    cause="A worker starts as a copy of the process that shares its memory until one of the two writes to it. Python "
    "writes into each object that it reads, to count references, so a worker that reads a list of many "
    "strings comes to own a copy of every page on which they lie.",
    confirm="`psutil.Process(pid).memory_full_info().uss` of a worker rises while it reads, up to the list's size.",
    fix="Keep the records in one array: `np.array(lines)`, a tensor, a memory-mapped file, an Arrow table; or the "
    "pickled records in one array of bytes with an array of offsets.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_workers_copy(facts: MemoryFacts) -> Finding | None:
    workers = facts.workers
    if workers is None or workers.bytes < WORKERS_MATTER:
        return None
    if workers.measured is not None and workers.measured < CONFIRMED * workers.bytes:
        return None
    each = workers.measured if workers.measured is not None else workers.bytes
    title = (
        f"`{workers.holder}` holds {workers.objects:,} Python objects, and each of the {workers.workers} workers that "
        f"reads them copies {size(each)}: {size(each * workers.workers)} in total"
    )
    evidence = {
        "objects": workers.objects,
        "workers": workers.workers,
        "bytes for each worker, estimated": workers.bytes,
    }
    if workers.measured is not None:
        evidence["bytes that a child process gained by reading them all"] = workers.measured
    return finding("loader-workers-copy", title, Where(), [workers.holder], [_packed(workers)], evidence)


def _packed(workers: LoaderWorkers) -> Fix:
    name = workers.holder.rpartition(".")[2]
    if workers.records in ("text", "numbers"):
        code = f"self.{name} = np.array({name})"
    else:
        code = (
            f"packed = [np.frombuffer(pickle.dumps(record), np.uint8) for record in {name}]\n"
            "self.ends = np.cumsum([len(one) for one in packed])\nself.data = np.concatenate(packed)"
        )
    if workers.packed is None or workers.measured is None:
        return Fix("Keep the records in one array.", code, None, {"a worker copies": size(workers.bytes)})
    return Fix(
        "Keep the records in one array.",
        code,
        workers.packed < workers.measured // 2,
        {"bytes that a child gained as it is": workers.measured, "bytes with the fix": max(0, workers.packed)},
    )


# -- the peak of a step ------------------------------------------------------------------------------------------------


TENFOLD = 10
"""Activations over weights, gradients and optimizer state: beyond that nothing else is worth a thought."""
ACTIVATIONS_MATTER = 16 << 20
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
    if activations < max(ACTIVATIONS_MATTER, CARD * (step.total or 0)) or activations < TENFOLD * others:
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
