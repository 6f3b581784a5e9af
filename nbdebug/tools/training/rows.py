"""What becomes of the rows of a batch: whether the output of one sample depends on another one or on its place;
whether rows are mixed, dealt anew or put in another order without their targets; whether graphs are joined as one;
whether what predicts a step sees it.

One sample is replaced by another one, and the outputs of all others are compared with what they were. It works for
tokens as for numbers. Normalization and dropout are in eval mode for it, so that batch normalization is excused. Tables
of all pairs (N, N) and batches of several views (2N) are no mixing: the change stays in the sample's own rows and
columns. `sees_ahead` asks the same of the time steps of a sample: does what predicts the next token know it?
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader, default_collate

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.snapshot import modes_put_back
from nbdebug.observe.sources import name_of, nodes_of
from nbdebug.observe.tensors import output_tensors, tensors_in
from nbdebug.report import Where
from nbdebug.text import module_name
from nbdebug.tools.training.batches import Batches, dataset_and_indices
from nbdebug.tools.training.evaluate import (
    LossFn,
    batch_size,
    describe,
    deterministic,
    loss_root,
    loss_value,
    preserve_rng,
    repeatable_loss,
    save_rng,
    takes_fewer_rows,
    targets_of,
)
from nbdebug.tools.training.facts import OverEnds, PairedAnew
from nbdebug.tools.training.one_step import VIEWS, Calls, Dependence, OpCall, calls_for, record
from nbdebug.tools.training.outputs import LOSSES, MASKED, outputs_and_targets
from nbdebug.tools.training.signals import tensors_at
from nbdebug.tools.training.static_facts import ORDER, BatchMixing, MixedSamples, SeesAhead, Twins, WrongCall

TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}
"""Change, over the output's deviation, that rounding alone may cause; 1e-3 for other dtypes."""
FEW = 7
"""Samples of the first, quick look."""
NEXT = 0.95
"""Share of the targets that are the next token."""
MEETING = frozenset(
    "matmul __matmul__ mm bmm einsum cdist cosine_similarity addmm baddbmm index_select gather scatter scatter_add "
    "index_add __getitem__ roll flip".split()
)
"""Ops that combine samples on purpose: similarities, graphs, prototypes."""
BY_INDEX = frozenset("getitem index_select index_add scatter scatter_add scatter_reduce gather".split())
"""Ops by which rows of nodes are taken, or added to."""
GRAPHS = 4
"""Graphs in a batch, at least."""
AGAIN, EVENLY, ALL_ALIKE, UNSEEN, ERRORS = 50, 0.3, 0.8, 0.1, 3.0
"""Rows that have to come again; by how much at most their counts vary, over their mean (1 where they are drawn, 0.25 in
the middle of a pass); the share of equal targets by chance from which on nothing can be told; the share of targets that
no sample had before (they are computed or drawn, not exchanged); standard errors."""
MIXTURES, FIRST_MIXTURES, LITTLE, MOST_OF_IT = 16, 3, 0.02, 0.6
"""Mixtures that are looked at, and after how many without one no more are; a share that is none; a share that is most:
a target that goes with less of a sample than that is another one's, whatever a published augmentation leaves out."""
MOST_TARGETS, ENDS_SEEN, TOLD, MOST_COLUMNS = 48, 8, 0.95, 62
"""Batches whose targets are taken apart, ends among them, how often a value has to tell an end from no end, and columns
of a table."""
COMPARED, MOST_KEYS = 256, 128
"""Numbers of a row that tell it from others; keys of a batch that are compared with each other."""
LEAST_SAMPLES, MOST_SAMPLES, CHUNK, SECONDS = 100, 5000, 64, 3.0
"""Samples of a dataset that is read to see whether its targets are in step, how many at once, and in how long."""
WORDS_APART, RIDGE, DEALT, SURELY, TOLD_APART = 128, 0.1, 8, 6.0, 0.1
"""Columns that a sample's numbers become; the penalty of the fit, over its samples; orders by chance, of how many of
their deviations an order has to stand out, and by what share of the targets' variance at least."""
DEALS = frozenset({"shuffle", "randperm", "permutation", "permuted"})
"""Names of what deals rows anew, to find the line."""


def _forward(model: nn.Module, loss_fn: LossFn, batch: Any) -> Calls:
    """The calls of one forward, without dropout and with the same random numbers each time."""
    calls = calls_for(model, batch)
    with deterministic(model), preserve_rng(loss_fn), torch.no_grad():
        torch.manual_seed(0)
        record(calls, loss_fn, batch)
    return calls


def batch_mixing(model: nn.Module, loss_fn: LossFn, batch: Any) -> tuple[BatchMixing | None, str]:
    """(what mixes, "") or (None, why it could not be checked, or "")."""
    n = batch_size(batch)
    if n is None or n < 2:
        return None, "Whether samples mix: the tensors of a batch share no first dimension of 2 or more"
    if any(
        isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is None and "Batch" in type(m).__name__
        for m in model.modules()
    ):
        return None, "Whether samples mix: batch normalization without running statistics mixes them in every mode"
    few = tree_map_only(torch.Tensor, lambda t: t[:FEW] if t.dim() and t.shape[0] == n else t, batch)
    of_few = None
    if n > FEW and takes_fewer_rows(model, loss_fn, batch, n):
        try:  # quick, and a prime number is rarely the width of a layer
            of_few, why = _mixing(model, loss_fn, few, FEW)
            if of_few is None and not why:
                return None, ""
        except Exception:  # the size of the batch is written into the program
            pass
    mixing, why = _mixing(model, loss_fn, batch, n)
    if mixing is None and of_few is not None and of_few.op:
        mixing, batch, n = of_few, few, FEW  # among many samples one counts for little
    if mixing is None:
        return None, why
    try:
        return (None, "") if _on_purpose(model, loss_fn, batch, n, mixing) else (mixing, why)
    except Exception as error:  # it can only be trained, not evaluated
        return mixing, describe("Whether samples mix in eval mode too", error)


def _mixing(model: nn.Module, loss_fn: LossFn, batch: Any, n: int) -> tuple[BatchMixing | None, str]:
    plain = _forward(model, loss_fn, batch)
    if not any(_has_rows(t, n) for t in plain.outputs):
        return None, "Whether samples mix: no output of the model has a row for each sample"
    for sample in dict.fromkeys((0, n // 2, n - 1)):
        other = _with_row_replaced(batch, n, sample)
        if other is None:
            continue
        changed = _forward(model, loss_fn, other)
        order = _other_order(plain, changed, n, sample)
        if order is not None:
            if order.rows is not None:
                return order, ""
            continue
        if _dealt_before(plain, changed, n):
            continue
        others = max((changed_rows(a, b, n, sample) for a, b in zip(plain.outputs, changed.outputs)), default=0)
        culprit = _first_mixing_call(plain, changed, n, sample) if others else None
        if culprit is None and (view := _view_after_model(plain, changed, n, sample)) is not None:
            culprit, others = view
        if others:
            module, op, where = ("", "", Where(phase="forward")) if culprit is None else _place(culprit)
            return BatchMixing(sample, others, n, module, op, where, None, *_batch_second(model, module)), ""
        if (crossed := _mixed_targets(plain, changed, n, sample)) is not None:
            return crossed, ""
    return None, ""


def _batch_second(model: nn.Module, name: str) -> tuple[str, str]:
    """(name, class) of the outermost layer of torch's around a module that takes the batch as its second dimension."""
    parts = name.split(".") if name else []
    for around in (".".join(parts[: n + 1]) for n in range(len(parts))):
        module = model.get_submodule(around)
        second = any(getattr(part, "batch_first", None) is False for part in module.modules())
        kind = type(module)
        told = module_name(kind).startswith("torch.nn.") and "batch_first" in inspect.signature(kind).parameters
        if second and (told or kind in (nn.LSTM, nn.GRU, nn.RNN)):  # these take it among **kwargs
            return around, kind.__name__
    return "", ""


def _place(call: OpCall) -> tuple[str, str, Where]:
    return call.module, call.op, call.where


def _on_purpose(model: nn.Module, loss_fn: LossFn, batch: Any, n: int, mixing: BatchMixing) -> bool:
    """Samples that are combined on purpose: by ops and modules that are there for it, or in training only (mixup).
    Raises what the loss raises in eval mode."""
    modules = dict(model.named_modules())
    kind = type(modules[mixing.module]).__name__.lower() if mixing.module in modules else ""
    if mixing.op in MEETING or any(word in kind for word in ("norm", "batch")) or kind.endswith("bn"):
        return True
    with modes_put_back(model):
        model.eval()
        return _mixing(model, loss_fn, batch, n)[0] is None


def _with_row_replaced(batch: Any, n: int, row: int) -> Any:
    """The batch with one row replaced by a row that differs; None where all rows are alike."""
    tensors = [t for t in output_tensors(batch) if t.dim() and t.shape[0] == n]
    unlike = {k: sum(not torch.equal(t[k], t[row]) for t in tensors) for k in range(n) if k != row}
    other = max(unlike, key=unlike.__getitem__, default=None)
    if other is None or not unlike[other]:
        return None

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != n:
            return tensor
        changed = tensor.detach().clone()
        changed[row] = tensor[other]
        return changed

    return tree_map_only(torch.Tensor, swap, batch)


def _has_rows(tensor: torch.Tensor, n: int) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 0 and any(size and size % n == 0 for size in tensor.shape)


def changed_rows(a: torch.Tensor, b: torch.Tensor, n: int, sample: int) -> int:
    """Rows of other samples in which two outputs differ; 0 where all change lies in the sample's own rows and
    columns."""
    if a.shape != b.shape or not _has_rows(a, n) or not (a.is_floating_point() and b.is_floating_point()):
        return 0
    a, b = a.detach(), b.detach()
    scale = float(a.float().std()) if a.numel() > 1 else 0.0
    differs = (a.float() - b.float()).abs() > TOLERANCE.get(a.dtype, 1e-3) * scale + 1e-7
    for dim, size in enumerate(a.shape):
        if size and size % n == 0:
            index, fold = torch.arange(size, device=a.device), size // n
            own = (index % n == sample) | (index // fold == sample)
            differs = differs & ~own.view([-1 if d == dim else 1 for d in range(a.dim())])
    if not bool(differs.any()):
        return 0
    dim = next(d for d, size in enumerate(a.shape) if size and size % n == 0)
    return min(
        n - 1,
        int(differs.any(dim=[d for d in range(a.dim()) if d != dim]).sum()) if a.dim() > 1 else int(differs.sum()),
    )


def _pairs(plain: Calls, changed: Calls) -> Iterator[tuple[OpCall, OpCall]]:
    """The calls of both forwards side by side; none where they do not run the same ops."""
    if [c.op for c in plain.calls] == [c.op for c in changed.calls]:
        yield from zip(plain.calls, changed.calls)


def _first_mixing_call(plain: Calls, changed: Calls, n: int, sample: int) -> OpCall | None:
    """The first call inside the model whose outputs mix."""
    for a, b in _pairs(plain, changed):
        if a.inside and any(changed_rows(x, y, n, sample) for x, y in zip(a.outputs, b.outputs)):
            return a
    return None


def _view_after_model(plain: Calls, changed: Calls, n: int, sample: int) -> tuple[OpCall, int] | None:
    """A reshape between model and loss that mixes what was separate in the model's output."""
    for a, b in _pairs(plain, changed):
        if a.inside or not a.params or not a.outputs:
            continue
        rows = changed_rows(a.outputs[0], b.outputs[0], n, sample)
        if rows:
            return (a, rows) if a.op in VIEWS and a.op != "__getitem__" else None
    return None


def _other_order(plain: Calls, changed: Calls, n: int, sample: int) -> BatchMixing | None:
    """Where the rows of the batch were dealt anew before the model: the loss of outputs beside the targets of other
    samples, or, where these were dealt alike, nothing that mixes (without rows). None where they are in order."""
    pairs = []
    for a, b in _pairs(plain, changed):
        if a.op in LOSSES and len(a.inputs) > 1:
            if any(not x.dim() or x.shape != y.shape for x, y in zip(a.inputs[:2], b.inputs[:2])):
                return None
            both = [(x != y).flatten(1).any(1) if x.dim() > 1 else x != y for x, y in zip(a.inputs[:2], b.inputs[:2])]
            output, target = (tuple(rows.nonzero().flatten().tolist()) for rows in both)
            if not len(both[0]) == len(both[1]) == n or not len(output) == len(target) == 1 or output[0] == sample:
                return None
            pairs.append((a, output, target))
    if not pairs:
        return None
    crossed = all(output != target for _, output, target in pairs)  # mixup has its share of the right ones
    return BatchMixing(sample, 1, n, *_place(pairs[0][0]), pairs[0][1:] if crossed else None)


def _dealt_before(plain: Calls, changed: Calls, n: int) -> bool:
    """Whether the loss deals the rows anew before the model, which depends on their values (it sorts them), and the
    outputs follow: each row that comes again has the output that it had."""
    pairs = zip(plain.entered, changed.entered)
    given = next(((a, b) for a, b in pairs if a.shape == b.shape and a.dim() > 1 and len(a) == n), None)
    if given is None:
        return False
    had = dict(zip(row_keys(given[0]), range(n)))
    moved = {j: had[key] for j, key in enumerate(row_keys(given[1])) if key in had}
    if len(moved) < n - 1 or all(i == j for j, i in moved.items()):
        return False
    outputs = [(a, b) for a, b in zip(plain.outputs, changed.outputs) if a.shape == b.shape and a.dim() and len(a) == n]
    old, new = list(moved.values()), list(moved)
    return bool(outputs) and all(torch.allclose(a[old], b[new], 1e-3, 1e-5) for a, b in outputs)


def _mixed_targets(plain: Calls, changed: Calls, n: int, sample: int) -> BatchMixing | None:
    """A loss whose outputs go through the samples in one order, and its targets in another."""
    for a, b in _pairs(plain, changed):
        if a.op in LOSSES and len(a.inputs) > 1:
            output, target = (_rows(x, y, n, sample) for x, y in zip(a.inputs[:2], b.inputs[:2]))
            if output and target and output[0] != target[0]:
                return BatchMixing(sample, n - 1, n, *_place(a), (output[1], target[1]))
    return None


def _rows(a: torch.Tensor, b: torch.Tensor, n: int, sample: int) -> tuple[bool, tuple[int, ...]] | None:
    """Whether the rows of a sample, several for each, are side by side (True) or n apart (False), and the first of
    them; None where that is not clear."""
    if a.shape != b.shape or not a.dim() or a.shape[0] % n or a.shape[0] <= n:
        return None
    size, fold = a.shape[0], a.shape[0] // n
    differs = (a != b).flatten(1).any(1) if a.dim() > 1 else a != b
    rows = differs.nonzero().flatten().tolist()
    beside, apart = all(r // fold == sample for r in rows), all(r % n == sample for r in rows)
    if not rows or beside == apart:
        return None
    return beside, tuple(range(sample * fold, (sample + 1) * fold) if beside else range(sample, size, n))[:4]


def twins(model: nn.Module, loss_fn: LossFn, batch: Any) -> Twins | None:
    """Of scores of each sample with each, of which the own ones are to be the highest: samples whose own key stands in
    further columns, since the batch holds it more than once, and which no mask takes out."""
    calls = _forward(model, loss_fn, batch)
    for call in calls.calls:
        scores, labels = call.argument(0, "input"), call.argument(1, "target")
        if call.op != "cross_entropy" or scores.dim() != 2 or labels.dim() != 1 or len(set(scores.shape)) > 1:
            continue
        n = min(len(scores), MOST_KEYS)
        if (
            n < 4
            or labels.is_floating_point()
            or not torch.equal(labels.cpu(), torch.arange(len(labels), device="cpu"))
        ):
            continue
        shown = scores.detach().float()[:n, :n]
        gaps = (shown[:, :, None] - shown[:, None, :]).abs()
        hidden = (shown <= MASKED)[:, :, None] | (shown <= MASKED)[:, None, :]
        same = (hidden | (gaps < 1e-5 * shown.where(shown > MASKED, 0.0).abs().max())).all(0)
        held = same & ~hidden.all(0) & (shown > MASKED)
        times, (one, other) = held.sum(1).clamp_min(1).float(), held.nonzero()[:COMPARED].T
        rows = [t for t in output_tensors(batch) if t.dim() and len(t) == len(scores) and not bool((t == t[:1]).all())]
        if any(torch.equal(t[one], t[other]) for t in rows) and float(times.mean()) < n / 2:
            return Twins(int((times > 1).sum()), n, float(times.log().mean()), call.where)
    return None


# -- graphs that are joined into one batch -----------------------------------------------------------------------------


def _graph_sizes(t: torch.Tensor, lengths: set[int]) -> list[int]:
    """The number of nodes of each graph, from the graph of each node, from where each begins (and the last ends), or
    from the numbers themselves; [] of other tensors. lengths: of the batch's tensors."""
    if t.dim() != 1 or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool or len(t) < GRAPHS:
        return []
    steps, first, last = t.diff(), int(t[0]), int(t[-1])
    if first == 0 and last + 1 >= GRAPHS and bool(((steps == 0) | (steps == 1)).all()):
        return t.long().bincount().tolist()
    if first == 0 and last in lengths and bool((steps > 0).all()):
        return steps.tolist()
    return t.tolist() if int(t.min()) > 0 and int(t.sum()) in lengths else []


def unshifted_edges(calls: Calls, batch: Any) -> Iterator[WrongCall]:
    """Pairs of nodes that all lie among as many nodes as the largest graph has, though many graphs are in the batch,
    where they take rows of all nodes: nobody has added the number of nodes before each graph."""
    tensors = output_tensors(batch)
    lengths = {len(t) for t in tensors if t.dim()}
    known = [sizes for t in tensors if (sizes := _graph_sizes(t, lengths)) and sum(sizes) in lengths]
    for i, edges in enumerate(tensors):
        pairs = edges.dim() == 2 and 2 in edges.shape and edges.dtype in (torch.int32, torch.int64)
        for sizes in known if pairs and edges.numel() and int(edges.min()) >= 0 else ():
            top, nodes = max(sizes), sum(sizes)
            if int(edges.max()) >= top or nodes < 2 * top or not edges.numel() > nodes:
                continue
            uses = [
                (call, index)
                for call in calls.calls
                if call.op.strip("_") in BY_INDEX and call.inputs and len(call.inputs[0]) == nodes
                for index in call.inputs[1:]
                if not index.is_floating_point() and calls.dependence(index).leaves >> i & 1
            ]
            if uses and max(int(index.max()) for _, index in uses) < top:
                alone = 1 - len(edges.unique()) / nodes
                yield WrongCall("unshifted edges", uses[0][0].op, uses[0][0].where, (top, nodes, len(sizes), alone))
                return


# -- later time steps -------------------------------------------------------------------------------------------------


def sees_ahead(model: nn.Module, loss_fn: LossFn, batch: Any) -> SeesAhead | None:
    """Where the targets are the inputs one place on: whether outputs change with the very token that they predict.
    Where they are the inputs as they stand, or two places on: whether the model reads forwards only, and was to tell
    the next one."""
    for tokens in output_tensors(batch):
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 4:
            continue
        plain = _forward(model, loss_fn, batch)
        before = _by_step(plain, tokens)
        shift = None if before is None else _shift(plain, tokens)
        if before is None or shift is None:
            continue
        at = tokens.shape[1] - 3 + shift % 2
        other = tokens.clone()
        other[:, at] = tokens[:, at].roll(1, 0)
        changed = _forward(model, loss_fn, _exchanged(batch, tokens, other))
        after = _by_step(changed, tokens)
        if after is None:
            continue
        ahead, now, later = (
            _changes(before, after, times) for times in (slice(at), slice(at, at + 1), slice(at + 1, None))
        )
        if shift == 1 and ahead:
            pairs = (
                (a, b) for a, b in _pairs(plain, changed) if a.inside and a.outputs[0].shape[:2] == before.shape[:2]
            )
            first = next((a for a, b in pairs if _changes(a.outputs[0], b.outputs[0], slice(at))), None)
            return SeesAhead(at, Where(phase="forward") if first is None else first.where)
        if shift != 1 and not ahead and now and (later or shift):
            return SeesAhead(at, _loss_of_tokens(plain).where, itself=not shift, twice=bool(shift))
    return None


def _exchanged(batch: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return tree_map_only(torch.Tensor, lambda t: new if t is old else t, batch)


def _by_step(calls: Calls, tokens: torch.Tensor) -> torch.Tensor | None:
    """The scores of the only loss by sample and time step, where there is one for each of these tokens, or all but the
    last."""
    losses, (n, length) = [call for call in calls.calls if call.op == "cross_entropy"], tokens.shape
    if len(losses) != 1:
        return None
    scores, labels = losses[0].argument(0, "input"), losses[0].argument(1, "target")
    if labels.is_floating_point() or labels.numel() not in (n * length, n * (length - 1)):
        return None
    by_step: torch.Tensor = scores.movedim(1, -1).reshape(n, labels.numel() // n, -1)
    return by_step


def _shift(calls: Calls, tokens: torch.Tensor) -> int | None:
    """How many places on the tokens stand that the scores predict: 1, 0 where each is the input's own, 2, or None."""
    length = tokens.shape[1]
    labels = _loss_of_tokens(calls).argument(1, "target").reshape(len(tokens), -1)
    for shift, least in ((1, NEXT), (0, 1.0), (2, 1.0)):
        own = labels[:, : length - shift]
        counted = own >= 0
        same = (own == tokens[:, shift : shift + own.shape[1]])[counted]
        if same.numel() and float(same.float().mean()) >= least:
            return shift
    return None


def _loss_of_tokens(calls: Calls) -> OpCall:
    return next(call for call in calls.calls if call.op == "cross_entropy")


def _changes(a: torch.Tensor, b: torch.Tensor, times: slice) -> bool:
    """Whether two outputs differ at one of these time steps."""
    if a.shape != b.shape or a.dim() < 3 or not a.is_floating_point():
        return False
    a, b = a.detach().float(), b.detach().float()
    difference = (a - b)[:, times].abs().flatten()
    return bool((difference > TOLERANCE.get(a.dtype, 1e-3) * float(a.std()) + 1e-7).any())


# -- what a loop or a loader does to rows ------------------------------------------------------------------------------


def paired_anew(batches: Sequence[Any], target: int, files: Sequence[str]) -> PairedAnew | None:
    """Whether passes over the same inputs give them the targets of other samples; None where they don't, or inputs do
    not come again as they were. target: its position in a batch's tensors; files: where the line may stand."""
    keys, labels, last = list[Any](), list[bytes](), list[torch.Tensor]()
    for batch in batches:
        tensors = output_tensors(batch)
        n = len(tensors[target]) if target < len(tensors) and tensors[target].dim() else 0
        inputs = [t for i, t in enumerate(tensors) if i != target and t.dim() and len(t) == n]
        if not n or not inputs:
            return None
        whole, last = last, [*inputs, tensors[target]]
        if len(whole) == len(last) and all(map(operator.is_, whole, last)):
            continue  # all rows at once, from which the loop takes some
        keys += zip(*map(row_keys, inputs))
        labels += row_keys(tensors[target])
    counts, known = Counter(keys), Counter(labels)
    often = statistics.fmean(counts.values()) if counts else 0.0
    if often < 1.5 or statistics.pvariance(counts.values()) > EVENLY * often or 2 * len(counts) < len(known):
        return None  # the last: these inputs do not tell the samples apart
    before, had = dict[Any, bytes](), set[bytes]()
    again = same = unseen = 0
    for key, label in zip(keys, labels):
        if key in before:
            again, same, unseen = again + 1, same + (before[key] == label), unseen + (label not in had)
        before[key] = label
        had.add(label)
    by_chance = sum((times / len(labels)) ** 2 for times in known.values())
    limit = by_chance + ERRORS * (by_chance * (1 - by_chance) / max(again, 1)) ** 0.5
    if again < AGAIN or by_chance > ALL_ALIKE or unseen > UNSEEN * again or same > limit * again:
        return None
    lines = {
        Site(file, node.lineno, "")
        for file in files
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and name_of(node) in DEALS
    }
    where = at_site(Where(), lines.pop()) if len(lines) == 1 else Where()
    return PairedAnew(again, same / again, by_chance, where)


def out_of_step(loader: Any, target: int) -> PairedAnew | None:
    """Whether a dataset gives each input the target of the sample at another place, by a rule: the one before or after
    it, or the one that a list of numbered names sorted as text has there (1, 10, 100, 2). Told by least squares on half
    of the samples: as paired they tell nothing of the others' targets, in that order much. target: its position in a
    batch's tensors. Reads up to `MOST_SAMPLES`; None where that takes more than `SECONDS`, or there are too few."""
    data, _ = dataset_and_indices(loader) or (None, [])
    count = len(data) if isinstance(data, Sized) and hasattr(data, "__getitem__") else 0
    if not LEAST_SAMPLES <= count <= MOST_SAMPLES or not isinstance(loader, DataLoader):
        return None
    inputs, targets, began = list[torch.Tensor](), list[torch.Tensor](), time.perf_counter()
    with preserve_rng(loader):
        for first in range(0, count, CHUNK):
            if time.perf_counter() - began > SECONDS:
                return None
            places = range(first, min(first + CHUNK, count))
            tensors = output_tensors(loader.collate_fn([data[i] for i in places]))  # type: ignore[index]
            if target >= len(tensors) or any(not t.dim() or len(t) != len(places) for t in tensors):
                return None
            targets.append(tensors[target].detach().cpu())
            inputs.append(_numbers([t.detach().cpu() for i, t in enumerate(tensors) if i != target]))
        wanted = torch.cat(targets).double().reshape(count, -1)
        if wanted.shape[1] != 1 or len({len(row) for rows in inputs for row in rows}) != 1:
            return None
        told = _told_by_place(torch.cat(inputs), wanted)
    as_is = torch.arange(count, device="cpu")
    from_0, from_1 = (torch.tensor(sorted(range(count), key=lambda n: str(n + b)), device="cpu") for b in (0, 1))
    orders = {
        "of numbered names sorted as text": from_0,
        "of numbered names sorted as text, the other way round": from_0.argsort(),
        "of names numbered from 1 and sorted as text": from_1,
        "of names numbered from 1 and sorted as text, the other way round": from_1.argsort(),
        "of the sample before": as_is.roll(1),
        "of the sample after": as_is.roll(-1),
        "from the last to the first": as_is.flip(0),
    }
    shares = {name: told(order) for name, order in orders.items()}
    dealt = torch.Generator("cpu").manual_seed(0)  # no random number of the user's is taken
    by_chance = [told(torch.randperm(count, generator=dealt, device="cpu")) for _ in range(DEALT)]
    as_paired, best = told(as_is), max(shares, key=lambda name: shares[name])
    limit = max(TOLD_APART, statistics.fmean(by_chance) + SURELY * statistics.stdev(by_chance))
    if as_paired > limit / 2 or shares[best] < limit:
        return None
    return PairedAnew(count, max(as_paired, 0.0), shares[best], order=best)


def _numbers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each sample as a row of numbers; words as their counts, many numbers as some sums of them."""
    rows = []
    for t in tensors:
        if t.is_floating_point() or t.dim() != 2 or t.dtype == torch.uint8:
            rows.append(t.double().reshape(len(t), -1))
        else:
            counts = torch.zeros(len(t), WORDS_APART, dtype=torch.double, device="cpu")
            rows.append(
                counts.scatter_add_(1, t.long() % WORDS_APART, torch.ones(t.shape, dtype=torch.double, device="cpu"))
            )
    whole = torch.cat(rows, 1)
    if whole.shape[1] <= WORDS_APART:
        return whole
    torch.manual_seed(0)
    return whole @ torch.randn(whole.shape[1], WORDS_APART, dtype=torch.double, device="cpu")


def _told_by_place(x: torch.Tensor, targets: torch.Tensor) -> Callable[[torch.Tensor], float]:
    """What share of the targets' variance a fit on every other sample tells of the rest, with the targets in another
    order."""
    kinds = targets.unique()
    if len(kinds) <= max(2, len(targets) // 20):
        targets = (targets == kinds).double()
    torch.manual_seed(0)
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-9)
    hidden = (x @ torch.randn(x.shape[1], WORDS_APART, dtype=torch.double, device="cpu") / x.shape[1] ** 0.5).relu()
    x = torch.cat([x, hidden - hidden.mean(0), torch.ones(len(x), 1, device="cpu")], 1)
    fit, rest = x[::2], x[1::2]
    solver = torch.linalg.solve(fit.T @ fit + RIDGE * len(fit) * torch.eye(fit.shape[1], device="cpu"), fit.T)

    def told(order: torch.Tensor) -> float:
        y = targets[order]
        y = y - y.mean(0)
        off = y[1::2] - rest @ (solver @ y[::2])
        return 1 - float(off.square().sum() / y[1::2].square().sum().clamp(min=1e-9))

    return told


def row_keys(rows: torch.Tensor) -> list[bytes]:
    """A key for the values of each row, without the zeros that fill it up."""
    table = rows.detach().cpu()
    table = table.float() if table.dtype == torch.bfloat16 else table
    return [row.tobytes().rstrip(b"\0") for row in table.numpy()]


@dataclasses.dataclass
class _Rows:
    """Samples of which one can be exchanged for another in the inputs or in the targets alone: rows of a batch, or the
    items that a collate function joins. inputs, target: positions among the tensors of either."""

    batch: Any
    inputs: int
    target: int
    items: list[Any]
    collate: Any = None

    @classmethod
    def each(cls, batches: Batches, n: int, inputs: int, target: int) -> Iterator[_Rows]:
        batch, loader = batches.train[0], batches.loader
        yield cls(batch, inputs, target, [[t[k] for t in output_tensors(batch)] for k in range(n)])
        data: Any = getattr(loader, "dataset", None)
        own = getattr(loader, "collate_fn", default_collate)
        if own is not default_collate and hasattr(data, "__getitem__"):
            items = [data[k] for k in range(min(n, MIXTURES))]
            if len(tree_leaves(items[0])) == len(output_tensors(batch)):
                yield cls(batch, inputs, target, items, own)

    def leaf(self, k: int, at: int) -> torch.Tensor:
        return torch.as_tensor(tree_leaves(self.items[k])[at])

    def exchanged(self, at: int | None, k: int, other: int) -> Any:
        """The batch, with what the other has at this position in place of a sample's own."""
        if self.collate is None:
            whole = [] if at is None else output_tensors(self.batch)[at : at + 1]
            order = [other if i == k else i for i in range(len(self.items))]
            return tree_map_only(torch.Tensor, lambda t: t[order] if any(t is w for w in whole) else t, self.batch)
        leaves, form = tree_flatten(self.items[k])
        if at is not None:
            leaves[at] = tree_leaves(self.items[other])[at]
        return self.collate([*self.items[:k], tree_unflatten(leaves, form), *self.items[k + 1 :]])


def mixed_samples(model: nn.Module, loss_fn: LossFn, batches: Batches) -> MixedSamples | None:
    """What a loop or a collate function that mixes the rows of a batch does with their targets; None where none mixes.
    A sample is exchanged for another in the inputs alone, and in the targets alone: in which rows of the model's input
    is it then seen, and in which of the loss's gradient at the output?"""
    n, known, tensors = batch_size(batches.train[0]), targets_of(batches.train[0]), output_tensors(batches.train[0])
    by_form = next((i for i, t in enumerate(tensors) if t is known), None)
    target = by_form if batches.target is None else batches.target
    inputs = next((i for i in batches.inputs if i != target), None)
    if n is None or n < 4 or target is None or inputs is None or tensors[inputs].dim() < 2:
        return None
    if not (tensors[inputs].is_floating_point() or tensors[inputs].dtype == torch.uint8):
        return None
    with deterministic(model), preserve_rng(loss_fn, batches.loader):
        for rows in _Rows.each(batches, n, inputs, target):
            draws, wrong = 0, list[tuple[float, float]]()
            for draw in range(MIXTURES):
                shares = _shares(model, loss_fn, rows, draw * len(rows.items) // MIXTURES, batches.loader)
                draws += shares is not None
                if not draws and draw == FIRST_MIXTURES:
                    break
                if shares is not None:
                    seen, counted = shares
                    top = int(seen.argmax())
                    pair = float(seen[top]), float(counted[top])
                    wrong += [pair] * (pair[0] > MOST_OF_IT > 1 - MOST_OF_IT > pair[1])
            if draws:
                return MixedSamples(draws, len(wrong), *wrong[:1])
    return None


def _shares(
    model: nn.Module, loss_fn: LossFn, rows: _Rows, k: int, *owners: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How much of a sample is in each row of the model's input, and of its target in each row of the loss; None where
    its own row is all that it is in."""
    own = rows.leaf(k, rows.inputs), rows.leaf(k, rows.target)
    others = (rows.leaf(i, at) for i in range(len(rows.items)) for at in (rows.inputs, rows.target))
    unlike = (i for i, pair in enumerate(zip(others, others)) if not any(map(torch.equal, own, pair)))
    other = next(unlike, None)
    if other is None or own[0].shape != rows.leaf(other, rows.inputs).shape:
        return None
    restore = save_rng(loss_fn, *owners)

    def seen(at: int | None) -> list[torch.Tensor | None]:
        restore()
        return _inputs_or_gradients(model, loss_fn, rows.exchanged(at, k, other))

    with torch.no_grad():
        before, after = seen(None), seen(rows.inputs)
    change = (rows.leaf(other, rows.inputs).float() - own[0].float()).cpu()
    large = change.abs() > 1e-3 * change.abs().max()
    for call, (x, y) in enumerate(zip(before, after)):
        if x is None or y is None or not x.shape == y.shape == (len(rows.items), *change.shape):
            continue
        parts = (y - x)[:, large] / change[large]
        share, most = parts.mean(1), float(parts.sum(0).abs().max())
        if int((parts.abs().amax(1) > LITTLE * most).sum()) != 2 or float(parts.min()) < -LITTLE * most:
            continue  # its own row alone; or numbers that were moved, not mixed
        with torch.enable_grad():
            x, y = seen(None)[call], seen(rows.target)[call]
        counted = None if x is None or y is None else (y - x).abs().flatten(1).sum(1)
        return None if counted is None or not bool(counted.any()) else (share / share.sum(), counted / counted.sum())
    return None


def _inputs_or_gradients(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[torch.Tensor | None]:
    """What goes into each call of the model, or, with gradients, the loss's gradient at what comes out of each."""
    inputs, outputs = list[torch.Tensor | None](), list[torch.Tensor]()

    def enters(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(iter(tensors_in((args, kwargs))), None)
        inputs.append(None if x is None or not x.is_floating_point() else x.detach().float().cpu())

    with (
        model.register_forward_pre_hook(enters, with_kwargs=True),
        model.register_forward_hook(lambda module, args, out: outputs.extend(output_tensors(out)[:1])),
    ):
        loss = loss_root(loss_fn(model, batch))
    if not torch.is_grad_enabled() or len(outputs) != len(inputs):
        return inputs
    gradients = torch.autograd.grad(loss.mean(), outputs, allow_unused=True)
    return [None if g is None else g.float().cpu() for g in gradients]


def over_ends(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Any], named: Sequence[Mapping[str, torch.Tensor]]
) -> OverEnds | None:
    """Whether targets `reward + something of the next state` have the latter also where a mark in the batch, or beside
    it, says that an episode ends. named: the marks beside each batch, by their names. A mark is a value of two that the
    loss does not use and that the reward or a state tells, as an end is; that the time is up is told by neither."""
    marks = dict[str, list[torch.Tensor]]()
    columns, rewards, added = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    place = Where()
    for batch, flags in zip(batches[:MOST_TARGETS], named):
        calls = _ColumnCalls(model, batch)
        with deterministic(model), preserve_rng(loss_fn), torch.enable_grad():
            record(calls, loss_fn, batch)
        found = _following(calls)
        if found is None:
            return None
        call, reward, following = found
        rows, place = following.numel(), call.where
        tensors = [t.detach().cpu() for t in output_tensors(batch) if t.dim() and len(t) == rows]
        own = calls.dependence(reward).leaves
        used = (t for c in calls.calls if c.op not in VIEWS for t in c.inputs if t.numel() == rows)
        patterns = {_pattern(t) for t in used if calls.dependence(t).leaves & ~own or not calls.dependence(t).leaves}
        beside = {f"batch[{i}]": t for i, t in enumerate(calls.columns) if not own >> i & 1}
        known = {n: t for n, t in (dict(flags) | beside).items() if t.numel() == rows and _pattern(t) not in patterns}
        for name in list(marks) or known:
            if name not in known:
                marks.pop(name, None)
                continue
            marks.setdefault(name, []).append(known[name].detach().cpu().float().flatten())
        rewards.append(reward.detach().cpu().float().flatten())
        columns.append(torch.cat([t.float().flatten(1) if t.dim() > 1 else t.float()[:, None] for t in tensors], 1))
        added.append(following.detach().cpu().float().flatten())
    if not added or len({t.shape[1] for t in columns}) > 1 or bool((values := torch.cat(added)).eq(0).any()):
        return None  # some of them end
    table = torch.cat(columns)
    table = torch.cat([table, (table - table.mean(0)).abs()], 1)
    for name, parts in marks.items():
        ends = torch.cat(parts) == min(both := torch.cat(parts).unique().tolist())
        if len(both) != 2:
            continue
        ends = ends if int(ends.sum()) * 2 <= len(ends) else ~ends
        others = [torch.cat(rewards), *(column for column in table.T if _pattern(column) != _pattern(ends))]
        if int(ends.sum()) >= ENDS_SEEN and any(_told(column, ends) > TOLD for column in others):
            name = "" if name.startswith("batch[") else name
            return OverEnds(name, int(ends.sum()), len(ends), float(values[ends].mean()), place)
    return None


class _ColumnCalls(Calls):
    """A batch that is one table counts as its columns, each a leaf of its own; so do parameters of models that are not
    trained. columns: the leaves."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        leaves = output_tensors(batch)
        table = leaves[0] if len(leaves) == 1 and leaves[0].dim() == 2 and leaves[0].shape[1] <= MOST_COLUMNS else None
        self.columns = leaves if table is None else [*table.T]
        super().__init__(model, model.named_parameters(), leaves)
        self._held = (
            {} if table is None else {id(table): torch.arange(table.shape[1], device="cpu").expand(table.shape)}
        )
        for leaf in leaves if table is not None else ():
            self.dependences[id(leaf)] = Dependence(leaves=(1 << len(self.columns)) - 1)

    def _masks(self, inputs: Iterable[torch.Tensor]) -> tuple[int, int]:
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter):
                self._adopt("", tensor)
        return super()._masks(inputs)

    def _propagate(self, call: OpCall) -> None:
        super()._propagate(call)
        held = self._held.get(id(call.inputs[0])) if call.op in VIEWS and len(call.inputs) == 1 else None
        if held is None:
            return
        with DisableTorchFunction():
            parts = output_tensors(getattr(torch.Tensor, call.op)(held, *call.args[1:], **call.kwargs))
        for tensor, part in zip(call.outputs, parts):
            mask = sum(1 << i for i in part.unique().tolist())
            self.dependences[id(tensor)] = dataclasses.replace(self.dependences[id(tensor)], leaves=mask)
            self._held[id(tensor)] = part


def _following(calls: Calls) -> tuple[OpCall, torch.Tensor, torch.Tensor] | None:
    """Of a target that adds a reward of the batch and what a model says of that which the output is not made of: the
    call that adds, and the two."""
    for pair in outputs_and_targets(calls, moving=True):
        for output, target in (pair[1:], pair[:0:-1]):
            call = calls.maker(target)
            while call is not None and call.op == "detach":
                call = calls.maker(call.inputs[0])
            if call is None or call.op not in ("add", "__add__", "__radd__") or len(call.inputs) != 2:
                continue
            own = calls.dependence(output).leaves
            for reward, following in (call.inputs, call.inputs[::-1]):
                one, other = calls.dependence(reward), calls.dependence(following)
                if not one.params and one.leaves & ~own and other.params and other.leaves & ~own & ~one.leaves:
                    return (call, reward, following) if reward.numel() == following.numel() > 1 else None
    return None


def _pattern(values: torch.Tensor) -> bytes:
    """Which of the values are the same as the first one."""
    flat = values.detach().cpu().flatten()
    return (flat == flat[:1]).numpy().tobytes()


def _told(column: torch.Tensor, marks: torch.Tensor) -> float:
    """How often a value beside a mark is above (or, if more often, below) one without, ties by half."""
    ranks = (column[marks][:, None] - column[~marks][None, :2000]).sign()
    return float(ranks.mean().abs() + 1) / 2


def ignores_input(model: nn.Module, loss_fn: LossFn, batch: Any, leaves: Sequence[int]) -> bool | None:
    """Whether the loss stays the same when the inputs are moved to other samples; None where all samples are alike."""
    inputs = tensors_at(batch, leaves)
    ids = {id(t) for t in inputs}
    rolled = tree_map_only(torch.Tensor, lambda t: t.roll(1, 0) if id(t) in ids and t.dim() else t, batch)
    if not ids or all(torch.equal(t, t.roll(1, 0)) for t in inputs if t.dim()):
        return None
    return repeatable_loss(model, loss_fn, batch) == repeatable_loss(model, loss_fn, rolled)


def by_place(model: nn.Module, loss_fn: LossFn, batch: Any) -> BatchMixing | None:
    """Where a sample's output depends on its row in the batch, though on no other sample: with all rows moved on by
    one, outputs change. Or where outputs come in an order of their own, and targets don't. None where random numbers
    or a state are in them."""
    n = batch_size(batch)
    if n is None or n < 4:
        return None

    def forward(rows: Sequence[int], seed: int) -> tuple[Calls, float]:
        moved = tree_map_only(torch.Tensor, lambda t: t[list(rows)] if t.dim() else t, batch)
        calls = calls_for(model, moved)
        with modes_put_back(model), preserve_rng(loss_fn), torch.no_grad():
            model.eval()
            torch.manual_seed(seed)
            loss = loss_value(record(calls, loss_fn, moved))
        return calls, loss

    own = [*range(n)]
    mapped = tree_map_only(torch.Tensor, torch.clone, batch)
    if any(a is b for a, b in zip(output_tensors(batch), output_tensors(mapped))):
        return None  # rows of such a container can't be moved
    (plain, loss), (again, _), (other, _), (moved, loss_moved) = (
        forward(*args) for args in ((own, 0), (own, 1), ([1, *own[1:]], 0), ([n - 1, *own[:-1]], 0))
    )
    outputs = [[t for t in calls.outputs if t.dim() and len(t) == n] for calls in (plain, again, other, moved)]
    if len({len(found) for found in outputs}) > 1 or not outputs[0]:
        return None
    if any(_rows_that_differ(a, b) for a, b in zip(outputs[0], outputs[1])):
        return None
    changed = max(_rows_that_differ(a.roll(1, 0), b) for a, b in zip(outputs[0], outputs[3]))
    pairs = [*_pairs(plain, moved)]
    if 2 * changed > n and _in_other_order(outputs[0][0], outputs[3][0]) and abs(loss - loss_moved) > 1e-4 * abs(loss):
        orders = (a for a, b in pairs if a.inside and any(map(_in_other_order, a.outputs, b.outputs)))
        first = next(orders, None)
        place = ("", "", Where(phase="forward")) if first is None else _place(first)
        return BatchMixing(0, changed, n, *place, placed=True, kind=ORDER)
    if any(_rows_that_differ(a[1:], b[1:]) for a, b in zip(outputs[0], outputs[2])):
        return None
    for a, b in pairs:
        both = [(x, y) for x, y in zip(a.outputs, b.outputs) if a.inside and x.dim() and len(x) == n]
        if 2 * changed > n and any(_rows_that_differ(x.roll(1, 0), y) for x, y in both):
            return BatchMixing(0, changed, n, a.module, a.op, a.where, placed=True)
    return None


def _in_other_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both have the same rows, no two of them alike, and most are elsewhere than one row on."""
    if a.shape != b.shape or not a.is_floating_point() or a.dim() < 2 or len(a) < 4:
        return False
    a, b = (t.detach().float().flatten(1)[:, :COMPARED] for t in (a, b))
    near = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") < 1e-3 * float(a.std()) + 1e-6
    own = near.long().argmax(1) == torch.arange(1, len(a) + 1, device=a.device) % len(a)
    return bool((near.sum(0) == 1).all() and (near.sum(1) == 1).all()) and 2 * int(own.sum()) < len(a)


def _rows_that_differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """By more than rounding."""
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0
    a, b = a.detach().float(), b.detach().float()
    return int(((a - b).abs() > 1e-3 * float(a.std()) + 1e-6).flatten(1).any(1).sum()) if a.dim() > 1 else 0
