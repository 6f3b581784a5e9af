"""Does the output of one sample depend on another sample of the batch?

One sample is replaced by another one, and the outputs of all others are compared with what they were. It works for
tokens as for numbers. Normalization and dropout are in eval mode for it, so that batch normalization is excused.
Tables of all pairs (N, N) and batches of several views (2N) are no mixing: the change stays in the sample's own rows
and columns. `sees_ahead` asks the same of the time steps of a sample: does what predicts the next token know it?
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.observe.tensors import output_tensors
from nbdebug.report import Where
from nbdebug.tools.training.facts import BatchMixing, SeesAhead
from nbdebug.tools.training.probe_errors import describe
from nbdebug.tools.training.run.data import preserve_rng
from nbdebug.tools.training.run.evaluate import LossFn, loss_value
from nbdebug.tools.training.static.one_step import VIEWS, Calls, OpCall, calls_for, record
from nbdebug.tools.training.static.outputs import LOSSES

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


def batch_size(batch: Any) -> int | None:
    """The first dimension that the batch's tensors share; None where they do not."""
    sizes = {t.shape[0] for t in output_tensors(batch) if t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Normalization and dropout in eval mode; other modules as they are."""
    flags = [(m, m.training) for m in model.modules()]
    with_dropout = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
    try:
        for module, _ in flags:
            if "Norm" in type(module).__name__ or isinstance(module, with_dropout):
                module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def repeatable_loss(model: nn.Module, loss_fn: LossFn, batch: Any) -> float:
    """The loss of a batch, without dropout and with the same random numbers each time."""
    with deterministic(model), preserve_rng(loss_fn), torch.no_grad():
        torch.manual_seed(0)
        return loss_value(loss_fn(model, batch))


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
    if n > FEW:
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
        others = max((changed_rows(a, b, n, sample) for a, b in zip(plain.outputs, changed.outputs)), default=0)
        culprit = _first_mixing_call(plain, changed, n, sample) if others else None
        if culprit is None and (view := _view_after_model(plain, changed, n, sample)) is not None:
            culprit, others = view
        if others:
            module, op, where = ("", "", Where(phase="forward")) if culprit is None else _place(culprit)
            return BatchMixing(sample, others, n, module, op, where), ""
        if (crossed := _mixed_targets(plain, changed, n, sample)) is not None:
            return crossed, ""
    return None, ""


def _place(call: OpCall) -> tuple[str, str, Where]:
    return call.module, call.op, call.where


def _on_purpose(model: nn.Module, loss_fn: LossFn, batch: Any, n: int, mixing: BatchMixing) -> bool:
    """Samples that are combined on purpose: by ops and modules that are there for it, or in training only (mixup).
    Raises what the loss raises in eval mode."""
    modules = dict(model.named_modules())
    kind = type(modules[mixing.module]).__name__.lower() if mixing.module in modules else ""
    if mixing.op in MEETING or any(word in kind for word in ("norm", "batch")) or kind.endswith("bn"):
        return True
    flags = [(m, m.training) for m in modules.values()]
    try:
        model.eval()
        return _mixing(model, loss_fn, batch, n)[0] is None
    finally:
        for module, flag in flags:
            module.training = flag


def _with_row_replaced(batch: Any, n: int, row: int) -> Any:
    """The batch with one row replaced by a row that differs; None where all rows are alike."""
    tensors = [t for t in output_tensors(batch) if t.dim() and t.shape[0] == n]
    other = next((k for k in range(n) if k != row and any(not torch.equal(t[k], t[row]) for t in tensors)), None)
    if other is None:
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


# Later time steps


def sees_ahead(model: nn.Module, loss_fn: LossFn, batch: Any) -> SeesAhead | None:
    """Where the targets are the inputs one place on: whether outputs change with the very token that they predict."""
    for tokens in output_tensors(batch):
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 4:
            continue
        plain, at = _forward(model, loss_fn, batch), tokens.shape[1] - 2
        before = _by_step(plain, tokens)
        if before is None:
            continue
        other = tokens.clone()
        other[:, at] = tokens[:, at].roll(1, 0)
        changed = _forward(model, loss_fn, _exchanged(batch, tokens, other))
        after = _by_step(changed, tokens)
        if after is not None and _changes_before(before, after, at):
            pairs = (
                (a, b) for a, b in _pairs(plain, changed) if a.inside and a.outputs[0].shape[:2] == before.shape[:2]
            )
            first = next((a for a, b in pairs if _changes_before(a.outputs[0], b.outputs[0], at)), None)
            return SeesAhead(at, Where(phase="forward") if first is None else first.where)
    return None


def _exchanged(batch: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return tree_map_only(torch.Tensor, lambda t: new if t is old else t, batch)


def _by_step(calls: Calls, tokens: torch.Tensor) -> torch.Tensor | None:
    """The scores by sample and time step, where what they predict are these tokens, one place on."""
    losses = [call for call in calls.calls if call.op == "cross_entropy"]
    if len(losses) != 1:
        return None
    scores, labels = losses[0].argument(0, "input"), losses[0].argument(1, "target")
    n, length = tokens.shape
    if labels.is_floating_point() or labels.numel() not in (n * length, n * (length - 1)):
        return None
    own = labels.reshape(n, -1)[:, : length - 1]
    counted = own >= 0
    if not bool(counted.any()) or float((own == tokens[:, 1:])[counted].float().mean()) < NEXT:
        return None
    by_step: torch.Tensor = scores.movedim(1, -1).reshape(n, labels.numel() // n, -1)
    return by_step


def _changes_before(a: torch.Tensor, b: torch.Tensor, at: int) -> bool:
    """Whether two outputs differ at a time step before this one."""
    if a.shape != b.shape or a.dim() < 3 or not a.is_floating_point():
        return False
    a, b = a.detach().float(), b.detach().float()
    return float((a - b)[:, :at].abs().max()) > TOLERANCE.get(a.dtype, 1e-3) * float(a.std()) + 1e-7
