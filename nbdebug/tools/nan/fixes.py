"""The fix as a text: the user's own line rewritten, and tried as it is printed.

A `Cure` names expressions in the user's source and a template for each; the same templates, evaluated on the operands
of the recorded op, are its change of the tape. Cures of one kind come at three widths: the call at fault, all such
calls in its statement, all in its function. Constants fit the dtype: 1e-8 is 0 in float16. `cures` has those of each
cause.

`try_fixes` takes them in order. A cure is tried on the tape of the failing step and, where the step can run again, by
the user's own functions with the edited text in them (`trials.py`); the first that is cured becomes the fix. Where none
can be tried, the edit, or the rule's own words, are a suggestion.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import inspect
import linecache
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe import sources
from nbdebug.observe.locations import Site, is_users_file
from nbdebug.observe.ops import named_arguments, schema_of
from nbdebug.observe.recorder import Op
from nbdebug.observe.tape import CannotReplay
from nbdebug.observe.tensors import can_be_nonfinite, finite
from nbdebug.report import Edit, Finding, Fix
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.origins import Origin
from nbdebug.tools.nan.probe import Detection, Probe
from nbdebug.tools.nan.rules.arithmetic import forward_sign
from nbdebug.tools.nan.trials import AUTOCAST, FixTrial, TapeChange, Trial

SPAN = "tried on"
LONGEST_WAIT = 20.0
"""Seconds after which no further cure is tried: somebody waits for the report."""
MOST = 16
"""Cures that are tried at most; each takes a few runs of the step."""
STOPGAP = "Keep the operand in its domain. Better: bring the targets into range where they are read."
Changes = dict[ast.AST, str]
Node = ast.expr | ast.AugAssign


@dataclasses.dataclass
class Cure:
    """One way to mend the source. changes: templates by expression, in `file`, or in the file of the op at fault.
    change: the same on the tape, None where it can't be told there; exact: the tape alone proves this text. setting:
    what the edit changes in an object that was made before the step; whole_run: only the run from its first step can
    tell. note: what it does to the meaning."""

    title: str
    changes: Changes
    change: TapeChange | None = None
    exact: bool = True
    file: str = ""
    setting: Callable[[], contextlib.AbstractContextManager] | None = None
    whole_run: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Wrap:
    """Templates for the operands of a call by place, and for its result; `{0}` there is the first operand's text."""

    operands: Mapping[int, str]
    result: str = ""


class Fault:
    """The op at fault and its place in the user's source. node: the call or operator; None where it isn't known."""

    def __init__(
        self,
        code: str,
        facts: NanFacts,
        probe: Probe,
        detection: Detection,
        culprit: Origin,
        op: Op | None,
        trial: FixTrial,
    ):
        self.code, self.facts, self.fact, self.probe, self.detection = code, facts, facts.origin, probe, detection
        self.culprit, self.trial = culprit, trial
        at_fault = culprit.op
        if at_fault is not None and at_fault.forward is not None and not at_fault.custom:
            at_fault = at_fault.forward
        self.op = op or at_fault
        self.name = self.op.name if self.op is not None else ""
        where = self.fact.where
        self.site = (
            self.op.site
            if self.op is not None
            else Site(where.file, where.line, "")
            if where.file and where.line
            else None
        )
        self.file = self.site.file if self.site is not None else ""
        self.node = sources.call_at(self.site, self.op.call, self.name) if self.op is not None and self.site else None
        self.half = self.dtype == "float16"

    @property
    def dtype(self) -> str:
        return next((o.dtype for o in self.fact.operands if "float" in o.dtype), self.fact.dtype)

    def least(self, ordinary: float, half: float) -> str:
        """A constant as text, for the dtype at fault."""
        return f"{half if self.half else ordinary:.0e}".replace("e-0", "e-")

    @property
    def large(self) -> str:
        """A finite number that stands for infinity, and whose square is finite."""
        return "1e4" if self.half else "1e9"

    @property
    def direct(self) -> bool:
        """Whether the user's own call is the op at fault, and not a function that contains it."""
        return self.node is not None and sources.is_call_of(self.node, self.name)

    def like_nodes(self) -> Iterator[tuple[list[Node], list[Op]]]:
        """The call at fault, all such calls in its statement, all in its function; with the recorded ops of each."""
        assert self.node is not None and self.site is not None and self.op is not None
        op, site = self.op, self.site
        ops = self.trial.ops(lambda o: o.name == op.name and o.site is not None and o.site.file == site.file)
        if op.call is not None:
            yield [self.node], [o for o in ops if o.call == op.call]
        statement, function = sources.statement_at(*site[:2]), sources.function_at(*site[:2])
        for part in (statement, function):
            if part is not None:
                low, high = part.lineno if hasattr(part, "lineno") else 1, getattr(part, "end_lineno", 10**9)
                yield sources.calls_of(part, op.name), [o for o in ops if o.site and low <= o.site.line <= high]


# -- trying them -------------------------------------------------------------------------------------------------------


def try_fixes(
    finding: Finding,
    facts: NanFacts,
    probe: Probe,
    detection: Detection,
    culprit: Origin,
    op: Op | None,
    again: Trial | None = None,
) -> tuple[Finding, FixTrial]:
    """The finding with its first fix as an edit of the user's line, tried. op: the forward op at fault, on the tape.
    again: the step by the user's own code, where that can run again."""
    trial = FixTrial(probe, detection, op)
    fixes = list(finding.fixes)
    if fixes and finding.code != "nan/not-located":
        fault = Fault(finding.code.split("/")[1], facts, probe, detection, culprit, op, trial)
        try:
            own = _tried(fixes[0], fault, trial, again)
        except Exception as error:  # of ours: the finding itself stands
            own = dataclasses.replace(fixes[0], after={"why not": f"nbdebug failed ({type(error).__name__}: {error})"})
        fixes[0] = own
    return dataclasses.replace(finding, fixes=tuple(fixes)), trial


def _tried(fix: Fix, fault: Fault, trial: FixTrial, again: Trial | None) -> Fix:
    """The first cure that works; else the first that could not be tried; else, and where all were tried in vain, the
    fix as it stands, a suggestion."""
    first: Fix | None = None
    began, failed = time.monotonic(), 0
    with contextlib.nullcontext() if again is None else again():
        for number, (cure, edit) in enumerate(_edits(fault)):
            if number == MOST or time.monotonic() - began > LONGEST_WAIT:
                break
            title = cure.title or fix.title
            works, after = _attempt(cure, edit, trial, again)
            if works:
                return Fix.of(title, edit, True, after)
            failed += works is False
            if first is None or (first.verified is None) < (works is None):
                first = Fix.of(title, edit, works, after)
    if first is not None and first.verified is None:
        return first
    if first is not None and not fix.after:
        reason = first.after.get("why not")
        tried = "the edit of your line did not help" if failed == 1 else f"none of {failed} edits of your line helped"
        tried += f" ({reason})" if reason else ""
        return dataclasses.replace(fix, after={"why not": tried})
    return fix if fix.after else dataclasses.replace(fix, after={"why not": "no line of yours was found for it"})


def _edits(fault: Fault) -> Iterator[tuple[Cure, Edit]]:
    """The cures that can be written into the user's source, each text once."""
    known = set()
    for cure in cures(fault):
        file = cure.file or fault.file
        edit = sources.edit_of(file, cure.changes) if cure.changes and is_users_file(file) else None
        if edit is not None and (edit.line, edit.new) not in known:
            known.add((edit.line, edit.new))
            yield cure, edit


def _attempt(cure: Cure, edit: Edit, trial: FixTrial, again: Trial | None) -> tuple[bool | None, dict[str, Any]]:
    """Whether a cure works (None: it can't be tried), and what was seen."""
    on_tape: tuple[bool, dict[str, Any]] | None = None
    if cure.change is not None and not trial.why_not:
        on_tape = trial.attempt(cure.change)
        if not on_tape[0]:
            return False, {SPAN: "the recorded step", **on_tape[1]}
    numbers = {**(on_tape[1] if on_tape else {}), **({"note": cure.note} if cure.note else {})}
    if again is not None and not again.why_not:
        outcome = again.run(edit, cure)
        if outcome.ran:
            seen = {"loss": outcome.loss} if outcome.loss is not None else {}
            why = {"why not": outcome.why_not} if outcome.why_not else {}
            return outcome.cured, {SPAN: outcome.span, **numbers, **seen, **why}
    if on_tape is not None and cure.exact:
        return True, {SPAN: "the recorded step", **numbers}
    reason = trial.why_not or (again.why_not if again is not None else "") or "the step can't run again with it"
    return None, {"why not": reason}


# -- those of each cause -----------------------------------------------------------------------------------------------


def cures(fault: Fault) -> Iterator[Cure]:
    """Those for this cause, the best first."""
    code = fault.code
    if code == "running-stats-nonfinite":
        for cure in _by_op(fault, forward_sign(fault.fact)):
            yield dataclasses.replace(cure, whole_run=True, change=None) if fault.fact.earlier_step else cure
        return
    yield from _SPECIAL.get(code, lambda fault: iter(()))(fault)
    if fault.fact.external is None:
        for cure in _by_op(fault, forward_sign(fault.fact) if code == "where-grad" else code):
            yield dataclasses.replace(cure, title=STOPGAP if code == "label-out-of-range" else cure.title)


def _by_op(fault: Fault, code: str) -> Iterator[Cure]:
    if fault.node is None:
        return
    if code == "empty-reduction":
        yield from _enough_elements(fault)
    if not fault.direct:
        yield from _in_library(fault)
        return
    if fault.name == "logdet":
        yield from _without_sign(fault)
    for wrap in _wraps(fault, code):
        yield from _wrapped(fault, wrap)


# -- an op's operands --------------------------------------------------------------------------------------------------

_EXPONENTIALS = frozenset({"exp", "expm1", "exp2", "sinh", "cosh"})
_SYMMETRIC = frozenset({"acos", "asin", "atanh", "erfinv", "special_erfinv"})


def _wraps(fault: Fault, code: str) -> Iterator[Wrap]:
    """What to make of the operands of an op, the gentlest first."""
    name = fault.name
    known = _OPERANDS.get(name)
    infinite = bool(fault.culprit.parents) or any(o.bad for o in fault.fact.operands)
    if known is not None and not (infinite and name not in ("softmax", "log_softmax")):
        yield from known(fault)
    elif name in _EXPONENTIALS:
        most = 5 if fault.half else 30
        yield from (Wrap({0: f"{{}}.clamp_max({most})"}), Wrap({0: f"{{}}.clamp(-{most}, {most})"}))
    if infinite or code in ("overflow", "inf-minus-inf", "zero-times-inf", "grad-overflow", "div-by-zero"):
        bound = f"{{}}.clamp(-{fault.large}, {fault.large})"
        if name in ("mul", "sub", "add", "rsub", "div", "mm", "bmm", "matmul", "addcmul"):
            yield from (Wrap({1: bound}), Wrap({0: bound}))
            yield Wrap({0: bound, 1: bound})
        else:
            yield Wrap({0: bound})
    if code == "overflow":
        small = "{}.clamp(-100, 100)" if fault.half else "{}.clamp(-1e4, 1e4)"
        yield from (Wrap({0: small}), Wrap({0: small, 1: small}))


def _floor(ordinary: float, half: float, place: int = 0) -> Callable[[Fault], Iterator[Wrap]]:
    return lambda fault: iter([Wrap({place: f"{{}}.clamp_min({fault.least(ordinary, half)})"})])


def _denominator(place: int) -> Callable[[Fault], Iterator[Wrap]]:
    def wraps(fault: Fault) -> Iterator[Wrap]:
        below = fault.fact.operand("other", "tensor2", "self" if place == 0 else "other")
        if below is not None and "float" not in below.dtype:
            yield Wrap({place: "{}.clamp_min(1)"})
            return
        least = fault.least(1e-6, 1e-3)
        if below is None:
            yield Wrap({place: f"max({{raw}}, {least})"})  # a number of Python's
        if below is None or (below.low is not None and below.low >= 0):
            yield Wrap({place: f"{{}}.clamp_min({least})"})
        yield Wrap({place: f"torch.where({{}}.abs() < {least}, {least}, {{again}})"})

    return wraps


def _inside(fault: Fault) -> Iterator[Wrap]:
    near = fault.least(1e-6, 1e-3) if fault.dtype != "bfloat16" else "1e-2"
    yield Wrap({0: f"{{}}.clamp(-1 + {near}, 1 - {near})"})


def _above_one(fault: Fault) -> Iterator[Wrap]:
    yield Wrap({0: f"{{}}.clamp_min(1 + {fault.least(1e-6, 1e-3)})"})


def _share(fault: Fault) -> Iterator[Wrap]:
    near = fault.least(1e-6, 1e-3)
    yield Wrap({0: f"{{}}.clamp({near}, 1 - {near})"})


def _open_rows(fault: Fault) -> Iterator[Wrap]:
    """Masked entries get a finite score: a row in which all are masked has a softmax then, which is made zero."""
    low = "-6e4" if fault.half else "-1e30"
    if fault.name == "softmax":
        yield Wrap({0: f"{{}}.clamp_min({low})"}, f"({{raw}} * ({{0}} > {low}))")
    yield Wrap({0: f"{{}}.clamp_min({low})"})


def _distinct(fault: Fault) -> Iterator[Wrap]:
    """Eigenvalues and singular values apart from one another."""
    device = next((o.device for o in fault.fact.operands), "cpu")
    where = "" if device == "cpu" else ", device={again}.device"
    yield Wrap({0: f"{{}} + torch.diag(1e-3 * torch.arange({{again}}.size(-1){where}))"})


def _without_sign(fault: Fault) -> Iterator[Cure]:
    """The log of the size of a determinant that may be below zero."""
    node, matrix = fault.node, None if fault.node is None else sources.operand(fault.node, 0)
    if node is None or matrix is None or fault.op is None:
        return
    call = fault.op.site, fault.op.call
    ops = fault.trial.ops(lambda o: o.name == "linalg_slogdet" and (o.site, o.call) == call)
    text = f"torch.linalg.slogdet({sources.source(fault.file, matrix)})[1]"
    yield Cure("", {node: text}, fault.trial.patch(ops, _positive))


def _positive(func: Any, args: Any, kwargs: Any) -> Any:
    sign, *others = func(*args, **kwargs)
    return (sign.abs(), *others)


def _power(fault: Fault) -> Iterator[Wrap]:
    base = fault.fact.operand("self")
    root = (fault.op.scalars if fault.op is not None else {}).get("exponent") == 0.5
    yield Wrap({0: f"{{}}.clamp_min({fault.least(1e-12 if root else 1e-6, 1e-4)})"})
    if base is not None and base.negatives:
        yield Wrap({0: "{}.abs()"})


_OPERANDS: dict[str, Callable[[Fault], Iterator[Wrap]]] = {
    **dict.fromkeys(("log", "log2", "log10"), _floor(1e-8, 1e-4)),
    **dict.fromkeys(("sqrt", "rsqrt"), _floor(1e-12, 1e-4)),
    **dict.fromkeys(("digamma", "lgamma", "polygamma"), _floor(1e-6, 1e-3)),
    **dict.fromkeys(_SYMMETRIC, _inside),
    **dict.fromkeys(("log1p",), lambda fault: iter([Wrap({0: f"{{}}.clamp_min(-1 + {fault.least(1e-6, 1e-3)})"})])),
    **dict.fromkeys(("xlogy", "special_xlogy"), _floor(1e-8, 1e-4, 1)),
    "special_xlog1py": lambda fault: iter([Wrap({1: f"{{}}.clamp_min(-1 + {fault.least(1e-6, 1e-3)})"})]),
    **dict.fromkeys(("div", "remainder", "fmod", "atan2"), _denominator(1)),
    "reciprocal": _denominator(0),
    **dict.fromkeys(("pow", "float_power"), _power),
    "hypot": lambda fault: iter([Wrap({1: f"{{}}.abs().clamp_min({fault.least(1e-6, 1e-3)})"})]),
    "acosh": _above_one,
    **dict.fromkeys(("logit", "special_ndtri"), _share),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _open_rows),
    "logaddexp": lambda fault: iter([Wrap(dict.fromkeys((0, 1), f"{{}}.clamp_min(-{fault.large})"))]),
    **dict.fromkeys(("linalg_eigh", "linalg_eig", "linalg_svd", "linalg_eigvals", "svd"), _distinct),
    **dict.fromkeys(("linalg_qr", "linalg_inv", "linalg_inv_ex", "linalg_slogdet", "linalg_det"), _distinct),
    "to": lambda fault: iter([Wrap({0: "{}.clamp(-65504, 65504)"})] if fault.fact.dtype == "float16" else []),
}


def _wrapped(fault: Fault, wrap: Wrap) -> Iterator[Cure]:
    """The wrap at each width, in the source and on the tape."""
    for nodes, ops in fault.like_nodes():
        changes: Changes = {}
        for node in nodes:
            parts = {place: _part(node, fault.name, place) for place in wrap.operands}
            literal = any(part is None or sources.is_number(part) for part in parts.values())
            if literal or isinstance(node, ast.AugAssign) and 0 in parts:
                continue
            for place, part in parts.items():
                assert part is not None
                changes[part] = _written(wrap.operands[place], part, "" if place else sources.name_of(node))
            if wrap.result:
                first = parts[0]
                if first is None or not sources.may_repeat(first):
                    changes = {}
                    break
                changes[node] = wrap.result.replace("{0}", sources.source(fault.file, first))
        if changes:
            yield Cure("", changes, fault.trial.patch(ops, _patched(wrap)))


def _part(node: Node, op: str, place: int) -> ast.expr | None:
    """The operand at this place of the op; `1 / x` is a reciprocal of its right side, `1 - x` an rsub of it."""
    reversed_ = op in ("reciprocal", "rsub") and isinstance(node, (ast.BinOp, ast.AugAssign))
    return sources.operand(node, 1 - place if reversed_ else place)


def _written(template: str, part: ast.expr, function: str) -> str:
    """A template as it is written there: an operand is repeated only where that changes nothing, and an op in place
    needs one that changes its operand in place."""
    if "{again}" in template:
        if sources.may_repeat(part):
            template = template.replace(", {again})", ", {raw})").replace("{again}", "{}")
        else:
            template = template.replace("{}", "(below := {raw})", 1).replace("{again}", "below")
    return _in_place(template) if function.endswith("_") and not function.startswith("_") else template


def _in_place(template: str) -> str:
    for name in ("clamp", "clamp_min", "clamp_max", "abs"):
        template = template.replace(f".{name}(", f".{name}_(")
    return template


def _patched(wrap: Wrap) -> Callable[..., Any]:
    """The wrap as a patch of an op: its templates, evaluated on what the op is given."""

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        operands, schema = list(args), schema_of(func)
        for place, template in wrap.operands.items():
            if len(operands) <= place or isinstance(operands[place], torch.Tensor) == template.startswith("max("):
                raise CannotReplay("the operand to be changed is a number in the code, or the edit is for one")
            writes = schema.names[place] in schema.writes
            operands[place] = _evaluated(_in_place(template) if writes else template, operands[place])
        out = func(*operands, **kwargs)
        return out if not wrap.result else _evaluated(wrap.result, out, args[0])

    return patch


def _evaluated(template: str, value: torch.Tensor, first: Any = None) -> Any:
    text = template.replace("{again}", "x").replace("{raw}", "x").replace("{}", "x").replace("{0}", "first")
    return eval(text, {"torch": torch, "x": value, "first": first})


def _in_library(fault: Fault) -> Iterator[Cure]:
    """The op lies in a function that the user calls: the same for the arguments of that call. Only the step itself can
    tell."""
    node = fault.node
    assert node is not None
    if sources.name_of(node) in ("log_prob", "rsample", "sample", "entropy", "cdf", "icdf"):
        yield from _distribution(fault)
    arguments = [*getattr(node, "args", ()), *(k.value for k in getattr(node, "keywords", ()))]
    arguments = [a for a in arguments if not sources.is_number(a) and not isinstance(a, (ast.Starred, ast.Constant))]
    shares = list(_share(fault)) if sources.name_of(node) == "log_prob" and fault.name in ("xlogy", "log1p") else []
    for wrap in (*shares, *_wraps(fault, fault.code)):  # of a Beta both ends are at fault
        template = next(iter(wrap.operands.values()))
        if not wrap.result and len(wrap.operands) == 1:
            for argument in arguments[:3]:
                yield Cure("", {argument: _written(template, argument, "")}, None)


_SCALES = {"Normal": 1, "LogNormal": 1, "Laplace": 1, "Gumbel": 1, "Cauchy": 1, "HalfNormal": 0, "HalfCauchy": 0,
           "Exponential": 0, "Poisson": 0, "StudentT": 2, "Gamma": 1, "Beta": 1}  # fmt: skip


def _distribution(fault: Fault) -> Iterator[Cure]:
    """A distribution with a scale that is not above zero: where it is made."""
    for call in [n for n in sources.nodes_of(fault.file) if isinstance(n, ast.Call) and sources.name_of(n) in _SCALES]:
        place = _SCALES[sources.name_of(call)]
        scale = call.args[place] if len(call.args) > place else sources.keyword(call, "scale", "rate", "df")
        if scale is not None and not sources.is_number(scale):
            yield Cure("Keep the scale of the distribution above zero.", {scale: "{}.clamp_min(1e-6)"}, None)


# -- infinities that are written in the code ---------------------------------------------------------------------------


def _finite_masks(fault: Fault) -> Iterator[Cure]:
    """A large finite number where a mask writes an infinity: at the op at fault, or where the mask is made."""
    origins = fault.probe.taint.origins
    masks = [origins[i] for i in sorted(origins.ancestors({fault.culprit.index})) if origins[i].op is not None]
    title = "Mask with a large finite number in place of an infinity."
    changes: Changes = {}
    for origin in [fault.culprit, *(o for o in masks if o.intended)]:
        op = origin.op
        if op is None or op.site is None or op.site.file != fault.file:
            continue
        node = sources.call_at(op.site, op.call, op.name)
        if node is None:
            continue
        sign = "-" if origin.made == "-inf" else ""
        own = {part: f"{_sign_of(part)}{fault.large}" for part in ast.walk(node) if _is_infinity(part)}
        inner = {id(x) for part in own for x in ast.walk(part) if x is not part}
        own = {part: text for part, text in own.items() if id(part) not in inner}
        value = sources.operand(node, 2) if op.name == "masked_fill" else None
        if not own and value is not None:
            own = {value: f"{sign}{fault.large}"}
        changes |= own
    if changes:
        yield Cure(title, changes, _finite_on_tape(fault))


def _is_infinity(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_infinity(node.operand)
    if isinstance(node, ast.Call) and sources.name_of(node) == "float" and len(node.args) == 1:
        value = node.args[0]
        return isinstance(value, ast.Constant) and str(value.value).strip().lstrip("+-").lower() in ("inf", "infinity")
    return isinstance(node, ast.Attribute) and node.attr in ("inf", "infty") and isinstance(node.value, ast.Name)


def _sign_of(node: ast.AST) -> str:
    if isinstance(node, ast.UnaryOp):
        return "" if _sign_of(node.operand) else "-"
    minus = isinstance(node, ast.Call) and str(getattr(node.args[0], "value", "")).strip().startswith("-")
    return "-" if minus else ""


def _finite_on_tape(fault: Fault) -> TapeChange:
    large = float(fault.large)

    def number(value: Any) -> Any:
        return math.copysign(large, value) if isinstance(value, float) and math.isinf(value) else value

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        return func(
            *map(_finite_tensor, map(number, args)), **{k: _finite_tensor(number(v)) for k, v in kwargs.items()}
        )

    def _finite_tensor(value: Any) -> Any:  # a number of the code comes as a tensor without dimensions
        if isinstance(value, torch.Tensor) and not value.dim() and can_be_nonfinite(value) and not value.requires_grad:
            return value.clamp(-large, large)
        return value

    fills = fault.trial.writing_infinities()
    return {op.index: patch for op in fills}, {}, 1.0


# -- too few elements, labels, frames ----------------------------------------------------------------------------------


def _enough_elements(fault: Fault) -> Iterator[Cure]:
    node = fault.node
    assert node is not None
    values = sources.operand(node, 0)
    if not fault.direct or not isinstance(node, ast.Call) or values is None:
        yield Cure("A mean of no elements is made zero.", {node: "torch.nan_to_num({raw})"}, None)
        return
    text = sources.source(fault.file, values)
    again = text if isinstance(values, sources.ATOMS) else f"({text})"
    dims = sources.operand(node, 1) or sources.keyword(node, "dim", "axis")
    size = f"{again}.numel()" if dims is None else f"{again}.size({sources.source(fault.file, dims)})"
    one_size = sources.may_repeat(values) and not isinstance(dims, (ast.Tuple, ast.List))
    change = fault.trial.patch(next(fault.like_nodes())[1], _corrected)
    if fault.name in ("std", "var", "std_mean", "var_mean"):
        known = sources.keyword(node, "correction")
        if sources.keyword(node, "unbiased") is not None:
            yield Cure("", sources.with_keyword(fault.file, node, "unbiased", "False"), change)
        elif one_size:
            most = "1" if known is None else "{raw}"
            yield Cure("", sources.with_keyword(fault.file, node, "correction", f"min({most}, {size} - 1)"), change)
        yield Cure("", sources.with_keyword(fault.file, node, "correction", "0"), change)
    elif fault.name == "mean" and one_size and sources.is_method(node):
        assert isinstance(node.func, ast.Attribute)
        yield Cure("", {node.func: f"{again}.sum", node: f"({{raw}} / max({size}, 1))"}, change)
    yield Cure("", {node: "torch.nan_to_num({raw})"}, change)


def _corrected(func: Any, args: Any, kwargs: Any) -> Any:
    """std and var with a correction that leaves a divisor above zero; the mean of nothing is zero."""
    if "correction" not in schema_of(func).names:
        return func(*args, **kwargs) if args[0].numel() else torch.nan_to_num(func(*args, **kwargs))
    out = func(*args, **kwargs)
    first = out[0] if isinstance(out, tuple) else out
    group = args[0].numel() / max(first.numel(), 1)
    return func(*args, **{**kwargs, "correction": min(kwargs.get("correction") or 1, group - 1)})


def _some_label(fault: Fault) -> Iterator[Cure]:
    """The mean over labels of which all are ignored."""
    node = fault.node
    if not isinstance(node, ast.Call):
        return
    scores, labels = sources.keyword(node, "input"), sources.keyword(node, "target")
    scores, labels = node.args[0] if node.args else scores, node.args[1] if len(node.args) > 1 else labels
    if labels is None or scores is None or not sources.may_repeat(labels):
        return
    text = sources.source(fault.file, labels)
    text = text if isinstance(labels, sources.ATOMS) else f"({text})"
    ignored = sources.keyword(node, "ignore_index")
    index = sources.source(fault.file, ignored) if ignored else str(fault.fact.scalars.get("ignore_index", -100))
    counts = f"({text} != {index})"
    change = fault.trial.patch(next(fault.like_nodes())[1], _no_loss)
    reduction = sources.keyword(node, "reduction")
    plain = reduction is None or getattr(reduction, "value", "") == "mean"
    if (
        sources.name_of(node) in ("cross_entropy", "nll_loss")
        and plain
        and not sources.keyword(node, "weight", "label_smoothing")
    ):
        changes = sources.with_keyword(fault.file, node, "reduction", '"sum"')
        yield Cure("", {**changes, node: f"({{raw}} / {counts}.sum().clamp_min(1))"}, change)
    if sources.may_repeat(scores):
        none = sources.source(fault.file, scores)
        none = none if isinstance(scores, sources.ATOMS) else f"({none})"
        yield Cure("", {node: f"({{raw}} if {counts}.any() else {none}.sum() * 0.0)"}, change)
    yield Cure("", {node: "torch.nan_to_num({raw})"}, change)


def _no_loss(func: Any, args: Any, kwargs: Any) -> Any:
    _, weight = func(*args, **kwargs)
    return args[0].sum() * 0.0, weight


def _zero_infinity(fault: Fault) -> Iterator[Cure]:
    title = "zero_infinity leaves such samples out. Better: drop them, or use a smaller stride."

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        loss, *more = func(**dict(named_arguments(schema_of(func), args, kwargs)) | {"zero_infinity": True})
        return torch.where(torch.isinf(loss), torch.zeros_like(loss), loss), *more

    ops = fault.trial.ops(lambda op: op.name == "ctc_loss")
    change = fault.trial.patch(ops, patch)
    if isinstance(fault.node, ast.Call) and sources.name_of(fault.node) == "ctc_loss":
        yield Cure(title, sources.with_keyword(fault.file, fault.node, "zero_infinity", "True"), change)
    yield from _constructed(fault, "CTCLoss", "zero_infinity", "True", True, title, change)


# -- what was made before the step -------------------------------------------------------------------------------------


def _constructed(
    fault: Fault, kind: str, argument: str, text: str, value: Any, title: str, change: TapeChange | None, **more: Any
) -> Iterator[Cure]:
    """An argument of the only call in the user's file that makes an object of this class."""
    file = more.pop("file", fault.file)
    made = [n for n in sources.nodes_of(file) if isinstance(n, ast.Call) and sources.name_of(n) == kind]
    if len(made) == 1 and not any(isinstance(n, (ast.Dict, ast.Starred)) for a in made[0].args for n in ast.walk(a)):
        setting = more.pop("setting", None) or (lambda: _attributes(kind, argument, value))
        place = 1 if argument == "lr" and len(made[0].args) > 1 else None
        changes: Changes = {made[0].args[place]: text} if place else sources.with_keyword(file, made[0], argument, text)
        yield Cure(title, changes, change, file=file, setting=setting, **more)


@contextlib.contextmanager
def _attributes(kind: str, name: str, value: Any) -> Iterator[None]:
    """Every module of a class with another value of an attribute, as its constructor would have set it."""
    modules = [m for m in gc.get_objects() if type(m).__name__ == kind and issubclass(type(m), nn.Module)]
    before = [(m, getattr(m, name)) for m in modules]
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, old in before:
            setattr(module, name, old)


def _groups(fault: Fault, name: str, value: Callable[[Any], Any]) -> Callable[[], contextlib.AbstractContextManager]:
    """The optimizers of the run with another setting; a snapshot puts it back."""

    def setting() -> contextlib.AbstractContextManager:
        for optimizer in fault.probe.optimizers.values():
            for group in optimizer.param_groups:
                group[name] = value(group[name])
        return contextlib.nullcontext()

    return setting


def _optimizer_eps(fault: Fault) -> Iterator[Cure]:
    line, kind = fault.facts.history.optimizer_line, fault.facts.history.optimizer
    title = "Give the optimizer an eps that this dtype can represent. Better: keep the weights in float32."

    def patch(func: Any, args: Any, kwargs: Any) -> Any:
        value, numerator, below, *rest = args
        below = [d.clamp_min(1e-4) for d in below] if isinstance(below, (list, tuple)) else below.clamp_min(1e-4)
        return func(value, numerator, below, *rest, **kwargs)

    ops = fault.trial.ops(lambda op: op.during == "optimizer" and op.name == "addcdiv")
    change = fault.trial.patch(ops, patch) if ops else None
    if line is not None and line.file and kind:
        setting = _groups(fault, "eps", lambda eps: 1e-4)
        more = {"file": line.file, "setting": setting, "exact": False}
        yield from _constructed(fault, kind, "eps", "1e-4", None, title, change, **more)


def _lower_rate(fault: Fault) -> Iterator[Cure]:
    history = fault.facts.history
    line, kind, rate = history.optimizer_line, history.optimizer, history.learning_rate
    if line is None or not line.file or not kind or rate is None:
        return
    groups = [group for optimizer in fault.probe.optimizers.values() for group in optimizer.param_groups]
    if any(group["lr"] != rate or "initial_lr" in group for group in groups):  # of a group's own, or of a schedule
        return
    for part in (10.0, 100.0):
        lower = functools.partial(operator.mul, 1 / part)
        more = {"file": line.file, "setting": _groups(fault, "lr", lower), "whole_run": True}
        yield from _constructed(fault, kind, "lr", f"{rate / part:g}", None, "Lower the learning rate.", None, **more)


def _initialized(fault: Fault) -> Iterator[Cure]:
    """Memory that was never written: another function that makes it."""
    if fault.fact.external is None:
        if isinstance(fault.node, ast.Call) and "empty" in (text := sources.source(fault.file, fault.node.func)):
            change: TapeChange = {op.index: _zeros for op in next(fault.like_nodes())[1]}, {}, 1.0
            yield Cure("Fill it with zeros.", {fault.node.func: text.replace("empty", "zeros")}, change)
        return
    owner, _, leaf = fault.fact.name.rpartition(".")
    for made in _made_in_class(fault, owner, leaf):
        file, call = made
        text = sources.source(file, call.func)
        name = text.replace("empty", "randn") if "empty" in text else "torch.randn"
        changes: Changes = {call.func: name, call: "0.02 * {raw}"}
        setting = _fill_parameters(fault, True)
        yield Cure("Initialize it.", changes, _filled(fault, True), False, file, setting)


def _zeros(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs).zero_()


def _made_in_class(fault: Fault, owner: str, leaf: str) -> Iterator[tuple[str, ast.Call]]:
    """The call of `torch.empty` that makes a parameter, in the class of its module."""
    for model in fault.probe.names.models.values():
        with contextlib.suppress(AttributeError, TypeError, OSError):
            kind = type(model.get_submodule(owner))
            file, first = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
            for node in sources.nodes_of(file or ""):
                if isinstance(node, ast.ClassDef) and node.lineno <= first + 3 and node.name == kind.__name__:
                    yield from ((file or "", call) for call in _empties(node, leaf))
                    return


def _empties(part: ast.AST, leaf: str) -> Iterator[ast.Call]:
    for node in ast.walk(part):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == leaf for t in node.targets):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and sources.name_of(call) in ("empty", "Tensor", "FloatTensor"):
                    yield call


def _loaded(fault: Fault) -> Iterator[Cure]:
    """Weights that were bad when they were loaded: filled below the line that loads them."""
    readers = [op.site.file for op in fault.culprit.readers if op.site is not None]
    line = fault.facts.history.optimizer_line
    for file in dict.fromkeys([*readers, *([line.file] if line is not None and line.file else [])]):
        calls = [
            n for n in sources.nodes_of(file) if isinstance(n, ast.Call) and sources.name_of(n) == "load_state_dict"
        ]
        statements = [s for c in calls if (s := sources.statement_at(file, c.lineno)) is not None]
        if len(calls) == 1 and statements and isinstance(calls[0].func, ast.Attribute):
            model, gap = sources.source(file, calls[0].func.value), " " * statements[0].col_offset
            fill = (
                f"{{raw}}\n{gap}for weight in {model}.state_dict().values():"
                f"\n{gap}    weight.nan_to_num_(0.0, 0.0, 0.0)"
            )
            title = "To go on, fill the bad elements. Better: load good weights, or reinitialize the layer."
            yield Cure(title, {statements[0]: fill}, _filled(fault), False, file, _fill_parameters(fault))


def _filled(fault: Fault, drawn: bool = False) -> TapeChange:
    """Every tensor from outside with its bad elements replaced, by 0 or small random numbers."""
    bad = [n for n, held in fault.trial.tape.externals.items() if held.grad_of is None and _has_bad(held.tensor)]
    return {}, dict.fromkeys(bad, lambda t: _filling(t, drawn)), 1.0


def _filling(tensor: torch.Tensor, drawn: bool) -> torch.Tensor:
    if not drawn:
        return tensor.nan_to_num(0.0, 0.0, 0.0)
    numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return (0.02 * numbers).to(tensor)


def _has_bad(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and can_be_nonfinite(tensor) and not bool(finite(tensor).all())


def _fill_parameters(fault: Fault, drawn: bool = False) -> Callable[[], contextlib.AbstractContextManager]:
    """The same in the models themselves; a snapshot puts them back."""

    def setting() -> contextlib.AbstractContextManager:
        with torch.no_grad():
            for model in fault.probe.names.models.values():
                for tensor in [*model.parameters(), *model.buffers()]:
                    if _has_bad(tensor):
                        tensor.copy_(_filling(tensor, drawn))
        return contextlib.nullcontext()

    return setting


def _finite_batch(fault: Fault) -> Iterator[Cure]:
    """The batch where it enters: an argument of a call in that line."""
    where, title = fault.fact.where, "As a stopgap, fill the missing values. Better: repair the data where it is read."
    statement = sources.statement_at(where.file, where.line) if where.file and where.line else None
    if statement is None:
        return
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)]
    if fault.fact.external == "input":
        calls.reverse()  # the model's call stands within that of the loss
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):  # written into the batch
        value = "0.0" if _is_infinity(statement.value) else "{}.nan_to_num(0.0, 0.0, 0.0)"
        yield Cure(title, {statement.value: value}, _filled(fault), exact=True, file=where.file or "")
        return
    called = {id(part) for call in calls for part in (call.func, getattr(call.func, "value", None))}
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    arguments: list[ast.expr] = [a for call in calls for a in (*call.args, *(k.value for k in call.keywords))]
    arguments = [a for a in arguments if isinstance(a, (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp))]
    arguments += [name for name in names if id(name) not in called and name not in arguments]
    for argument in arguments[:6]:
        changes: Changes = {argument: "{}.nan_to_num(0.0, 0.0, 0.0)"}
        yield Cure(title, changes, _filled(fault), exact=len(arguments) == 1, file=where.file or "")


def _smaller_loss(fault: Fault) -> Iterator[Cure]:
    """A loss from which backward starts smaller."""
    if fault.direct and fault.name in ("div", "reciprocal", "log", "pow", "sqrt"):
        yield from _by_op(fault, "div-by-zero")
    where = fault.detection.target.where
    statement = sources.statement_at(where.file, where.line) if where.file and where.line else None
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)] if statement is not None else []
    for call in calls:
        if sources.name_of(call) == "backward" and isinstance(call.func, ast.Attribute) and not call.args:
            loss = call.func.value
            product = isinstance(loss, ast.BinOp) and isinstance(loss.op, (ast.Mult, ast.Div))
            template = "{raw} / 1024" if product else "({} / 1024)" if isinstance(loss, sources.ATOMS) else "{} / 1024"
            yield Cure(
                "Let backward start from a smaller loss. Better: bfloat16, or torch.amp.GradScaler.",
                {loss: template},
                ({}, {}, 1 / 1024),
                file=where.file or "",
                note="all gradients are 1,024 times smaller: SGD needs another learning rate",
            )


def _safe_operand(fault: Fault) -> Iterator[Cure]:
    """A tensor from outside whose bad values are dropped later: another number there."""
    if fault.fact.external is not None and fault.node is not None and fault.direct:
        for place in (1, 0):
            for cure in _wrapped(fault, Wrap({place: "{}.nan_to_num(0.0, 0.0, 0.0)"})):
                title = "Fill the missing values before they are used: what is dropped later may be any number."
                yield dataclasses.replace(cure, title=title)


def _open_padding(fault: Fault) -> Iterator[Cure]:
    """The mask that a module of torch's takes."""
    padding = "key_padding_mask", "src_key_padding_mask", "memory_key_padding_mask"
    for name in (*padding, "attn_mask", "mask", "src_mask"):
        mask = None if fault.node is None or fault.direct else sources.keyword(fault.node, name)
        if mask is not None:
            opened = _written("{} & ~{again}.all(-1, keepdim=True)", mask, "")
            yield Cure("Leave one entry open where all are masked.", {mask: opened}, None)


# -- values that float16 does not hold ---------------------------------------------------------------------------------


def _in_float32(fault: Fault) -> Iterator[Cure]:
    """The op at fault in float32: its operands cast; without autocast, which would cast them back; and, where the model
    is in float16 itself, the statement's result cast back."""
    node, statement = fault.node, fault.site and sources.statement_at(*fault.site[:2])
    if fault.fact.dtype != "float16" or node is None or statement is None or isinstance(node, ast.AugAssign):
        return
    parts = [p for p in sources.operands(node) if not isinstance(p, ast.Constant) and not sources.is_number(p)]
    products = fault.direct or isinstance(node, ast.BinOp) or sources.name_of(node) in AUTOCAST
    one = fault.direct and len(fault.fact.operands) == 1  # tensor, of perhaps two parts: the tape does not tell which
    choices, exact = [parts[:1], parts[1:2]] if one else [parts, parts[:1]], len(parts) == 1 or products and not one
    indent = linecache.getline(fault.file, statement.lineno)[: statement.col_offset]
    device = next((o.device.partition(":")[0] for o in fault.fact.operands), "cpu")
    head = f'with torch.autocast("{device}", enabled=False):\n{indent}    {{raw}}'
    half = any(p.dtype == torch.float16 for m in fault.probe.names.models.values() for p in m.parameters())
    trial, alone = fault.trial, not indent.strip() and not hasattr(statement, "body")
    for choice in filter(None, choices):
        cast: Changes = dict.fromkeys(choice, "{}.float()")
        if half or fault.direct and fault.name not in AUTOCAST:
            own = None if half else trial.in_float32(next(fault.like_nodes())[1])
            yield Cure("Compute it in float32.", cast, own, exact)
        if half and (value := getattr(statement, "value", None)) is not None:
            yield Cure("Compute it in float32, and cast the result.", {**cast, value: "{}.half()"})
        elif not half and alone:
            line = trial.in_float32(trial.ops(lambda o: o.site == fault.site))
            yield Cure("Compute it in float32, without autocast.", {**cast, statement: head}, line, exact)


_SPECIAL: dict[str, Callable[[Fault], Iterator[Cure]]] = {
    "inf-minus-inf": _finite_masks,
    "zero-times-inf": _finite_masks,
    "fully-masked-softmax": _open_padding,
    "all-labels-ignored": _some_label,
    "ctc-infeasible": _zero_infinity,
    "optimizer-eps-underflow": _optimizer_eps,
    "lr-divergence": _lower_rate,
    "uninitialized-memory": _initialized,
    "parameter-nonfinite": _loaded,
    "input-nonfinite": _finite_batch,
    "grad-overflow": _smaller_loss,
    "where-grad": _safe_operand,
    "overflow": _in_float32,
}
