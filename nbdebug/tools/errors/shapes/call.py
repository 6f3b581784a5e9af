"""Which call failed, with the sizes of torch's message, and its operands with the user's names for them.

The message is parsed first: which sentences are about a size, a number of axes or an axis that does not fit, and the
numbers in them. The wording differs between versions of torch, between the kernels of the CPU, of a GPU and of a
compiled model, and between torch and NumPy; the subject does not. `a` and `b` are shapes or sizes in the order of the
message.

Either the user's own line holds the op (`q @ k`, `torch.cat(...)`, `x.view(...)`), and its operands are read from the
syntax. Or it called something of torch's, a layer or a function, whose frame holds the tensors under torch's names
(`input`, `target`, `hx`); the user's names are found by identity, or by the position of the argument in the user's
call. Of a compiled model the frames are known from text alone: the layer is found by its sizes. The last part reads
what an operand was bound to before the line, and which call takes the result.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import tree_of
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.text import module_name
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    bindings,
    entries,
    expression,
    functions_around,
    is_tensor,
    message_of,
    statement,
    value_of,
)
from nbdebug.tools.errors.operands import OperandNames, library_frames
from nbdebug.tools.errors.rules import word_pairs
from nbdebug.tools.errors.sandbox import Sandbox, quiet
from nbdebug.tools.errors.shapes.rules import Shape, ShapeOperand

# -- torch's sentence --------------------------------------------------------------------------------------------------


TOKEN = re.compile(r"(?<!\?P)<(A|B|expected2?|actual|axis|which|last)>")


def _group(token: re.Match[str]) -> str:
    """`<A>` is a shape as a message writes it, `[2, 3]`, `(2, 3)` or `torch.Size([2, 3])`; `<axis>` a whole number."""
    if token[1] in "AB":
        return rf"(?:torch\.Size\()?[\[(](?P<{token[1].lower()}>[-\d, ]*)[\])]\)?"
    return rf"(?P<{token[1]}>\d+)"


@dataclasses.dataclass(frozen=True)
class ParsedMessage:
    """kind: what does not fit; a, b: the shapes in the message; expected, actual: the two sizes; axis: where; which:
    the number of the operand at fault, from 0."""

    kind: str
    a: Shape | None = None
    b: Shape | None = None
    expected: int | None = None
    actual: int | None = None
    axis: int | None = None
    which: int | None = None


PATTERNS = tuple(
    (kind, re.sub(TOKEN, _group, pattern))
    for kind, patterns in {
        "product": (
            r"shapes cannot be multiplied \((?P<a>\d+x<actual>) and (?P<b><expected>x\d+)\)",
            "a and b must have same reduction dim, but got <A> X <B>",
            r"size mismatch, got input \(\d+\), mat \((?P<a>\d+x<actual>)\), vec \(<expected>\)",
            r"inconsistent tensor size, expected tensor \[<actual>\] and src \[<expected>\]",
            "Expected size for first two dimensions of batch2 tensor to be: <A> but got: <B>",
            r"contracted dimensions need to match, but first has size <actual> in dim -?\d+ and second has size "
            "<expected>",
            r"matmul: Input operand 1 has a mismatch .*\(size <expected> is different from <actual>\)",
            r"shapes <A> and <B> not aligned: <actual> \(dim \d+\) != <expected>",
            "Incompatible shapes of A and B|X1 and X2 must have the same number of columns",
            r"einsum\(\): subscript \w has size <actual> for operand <which> which does not broadcast with previously "
            "seen size <expected>",
            "einstein sum .*: operand <which> has a mismatch|operand has a mismatch in its core dimension",
        ),
        "features": (
            "expected input<A> to have <expected> channels, but got <actual> channels",
            "Invalid channel dimensions",
            "(?:running_(?:mean|var)|weight|bias) should contain <actual> elements not <expected>",
            r"Given normalized_shape=\[(?P<b>[\d, ]+)\], expected input with shape .*?, but got input of size ?<A>",
            r"weight of shape \[<expected>\] and input of shape <A>",
            r"input's size at dim=<axis> to match num_features\s+\(<expected>\), but got: <actual>",
            r"input\.size\(-1\) must be equal to input_size\. Expected <expected>, got <actual>",
            "input has inconsistent input_size: got <actual>,? expected <expected>",
            "was expecting embedding dimension of <expected>, but got <actual>",
            r"bilinear\(\): input(?P<which>\d) size does not match weight size: got <actual> but expected <expected>",
            "Found parameter numbers = <expected> and channel size = <actual>",
            "feature number of src and tgt must be equal to d_model",
        ),
        "hidden": (
            r"Expected hidden(?:\[\d\])? size <A>, got <B>",
            "For (?:un)?batched [23]-D input, hx .*should also be [23]-D",
            r"Input batch size <expected> doesn't match hidden\d? ?batch size <actual>",
        ),
        "mask": (
            "The shape of the [23]D attn_mask is <A>, but should be <B>",
            r"key_padded_mask\.shape\[(?P<axis>\d)\] to be <expected>, but got <actual>",
            "key_padding_mask|attn_mask's dimension|attn_mask dim",
        ),
        "attention": (
            "key shape <A> does not match value shape <B>",
            "key's sequence and batch dims <A> do not match value's <B>",
            "batch number of src and tgt must be equal",
        ),
        "small": (
            "Kernel size can't be greater than actual input size|Output size is too small",
            "Invalid computed output size|Padding size should be less than the corresponding input dimension",
            "calculated shape of the array of sliding blocks|to have non-zero size for non-batch dimensions",
        ),
        "single": ("Expected more than 1 (?:value per channel|spatial element) when training, got input size <A>",),
        "loss": (
            r"Expected input batch_size \(<expected>\) to match target batch_size \(<actual>\)",
            "0D or 1D target tensor expected, multi-target not supported",
            "only batches of spatial targets supported|Expected target size <A>, got <B>",
            r"size mismatch \(got input: <A> ?, target: <B>",
            r"Using a target size \(<A>\) that is different to the input size \(<B>",
            r"Target size \(<A>\) must be the same as input size \(<B>",
            "For 1D input, 1D target must have size 1|weight tensor should be defined either for all",
            "target tensor should be 1-D with size|inconsistent target size: <A> for input of size: <B>",
            r"All input tensors should have same dimension but got sizes|expected target to be \d-?D|ctc_loss",
        ),
        "lengths": (
            r"Expected `len\(lengths\)` to be equal to batch_size, but got <actual> \(batch_size=<expected>\)",
            "`lengths` array must be sorted in decreasing order|Length of all samples has to be greater than 0",
        ),
        "broadcast": (
            r"size of tensor a \(<actual>\) must match the size of tensor b \(<expected>\) at non-singleton dimension "
            "<axis>",
            r"Attempting to broadcast a dimension of length \d+ at -?\d+! Mismatching argument at index \d+ had <A>; "
            "but expected shape should be broadcastable to <B>",
            "operands could not be broadcast together with (?:remapped )?shapes .*?<A>,? <B>",
            "[Ss]hape mismatch: objects cannot be broadcast to a single shape",
            "indexing (?:tensors|arrays) could not be broadcast together with shapes <A>,? <B>",
        ),
        "inplace": ("output (?:operand )?with shape <A> doesn't match the broadcast shape <B>",),
        "expand": (
            r"expanded size of the tensor \(<expected>\) must match the existing size \(<actual>\) at non-singleton "
            r"dimension <axis>\.\s+Target sizes: <A>\.\s+Tensor sizes: <B>",
            r"number of sizes provided \(<expected>\) must be greater or equal to the number of dimensions in the "
            r"tensor \(<actual>\)|Number of dimensions of repeat dims can not be smaller",
        ),
        "assign": (
            "could not broadcast input array from shape <B> into shape <A>",
            r"value (?:tensor|array) of shape <B>,? c\w+(?: not)? be broadcast to indexing result of shape <A>",
            "attempting to assign a gradient of size '<B>' to a tensor of size '<A>",
            r"Mismatch in shape: grad_output\[\d+\] has a shape of <B> and output\[\d+\] has a shape of <A>",
        ),
        "join": (
            r"Sizes of tensors must match except in dimension <axis>\. (?:Expected size|Expected|Got) <expected>(?: "
            r"in dimension \d+)? (?:but got|and)(?: size)? <actual>.*?(?:number|index) <which>",
            r"stack expects each tensor to be equal size, but got <A> at entry \d+ and <B> at entry <which>",
            "Tensors must have same number of dimensions: got <expected> and <actual>",
            "all (?:the )?input array(?: dimension)?s .*?must (?:match exactly|have (?:the )?same)",
            "Size mismatch between tensors",
        ),
        "count": (
            "shape '<A>' is invalid for input of size <actual>",
            r"cannot reshape array of size <actual> into shape \((?P<a>[^)]*)\)",
            r"Provided sizes <A> don't multiply up to the size of dim (?P<axis>-?\d+) \(<actual>\)",
        ),
        "split": (
            r"split_with_sizes expects split_sizes to sum exactly to <actual> .*?dimension (?P<axis>-?\d+)\), but got "
            "split_sizes=<A>",
        ),
        "strides": ("view size is not compatible with input tensor's size and stride",),
        "order": (
            r"input\.dim\(\) = <actual> is not equal to len\(dims\) = <expected>|axes don't match array",
            r"t\(\) expects a tensor with <= 2 dimensions, but self is (?P<actual>\d)D",
        ),
        "axis": (
            r"Dimension out of range \(expected to be in range of \[-?\d+, (?P<last>-?\d+)\], but got "
            r"(?P<axis>-?\d+)\)",
            r"axis (?P<axis>-?\d+) is out of bounds for array of dimension <actual>",
            r"Dimension specified as (?P<axis>-?\d+) but tensor has no dimensions",
            "too many indices for (?:tensor of dimension <actual>|array)",
            r"invalid index of a 0-dim tensor|iteration over a 0-d (?:tensor|array)|len\(\) of (?:a 0-d|unsized)",
        ),
        "index": (
            "The shape of the mask <A> at index <axis> does not match the shape of the indexed tensor <B>",
            "boolean index did not match indexed array along (?:axis|dimension) <axis>;",
            "Index tensor must have the same number of dimensions as (?:input|self|src) tensor",
            "[Ee]xpected index <A> to be (?:no larger|smaller) than self <B>",
            r"^selected index k out of range|start \(\d+\) \+ length \(\d+\) exceeds dimension size",
            r"Index is supposed to be a vector|Number of indices \(<actual>\) should be equal to source\.size",
        ),
        "rank": (
            r"Expected (?P<expected>\d)D \(unbatched\) or \dD \(batched\) input to \w+, but got input of size: <A>",
            r"[Ee]xpected (?P<expected>\d)D(?: or \dD)? input \(got (?P<actual>\d)D input\)",
            r"Expected input to be (?P<expected>\d)D or \dD, got (?P<actual>\d)D instead",
            r"non-empty (?P<expected>\d)D or \dD \(batch mode\) tensor expected for input",
            r"Expected (?P<expected>\d)D or \dD tensor, but got <A>",
            r"^(?:self|mat1|mat2|batch1|batch2) must be a (?:matrix|\dD tensor)|1D tensors expected|'weight' must be "
            "2-D",
            r"Got (?P<actual>\d)D input, but \w+ mode needs (?P<expected>\d)D input",
            "must have the same number of spatial dimensions, but got input with spatial dimensions of",
            r"number of subscripts in the equation \(<expected>\) does not match the number of dimensions "
            r"\(<actual>\) for operand <which>",
            r"Expected (?P<expected>\d)-D argument \w+, but got (?P<actual>\d)-D|expected a matrix, but got tensor "
            "with",
            "must have at least 2 dimensions|expected a 1D or 2D tensor|Expected 0D or 1D tensor in the tensor list|"
            "Supports 1D or 2D tensors|Feature dropout requires at least 2 dim",
            "Padding length should be less than or equal to two times the input dimension",
            r"Padding size \d+ is not supported for (?P<actual>\d)D input|Expected 3D or higher dimensionality",
            "Input tensors must have 2 or fewer dimensions|input is (?:3|2)D, then offsets|offsets has to be a 1D",
        ),
        "divide": (
            "=<actual> is not divisible by <expected>|num_groups=<expected2>",
            r"Halving dimension must be even, but dimension \d+ is size <actual>",
            "to be divisible by|is not divisible by|must be divisible by|calculated number of sliding blocks",
        ),
        "square": ("must be batches of square matrices, but they are <actual> by <expected> matrices",),
        "grid": (
            r"grid_sampler\(\): expected|Expected a batch of 2D affine matrices|Expected shape of indices to be same",
        ),
        "output": ("requested an output size of .*, but valid sizes range from",),
        "samples": ("per_sample_weights .* must have the same shape as the input",),
        "gradient": (r"returned an invalid gradient at index \d+ - got <B> but expected shape compatible with <A>",),
        "vmap": ("vmap: Expected all tensors to have the same size in the mapped dimension, got sizes <A>",),
        "bias": (r"expected bias to be 1-dimensional with <expected> elements, but got bias of size \[<actual>\]",),
        "scalar": (
            "a Tensor with <actual> elements cannot be converted to Scalar",
            "only (?:one element tensors|(?:0-dimensional|length-1|size-1) arrays) can be converted to Python scalars",
        ),
        "truth": (
            "Boolean value of Tensor with more than one value is ambiguous|truth value of an array with more than "
            "one element is ambiguous",
            "Boolean value of Tensor with no values is ambiguous",
        ),
        "unpack": (
            r"too many values to unpack \(expected <expected>(?:, got \d+)?\)|not enough values to unpack \(expected "
            r"<expected2>, got <actual>\)",
        ),
        "zero": (r"zero-dimensional tensor \(at position \d+\) cannot be concatenated",),
        "picture": ("Invalid shape <A> for image data",),
        "ragged": (
            r"expected sequence of length <expected> at dim <axis> \(got <actual>\)",
            "requested array has an inhomogeneous shape after <axis> dimensions",
        ),
    }.items()
    for pattern in patterns
)
"""(kind, pattern), the narrow before the wide."""
NUMBERS = ("expected", "actual", "axis", "which")
COMPILED = tuple((kind, re.compile(pattern, re.DOTALL)) for kind, pattern in PATTERNS)


def parse_message(message: str) -> ParsedMessage | None:
    """The kind and the numbers of a message, or None where it is not about a shape."""
    if message.startswith("Error(s) in loading state_dict"):
        return None
    for kind, pattern in COMPILED:
        match = pattern.search(message)
        if match is not None:
            groups = {key: value for key, value in match.groupdict().items() if value is not None}
            if "expected2" in groups:
                groups["expected"] = groups.pop("expected2")
            if "last" in groups:
                groups["actual"] = str(int(groups.pop("last")) + 1)
            shapes = {
                key: tuple(int(part) for part in re.findall(r"-?\d+", groups[key].replace("newaxis", "-1")))
                for key in ("a", "b")
                if key in groups
            }
            numbers = {key: int(text) for key, text in groups.items() if key not in shapes}
            return ParsedMessage(kind, shapes.get("a"), shapes.get("b"), *(numbers.get(key) for key in NUMBERS))
    return None


# -- the call and its operands -----------------------------------------------------------------------------------------


SYMBOLS = {
    getattr(ast, kind): sign
    for kind, sign in word_pairs(
        "Add:+ Sub:- Mult:* Div:/ MatMult:@ Pow:** FloorDiv:// Mod:% BitAnd:& BitOr:| Eq:== NotEq:!= Lt:< Gt:> LtE:<= "
        "GtE:>="
    ).items()
}
PASS_THROUGH = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CONTAINERS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""They are at fault themselves only where no layer inside them is."""
LONGEST_TEXT = 60
REPLACED = ("query", "key", "value", "hx", "key_padding_mask", "attn_mask", "mask")
"""Arguments that torch's layers hand on as other tensors: the user's are known by their shape."""
FLATTENING = ("reshape", "view", "flatten", "contiguous", "long", "clone", "detach", "squeeze")
MAX_BINDINGS = 3
"""Bindings that are followed back from a name."""


@dataclasses.dataclass
class CallOperand:
    """One tensor or array that the op was given. text: what the user wrote for it, "" where that is not known."""

    text: str
    role: str
    value: Any
    node: ast.AST | None = None
    weight: bool = False

    @property
    def shape(self) -> Shape | None:
        return tuple(self.value.shape) if is_array(self.value) else None

    def fact(self) -> ShapeOperand:
        dtype = str(self.value.dtype).removeprefix("torch.") if is_array(self.value) else ""
        return ShapeOperand(self.text[:LONGEST_TEXT], self.role, self.shape, dtype, self.weight)


@dataclasses.dataclass
class FailedCall:
    """op: its name as the user knows it; frame: the user's innermost; node: the expression of theirs that failed or
    called what failed; layer: torch's module that failed; function, inner: torch's function that failed and the frame
    with its arguments, where the op is not in the user's line; arguments: its plain ones, each as (text, value)."""

    op: str
    operands: list[CallOperand]
    frame: Frame | None = None
    node: ast.AST | None = None
    layer: nn.Module | None = None
    function: Callable[..., Any] | None = None
    inner: Frame | None = None
    arguments: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def direct(self) -> bool:
        """Whether the user's own expression is the op, or calls the very layer or function that failed."""
        if self.inner is None:
            return True
        function = value_of(self.node.func, self.frame) if isinstance(self.node, ast.Call) and self.frame else UNKNOWN
        return function is not UNKNOWN and (function is self.layer or function is self.function)


def failed_call(context: ErrorContext, kind: str, names: OperandNames) -> FailedCall:
    """The call that raised."""
    frame = _with_self(context, context.users[0]) if context.users else None
    node = _failing_expression(frame, kind) if frame is not None else None
    below = [f for f in library_frames(context) if f.names]  # in frames known from text alone there is nothing to read
    if not below:
        return _expression_call(frame, node, kind)
    modules = [f.module for f in below if f.module is not None and type(f.module) not in PASS_THROUGH]
    layer = next((m for m in modules if type(m) not in CONTAINERS), modules[-1] if modules else None)
    if layer is not None and not type(layer).__name__.endswith("Loss"):
        forwards = (f for f in reversed(below) if f.module is layer and f.site.function == "forward")
        inner = _as_passed(next(forwards, below[-1]), layer, below)
        function: Callable[..., Any] | None = type(layer).forward
    else:  # of a loss the function knows the tensors as well, and may be called again
        inner = below[-1]
        if layer is not None:
            inner = next((f for f in reversed(below) if _torch_function(f) is not None), inner)
        layer, function = None, _torch_function(inner)
    op = inner.site.function if layer is None else type(layer).__name__
    call = FailedCall(op, [], frame, node, layer, function, inner)
    call.operands = list(_argument_operands(call, names))
    return call


def _as_passed(inner: Frame, layer: Any, below: list[Frame]) -> Frame:
    """Attention transposes what has its batch first before it computes: its frame with the operands as passed."""
    transposed = (
        type(layer) is nn.MultiheadAttention
        and bool(attributes(layer).get("batch_first"))
        and any(frame.site.function == "multi_head_attention_forward" for frame in below)
    )
    if not transposed or inner.site.function != "forward":
        return inner
    names = {
        name: value.detach().transpose(0, 1)
        for name, value in inner.names.items()
        if name in ("query", "key", "value") and is_tensor(value) and value.ndim == 3
    }
    return dataclasses.replace(inner, names={**inner.names, **names})


def _torch_function(frame: Frame) -> Callable[..., Any] | None:
    """torch's function whose frame this is."""
    for home in (nn.functional, torch.functional, torch.nn.utils.rnn, torch.Tensor):
        function = vars(home).get(frame.site.function)
        if type(function) is FunctionType and function.__code__.co_filename == frame.site.file:
            return function
    return None


def _failing_expression(frame: Frame, kind: str) -> ast.AST | None:
    """Where Python knows only the statement, its parts are run on copies, innermost first: the first that fails in the
    same way is the one."""
    node = expression(frame)
    if kind == "truth" and node is not None:
        return _ambiguous_part(getattr(node, "test", node), frame)
    if not isinstance(node, ast.stmt) or isinstance(node, ast.AugAssign):
        return node
    inner = [n for n in ast.walk(node) if isinstance(n, (ast.BinOp, ast.Call, ast.Compare, ast.Subscript))]
    for part in reversed(inner):
        if _failure_kind(part, frame) == kind:
            return part
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if kind in ("unpack", "assign", "expand", "broadcast") and isinstance(target, (ast.Tuple, ast.Subscript)):
        return target
    return inner[0] if inner else node


def _ambiguous_part(test: ast.AST, frame: Frame) -> ast.AST:
    """The part of a condition that is no single true or false."""
    for part in ast.walk(test):
        if isinstance(part, ast.expr):
            value = operand_value(part, frame)
            if is_array(value) and value.ndim > 0:
                return part
    return test


def _failure_kind(node: ast.AST, frame: Frame) -> str | None:
    """What kind of shape error an expression raises when it runs on copies; None where it runs, or can't."""
    with quiet():
        try:
            Sandbox().evaluate(node, frame)
        except Exception as error:  # CannotRun has no message, and so no kind
            message = parse_message(message_of(error))
            return message.kind if message else None
    return None


def is_array(value: Any) -> bool:
    return is_tensor(value) or type(value) is np.ndarray


def operand_value(node: ast.AST, frame: Frame) -> Any:
    """The value of an operand: from the frame, else computed again on copies, else UNKNOWN."""
    value = value_of(node, frame)
    if value is not UNKNOWN:
        return value
    with quiet():
        try:
            return Sandbox().evaluate(node, frame)
        except Exception:
            return UNKNOWN


# -- torch's frames: the tensors under torch's names --------------------------------------------------------------


def _argument_operands(call: FailedCall, names: OperandNames) -> Iterator[CallOperand]:
    """The tensors among the arguments of torch's function, under the user's names."""
    assert call.inner is not None
    roles = list(inspect.signature(call.function).parameters) if call.function else list(call.inner.names)
    written = _written_arguments(call, [role for role in roles if role != "self"])
    for role in roles:
        argument: Any = call.inner.names.get(role)
        several: list[Any] = list(argument) if type(argument) in (list, tuple) and len(argument) < 50 else [argument]
        for i, value in enumerate(several):
            if is_array(value):
                named = names.argument(value, role) if is_tensor(value) else None
                text = named.name if named is not None and named.known else ""
                node = written.get(role)
                if node is not None and call.frame is not None and value_of(node, call.frame) is value:
                    text = ast.unparse(node)  # the name in the line that failed, of several
                if not text and role in REPLACED:
                    text, value = _of_same_shape(call, value, role)
                label = role if len(several) == 1 else f"{role}[{i}]"
                if not text and node is not None:
                    text, value = _as_written(call, node, i if len(several) > 1 else None, value)
                yield CallOperand(text, label, value, node, bool(named and named.owner is not None))


def _of_same_shape(call: FailedCall, item: Any, role: str) -> tuple[str, Any]:
    """The one argument of the user's call that has this shape, or has it with batch and time exchanged: torch's layers
    make another tensor of a mask, and transpose what has its batch first."""
    shapes = {tuple(item.shape)} if "mask" in role else {tuple(item.shape), (*item.shape[1::-1], *item.shape[2:])}
    values: dict[str, Any] = {}
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, (ast.Name, ast.Attribute)) and call.frame is not None:
            value, text = value_of(node, call.frame), ast.unparse(node)
            if is_array(value) and tuple(value.shape) in shapes and ("mask" in role or "mask" not in text):
                values[text] = value
    return values.popitem() if len(values) == 1 else ("", item)


def _as_written(call: FailedCall, node: ast.AST, i: int | None, item: Any) -> tuple[str, Any]:
    """The user's text for an argument, and the tensor as they passed it: torch's function may have transposed it."""
    if i is not None:
        inner = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
        return (ast.unparse(inner[i]) if i < len(inner) else f"{ast.unparse(node)}[{i}]"), item
    value = operand_value(node, call.frame) if call.frame is not None else UNKNOWN
    return ast.unparse(node), value if is_array(value) else item


def _written_arguments(call: FailedCall, parameters: list[str]) -> dict[str, ast.AST]:
    """What the user wrote for each parameter, where the user's own expression calls this layer or function."""
    node = call.node
    if not isinstance(node, ast.Call) or call.frame is None:
        return {}
    function = value_of(node.func, call.frame)
    method = getattr(node.func, "attr", "") == call.op and not issubclass(type(function), nn.Module)
    if function is UNKNOWN and isinstance(node.func, ast.Call):  # a layer made and called on the spot
        kind = value_of(node.func.func, call.frame)
        loss = getattr(node.func.func, "attr", "").endswith("Loss")
        function = call.layer if kind is type(call.layer) or loss else function
    same = (
        function is not UNKNOWN
        and function is call.layer
        or function is call.function
        or method
        or (issubclass(type(function), nn.Module) and type(function).__name__.endswith("Loss"))
    )
    if not same:
        return {}
    plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    return {**dict(zip(parameters, plain)), **{k.arg: k.value for k in node.keywords if k.arg}}


def operands_of_shapes(context: ErrorContext, shapes: tuple[Shape | None, ...]) -> list[CallOperand]:
    """The user's variables of these shapes, where the line itself can't be read (`%time`, `exec`) and each is the only
    one of its shape."""
    operands = []
    for shape in shapes:
        alike = {
            id(value): (name, value)
            for name, value, _ in context.variables()
            if shape is not None and is_array(value) and tuple(value.shape) == shape
        }
        if len(alike) == 1:
            name, value = next(iter(alike.values()))
            operands.append(CallOperand(name, "", value))
    return operands


# -- the user's own expression ---------------------------------------------------------------------------------------


def _expression_call(frame: Frame | None, node: ast.AST | None, kind: str) -> FailedCall:
    """Of an op in the user's own line."""
    call = FailedCall(_op_name(node), [], frame, node)
    if frame is None or node is None:
        return call
    function: Any = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
    if issubclass(type(function), nn.Module) and module_name(type(function)).startswith("torch.nn."):
        call.layer, call.op = function, type(function).__name__  # of a compiled model
    for role, part in _operand_nodes(node, frame, kind):
        value = operand_value(part, frame)
        text = ast.unparse(part)
        if type(value) in (list, tuple) and value and all(is_array(item) for item in value):
            call.operands += [CallOperand(f"{text}[{i}]", role, item) for i, item in enumerate(value)]
        elif is_array(value) or value is UNKNOWN and not _is_plain(part):
            call.operands.append(CallOperand(text, role, None if value is UNKNOWN else value, part))
        elif type(value) in (int, tuple, list, torch.Size):
            call.arguments.append((text, value if type(value) is int else tuple(value)))
    return call


def _op_name(node: ast.AST | None) -> str:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return SYMBOLS.get(type(node.op), "") + "=" * isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Compare):
        return SYMBOLS.get(type(node.ops[0]), "")
    if isinstance(node, ast.Call):
        return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    if isinstance(node, ast.Subscript):
        return "[]"
    return str(node.attr) if isinstance(node, ast.Attribute) else ""


def _operand_nodes(node: ast.AST, frame: Frame, kind: str) -> Iterator[tuple[str, ast.AST]]:
    """(role, node) of the operands of an expression."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Subscript)) and isinstance(node.ctx, ast.Store):
        around = statement(frame)
        yield from ([("target", node)] if isinstance(node, ast.Subscript) else [])
        if isinstance(around, (ast.Assign, ast.AugAssign)):
            yield "value", around.value
    elif isinstance(node, ast.BinOp):
        yield from (("left", node.left), ("right", node.right))
    elif isinstance(node, ast.AugAssign):
        yield from (("left", node.target), ("right", node.value))
    elif isinstance(node, ast.Compare) and kind != "truth":
        yield from (("left", node.left), ("right", node.comparators[0]))
    elif isinstance(node, ast.Subscript):
        yield "self", node.value
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield "index", index
    elif isinstance(node, ast.Call):
        yield from _call_nodes(node, frame)
    else:
        yield "self", node


def _call_nodes(node: ast.Call, frame: Frame) -> Iterator[tuple[str, ast.AST]]:
    function = value_of(node.func, frame)
    if isinstance(node.func, ast.Attribute) and (
        function is UNKNOWN or type(function) in (MethodType, BuiltinFunctionType) and is_array(function.__self__)
    ):
        yield "self", node.func.value
    for arg in [*node.args, *(k.value for k in node.keywords)]:
        if isinstance(arg, (ast.List, ast.Tuple)) and arg.elts and not all(_is_plain(e) for e in arg.elts):
            yield from (("tensors", part) for part in arg.elts)
        else:
            yield "", arg


def _is_plain(node: ast.AST) -> bool:
    """Sizes, axes and slices: no tensors, though their values may be unknown."""
    function = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    plain = (ast.Constant, ast.Slice, ast.UnaryOp, ast.Tuple, ast.Starred)
    return isinstance(node, plain) or function in ("size", "len", "int")


# -- a compiled model ------------------------------------------------------------------------------------------------


def compiled_layer(context: ErrorContext, weight: Shape | None) -> Any:
    """The one Linear of the user's models whose weight, transposed, has this shape; None where several have it."""
    if context.carried is None or weight is None or len(weight) != 2:
        return None
    layers = {
        id(part): part
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        if type(part) is nn.Linear and (part.in_features, part.out_features) == weight
    }
    return next(iter(layers.values())) if len(layers) == 1 else None


def _with_self(context: ErrorContext, frame: Frame) -> Frame:
    """A frame that is known from text alone, as a compiled model's, with its `self` where one module of the user's has
    this method."""
    if frame.names or frame.site.function in ("<module>", "<lambda>"):
        return frame
    owners = {
        id(part): part
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        for kind in type(part).__mro__
        if type(method := vars(kind).get(frame.site.function)) is FunctionType
        and method.__code__.co_filename == frame.site.file
        and frame.site.line in [line for *_, line in method.__code__.co_lines()]
    }
    if len(owners) != 1:
        return frame
    module = next(iter(owners.values()))
    return dataclasses.replace(frame, names={"self": module}, module=module)


# -- the statements around the line ----------------------------------------------------------------------------------


def _scope(frame: Frame) -> ast.AST | None:
    """The function of a frame as syntax, or the whole file or cell."""
    tree = tree_of(frame.site.file)
    return next(iter(functions_around(tree, frame.site.line)), tree)


def unflattened(node: ast.AST | None, frame: Frame, rows: int) -> Iterator[tuple[ast.expr, ast.expr, Any]]:
    """(expression, the part of it before it was flattened, the value of that) of a flat operand of so many rows: of its
    expression, or of what its name was bound to before."""
    for source in bindings_back(node, frame):
        base = source
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in FLATTENING:
            base = base.func.value
            value = operand_value(base, frame)
            if is_array(value) and value.ndim > 1 and value.shape[0] * value.shape[1] == rows:
                yield source, base, value


def bindings_back(node: ast.AST | None, frame: Frame) -> Iterator[ast.expr]:
    """The expression itself, then what its name was bound to, nearest first."""
    scope, line = _scope(frame), frame.site.line
    for _ in range(MAX_BINDINGS):
        if not isinstance(node, ast.expr):
            return
        yield node
        if not isinstance(node, ast.Name) or scope is None:
            return
        earlier = [b for b in bindings(scope, node.id) if b[0].lineno < line]
        if not earlier:
            return
        value, keys = earlier[-1]
        node, line = next((part for part, rest in entries(value, keys) if not rest), None), value.lineno


def next_call(node: ast.AST | None, frame: Frame) -> ast.Call | None:
    """The call that takes the result of the failing expression: the one around it, or the next one after the statement
    whose first argument is the name that it binds."""
    line, scope = statement(frame), _scope(frame)
    if line is None or scope is None:
        return None
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and n.args]
    around = next((call for call in calls if call.args[0] is node), None)
    if around is not None or not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
        return around
    name, end = line.targets[0].id, line.end_lineno or line.lineno
    after = [n for n in calls if n.lineno > end and isinstance(n.args[0], ast.Name) and n.args[0].id == name]
    return min(after, key=lambda n: n.lineno, default=None)


# -- the failed layer --------------------------------------------------------------------------------------------------

SIZES = (
    "in_features out_features in_channels out_channels num_features normalized_shape num_channels num_groups "
    "input_size hidden_size num_layers embed_dim num_heads kernel_size in1_features in2_features num_parameters "
    "num_embeddings embedding_dim batch_first"
).split()
"""The settings of torch's layers that say for which sizes they were made."""


def layer_sizes(layer: nn.Module) -> dict[str, int]:
    """What a layer was made for, of the sizes that its class takes."""
    settings = attributes(layer)
    values = {name: settings[name] for name in SIZES if name in settings}
    return {
        name: value[0] if type(value) is tuple and len(set(value)) == 1 else value
        for name, value in values.items()
        if type(value) in (int, bool, tuple)
    }


def user_input(call: FailedCall) -> ShapeOperand | None:
    """The user's tensor that went into what failed: the first in the arguments of the user's own call."""
    if call.inner is None or call.frame is None or not isinstance(call.node, ast.Call):
        return None
    for arg in [*call.node.args, *(k.value for k in call.node.keywords)]:
        for part in ast.walk(arg):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                value = value_of(part, call.frame)
                if is_array(value):
                    return CallOperand(ast.unparse(part), "", value).fact()
    return None


def frames_below(context: ErrorContext) -> list[Frame]:
    """The frames under the user's innermost line, outermost first."""
    last = max((i for i, frame in enumerate(context.trail) if frame.users), default=-1)
    return context.trail[last + 1 :]


def path_of(layer: Any, names: OperandNames) -> str:
    """The name of a layer within its model ("stages.3.1"); with the model's own where that would be a bare number
    ("self.mlp.0"), or where the model is the layer."""
    inside = (names.context.path(layer) or "").removeprefix("_orig_mod.")  # of a compiled model
    whole = names.module(layer)
    root = whole.removesuffix(inside).rstrip(".")
    classes = {
        type(model).__name__ for model in names.context.owners.models.values()
    }  # names of models without a variable
    if inside[:1].isdigit() and whole.endswith(f".{inside}") and root not in classes:
        return whole
    return inside or whole
