"""Every kind of error: how it is recognised, and the rule that names it. The first that knows an exception names it.

A kind is imported when an exception comes that it may know: all of them together take longer than what one has to say.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from nbdebug.chapters.error.scene import Scene
from nbdebug.finding import Finding

ON_A_CARD = r"assert|memory access|misaligned|launch|cublas|cudnn"
HERE = __name__.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Kind:
    """look, check: "module.function" among the looks and the rules. words: of the exception's type and message; where
    they hold none of these, the look knows nothing of it and is not asked. Wider than the look's own patterns."""

    look: str
    check: str
    words: str = ""

    def may_know(self, scene: Scene) -> bool:
        return re.search(self.words, f"{scene.type}: {scene.message}", re.IGNORECASE) is not None

    def ask(self, scene: Scene) -> Finding | None:
        facts = _function(f"looks.{self.look}")(scene)
        found: Finding | None = _function(f"rules.{self.check}")(facts) if facts is not None else None
        return found


@functools.cache
def _function(path: str) -> Callable[[Any], Any]:
    module, _, name = path.rpartition(".")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"{HERE}.{module}"), name)
    return found


KINDS: tuple[Kind, ...] = (
    Kind("collate.look", "collate.collate_mismatch"),
    Kind("workers.look", "workers.loader_worker_died"),
    Kind(
        "nccl.look",
        "nccl.nccl",
        r"^Dist|nccl|gloo|process|distributed|collective|rendezvous|c10d|store|clients|DDP|"
        r"reduction|ready only|backend|socket",
    ),
    Kind("card.look", "card.cuda_unavailable", r"cuda|nvidia|driver|device|kernel"),
    Kind("cuda_asserts.look_proven", "indices.index_out_of_range", ON_A_CARD),
    Kind("cuda_asserts.look", "cuda_asserts.device_assert", ON_A_CARD),
    Kind("devices.look", "devices.device_mismatch", r"device|[cg]pu|cuda|numpy|meta|generator"),
    Kind("dtypes.look", "dtypes.dtype_mismatch"),
    Kind("cudnn.look", "cudnn.cudnn_not_supported", r"cudnn|contiguous|engine|miopen"),
    Kind("indices.look", "indices.index_out_of_range"),
    Kind("autograd.twice.look", "autograd_twice.backward_twice", r"second time|unpacked|backward"),
    Kind(
        "autograd.in_place.look",
        "autograd_in_place.inplace_modified",
        r"in-?place|memory location|written-to|out=|leaf|view",
    ),
    Kind(
        "autograd.no_grad.look",
        "autograd_path.no_grad_path",
        r"grad|graph|parameter list|non-leaf|inference|attribute|operand|nonetype",
    ),
    Kind("state_dict.look_model", "state_dict.state_dict_mismatch", r"state.?dict"),
    Kind("state_dict.look_optimizer", "state_dict.state_dict_mismatch", r"state.?dict|param.?group|parameter group"),
    Kind("modules.look", "modules.module_not_found", r"import|module|attribute|pickl|global"),
    Kind("shapes.look", "shapes.shape_mismatch"),
)
"""The narrow before the wide."""
