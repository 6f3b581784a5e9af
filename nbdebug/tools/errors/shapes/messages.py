"""Which messages are about a size, a number of axes or an axis that does not fit, and the numbers in them.

The wording differs between versions of torch, between the kernels of the CPU, of a GPU and of a compiled model, and
between torch and NumPy; the subject does not. `a` and `b` are shapes or sizes in the order of the message.
"""

from __future__ import annotations

import dataclasses
import re

from nbdebug.tools.errors.shapes.rules import Shape

_SHAPE = r"(?:torch\.Size\()?[\[(]([-\d, ]*)[\])]\)?"


def _shape(name: str) -> str:
    """A shape as a message writes it, `[2, 3]`, `(2, 3)` or `torch.Size([2, 3])`, as the group of this name."""
    return _SHAPE.replace("([-", f"(?P<{name}>[-")


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


_A, _B = _shape("a"), _shape("b")
PATTERNS: tuple[tuple[str, str], ...] = (
    ("product", r"shapes cannot be multiplied \((?P<a>\d+x(?P<actual>\d+)) and (?P<b>(?P<expected>\d+)x\d+)\)"),
    ("product", r"a and b must have same reduction dim, but got " + _A + " X " + _B),
    ("product", r"size mismatch, got input \(\d+\), mat \((?P<a>\d+x(?P<actual>\d+))\), vec \((?P<expected>\d+)\)"),
    ("product", r"inconsistent tensor size, expected tensor \[(?P<actual>\d+)\] and src \[(?P<expected>\d+)\]"),
    ("product", r"Expected size for first two dimensions of batch2 tensor to be: " + _A + r" but got: " + _B),
    (
        "product",
        r"contracted dimensions need to match, but first has size (?P<actual>\d+) in dim -?\d+ and second has "
        r"size (?P<expected>\d+)",
    ),
    (
        "product",
        r"matmul: Input operand 1 has a mismatch .*\(size (?P<expected>\d+) is different from (?P<actual>\d+)\)",
    ),
    ("product", r"shapes " + _A + r" and " + _B + r" not aligned: (?P<actual>\d+) \(dim \d+\) != (?P<expected>\d+)"),
    ("product", r"Incompatible shapes of A and B|X1 and X2 must have the same number of columns"),
    (
        "product",
        r"einsum\(\): subscript \w has size (?P<actual>\d+) for operand (?P<which>\d+) which does not broadcast "
        r"with previously seen size (?P<expected>\d+)",
    ),
    ("product", r"einstein sum .*: operand (?P<which>\d+) has a mismatch|operand has a mismatch in its core dimension"),
    ("features", r"expected input" + _A + r" to have (?P<expected>\d+) channels, but got (?P<actual>\d+) channels"),
    ("features", r"Invalid channel dimensions"),
    ("features", r"(?:running_(?:mean|var)|weight|bias) should contain (?P<actual>\d+) elements not (?P<expected>\d+)"),
    (
        "features",
        r"Given normalized_shape=\[(?P<b>[\d, ]+)\], expected input with shape .*?, but got input of size ?" + _A,
    ),
    ("features", r"weight of shape \[(?P<expected>\d+)\] and input of shape " + _A),
    (
        "features",
        r"input's size at dim=(?P<axis>\d+) to match num_features\s+\((?P<expected>\d+)\), but got: "
        r"(?P<actual>\d+)",
    ),
    ("features", r"input\.size\(-1\) must be equal to input_size\. Expected (?P<expected>\d+), got (?P<actual>\d+)"),
    ("features", r"input has inconsistent input_size: got (?P<actual>\d+),? expected (?P<expected>\d+)"),
    ("features", r"was expecting embedding dimension of (?P<expected>\d+), but got (?P<actual>\d+)"),
    (
        "features",
        r"bilinear\(\): input(?P<which>\d) size does not match weight size: got (?P<actual>\d+) but expected "
        r"(?P<expected>\d+)",
    ),
    ("features", r"Found parameter numbers = (?P<expected>\d+) and channel size = (?P<actual>\d+)"),
    ("features", r"feature number of src and tgt must be equal to d_model"),
    ("hidden", r"Expected hidden(?:\[\d\])? size " + _A + r", got " + _B),
    ("hidden", r"For (?:un)?batched [23]-D input, hx .*should also be [23]-D"),
    ("hidden", r"Input batch size (?P<expected>\d+) doesn't match hidden\d? ?batch size (?P<actual>\d+)"),
    ("mask", r"The shape of the [23]D attn_mask is " + _A + r", but should be " + _B),
    ("mask", r"key_padded_mask\.shape\[(?P<axis>\d)\] to be (?P<expected>\d+), but got (?P<actual>\d+)"),
    ("mask", r"key_padding_mask|attn_mask's dimension|attn_mask dim"),
    ("attention", r"key shape " + _A + r" does not match value shape " + _B),
    ("attention", r"key's sequence and batch dims " + _A + r" do not match value's " + _B),
    ("attention", r"batch number of src and tgt must be equal"),
    ("small", r"Kernel size can't be greater than actual input size|Output size is too small"),
    ("small", r"Invalid computed output size|Padding size should be less than the corresponding input dimension"),
    ("small", r"calculated shape of the array of sliding blocks|to have non-zero size for non-batch dimensions"),
    ("single", r"Expected more than 1 (?:value per channel|spatial element) when training, got input size " + _A),
    ("loss", r"Expected input batch_size \((?P<expected>\d+)\) to match target batch_size \((?P<actual>\d+)\)"),
    ("loss", r"0D or 1D target tensor expected, multi-target not supported"),
    ("loss", r"only batches of spatial targets supported|Expected target size " + _A + r", got " + _B),
    ("loss", r"size mismatch \(got input: " + _A + r" ?, target: " + _B),
    ("loss", r"Using a target size \(" + _A + r"\) that is different to the input size \(" + _B),
    ("loss", r"Target size \(" + _A + r"\) must be the same as input size \(" + _B),
    ("loss", r"For 1D input, 1D target must have size 1|weight tensor should be defined either for all"),
    ("loss", r"target tensor should be 1-D with size|inconsistent target size: " + _A + r" for input of size: " + _B),
    ("loss", r"All input tensors should have same dimension but got sizes|expected target to be \d-?D|ctc_loss"),
    (
        "lengths",
        r"Expected `len\(lengths\)` to be equal to batch_size, but got (?P<actual>\d+) "
        r"\(batch_size=(?P<expected>\d+)\)",
    ),
    ("lengths", r"`lengths` array must be sorted in decreasing order|Length of all samples has to be greater than 0"),
    (
        "broadcast",
        r"size of tensor a \((?P<actual>\d+)\) must match the size of tensor b \((?P<expected>\d+)\) at "
        r"non-singleton dimension (?P<axis>\d+)",
    ),
    (
        "broadcast",
        r"Attempting to broadcast a dimension of length \d+ at -?\d+! Mismatching argument at index \d+ had "
        + _A
        + r"; but expected shape should be broadcastable to "
        + _B,
    ),
    ("broadcast", r"operands could not be broadcast together with (?:remapped )?shapes .*?" + _A + ",? " + _B),
    ("broadcast", r"[Ss]hape mismatch: objects cannot be broadcast to a single shape"),
    ("broadcast", r"indexing (?:tensors|arrays) could not be broadcast together with shapes " + _A + ",? " + _B),
    ("inplace", r"output (?:operand )?with shape " + _A + r" doesn't match the broadcast shape " + _B),
    (
        "expand",
        r"expanded size of the tensor \((?P<expected>\d+)\) must match the existing size \((?P<actual>\d+)\) at "
        r"non-singleton dimension (?P<axis>\d+)\.\s+Target sizes: " + _A + r"\.\s+Tensor sizes: " + _B,
    ),
    (
        "expand",
        r"number of sizes provided \((?P<expected>\d+)\) must be greater or equal to the number of dimensions in "
        r"the tensor \((?P<actual>\d+)\)|Number of dimensions of repeat dims can not be smaller",
    ),
    ("assign", r"could not broadcast input array from shape " + _B + r" into shape " + _A),
    (
        "assign",
        r"value (?:tensor|array) of shape " + _B + r",? c\w+(?: not)? be broadcast to indexing result of shape " + _A,
    ),
    ("assign", r"attempting to assign a gradient of size '" + _B + r"' to a tensor of size '" + _A),
    (
        "assign",
        r"Mismatch in shape: grad_output\[\d+\] has a shape of " + _B + r" and output\[\d+\] has a shape of " + _A,
    ),
    (
        "join",
        r"Sizes of tensors must match except in dimension (?P<axis>\d+)\. (?:Expected size|Expected|Got) "
        r"(?P<expected>\d+)(?: in dimension \d+)? (?:but got|and)(?: size)? (?P<actual>\d+).*?(?:number|index) "
        r"(?P<which>\d+)",
    ),
    (
        "join",
        r"stack expects each tensor to be equal size, but got "
        + _A
        + r" at entry \d+ and "
        + _B
        + r" at entry (?P<which>\d+)",
    ),
    ("join", r"Tensors must have same number of dimensions: got (?P<expected>\d+) and (?P<actual>\d+)"),
    ("join", r"all (?:the )?input array(?: dimension)?s .*?must (?:match exactly|have (?:the )?same)"),
    ("join", r"Size mismatch between tensors"),
    ("count", r"shape '" + _A + r"' is invalid for input of size (?P<actual>\d+)"),
    ("count", r"cannot reshape array of size (?P<actual>\d+) into shape \((?P<a>[^)]*)\)"),
    ("count", r"Provided sizes " + _A + r" don't multiply up to the size of dim (?P<axis>-?\d+) \((?P<actual>\d+)\)"),
    (
        "split",
        r"split_with_sizes expects split_sizes to sum exactly to (?P<actual>\d+) .*?dimension (?P<axis>-?\d+)\), "
        r"but got split_sizes=" + _A,
    ),
    ("strides", r"view size is not compatible with input tensor's size and stride"),
    (
        "order",
        r"input\.dim\(\) = (?P<actual>\d+) is not equal to len\(dims\) = (?P<expected>\d+)|axes don't match array",
    ),
    ("order", r"t\(\) expects a tensor with <= 2 dimensions, but self is (?P<actual>\d)D"),
    (
        "axis",
        r"Dimension out of range \(expected to be in range of \[-?\d+, (?P<last>-?\d+)\], but got "
        r"(?P<axis>-?\d+)\)",
    ),
    ("axis", r"axis (?P<axis>-?\d+) is out of bounds for array of dimension (?P<actual>\d+)"),
    ("axis", r"Dimension specified as (?P<axis>-?\d+) but tensor has no dimensions"),
    ("axis", r"too many indices for (?:tensor of dimension (?P<actual>\d+)|array)"),
    ("axis", r"invalid index of a 0-dim tensor|iteration over a 0-d (?:tensor|array)|len\(\) of (?:a 0-d|unsized)"),
    (
        "index",
        r"The shape of the mask " + _A + r" at index (?P<axis>\d+) does not match the shape of the indexed "
        r"tensor " + _B,
    ),
    ("index", r"boolean index did not match indexed array along (?:axis|dimension) (?P<axis>\d+);"),
    ("index", r"Index tensor must have the same number of dimensions as (?:input|self|src) tensor"),
    ("index", r"[Ee]xpected index " + _A + r" to be (?:no larger|smaller) than self " + _B),
    ("index", r"^selected index k out of range|start \(\d+\) \+ length \(\d+\) exceeds dimension size"),
    (
        "index",
        r"Index is supposed to be a vector|Number of indices \((?P<actual>\d+)\) should be equal to source\.size",
    ),
    ("rank", r"Expected (?P<expected>\d)D \(unbatched\) or \dD \(batched\) input to \w+, but got input of size: " + _A),
    ("rank", r"[Ee]xpected (?P<expected>\d)D(?: or \dD)? input \(got (?P<actual>\d)D input\)"),
    ("rank", r"Expected input to be (?P<expected>\d)D or \dD, got (?P<actual>\d)D instead"),
    ("rank", r"non-empty (?P<expected>\d)D or \dD \(batch mode\) tensor expected for input"),
    ("rank", r"Expected (?P<expected>\d)D or \dD tensor, but got " + _A),
    (
        "rank",
        r"^(?:self|mat1|mat2|batch1|batch2) must be a (?:matrix|\dD tensor)|1D tensors expected|"
        r"'weight' must be 2-D",
    ),
    ("rank", r"Got (?P<actual>\d)D input, but \w+ mode needs (?P<expected>\d)D input"),
    ("rank", r"must have the same number of spatial dimensions, but got input with spatial dimensions of"),
    (
        "rank",
        r"number of subscripts in the equation \((?P<expected>\d+)\) does not match the number of dimensions "
        r"\((?P<actual>\d+)\) for operand (?P<which>\d+)",
    ),
    (
        "rank",
        r"Expected (?P<expected>\d)-D argument \w+, but got (?P<actual>\d)-D|expected a matrix, but got tensor with",
    ),
    (
        "rank",
        r"must have at least 2 dimensions|expected a 1D or 2D tensor|Expected 0D or 1D tensor in the tensor list|"
        r"Supports 1D or 2D tensors|Feature dropout requires at least 2 dim",
    ),
    ("rank", r"Padding length should be less than or equal to two times the input dimension"),
    ("rank", r"Padding size \d+ is not supported for (?P<actual>\d)D input|Expected 3D or higher dimensionality"),
    ("rank", r"Input tensors must have 2 or fewer dimensions|input is (?:3|2)D, then offsets|offsets has to be a 1D"),
    ("divide", r"=(?P<actual>\d+) is not divisible by (?P<expected>\d+)|num_groups=(?P<expected2>\d+)"),
    ("divide", r"Halving dimension must be even, but dimension \d+ is size (?P<actual>\d+)"),
    ("divide", r"to be divisible by|is not divisible by|must be divisible by|calculated number of sliding blocks"),
    ("square", r"must be batches of square matrices, but they are (?P<actual>\d+) by (?P<expected>\d+) matrices"),
    ("grid", r"grid_sampler\(\): expected|Expected a batch of 2D affine matrices|Expected shape of indices to be same"),
    ("output", r"requested an output size of .*, but valid sizes range from"),
    ("samples", r"per_sample_weights .* must have the same shape as the input"),
    (
        "gradient",
        r"returned an invalid gradient at index \d+ - got " + _B + r" but expected shape compatible with " + _A,
    ),
    ("vmap", r"vmap: Expected all tensors to have the same size in the mapped dimension, got sizes " + _A),
    (
        "bias",
        r"expected bias to be 1-dimensional with (?P<expected>\d+) elements, but got bias of size \[(?P<actual>\d+)\]",
    ),
    ("scalar", r"a Tensor with (?P<actual>\d+) elements cannot be converted to Scalar"),
    (
        "scalar",
        r"only (?:one element tensors|(?:0-dimensional|length-1|size-1) arrays) can be converted to Python "
        r"scalars",
    ),
    (
        "truth",
        r"Boolean value of Tensor with more than one value is ambiguous|"
        r"truth value of an array with more than one element is ambiguous",
    ),
    ("truth", r"Boolean value of Tensor with no values is ambiguous"),
    (
        "unpack",
        r"too many values to unpack \(expected (?P<expected>\d+)(?:, got \d+)?\)|"
        r"not enough values to unpack \(expected (?P<expected2>\d+), got (?P<actual>\d+)\)",
    ),
    ("zero", r"zero-dimensional tensor \(at position \d+\) cannot be concatenated"),
    ("picture", r"Invalid shape " + _A + r" for image data"),
    ("ragged", r"expected sequence of length (?P<expected>\d+) at dim (?P<axis>\d+) \(got (?P<actual>\d+)\)"),
    ("ragged", r"requested array has an inhomogeneous shape after (?P<axis>\d+) dimensions"),
)
NUMBERS = ("expected", "actual", "axis", "which")
COMPILED = tuple((kind, re.compile(text, re.DOTALL)) for kind, text in PATTERNS)


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
