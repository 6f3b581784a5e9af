"""Which ops a record may ask for: those of ATen that compute with tensors and numbers, by their public names.

A record may come from a stranger. ATen also has ops that open files, that take memory without asking how large it is,
or that are for its own use and check nothing. So an op whose name begins with an underscore must be on a list, some
others are refused, and of texts only the few that name a reduction or a rounding are let through.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_INNER = frozenset(
    "_softmax _log_softmax _safe_softmax _masked_softmax _to_copy _unsafe_view _local_scalar_dense _cdist_forward "
    "_euclidean_dist _pdist_forward _weight_norm_interface _fft_r2c _fft_c2r _fft_c2c _linalg_det _linalg_eigh "
    "_linalg_slogdet _linalg_solve_ex _linalg_svd _trilinear _conj _neg_view _ctc_loss _prelu_kernel "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _unique2 _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _stack _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _upsample_bilinear2d_aa _upsample_bicubic2d_aa _assert_async".split()
)
"""Ops that torch's public functions are made of, and that check what they are given."""
_REFUSED = frozenset(
    "from_file set_ set_data set record_stream data resize resize_ resize_as_ resize_as_sparse_ "
    "copy_sparse_to_sparse_ pin_memory is_pinned".split()
)
TEXTS = frozenset(
    "none mean sum prod amax amin add multiply floor trunc tanh left right linear lower higher midpoint nearest L U "
    "ij xy reduced complete r".split()
)
"""The texts that an op may be given: reductions, roundings, sides."""
_NAME = re.compile(r"aten\.([A-Za-z0-9_]{1,80})\.([A-Za-z0-9_]{1,80})", re.ASCII)
_OPERATORS = frozenset({"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"})


def name_of(op: Any) -> str | None:
    """The name under which a record has an op, "aten.log.default"; None where it may not have it."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    name = f"aten.{op._schema.name.split('::')[-1]}.{op._overloadname}"
    return name if _allowed(name) else None


def op_of(name: Any) -> torch._ops.OpOverload:
    """The op of this name. Raises ValueError for one that there is not, or that a record may not ask for."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or not _allowed(name):
        raise ValueError(f"the record asks for the op {str(name)[:100]!r}, which is not among those it may ask for")
    try:
        op = getattr(getattr(torch.ops.aten, match[1]), match[2])
    except AttributeError:
        op = None
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"this torch ({torch.__version__}) has no op {name}")
    return op


def check_texts(value: Any, name: str) -> None:
    """Raises ValueError where an op would be given a text that is none of TEXTS."""
    if isinstance(value, str) and value not in TEXTS:
        raise ValueError(f"the record gives {value[:40]!r} to the op {name}, which takes no such text")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_texts(inner, name)


def _allowed(name: str) -> bool:
    base = name.split(".")[1]
    if base.startswith("_"):
        return base in _INNER or base in _OPERATORS or base.startswith("_foreach_")
    return base not in _REFUSED
