"""Two dtypes in one op, or one without a kernel: which tensor, and where its dtype comes from.

The message names dtypes, never a tensor. The frames show it: the tensor with the dtype of the message that is not the
dtype of the module's weights, or else of most of the user's parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import phase
from nbdebug.observe.sources import edit_of, nodes_of, with_keyword
from nbdebug.report import Link
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    bindings,
    callee_name,
    expression,
    fact,
    is_tensor,
    kind_of_message,
    operands,
    parsed_expression,
    value_of,
    value_parts,
    word_set,
)
from nbdebug.tools.errors.operands import (
    ExpressionBinding,
    OpArgument,
    OperandNames,
    argument_texts,
    is_instance,
    library_frames,
    model_name,
    op_arguments,
    origin_of,
    raised_by_user,
    raised_facts,
    weights,
    where_of,
)
from nbdebug.tools.errors.rules import ArgumentFact, TensorFact, TriedFix, ValueOrigin, bracketed, word_pairs
from nbdebug.tools.errors.rules.tensor_attributes import CASTS, DtypeFacts, cast
from nbdebug.tools.errors.sandbox import computed_operands, edited, rerun

PATTERNS = {
    "autocast": "are unsafe to autocast",
    "array": r"can't convert np\.ndarray of type|Could not infer dtype of|too many dimensions '\w+'|"
    r"Got unsupported ScalarType|must be Tensor, not (?:numpy\.\w+|list|tuple|float|int|Series|DataFrame)\b|"
    "byte order different from the native",
    "overflow": r"value cannot be converted to type \S+ without overflow",
    "classes": r"expected target dtype to be Long|\"nll_loss\w*\" not implemented for|"
    r"expected scalar type Long but found \w+|Expected object of scalar type Long",
    "probable": "Expected floating point type for target with class probabilities",
    "index": "argument #1 'indices' to have one of the following scalar types|tensors used as indices must be|"
    r"Expected dtype int\d+(?:/int\d+| or int\d+)? for index|one_hot is only applicable to index|"
    "Expected a long tensor for index|argument #1 'indices' to have scalar type Long",
    "mask": "with (?:two bool tensors|a bool tensor) is not supported|on a bool tensor is not supported|"
    "only supports boolean masks|expected condition to be a boolean tensor|"
    r"only bool and floating types of \w+ are supported|attn_mask dtype to be bool",
    "gradient": "[Oo]nly Tensors of floating point",
    "in-place": "can't be cast to the desired output type",
    "half": "not implemented for '(?:Half|BFloat16)'|Low precision dtypes not supported",
    "integers": "not implemented for '(?:Float|Double)'",
    "complex": r"not implemented for 'Complex\w+'|not supported for complex|does(?:n't| not) support complex",
    "whole": r"not implemented for '(?:Long|Int|Short|Byte|Char|Bool|U?Int\d+)'|could not infer output dtype|"
    "std and var only support floating|Integral inputs not supported|only supports floating-point dtypes for input|"
    "must be either a floating point or complex dtype|result type Long can't",
    "mixed": r"must have the same dtype|to have the same dtype|expected scalar type \w+ but found \w+|"
    r"Input type \(.+?\) and (?:bias|weight) type \(.+?\) should be the same|mixed dtype \(|"
    r"Found dtype \w+ but expected \w+|RNN input dtype|same dtype, but got|dtypes match, got|"
    r"Expected self\.dtype to be equal to src\.dtype|must have the same scalar type|"
    r"expected dtype \S+ for `\w+` but got dtype|Expected object of scalar type \w+ but got|same type as input|"
    r"all inputs must share same datatype|input must have the type \S+ got type",
}
"""(kind, pattern), the narrow before the wide."""

NAMES = {
    word: dtype
    for dtype, words in {
        "int64": "long, long int",
        "int32": "int",
        "int16": "short",
        "uint8": "byte, unsigned char",
        "int8": "char, signed char",
        "bool": "bool",
        "float16": "half, c10::half",
        "bfloat16": "bfloat16, c10::bfloat16",
        "float32": "float",
        "float64": "double",
        "complex64": "complexfloat, c10::complex<float>",
        "complex128": "complexdouble, c10::complex<double>",
        "complex32": "complexhalf",
    }.items()
    for word in words.split(", ")
}
"""torch's words for a dtype (ScalarType, C++ type, old tensor type), in lower case → its name."""
_WORD = (
    r"(?:torch\.)?(?:cuda\.|mps\.|xpu\.)?(c10::complex<\w+>|c10::\w+|unsigned char|signed char|long int|"
    r"Complex(?:Float|Double|Half)|BFloat16|Half|Float|Double|Long|Int|Short|Byte|Char|Bool|"
    r"u?int\d+|float\d+|bfloat16|complex\d+|long|double|float|int|bool)(?:Tensor)?"
)


def kind_of(message: str) -> str | None:
    """The kind of dtype error of a message, None for other messages."""
    return kind_of_message(PATTERNS, message)


def dtypes_in(message: str) -> list[str]:
    """The dtypes that a message names, in order: "got Double and Float" → ["float64", "float32"]."""
    words = re.findall(rf"(?<![\w.:]){_WORD}(?![\w:])", message)
    return [NAMES.get(word.lower(), word) for word in words]


def on_two_devices(message: str) -> bool:
    """Whether the old names of tensor types mean two devices: torch.cuda.FloatTensor and torch.FloatTensor."""
    types = re.findall(r"torch\.(cuda\.|mps\.|xpu\.|)\w+Tensor", message)
    return len(set(types)) > 1


def detect_in_worker(facts: DtypeFacts, context: ErrorContext) -> DtypeFacts | None:
    """`self.net(torch.from_numpy(row))`: the module is in the data set, the dtypes are in the message."""
    dtypes = dtypes_in(context.message)
    if not context.users:
        return None
    frame = context.users[0]
    for call in ast.walk(expression(frame) or ast.Module([], [])):
        module = value_of(call.func, frame) if isinstance(call, ast.Call) and call.args else None
        if not isinstance(call, ast.Call) or not is_instance(module, nn.Module):
            continue
        own = [w for w in weights(module) if w.dtype.is_floating_point]  # type: ignore[arg-type]
        dtype = str(own[0].dtype).removeprefix("torch.") if own else ""
        others = [word for word in dtypes if word != dtype]
        if dtype not in dtypes or not others:
            continue
        text, path = ast.unparse(call.args[0]), OperandNames(context).module(module)
        maker = next(
            (callee_name(n) for n in value_parts(call.args[0]) if callee_name(n) in MAKERS.get(others[0], ())), ""
        )
        partner = ArgumentFact(fact(f"{path}.weight", own[0]), "weight", path)
        odd = ArgumentFact(TensorFact(text, (), others[0], "cpu"))
        origin = ValueOrigin(text, text, maker, frame.where) if maker else None
        return dataclasses.replace(facts, op=path, expected=dtype, odd=odd, partner=partner, origin=origin)
    return None


def _made_of_floats(context: ErrorContext) -> TriedFix | None:
    """`torch.tensor([1, 2], requires_grad=True)` with a dtype."""
    frame = context.frame
    for call in ast.walk(expression(frame) or ast.Module([], [])) if frame is not None else ():
        names = [keyword.arg for keyword in call.keywords] if isinstance(call, ast.Call) else []
        if isinstance(call, ast.Call) and "requires_grad" in names and frame is not None:
            edit = edit_of(frame.site.file, with_keyword(frame.site.file, call, "dtype", "torch.float32"))
            return TriedFix("", edit=edit) if edit is not None else None
    return None


FLOAT_TARGETS = (
    "binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "gaussian_nll_loss poisson_nll_loss soft_margin_loss"
).split()
CLASS_TARGETS = ("cross_entropy", "nll_loss", "multi_margin_loss")


def detect(context: ErrorContext) -> DtypeFacts | None:
    """The facts of an error about dtypes; None of any other."""
    kind = kind_of(context.message)
    if kind is None or raised_by_user(context) or on_two_devices(context.message):
        return None
    if kind == "array":
        return array_facts(context, _default(context))
    dtypes = dtypes_in(context.message)
    parts = op_arguments(context)
    parts += [OpArgument(value, text) for text, value in computed_operands(context, {part.name for part in parts})]
    if (
        not parts
        or kind == "mixed"
        and not any(_name(part) in dtypes for part in parts)
        or (phase(context.trail) == "backward")
    ):
        parts = parts + _variables(context, parts)
    if not parts and context.carried:
        return detect_in_worker(DtypeFacts(raised_facts(context), kind, default=_default(context)), context)
    kind = _by_function(kind, parts, context)
    if kind == "gradient" and (cure := _made_of_floats(context)) is not None:
        return DtypeFacts(raised_facts(context), kind, cure=cure)
    facts = DtypeFacts(
        raised_facts(context), kind, op=_op(context), named=dtypes[-1] if dtypes else "", default=_default(context)
    )
    odd, partner, expected = _chosen(kind, parts, dtypes, facts.default, context)
    if odd is None:
        return dataclasses.replace(facts, expected=expected)
    if odd.value.dtype.is_complex and kind == "mixed":
        kind = "complex"
    mine = _in_users_names(odd, context)
    usual = partner is not None and partner.owner is not None and _name(odd) == str(torch.get_default_dtype())[6:]
    weight = mine if type(mine.value) is nn.Parameter else partner if usual else None
    source = of_model(weight, context) if weight is not None else origin(mine, context)
    brought = passed(mine, context) if weight is not None else None
    if brought is not None:
        source = brought if source is None else dataclasses.replace(source, way=(*source.way, *brought.way))
    model = next((p.name for p in (mine, partner) if p is not None and p.owner is not None), "")
    facts = dataclasses.replace(facts, kind=kind, origin=source, model=model_name(model, context) if model else "")
    return dataclasses.replace(
        facts,
        odd=mine.plain(read=True),
        partner=partner.plain(read=True) if partner else None,
        expected=expected,
        cure=_cure(kind, mine, expected, parts, context),
    )


def _name(argument: OpArgument) -> str:
    return str(argument.value.dtype).removeprefix("torch.")


def _variables(context: ErrorContext, parts: list[OpArgument]) -> list[OpArgument]:
    """The other tensors of the user's frames, for an error that is raised elsewhere."""
    visited, variables, names = {id(part.value) for part in parts}, [], OperandNames(context)
    for name, value, _ in context.variables():
        if is_tensor(value) and id(value) not in visited:
            visited.add(id(value))
            variables.append(dataclasses.replace(names.argument(value, ""), name=name, known=True))
    return variables


def _default(context: ErrorContext) -> str:
    """The dtype that most parameters of the user's models have, else torch's default."""
    counts = Counter(
        str(p.dtype).removeprefix("torch.")
        for model in context.owners.models.values()
        for p in weights(model)
        if p.dtype.is_floating_point
    )
    return counts.most_common(1)[0][0] if counts else str(torch.get_default_dtype()).removeprefix("torch.")


def _op(context: ErrorContext) -> str:
    """What failed: the module of torch's, else torch's function."""
    for frame in library_frames(context):
        if frame.module is not None and type(frame.module).__name__ != "GraphModule":
            return OperandNames(context).module(frame.module)
    functions = [f.site.function for f in library_frames(context) if f.site.file == nn.functional.__file__]
    ran = context.ran
    ran = ran.value if isinstance(ran, (ast.Expr, ast.Return, ast.Assign)) else ran
    return functions[-1] if functions else callee_name(ran) if ran is not None else ""


def _by_function(kind: str, parts: list[OpArgument], context: ErrorContext) -> str:
    """The kind by the function: a loss with a target of the wrong dtype."""
    functions = {frame.site.function for frame in library_frames(context)}
    target = next((part for part in parts if part.role == "target"), None)
    if target is None:
        return kind
    if (
        functions & set(CLASS_TARGETS)
        and kind in ("mixed", "index", "whole")
        and (target.value.dtype.is_floating_point or _name(target) in ("int32", "int16", "int8"))
    ):
        return "classes"
    if functions & set(FLOAT_TARGETS) and not target.value.dtype.is_floating_point:
        inputs = next((part for part in parts if part.role == "input"), target)
        return "probable" if inputs.value.dtype.is_floating_point else kind
    return kind


def _chosen(
    kind: str, parts: list[OpArgument], dtypes: list[str], default: str, context: ErrorContext
) -> tuple[OpArgument | None, OpArgument | None, str]:
    """(the tensor to change, the other operand, the dtype that works)."""
    if kind == "mixed":
        return _mixed(parts, dtypes, default)
    target = next((part for part in parts if part.role == "target"), None)
    inputs = next((part for part in parts if part.role == "input"), None)
    if kind in ("classes", "probable"):
        fits = target or _of(parts, dtypes[-1:])
        return fits, inputs, "int64" if kind == "classes" else _name(inputs) if inputs else default
    if kind == "index":
        index = _index(parts, context)
        return index, None, "bool" if index is not None and _is_mask(index, parts) else "int64"
    if kind == "mask":
        return _mask(parts, dtypes, context, default)
    own = [p for p in parts if kind == "half" and type(p.value) is nn.Parameter and _name(p) in dtypes[-1:]]
    if own:  # the model is in half precision: its inputs alone would not fit it
        return own[0], None, "float32"
    if kind in ("half", "complex", "whole", "gradient", "overflow"):
        whole = kind in ("whole", "gradient") and not dtypes
        fits = next((p for p in parts if not _floating(p)), None) if whole else _of(parts, dtypes[-1:])
        return fits, None, "float32" if kind in ("half", "overflow") else default
    if kind == "integers":
        return _of(parts, dtypes[-1:]), None, "bool" if "bitwise" in context.message else "int64"
    if kind == "in-place":
        return _of(parts, dtypes[1:2]), None, dtypes[0]
    return inputs, None, default


def _index(parts: list[OpArgument], context: ErrorContext) -> OpArgument | None:
    """The tensor used as an index with a wrong dtype: in the brackets or the arguments, not what is indexed."""
    message = context.message
    fits = (
        ("int64",)
        if "Long" in message and "Int" not in message
        else ("int64", "int32")
        if "dtype int" in message or ("'indices'" in message)
        else ("int64", "int32", "bool", "uint8")
    )
    indices = [p for p in parts if p.owner is None and _name(p) not in fits]
    inside = [p for p in indices if p.role in ("indices", "index", "input")]
    ran = context.ran
    ran = ran.value if isinstance(ran, (ast.Expr, ast.Return, ast.Assign)) else ran
    keys = [ran.slice] if isinstance(ran, ast.Subscript) else ran.args if isinstance(ran, ast.Call) else []
    texts = {ast.unparse(part) for key in keys for part in ast.walk(key) if isinstance(part, ast.expr)}
    return next(iter(inside or [p for p in indices if p.name in texts]), None)


def _is_mask(index: OpArgument, parts: list[OpArgument]) -> bool:
    """Whether it is a mask: zeros and ones in the shape of what is indexed."""
    fact, shape = index.fact(read=True), tuple(index.value.shape)
    return (
        fact.low is not None
        and fact.low >= 0
        and fact.high is not None
        and fact.high <= 1
        and any(p is not index and shape and tuple(p.value.shape[: len(shape)]) == shape for p in parts)
    )


def _of(parts: list[OpArgument], dtypes: list[str]) -> OpArgument | None:
    return next(
        (p for p in parts if _name(p) in dtypes and p.owner is None),
        next((p for p in parts if _name(p) in dtypes), None),
    )


def _floating(part: OpArgument) -> bool:
    return part.value.dtype.is_floating_point or part.value.dtype.is_complex


def _mixed(
    parts: list[OpArgument], dtypes: list[str], default: str
) -> tuple[OpArgument | None, OpArgument | None, str]:
    """A module computes in the dtype of its weights; without weights the odd one differs from the model."""
    fits = [p for p in parts if _name(p) in dtypes or not dtypes]
    own = [
        p
        for p in parts
        if type(p.value) is nn.Parameter and p.value.dtype.is_floating_point and (p.owner is not None or p.role)
    ]  # a parameter in the user's own line is an operand
    others = [p for p in fits if not any(p is w for w in own)]
    if own:
        partner = next((w for w in own if w.role == "weight"), own[0])
        unlike = [p for p in [*others, *own] if _name(p) != _name(partner)]
        unlike.sort(key=lambda p: p.owner is not None)
        return unlike[0] if unlike else None, partner, _name(partner)
    unlike = sorted((p for p in others if _name(p) != default), key=lambda p: not _floating(p))
    if not unlike:
        return None, None, default
    other = next((p for p in others if _name(p) != _name(unlike[0])), None)
    return unlike[0], other, _name(other) if other is not None and _floating(other) else default


def _mask(
    parts: list[OpArgument], dtypes: list[str], context: ErrorContext, default: str
) -> tuple[OpArgument | None, OpArgument | None, str]:
    """Masks in arithmetic must become numbers; a mask of another dtype must become bool."""
    if "bool tensor" in context.message and "condition" not in context.message:
        bools = [p for p in parts if _name(p) == "bool"]
        if "a bool tensor" in context.message:  # the other side is no mask: the operand itself comes after its parts
            return bools[-1] if bools else None, None, default
        return bools[0] if bools else None, bools[1] if len(bools) > 1 else None, default
    masks = [p for p in parts if "mask" in p.role and _name(p) != "bool"]
    wrong = dtypes[-2:-1] if "attn_mask" in context.message else dtypes[-1:]
    fits = masks or [p for p in parts if _name(p) in wrong and p.role in ("", "condition")]
    return next(iter(fits), None), None, "bool"


def _in_users_names(odd: OpArgument, context: ErrorContext) -> OpArgument:
    """For a tensor only in torch's frames: the one of its dtype that the user's line passes to the model."""
    if odd.known:
        return odd
    for frame in context.users:
        for text, value in operands(frame):
            if is_tensor(value) and value.dtype == odd.value.dtype and type(value) is not nn.Parameter:
                return dataclasses.replace(odd, value=value, name=text, known=True)
    return odd


def _cure(kind: str, odd: OpArgument, expected: str, parts: list[OpArgument], context: ErrorContext) -> TriedFix | None:
    """The cast that works, tried on the failing op; a cast helps no weight, gradient, or op without a kernel."""
    dtype = getattr(torch, expected, None)
    if odd.owner is not None and type(odd.value) is nn.Parameter or kind in ("autocast", "overflow") or dtype is None:
        return None
    change = (lambda t: t.detach().abs()) if kind == "complex" else (lambda t: t.detach().to(dtype))
    method = "abs()" if kind == "complex" else cast(expected)
    code = f"{bracketed(odd.name)}.{method}"
    if type(odd.value) is nn.Parameter:
        code = f"nn.Parameter({odd.name}.detach().{method})"
    if odd.value.is_meta or odd.value.numel() > 1_000_000 or type(odd.value) not in (torch.Tensor, nn.Parameter):
        return TriedFix(code)
    alike = [odd]
    alone = kind == "mask" and odd.value.dtype != torch.bool
    if kind not in ("classes", "probable", "index", "in-place") and not alone:
        alike += [p for p in parts if p.value.dtype == odd.value.dtype and type(p.value) is not nn.Parameter]
    try:
        changed = [(p, change(p.value)) for p in alike]
    except RuntimeError:  # a tensor that has left its vmap or grad can't be computed with
        return TriedFix(code)
    trial = rerun(context, {key: new for p, new in changed for key in (id(p.value), p.name)})
    if trial is not None and not trial.worked:
        return TriedFix(code, False, trial.after)
    return edited(context, code, {p.name: method for p in alike if p.known}, trial)


# -- where a dtype comes from ------------------------------------------------------------------------------------------

_TAKES = word_set("from_numpy tensor as_tensor asarray")
MAKERS = {
    dtype: word_set(calls) | (_TAKES if not dtype.startswith("complex") else frozenset())
    for dtype, calls in {
        "float64": "double DoubleTensor",
        "int64": "long arange randint LongTensor argmax argmin argsort one_hot randperm multinomial bincount nonzero "
        "searchsorted bucketize",
        "float32": "float zeros ones empty rand randn full linspace FloatTensor Tensor rand_like randn_like eye mean "
        "softmax sigmoid",
        "float16": "half HalfTensor",
        "bfloat16": "bfloat16",
        "bool": "bool isnan isfinite logical_not logical_and eq ne ge gt le lt",
        "int32": "int IntTensor",
        "int16": "short",
        "uint8": "byte ByteTensor",
        "complex64": "fft fft2 fftn rfft rfft2 stft complex view_as_complex polar eig eigvals tensor",
        "complex128": "fft fft2 rfft stft complex from_numpy tensor eig eigvals",
    }.items()
}
"""dtype → the calls that can give it."""


ALIASES = word_pairs(
    "long:int64 int:int64 int_:int64 float:float32 double:float64 half:float16 short:int16 cfloat:complex64 "
    "cdouble:complex128 bool_:bool byte:uint8"
)
"""Further names of a dtype, behind `torch.` or `np.`; `float` alone is float64 in NumPy and float32 in torch."""


def origin(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """The binding that set the dtype, and the way from there; None where the sources don't show it."""
    if not odd.known:
        return None
    dtype = odd.value.dtype
    name = str(dtype).removeprefix("torch.")

    def is_origin(node: ast.expr) -> bool:
        return _makes(node, name) or _module(node, dtype, context) is not None

    def fits(value: Any) -> bool:
        """A tensor on the way must have the dtype; an array and other objects may be its source."""
        return value.dtype == dtype if is_tensor(value) else not is_instance(value, (int, float, str))

    way = origin_of(odd.name, context, is_origin, fits)
    result = _origin(way, context, dtype) if way else _at_once(odd, context, is_origin) or _autocast(odd, context)
    return result or passed(odd, context)


def passed(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """The bindings and arguments on a tensor's way to the failing line, where no line shows what set its dtype."""

    def fits(value: Any) -> bool:
        return value.dtype == odd.value.dtype if is_tensor(value) else not is_instance(value, (int, float, str))

    way = origin_of(odd.name, context, lambda node: False, fits, partial=True) if odd.known else ()
    links = tuple(Link(binding.phrase, binding.where) for binding in way[-6:])
    return ValueOrigin(way[0].name, way[0].code, "", way[0].where, links) if way else None


def of_model(weight: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """Where the dtype of a model was changed: `.half()` on it, as a statement or after its constructor."""
    root, name = model_name(weight.name, context), str(weight.value.dtype).removeprefix("torch.")

    def is_origin(node: ast.expr) -> bool:
        return callee_name(node) in ("to", *(call for call, dtype in CASTS.items() if dtype == name)) and _makes(
            node, name
        )

    way = origin_of(root, context, is_origin)
    if way:
        return _origin(way, context, weight.value.dtype)
    for frame in context.users:
        for node in nodes_of(frame.site.file):
            if (
                isinstance(node, ast.Call)
                and is_origin(node)
                and isinstance(node.func, ast.Attribute)
                and (ast.unparse(node.func.value) == root)
            ):
                binding = ExpressionBinding(root, ast.unparse(node), where_of(frame.site.file, node), node)
                return ValueOrigin(
                    root, binding.code, callee_name(node), binding.where, (Link(f"`{binding.code}`", binding.where),)
                )
    return None


def _origin(way: tuple[ExpressionBinding, ...], context: ErrorContext, dtype: torch.dtype) -> ValueOrigin:
    first = way[0]
    maker = first.maker or first.node
    call = callee_name(maker) or ("comparison" if isinstance(maker, ast.Compare) else "")
    path = _module(maker, dtype, context)
    stated = next((ast.unparse(k.value) for k in getattr(maker, "keywords", []) if k.arg == "dtype"), "")
    links = tuple(Link(binding.phrase, binding.where) for binding in way)
    return ValueOrigin(path or first.name, first.code, "module" if path else call, first.where, links, stated)


def _at_once(odd: OpArgument, context: ErrorContext, is_origin: Any) -> ValueOrigin | None:
    """An operand that is not a variable but is created in the failing line."""
    node = parsed_expression(odd.name)
    maker = next((part for part in value_parts(node) if is_origin(part)), None) if node is not None else None
    if maker is None or isinstance(node, (ast.Name, ast.Attribute)):
        return None
    path = _module(maker, odd.value.dtype, context)
    call = callee_name(maker) or "comparison"
    stated = next((ast.unparse(k.value) for k in getattr(maker, "keywords", []) if k.arg == "dtype"), "")
    return ValueOrigin(path or odd.name, odd.name, "module" if path else call, context.users[0].where, (), stated)


def _module(node: ast.expr, dtype: torch.dtype, context: ErrorContext) -> str | None:
    """The path of a module whose weights have the dtype, where the expression is a call of it."""
    if not isinstance(node, ast.Call) or not dtype.is_floating_point or dtype == torch.get_default_dtype():
        return None
    module = next((value for frame in context.users[:3] if (value := value_of(node.func, frame)) is not UNKNOWN), None)
    if module is None or not is_instance(module, torch.nn.Module):
        return None
    own = [p.dtype for p in weights(module) if p.dtype.is_floating_point]
    return OperandNames(context).module(module) if own and own[-1] == dtype else None


def _autocast(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """A half precision tensor that was computed in an autocast block and used after its end."""
    if odd.value.dtype not in (torch.float16, torch.bfloat16) or not context.users:
        return None
    for frame in context.users:
        for node in nodes_of(frame.site.file):
            heads = node.items if isinstance(node, ast.With) else []
            if any("autocast" in ast.unparse(item.context_expr) for item in heads) and bindings(node, odd.name):
                where = where_of(frame.site.file, heads[0].context_expr)
                link = Link(f"`{odd.name}` was computed under autocast, and is used after its end", where)
                return ValueOrigin(odd.name, ast.unparse(heads[0].context_expr), "autocast", where, (link,))
    return None


def _makes(node: ast.expr, name: str) -> bool:
    """Whether this expression itself can give the dtype."""
    if isinstance(node, ast.Compare):
        return name == "bool"
    if not isinstance(node, ast.Call):
        return False
    stated = [k.value for k in node.keywords if k.arg == "dtype"]
    if callee_name(node) in ("to", "type", "astype"):
        return any(_named(arg, name) for arg in (*node.args, *stated))
    if stated:
        return _named(stated[0], name)
    return callee_name(node) in MAKERS.get(name, frozenset())


def _named(node: ast.expr, name: str) -> bool:
    text = ast.unparse(node).strip("'\"")
    last = text.split(".")[-1]
    return last == name or ALIASES.get(last) == name or text == "float" and name == "float64"


def is_array(value: Any) -> bool:
    """Whether its class is a NumPy array."""
    return issubclass(type(value), np.ndarray)


MAX_ENTRIES = 100_000
"""Entries of an array or a list that are searched for one that is not a number."""
_NUMBERS = (int, float, bool, complex)


def array_facts(context: ErrorContext, default: str) -> DtypeFacts | None:
    """Which array it is, and its first entry that is not a number: the type and the place, never the value."""
    message = context.message
    if "ScalarType" in message:
        odd = next(
            (p for p in op_arguments(context) if str(p.value.dtype) in ("torch.bfloat16", "torch.complex32")), None
        )
        part = odd.plain() if odd else None
        cure = TriedFix(f"{odd.name}.float()") if odd else None
        return DtypeFacts(
            raised_facts(context), "array", part, None, "float32", "numpy()", "ScalarType", default=default, cure=cure
        )
    kind = _rejected_type(message)
    match = next(((text, value) for text, value in _values(context) if _is_rejected(value, kind)), None)
    if match is None and kind in ("list", "tuple", "int", "float"):
        return None  # an argument of the wrong class, with no candidate: not named
    text, value = match or ("", None)
    part = ArgumentFact(_fact(text, value)) if match else None
    function = re.match(r"(\w+)\(\): argument", message)
    entry = _entry(value) if kind in ("object_", "str_", "str", "NoneType") else ""
    return DtypeFacts(
        raised_facts(context),
        "array",
        part,
        None,
        default,
        function[1] if function else "",
        kind,
        default=default,
        entry=entry,
        cure=_array_cure(text, value, kind),
    )


def _rejected_type(message: str) -> str:
    patterns = (
        r"np\.ndarray of type numpy\.(\w+)",
        r"infer dtype of (\w+)",
        r"too many dimensions '(\w+)'",
        r"must be Tensor, not (?:numpy\.)?(\w+)",
        r"byte (order)",
    )
    return next((m[1] for p in patterns if (m := re.search(p, message))), "")


def _values(context: ErrorContext) -> list[tuple[str, Any]]:
    """Operands of the failing line, arguments of torch's functions in it, operands of the lines that led to it."""
    lines = [list(operands(frame)) for frame in context.users[:6]]
    texts = argument_texts(context)
    arguments = [
        (texts[id(value)], value)
        for frame in library_frames(context)
        for value in frame.names.values()
        if id(value) in texts
    ]
    return [*(lines[0] if lines else []), *arguments, *(pair for line in lines[1:] for pair in line)]


def _is_rejected(value: Any, kind: str) -> bool:
    if kind in ("object_", "str_", "order"):
        return is_array(value) and value.dtype.kind in {"object_": "O", "str_": "SU", "order": "fiuc"}[kind]
    if kind == "ndarray":
        return is_array(value)
    if kind in ("Series", "DataFrame", "list", "tuple"):
        return type(value).__name__ == kind
    return type(value) in (list, tuple) and bool(_entry(value))


def _entry(value: Any) -> str:
    """ "a NoneType at [3]": the first entry that is not a number."""
    todo: list[tuple[str, Any]] = [("", value)]
    for _ in range(MAX_ENTRIES):
        if not todo:
            return ""
        place, one = todo.pop(0)
        if type(one) in (list, tuple) or is_array(one) and one.ndim:
            room = min(len(one), MAX_ENTRIES - len(todo))
            todo += [(f"{place}[{i}]", one[i]) for i in range(max(0, room))]
        elif type(one) not in _NUMBERS and not is_instance(one, np.number):
            kind = "str" if is_instance(one, str) else type(one).__name__
            return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} at {place or '[]'}"
    return ""


def _fact(text: str, value: Any) -> TensorFact:
    if is_array(value):
        return TensorFact(text, tuple(value.shape), str(value.dtype), "numpy", "array")
    shape = (len(value),) if type(value) in (list, tuple) else ()
    return TensorFact(text, shape, type(value).__name__, "Python", "list")


def _array_cure(text: str, value: Any, kind: str) -> TriedFix | None:
    """The conversion to a tensor; of an array of objects only where all entries are numbers of one shape."""
    if kind == "ndarray" and is_array(value) and value.dtype.kind in "fiub":
        import torch

        tensor = torch.as_tensor(value[:1] if value.ndim else value, dtype=torch.float32)
        code = f"torch.as_tensor({text}, dtype=torch.float32)"
        return TriedFix(code, True, {"result": f"{str(tensor.dtype).removeprefix('torch.')} {list(value.shape)}"})
    if kind in ("list", "tuple") and not _entry(value):
        return TriedFix(f"torch.tensor({text}, dtype=torch.float32)")
    if kind == "object_" and is_array(value) and not _entry(value) and value.size <= MAX_ENTRIES:
        tensor = value.astype(np.float32)
        return TriedFix(f'{text}.astype("float32")', True, {"result": f"{tensor.dtype} {list(tensor.shape)}"})
    if kind == "order":
        return TriedFix(f"{text}.astype({text}.dtype.newbyteorder('='))")
    return None
