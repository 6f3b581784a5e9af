"""How torch words an error about dtypes, in its versions and on its devices, and the dtypes in such a message."""

from __future__ import annotations

import re

WORDED: tuple[tuple[str, str], ...] = (
    ("autocast", r"are unsafe to autocast"),
    (
        "array",
        r"can't convert np\.ndarray of type|Could not infer dtype of|too many dimensions '\w+'|"
        r"Got unsupported ScalarType|must be Tensor, not (?:numpy\.\w+|list|tuple|float|int|Series|DataFrame)\b|"
        r"byte order different from the native",
    ),
    ("overflow", r"value cannot be converted to type \S+ without overflow"),
    (
        "classes",
        r"expected target dtype to be Long|\"nll_loss\w*\" not implemented for|"
        r"expected scalar type Long but found \w+|Expected object of scalar type Long",
    ),
    ("probable", r"Expected floating point type for target with class probabilities"),
    (
        "index",
        r"argument #1 'indices' to have one of the following scalar types|tensors used as indices must be|"
        r"Expected dtype int\d+(?:/int\d+| or int\d+)? for index|one_hot is only applicable to index|"
        r"Expected a long tensor for index|argument #1 'indices' to have scalar type Long",
    ),
    (
        "mask",
        r"with (?:two bool tensors|a bool tensor) is not supported|on a bool tensor is not supported|"
        r"only supports boolean masks|expected condition to be a boolean tensor|"
        r"only bool and floating types of \w+ are supported|attn_mask dtype to be bool",
    ),
    ("gradient", r"[Oo]nly Tensors of floating point"),
    ("in-place", r"can't be cast to the desired output type"),
    ("half", r"not implemented for '(?:Half|BFloat16)'|Low precision dtypes not supported"),
    ("integers", r"not implemented for '(?:Float|Double)'"),
    ("complex", r"not implemented for 'Complex\w+'|not supported for complex|does(?:n't| not) support complex"),
    (
        "whole",
        r"not implemented for '(?:Long|Int|Short|Byte|Char|Bool|U?Int\d+)'|could not infer output dtype|"
        r"std and var only support floating|Integral inputs not supported|"
        r"only supports floating-point dtypes for input|must be either a floating point or complex dtype|"
        r"result type Long can't",
    ),
    (
        "mixed",
        r"must have the same dtype|to have the same dtype|expected scalar type \w+ but found \w+|"
        r"Input type \(.+?\) and (?:bias|weight) type \(.+?\) should be the same|mixed dtype \(|"
        r"Found dtype \w+ but expected \w+|RNN input dtype|same dtype, but got|dtypes match, got|"
        r"Expected self\.dtype to be equal to src\.dtype|must have the same scalar type|"
        r"expected dtype \S+ for `\w+` but got dtype|Expected object of scalar type \w+ but got|"
        r"same type as input|all inputs must share same datatype|input must have the type \S+ got type",
    ),
)
"""(kind, pattern), the narrow before the wide."""

NAMES = {
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "byte": "uint8",
    "unsigned char": "uint8",
    "char": "int8",
    "signed char": "int8",
    "bool": "bool",
    "half": "float16",
    "c10::half": "float16",
    "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "complexhalf": "complex32",
}
"""torch's words for a dtype (ScalarType, C++ type, old tensor type), in lower case → its name."""
_WORD = (
    r"(?:torch\.)?(?:cuda\.|mps\.|xpu\.)?(c10::complex<\w+>|c10::\w+|unsigned char|signed char|long int|"
    r"Complex(?:Float|Double|Half)|BFloat16|Half|Float|Double|Long|Int|Short|Byte|Char|Bool|"
    r"u?int\d+|float\d+|bfloat16|complex\d+|long|double|float|int|bool)(?:Tensor)?"
)


def kind_of(message: str) -> str | None:
    """The kind of error about dtypes that a message tells of, None when it tells of none."""
    return next((kind for kind, pattern in WORDED if re.search(pattern, message)), None)


def dtypes_in(message: str) -> list[str]:
    """The dtypes that a message names, in order: "got Double and Float" → ["float64", "float32"]."""
    found = re.findall(rf"(?<![\w.:]){_WORD}(?![\w:])", message)
    return [NAMES.get(word.lower(), word) for word in found]


def on_two_devices(message: str) -> bool:
    """Whether the old words for tensor types tell of two devices: torch.cuda.FloatTensor and torch.FloatTensor."""
    types = re.findall(r"torch\.(cuda\.|mps\.|xpu\.|)\w+Tensor", message)
    return len(set(types)) > 1
