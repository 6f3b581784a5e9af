"""A perplexity that somebody reports: the numbers that known mistakes would give, and the line of a mistake."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from nbdebug.observe import sources
from nbdebug.observe.locations import cell_name
from nbdebug.report import Fix, Where
from nbdebug.text import figures

EXACT, ROUNDED = 3e-4, 1e-2
"""Relative difference of two numbers that are one: computed in float32, or in half precision."""
LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "criterion", "loss_fn")


@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """Losses in nats, float64, as NumPy arrays. nll: (N, T-1), of each next token; real: the same shape, whether that
    token is no padding. rivals: (words, code, losses, mask) where other targets or other contexts were taken."""

    nll: Any
    real: Any
    rivals: tuple[tuple[str, str, Any, Any], ...] = ()

    @property
    def value(self) -> float:
        return _exp(self.nll[self.real].mean())


def _exp(value: float) -> float:
    return math.exp(min(float(value), 700.0))


def mistakes(losses: TokenLosses, batch_size: int | None) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """(codes, words, perplexity) of each known mistake: one alone first, then two together."""
    targets: list[tuple[tuple[str, ...], str, Any, Any]] = [((), "", losses.nll, losses.real)]
    targets += [((code,), words, nll, real) for words, code, nll, real in losses.rivals]
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
    cells = dict(zip(own.__code__.co_freevars, (cell.cell_contents for cell in own.__closure__ or ())))
    called = [cells.get(name, own.__globals__.get(name)) for name in (*own.__code__.co_names, *cells)]
    file = own.__code__.co_filename
    return [own, *(f for f in called if isinstance(f, FunctionType) and f.__code__.co_filename == file)]


def place(evaluate: Any, code: str) -> tuple[str, ast.expr] | None:
    """(file, expression) at which the mistake stands in the user's function; None where it can't be told."""
    for function in functions_of(evaluate):
        file, first = function.__code__.co_filename, function.__code__.co_firstlineno
        body = [
            node
            for node in sources.nodes_of(file)
            if isinstance(node, (ast.FunctionDef, ast.Lambda))
            and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) == first
        ]
        inner = [node for node in (ast.walk(body[0]) if body else ()) if isinstance(node, (ast.Call, ast.BinOp))]
        for fits in SIGNS[code]:
            match = [node for node in inner if fits(node)]
            if match:
                return file, min(match, key=lambda node: (node.lineno, node.col_offset))
    return None


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


def _division(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


_MEAN = _call("mean", "fmean", "nanmean", "average")
SIGNS: dict[str, tuple[Callable[[ast.AST], bool], ...]] = {
    "padding-counted": (_without_padding, _MEAN, _division, _call(*LOSSES, "gather")),
    "mean-of-perplexities": (_call("exp"), _power_of_two, _MEAN, _division),
    "mean-of-batches": (_MEAN, _division, _call("exp")),
    "wrong-base": (_power_of_two, _call("exp2", "log2"), _call("exp")),
    "labels-not-shifted": (_call(*LOSSES), _call("gather", "take_along_axis", "take_along_dim"), _MEAN),
    "window-without-stride": (_call("range"), _call("split", "chunk", "unfold"), _call(*LOSSES)),
}
"""Code → what stands at the mistake, the surest sign first."""


def where_of(evaluate: Any, code: str) -> Where:
    """The user's line; an empty Where where `evaluate` is a number, or the line can't be told."""
    found = place(evaluate, code) if callable(evaluate) else None
    if found is None:
        return Where()
    file, node = found
    text = linecache.getline(file, node.lineno).strip()
    return Where(file=file, line=node.lineno, text=text, cell=cell_name(file))


def tried(evaluate: Any, code: str, pad_id: int | None, right: float) -> Fix | None:
    """The edit that leaves padding out, run in the user's own function; None where the number is not right then."""
    wanted = callable(evaluate) and code == "padding-counted" and pad_id is not None
    found = place(evaluate, code) if wanted else None
    if found is None or not isinstance(found[1], ast.Call) or not _without_padding(found[1]):
        return None
    file, node = found[0], found[1]
    if isinstance(node.func, ast.Call):  # nn.CrossEntropyLoss()(logits, targets)
        node = node.func
    if _name(node) not in LOSSES[:4]:
        return None
    edit = sources.edit_of(file, sources.with_keyword(file, node, "ignore_index", str(pad_id)))
    if edit is None:
        return None
    with sources.edited_functions(edit) as exchanged:
        value = number_of(evaluate) if exchanged else math.nan
    if not near(value, right, ROUNDED):
        return None
    return Fix.of("Leave padding out of the mean.", edit, True, {"perplexity with it": figures(value, 4)})


def number_of(evaluate: Any) -> float:
    """The number that a function gives, or that is given. Raises TypeError where it is none."""
    value = evaluate() if callable(evaluate) else evaluate
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"reported takes a number, or a function that gives one; got {type(value).__name__}") from None
