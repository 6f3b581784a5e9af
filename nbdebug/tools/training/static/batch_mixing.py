"""Does the output of one sample hang on another sample of the batch?

One sample is replaced by another one, and the outputs of all others are compared with what they were. It works for
tokens as for numbers. Normalisation and dropout stand in eval mode for it, so that batch normalisation is excused.
Tables of all pairs (N, N) and batches of several views (2N) are no mixing: the change stays in the sample's own rows
and columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.observe.tensors import output_tensors
from nbdebug.report import Where
from nbdebug.tools.training.facts import Mixing
from nbdebug.tools.training.probe_errors import told
from nbdebug.tools.training.run.data import unnoticed
from nbdebug.tools.training.static.one_step import VIEWS, Calls, OpCall, begin, record
from nbdebug.tools.training.static.outputs import LOSSES

TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}
"""Change, over the output's deviation, that arithmetic alone may bring; 1e-3 where nothing is said."""
FEW = 7
"""Samples that are looked at first."""
MEETING = frozenset(
    {
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "einsum",
        "cdist",
        "cosine_similarity",
        "addmm",
        "baddbmm",
        "index_select",
        "gather",
        "scatter",
        "scatter_add",
        "index_add",
        "__getitem__",
        "roll",
        "flip",
    }
)
"""Ops by which samples meet on purpose: similarities, graphs, prototypes."""


def batch_size(batch: Any) -> int | None:
    """The first dimension that the batch's tensors share; None where they do not."""
    sizes = {t.shape[0] for t in output_tensors(batch) if t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def mixing(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any) -> tuple[Mixing | None, str]:
    """(what mixes, "") or (None, why it could not be checked, or "")."""
    n = batch_size(batch)
    if n is None or n < 2:
        return None, "Whether samples mix: the tensors of a batch share no first dimension of 2 or more"
    if any(
        isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is None and "Batch" in type(m).__name__
        for m in model.modules()
    ):
        return None, "Whether samples mix: batch normalisation without running statistics mixes them in every mode"
    few = tree_map_only(torch.Tensor, lambda t: t[:FEW] if t.dim() and t.shape[0] == n else t, batch)
    of_few = None
    if n > FEW:
        try:  # quick, and a prime number is rarely the width of a layer
            of_few, why = _mixing(model, ask, few, FEW)
            if of_few is None and not why:
                return None, ""
        except Exception:  # the size of the batch is written into the program
            pass
    found, why = _mixing(model, ask, batch, n)
    if found is None and of_few is not None and of_few.op:
        found, batch, n = of_few, few, FEW  # among many samples one counts for little
    if found is None:
        return None, why
    try:
        return (None, "") if _meant(model, ask, batch, n, found) else (found, why)
    except Exception as fault:  # it can only be trained, not evaluated
        return found, told("Whether samples mix in eval mode too", fault)


def _meant(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any, n: int, found: Mixing) -> bool:
    """Samples that meet on purpose: by ops and modules that are there for it, or in training only (mixup). Raises what
    the loss raises in eval mode."""
    parts = dict(model.named_modules())
    kind = type(parts[found.module]).__name__.lower() if found.module in parts else ""
    if found.op in MEETING or any(word in kind for word in ("norm", "batch")) or kind.endswith("bn"):
        return True
    flags = [(m, m.training) for m in parts.values()]
    try:
        model.eval()
        return _mixing(model, ask, batch, n)[0] is None
    finally:
        for module, flag in flags:
            module.training = flag


def _mixing(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any, n: int) -> tuple[Mixing | None, str]:
    plain = _outputs(model, ask, batch)
    if not any(_table(t, n) for t in plain.outputs):
        return None, "Whether samples mix: no output of the model has a row for each sample"
    for j in dict.fromkeys((0, n // 2, n - 1)):
        other = replaced(batch, n, j)
        if other is None:
            continue
        changed = _outputs(model, ask, other)
        others = _others(plain.outputs, changed.outputs, n, j)
        culprit = _first(plain, changed, n, j) if others else None
        if culprit is None and (view := _view_after(plain, changed, n, j)) is not None:
            culprit, others = view
        if others:
            return _told(culprit, j, others, n), ""
        if (crossed := _crossed(plain, changed, n, j)) is not None:
            return crossed, ""
    return None, ""


def _told(culprit: OpCall | None, j: int, others: int, n: int) -> Mixing:
    if culprit is None:
        return Mixing(j, others, n, "", "", Where(phase="forward"))
    return Mixing(j, others, n, culprit.module, culprit.op, culprit.where)


def replaced(batch: Any, n: int, j: int) -> Any:
    """The batch with row j replaced by a row that differs; None where all rows are alike."""
    tensors = [t for t in output_tensors(batch) if t.dim() and t.shape[0] == n]
    other = next((k for k in range(n) if k != j and any(not torch.equal(t[k], t[j]) for t in tensors)), None)
    if other is None:
        return None

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != n:
            return tensor
        changed = tensor.detach().clone()
        changed[j] = tensor[other]
        return changed

    return tree_map_only(torch.Tensor, swap, batch)


def _outputs(model: nn.Module, ask: Callable[[Any, Any], Any], batch: Any) -> Calls:
    """The calls of one forward in a quiet mode, with the same random numbers each time."""
    calls = begin(model, batch)
    with quiet(model), unnoticed(ask), torch.no_grad():
        torch.manual_seed(0)
        record(calls, ask, batch)
    return calls


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Normalisation and dropout in eval mode; other modules as they are."""
    flags = [(m, m.training) for m in model.modules()]
    try:
        for module, _ in flags:
            if "Norm" in type(module).__name__ or isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False
            elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)):
                module.training = False  # dropout of their own
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _table(tensor: torch.Tensor, n: int) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 0 and any(size and size % n == 0 for size in tensor.shape)


def _others(plain: list[torch.Tensor], changed: list[torch.Tensor], n: int, j: int) -> int:
    """How many other samples' outputs have changed, at most over the outputs."""
    return max((spread(a, b, n, j) for a, b in zip(plain, changed)), default=0)


def spread(a: torch.Tensor, b: torch.Tensor, n: int, j: int) -> int:
    """Rows of other samples in which two outputs differ; 0 where all change lies in the rows and columns of j."""
    if a.shape != b.shape or not _table(a, n) or not (a.is_floating_point() and b.is_floating_point()):
        return 0
    a, b = a.detach(), b.detach()
    scale = float(a.float().std()) if a.numel() > 1 else 0.0
    differs = (a.float() - b.float()).abs() > TOLERANCE.get(a.dtype, 1e-3) * scale + 1e-7
    for dim, size in enumerate(a.shape):
        if size and size % n == 0:
            index, fold = torch.arange(size, device=a.device), size // n
            own = (index % n == j) | (index // fold == j)
            differs = differs & ~own.view([-1 if d == dim else 1 for d in range(a.dim())])
    if not bool(differs.any()):
        return 0
    dim = next(d for d, size in enumerate(a.shape) if size and size % n == 0)
    return min(
        n - 1,
        int(differs.any(dim=[d for d in range(a.dim()) if d != dim]).sum()) if a.dim() > 1 else int(differs.sum()),
    )


def _first(plain: Calls, changed: Calls, n: int, j: int) -> OpCall | None:
    """The first call inside the model whose result mixes."""
    if [c.op for c in plain.calls] != [c.op for c in changed.calls]:
        return None
    for a, b in zip(plain.calls, changed.calls):
        if a.inside and any(spread(x, y, n, j) for x, y in zip(a.out, b.out)):
            return a
    return None


def _view_after(plain: Calls, changed: Calls, n: int, j: int) -> tuple[OpCall, int] | None:
    """A reshape between model and loss that mixes what came apart from the model."""
    if [c.op for c in plain.calls] != [c.op for c in changed.calls]:
        return None
    for a, b in zip(plain.calls, changed.calls):
        if a.inside or not a.params or not a.out:
            continue
        found = spread(a.out[0], b.out[0], n, j)
        if found:
            return (a, found) if a.op in VIEWS and a.op != "__getitem__" else None
    return None


def _crossed(plain: Calls, changed: Calls, n: int, j: int) -> Mixing | None:
    """A loss whose outputs go through the samples in one order, and its targets in another."""
    if [c.op for c in plain.calls] != [c.op for c in changed.calls]:
        return None
    for a, b in zip(plain.calls, changed.calls):
        if a.op in LOSSES and len(a.given) > 1:
            output, target = (_rows(x, y, n, j) for x, y in zip(a.given[:2], b.given[:2]))
            if output and target and output[0] != target[0]:
                return Mixing(j, n - 1, n, a.module, a.op, a.where, (output[1], target[1]))
    return None


def _rows(a: torch.Tensor, b: torch.Tensor, n: int, j: int) -> tuple[bool, tuple[int, ...]] | None:
    """Whether rows of several for each sample stand side by side (True) or n apart (False), and the first of sample j;
    None where that is not clear."""
    if a.shape != b.shape or not a.dim() or a.shape[0] % n or a.shape[0] <= n:
        return None
    size, fold = a.shape[0], a.shape[0] // n
    differs = (a != b).flatten(1).any(1) if a.dim() > 1 else a != b
    rows = differs.nonzero().flatten().tolist()
    beside, apart = all(r // fold == j for r in rows), all(r % n == j for r in rows)
    if not rows or beside == apart:
        return None
    return beside, tuple(range(j * fold, (j + 1) * fold) if beside else range(j, size, n))[:4]
