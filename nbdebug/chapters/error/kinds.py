"""Every kind of error: how it is recognised, and the rule that names it. The first that knows an exception names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdebug.chapters.error.looks import card as card_looks
from nbdebug.chapters.error.looks import collate as collate_looks
from nbdebug.chapters.error.looks import cuda_asserts as cuda_looks
from nbdebug.chapters.error.looks import cudnn as cudnn_looks
from nbdebug.chapters.error.looks import devices as device_looks
from nbdebug.chapters.error.looks import dtypes as dtype_looks
from nbdebug.chapters.error.looks import indices as index_looks
from nbdebug.chapters.error.looks import modules as module_looks
from nbdebug.chapters.error.looks import nccl as nccl_looks
from nbdebug.chapters.error.looks import shapes
from nbdebug.chapters.error.looks import state_dict as state_looks
from nbdebug.chapters.error.looks import workers as worker_looks
from nbdebug.chapters.error.looks.autograd import in_place, no_grad, twice
from nbdebug.chapters.error.rules import (
    card,
    collate,
    cuda_asserts,
    cudnn,
    devices,
    dtypes,
    indices,
    modules,
    nccl,
    state_dict,
    workers,
)
from nbdebug.chapters.error.rules.autograd_in_place import inplace_modified
from nbdebug.chapters.error.rules.autograd_path import no_grad_path
from nbdebug.chapters.error.rules.autograd_twice import backward_twice
from nbdebug.chapters.error.rules.shapes import shape_mismatch
from nbdebug.chapters.error.scene import Scene
from nbdebug.finding import Finding

KINDS: tuple[tuple[Callable[[Scene], Any], Callable[[Any], Finding | None]], ...] = (
    (collate_looks.look, collate.collate_mismatch),
    (worker_looks.look, workers.loader_worker_died),
    (nccl_looks.look, nccl.nccl),
    (card_looks.look, card.cuda_unavailable),
    (cuda_looks.look_proven, indices.index_out_of_range),
    (cuda_looks.look, cuda_asserts.device_assert),
    (device_looks.look, devices.device_mismatch),
    (dtype_looks.look, dtypes.dtype_mismatch),
    (cudnn_looks.look, cudnn.cudnn_not_supported),
    (index_looks.look, indices.index_out_of_range),
    (twice.look, backward_twice),
    (in_place.look, inplace_modified),
    (no_grad.look, no_grad_path),
    (state_looks.look_model, state_dict.state_dict_mismatch),
    (state_looks.look_optimizer, state_dict.state_dict_mismatch),
    (module_looks.look, modules.module_not_found),
    (shapes.look, shape_mismatch),
)
"""(look, rule's check), the narrow before the wide."""
