"""perplexity(): how well a model predicts the next token, and why somebody's own number is another one."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import math
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy
import torch

from nbdebug.observe import sources
from nbdebug.observe.locations import cell_name
from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.variables import closure_variables
from nbdebug.report import Fix, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import count, figures
from nbdebug.tools.quality.compare import kept
from nbdebug.tools.quality.rules import Evidence, findings_of

RESAMPLES, FEW, BLOCK = 1000, 10, 32
"""Of the bootstrap: texts are drawn, and of fewer than FEW texts blocks of so many tokens (tokens beside each other are
not independent)."""
PARTS = 5
ELEMENTS = 1 << 24
"""Logits in float64 that are held at a time: 128 MiB."""
EXACT, ROUNDED = 3e-4, 1e-2
"""Relative difference of two numbers that are one: computed in float32, or in half precision."""
INPUT_MASK = "the mask of the inputs is taken for that of the targets, so that the first padding of a text counts"
LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "criterion", "loss_fn")


def perplexity(
    model_or_logits: Any,
    data: Any,
    *,
    pad_id: int | None = None,
    baseline: Any = None,
    reported: Any = None,
    batch_size: int | None = None,
    window: int | None = None,
) -> Report:
    """The perplexity of a language model: exp of the mean loss, in nats, over all real next tokens.

    model_or_logits: logits (N, T, V), or a causal model, called with a batch's token ids (a dict by keyword) without
    gradients, in eval mode. data: token ids (N, T); for a model also batches of them: tensors, tuples that begin with
    the ids, or dicts with `input_ids`, `attention_mask` and `labels` (-100 is no target). pad_id: the padding token,
    which is no target; None: all tokens count. baseline: another model, or its logits, on the same data. reported: your
    own perplexity, or your function of no arguments that computes it: where it differs, the report names the mistake
    that gives exactly this number, and the line in the function. batch_size: of your own evaluation. window: the tokens
    of your own evaluation's windows, where it cuts texts (a model is needed).

    Computed in float64. The interval of 95% is a bootstrap over texts, the unigram baseline counts all other targets
    of the data, with one added to each. `report.facts` has `value`, `interval`, `tokens`, `uniform`, `unigram`.
    Raises ValueError for shapes that do not fit, or where no real target is left; TypeError for what is no number.
    """
    if window is not None and window < 2:
        raise ValueError(f"window takes at least 2 tokens; got {window}")
    with same_random_numbers():
        own = _losses(model_or_logits, data, pad_id, window)
        other = None if baseline is None else _losses(baseline, data, pad_id, None)
    if not own.real.any():
        raise ValueError("no real target is left: every token after the first is padding")
    low, high = interval(own.nll, own.real)
    tokens = int(own.real.sum())
    values = {"model": (own.value, low, high), "uniform": (float(own.vocabulary),) * 3}
    values["unigram"] = (unigram(own.targets[own.real], own.vocabulary),) * 3
    if other is not None:
        values["baseline"] = (other.value, *interval(other.nll, other.real))
    problems, symptoms, ruled, number = _judged(own, reported, batch_size, pad_id)
    notes = [] if pad_id is not None else ["No pad_id is given: all tokens count as real."]
    notes += [f"The model is no better than the frequencies of tokens ({figures(values['unigram'][0], 4)})."] * (
        own.value >= values["unigram"][0]
    )
    notes += _beside(own, other)
    shape = f"{count(len(own.nll), 'text')}, {count(tokens, 'real target')}, vocabulary of {own.vocabulary:,}"
    table = Table("Perplexity", ("what", "value", "from", "to"), [(name, *row) for name, row in values.items()])
    plain: dict[str, Any] = {"value": own.value, "interval": [low, high], "tokens": tokens, "uniform": own.vocabulary}
    plain |= {"unigram": values["unigram"][0], "reported": number}
    return Report(
        "perplexity()",
        findings_of(problems),
        ruled,
        notes=tuple(notes),
        subject=shape,
        facts=plain,
        headline=f"The perplexity is {figures(own.value, 4)} (95% interval {figures(low, 4)} to {figures(high, 4)}).",
        symptoms=symptoms,
        tables=(table, *_parts(own)),
    )


def _judged(
    own: TokenLosses, reported: Any, batch_size: int | None, pad_id: int | None
) -> tuple[tuple[Evidence, ...], tuple[Symptom, ...], tuple[RuledOut, ...], float | None]:
    """(problems, symptoms, what is ruled out, the number) of what is reported."""
    if reported is None:
        return (), (), (), None
    with same_random_numbers():
        number = number_of(reported)
    match = explanation(own, number, batch_size)
    right = figures(own.value, 4)
    if match is None:
        text = f"The reported perplexity is {figures(number, 4)}, the right one {right}; no known mistake gives that."
        return (), (Symptom(text, "Give batch_size and window as your own evaluation has them."),), (), number
    codes, words, value = match
    if not codes:
        return (), (), (RuledOut("a wrong perplexity", f"reported {figures(number, 5)}, computed {right}"),), number
    problems = []
    for code in dict.fromkeys(codes):
        sign = "input mask" if code == "padding-counted" and INPUT_MASK in words else code
        title = f"The reported perplexity, {figures(number, 4)}, is what comes out where {words}; it is {right}"
        with same_random_numbers():
            where, fix = mended(reported, sign, pad_id if len(codes) == 1 else None, own.value)
        evidence = {"reported": number, "with the mistake": value, "right": own.value}
        problems.append(Evidence(f"quality/{code}", title, values=evidence, where=where, fix=fix))
    return tuple(problems), (), (), number


# -- losses ------------------------------------------------------------------------------------------------------------


def _losses(model: Any, data: Any, pad_id: int | None, window: int | None) -> TokenLosses:
    """Of all batches: shorter ones are filled with positions that are no target and have no loss."""
    if not callable(model):
        return _of_batch(torch.as_tensor(model), torch.as_tensor(data), None, pad_id, None)
    with kept([model], evaluate=True), torch.no_grad():
        windows = None if window is None else functools.partial(_in_windows, model, window)
        batches = []
        for ids, mask, inputs in map(_inputs, [data] if hasattr(data, "shape") else data):
            batches.append(_of_batch(_logits(model, inputs), ids, mask, pad_id, windows))
    nll, real, targets = (_stacked([getattr(b, name) for b in batches]) for name in ("nll", "real", "targets"))
    keys = batches[0].rivals
    rivals = {key: tuple(_stacked([batch.rivals[key][i] for batch in batches]) for i in (0, 1)) for key in keys}
    return TokenLosses(nll, real, targets, batches[0].vocabulary, rivals)


def _inputs(batch: Any) -> tuple[Any, Any, Any]:
    """(ids, mask of real tokens or None, what the model is called with)."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if batch.get("labels") is not None:
            mask = (batch["labels"] != -100) & (torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())
        return ids, mask, {key: batch[key] for key in ("input_ids", "attention_mask") if batch.get(key) is not None}
    ids = torch.as_tensor(batch[0] if isinstance(batch, (tuple, list)) else batch)
    return ids, None, ids


def _logits(model: Any, inputs: Any) -> Any:
    given = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    given = getattr(given, "logits", given)
    return given[0] if isinstance(given, (tuple, list)) else given


def _nll(logits: Any, targets: Any) -> Any:
    """(N, T) losses in float64, in pieces."""
    out = torch.empty(targets.shape, dtype=torch.float64, device="cpu")
    step = max(1, ELEMENTS // max(1, logits.shape[1] * logits.shape[2]))
    for start in range(0, len(logits), step):
        some = logits[start : start + step].detach().double()
        picked = some.gather(2, targets[start : start + step, :, None].to(some.device))[..., 0]
        out[start : start + step] = (some.logsumexp(2) - picked).cpu()
    return out.numpy()


def _of_batch(logits: Any, ids: Any, mask: Any, pad_id: int | None, windows: Any) -> TokenLosses:
    """windows: what gives the losses and the mask of texts that are cut, of tokens and their mask."""
    ids = ids.long()
    if logits.ndim != 3 or ids.shape != logits.shape[:2]:
        raise ValueError(f"logits are (N, T, V) and tokens (N, T); got {tuple(logits.shape)} and {tuple(ids.shape)}")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    real = real if pad_id is None or mask is not None else ids != pad_id
    known = ids.clamp(0, logits.shape[2] - 1)
    if bool((known != ids)[real].any()):
        raise ValueError(f"a token is out of the vocabulary of {logits.shape[2]}: {int(ids[real].max())}")
    real = real.cpu().numpy()
    ahead = "labels-not-shifted"
    rivals = {
        ("targets are not shifted", ahead): (_nll(logits, known), real),
        ("targets are not shifted, and the last is left out", ahead): (
            _nll(logits[:, :-1], known[:, :-1]),
            real[:, :-1],
        ),
        ("targets are shifted twice", ahead): (_nll(logits[:, :-2], known[:, 2:]), real[:, 2:]),
        ("targets are shifted the wrong way", ahead): (_nll(logits[:, 1:], known[:, :-1]), real[:, :-1]),
    }
    nll, targets = _nll(logits[:, :-1], known[:, 1:]), known[:, 1:].cpu().numpy()
    rivals[INPUT_MASK, "padding-counted"] = nll, real[:, :-1]
    if windows is not None:
        rivals["texts are cut into windows without overlap", "window-without-stride"] = windows(known, real)
    return TokenLosses(nll, real[:, 1:], targets, logits.shape[2], rivals)


def _in_windows(model: Any, window: int, known: Any, real: Any) -> tuple[Any, Any]:
    """(losses, mask) of texts that are cut into windows, each without the context before it."""
    parts = [slice(start, start + window) for start in range(0, known.shape[1] - 1, window)]
    losses = [_nll(_logits(model, known[:, part])[:, :-1], known[:, part][:, 1:]) for part in parts]
    return numpy.concatenate(losses, 1), numpy.concatenate([real[:, part][:, 1:] for part in parts], 1)


def _stacked(arrays: list[Any]) -> Any:
    wide = max(array.shape[1] for array in arrays)
    return numpy.concatenate([numpy.pad(array, ((0, 0), (0, wide - array.shape[1]))) for array in arrays])


# -- beside it ---------------------------------------------------------------------------------------------------------


def _units(nll: Any, real: Any) -> tuple[Any, Any]:
    """(sums of losses, numbers of tokens) of what the bootstrap draws."""
    held = real.any(1)
    if held.sum() >= FEW:
        return (nll * real).sum(1)[held], real.sum(1)[held]
    values = nll[real]
    starts = numpy.arange(0, len(values), min(BLOCK, max(1, len(values) // FEW)))
    return numpy.add.reduceat(values, starts), numpy.diff([*starts, len(values)])


def interval(nll: Any, real: Any) -> tuple[float, float]:
    """The 95% interval of the perplexity, by bootstrap."""
    sums, sizes = _units(nll, real)
    draws = numpy.random.default_rng(0).multinomial(len(sums), numpy.full(len(sums), 1 / len(sums)), RESAMPLES)
    means = (draws @ sums) / (draws @ sizes)
    low, high = numpy.quantile(means, [0.025, 0.975])
    return _exp(low), _exp(high)


def unigram(targets: Any, vocabulary: int) -> float:
    """Perplexity of the frequencies of the other targets, with one added to each token's."""
    counts = numpy.bincount(targets, minlength=vocabulary)
    return float(numpy.exp(-numpy.log(counts[targets] / (len(targets) - 1 + vocabulary)).mean()))


def _beside(own: TokenLosses, other: TokenLosses | None) -> Iterator[str]:
    """Whether the baseline is beaten, in a sentence: on the same tokens, paired."""
    if other is None:
        return
    ratio = other.value / own.value
    low, high = (1 / edge for edge in interval(own.nll - other.nll, own.real)[::-1])
    if low <= 1 <= high:
        yield f"Unsure beside the baseline: its perplexity is {ratio:.3g} times as high ({low:.3g} to {high:.3g})."
    else:
        yield f"The baseline's perplexity is {ratio:.3g} times as high ({low:.3g} to {high:.3g}, paired by text)."


def _parts(own: TokenLosses) -> Iterator[Table]:
    """By position, and by length of the text."""
    edges = numpy.unique(numpy.linspace(0, own.nll.shape[1], PARTS + 1).astype(int))
    places = [(f"{start + 1} to {end}", (slice(None), slice(start, end))) for start, end in itertools.pairwise(edges)]
    lengths = own.real.sum(1)
    texts = numpy.array_split(numpy.argsort(lengths, kind="stable"), min(PARTS, len(lengths)))
    sizes = [(f"{lengths[some].min()} to {lengths[some].max()}", some) for some in texts]
    for title, name, parts in (("By position", "position", places), ("By length", "targets of a text", sizes)):
        held = [(words, own.nll[part], own.real[part]) for words, part in parts]
        rows = [(words, int(real.sum()), _exp(nll[real].mean())) for words, nll, real in held if real.any()]
        if parts is places or len({*lengths.tolist()}) > 1:
            yield Table(title, (name, "targets", "perplexity"), rows)


# -- a number of the user's own: what known mistakes would give, and the line of a mistake -----------------------------


@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """Losses in nats, float64, as NumPy arrays. nll: (N, T-1), of each next token; real: the same shape, whether that
    token is no padding; targets: the tokens. rivals: (words, code) → (losses, mask) where other targets or other
    contexts were taken."""

    nll: Any
    real: Any
    targets: Any
    vocabulary: int
    rivals: Mapping[tuple[str, str], tuple[Any, ...]]

    @property
    def value(self) -> float:
        return _exp(self.nll[self.real].mean())


def _exp(value: float) -> float:
    return math.exp(min(float(value), 700.0))


def mistakes(losses: TokenLosses, batch_size: int | None) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """(codes, words, perplexity) of each known mistake: one alone first, then two together."""
    targets: list[tuple[tuple[str, ...], str, Any, Any]] = [((), "", losses.nll, losses.real)]
    targets += [((code,), words, nll, real) for (words, code), (nll, real) in losses.rivals.items()]
    for pair in (False, True):
        for codes, words, nll, real in targets:
            for more, told, value in _means(nll, real, batch_size):
                both = (*codes, *more)
                if both and (len(both) > 1) == pair:
                    yield both, " and ".join(filter(None, (words, told))), value


def _means(nll: Any, real: Any, batch_size: int | None) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """(codes, words, perplexity) of the ways to take the mean of these losses, the right one first."""
    mean = float(nll[real].mean())
    yield (), "", _exp(mean)
    yield ("padding-counted",), "padding is counted", _exp(nll.mean())
    yield ("padding-counted",), "the sum over real tokens is divided by all positions", _exp(nll[real].sum() / nll.size)
    words = "the sum is divided by the number of all tokens, though nobody predicts the first of a text"
    yield ("wrong-token-count",), words, _exp(nll[real].sum() / (real.sum() + len(nll)))
    sizes = {batch_size: f"batches of {batch_size}", 1: "single texts"} if batch_size else {1: "single texts"}
    for size, words in sizes.items():
        rows = [slice(i, i + int(size or 1)) for i in range(0, len(nll), int(size or 1))]
        each = [float(nll[r][real[r]].mean()) for r in rows if real[r].any()]
        padded = [float(nll[r].mean()) for r in rows]
        yield ("mean-of-perplexities",), f"the perplexities of {words} are averaged", _mean(map(_exp, each))
        yield ("mean-of-batches",), f"the losses of {words} are averaged without their sizes", _exp(_mean(each))
        both = ("padding-counted", "mean-of-perplexities")
        yield both, f"padding is counted and the perplexities of {words} are averaged", _mean(map(_exp, padded))
    yield ("wrong-base",), "2 is raised to a loss in nats", 2.0 ** min(mean, 1000.0)
    yield ("wrong-base",), "e is raised to a loss in bits", _exp(mean / math.log(2))
    both = ("padding-counted", "wrong-base")
    yield both, "padding is counted and 2 is raised to nats", 2.0 ** min(float(nll.mean()), 1000.0)


def _mean(values: Any) -> float:
    known = list(values)
    return sum(known) / len(known)


def near(one: float, other: float, within: float = EXACT) -> bool:
    return abs(one - other) <= within * max(abs(one), abs(other))


def explanation(
    losses: TokenLosses, number: float, batch_size: int | None
) -> tuple[tuple[str, ...], str, float] | None:
    """The mistake that gives this number: (codes, words, its own number). None where none does; codes are () where the
    number is right."""
    rows = [row for row in mistakes(losses, batch_size) if not near(row[2], losses.value)]
    rows.sort(key=lambda row: (len(row[0]), abs(row[2] - number)))
    if near(number, losses.value):
        return (), "", losses.value
    match = next((row for row in rows if near(row[2], number, digits(number))), None)
    return match if match is not None or not near(number, losses.value, ROUNDED) else ((), "", losses.value)


def digits(number: float) -> float:
    """The relative difference that a number allows: of one that was typed, half a unit of its last digit."""
    _, _, decimals = repr(number).partition(".")
    typed = 0.5 * 10.0 ** -len(decimals) / abs(number) if 0 < len(decimals) < 4 and number else 0.0
    return min(max(EXACT, typed), 2e-3)


# -- where it stands ---------------------------------------------------------------------------------------------------


def functions_of(evaluate: Any) -> list[FunctionType]:
    """The user's function, and those of the same file that it calls by name."""
    own = getattr(evaluate, "__func__", evaluate)
    if not isinstance(own, FunctionType):
        own = vars(type(evaluate)).get("__call__")
    if not isinstance(own, FunctionType):
        return []
    cells = closure_variables(own)
    called = [cells.get(name, own.__globals__.get(name)) for name in (*own.__code__.co_names, *cells)]
    file = own.__code__.co_filename
    return [own, *(f for f in called if isinstance(f, FunctionType) and f.__code__.co_filename == file)]


def places(evaluate: Any, sign: str) -> Iterator[tuple[str, ast.expr]]:
    """(file, expression) at which the mistake may stand in the user's functions, the likeliest first."""
    for function in functions_of(evaluate):
        file, first = function.__code__.co_filename, function.__code__.co_firstlineno
        body = [
            node
            for node in sources.nodes_of(file)
            if isinstance(node, (ast.FunctionDef, ast.Lambda))
            and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) == first
        ]
        inner = [
            node
            for node in (ast.walk(body[0]) if body else ())
            if isinstance(node, (ast.Call, ast.BinOp, ast.Subscript))
        ]
        for fits in SIGNS[sign]:
            match = [node for node in inner if fits(node)]
            yield from ((file, node) for node in sorted(match, key=lambda node: (node.lineno, node.col_offset)))


def _call(*known: str) -> Callable[[ast.AST], bool]:
    def fits(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and _name(node.func) in known

    return fits


def _name(node: ast.AST) -> str:
    """ "exp" of math.exp, loss.exp and exp; "CrossEntropyLoss" of nn.CrossEntropyLoss()(…)."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _power_of_two(node: ast.AST) -> bool:
    base = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else None
    if isinstance(node, ast.Call) and _name(node.func) in ("pow", "power", "float_power") and node.args:
        base = node.args[0]
    base = base.args[0] if isinstance(base, ast.Call) and base.args else base
    return isinstance(base, ast.Constant) and base.value == 2


def _without_padding(node: ast.AST) -> bool:
    return _call(*LOSSES)(node) and sources.keyword(node, "ignore_index") is None


def _loss_of_two(node: ast.AST) -> bool:
    """Where scores and targets are given to a loss; not where its object is made."""
    return _call(*LOSSES)(node) and isinstance(node, ast.Call) and len(node.args) > 1


def _division(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _last_left_out(node: ast.AST) -> bool:
    """`x[:, :-1]` or `x[..., :-1]`."""
    last = getattr(node, "slice", None)
    last = last.elts[-1] if isinstance(last, ast.Tuple) and last.elts else last
    return isinstance(last, ast.Slice) and last.lower is None and ast.unparse(last) == ":-1"


def _mask_of_inputs(node: ast.AST) -> bool:
    """The same of what is called a mask, or of a comparison."""
    base = node.value if isinstance(node, ast.Subscript) and _last_left_out(node) else None
    named = [part for part in ast.walk(base) if isinstance(part, ast.Compare) or "mask" in _name(part)] if base else ()
    return bool(named)


def _all_counted(node: ast.AST) -> bool:
    """A count of tokens that begins with the first: `(tokens != pad).sum()`, `mask.sum()`."""
    counted = isinstance(node, ast.Call) and _name(node.func) in ("sum", "count_nonzero", "numel", "len")
    return counted and _tokens_in(node) is not None


def _tokens_in(node: ast.AST) -> ast.expr | None:
    """The whole tensor whose entries are counted: a name that is compared, or a mask's."""
    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and isinstance(part.left, ast.Name):
            return part.left
        if isinstance(part, ast.Name) and "mask" in part.id:
            return part
    return None


_MEAN = _call("mean", "fmean", "nanmean", "average")
SIGNS: dict[str, tuple[Callable[[ast.AST], bool], ...]] = {
    "padding-counted": (_without_padding, _MEAN, _division, _call(*LOSSES, "gather")),
    "input mask": (_mask_of_inputs, _division, _MEAN),
    "wrong-token-count": (_all_counted, _division),
    "mean-of-perplexities": (_call("exp"), _power_of_two, _MEAN, _division),
    "mean-of-batches": (_MEAN, _division, _call("exp")),
    "wrong-base": (_power_of_two, _call("exp2", "log2"), _call("exp")),
    "labels-not-shifted": (_loss_of_two, _call(*LOSSES), _call("gather", "take_along_axis", "take_along_dim"), _MEAN),
    "window-without-stride": (_call("range"), _call("split", "chunk", "unfold"), _call(*LOSSES)),
}
"""Code, or "input mask" → what stands at the mistake, the surest sign first."""


def mended(evaluate: Any, sign: str, pad_id: int | None, right: float) -> tuple[Where, Fix | None]:
    """The user's line, and an edit of it that gives the right number in their own function. An empty Where where
    `evaluate` is a number or the line can't be told; no edit where none does."""
    likely = list(places(evaluate, sign)) if callable(evaluate) else []
    for file, node in likely if pad_id is not None else ():
        changes = _changes(file, node, sign, str(pad_id))
        edit = sources.edit_of(file, changes) if changes else None
        if edit is None:
            continue
        with sources.edited_functions(edit) as exchanged:
            value = number_of(evaluate) if exchanged else math.nan
        if near(value, right, ROUNDED):
            title = "Count what is predicted." if sign == "wrong-token-count" else "Leave padding out of the mean."
            fix = Fix.of(title, edit, True, {"perplexity with it": figures(value, 4)})
            return _where(file, node), fix
    return (_where(*likely[0]) if likely else Where()), None


def _where(file: str, node: ast.expr) -> Where:
    text = linecache.getline(file, node.lineno).strip()
    return Where(file=file, line=node.lineno, text=text, cell=cell_name(file))


def _changes(file: str, node: ast.expr, sign: str, pad_id: str) -> dict[ast.AST, str]:
    """What is written anew: the mask's slice, the tokens that are counted, or the loss with padding ignored."""
    if sign == "wrong-token-count" and (tokens := _tokens_in(node)) is not None:
        return {tokens: f"{ast.unparse(tokens)}[:, 1:]"}
    if sign == "input mask" and isinstance(node, ast.Subscript) and _last_left_out(node):
        last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
        return {last: "1:"}
    if sign != "padding-counted" or not isinstance(node, ast.Call) or not _without_padding(node):
        return {}
    if isinstance(node.func, ast.Call):  # nn.CrossEntropyLoss()(logits, targets)
        node = node.func
    return sources.with_keyword(file, node, "ignore_index", pad_id) if _name(node) in LOSSES[:4] else {}


def number_of(evaluate: Any) -> float:
    """The number that a function gives, or that is given. Raises TypeError where it is none."""
    value = evaluate() if callable(evaluate) else evaluate
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"reported takes a number, or a function that gives one; got {type(value).__name__}") from None
