"""nbdebug: name the cause of a broken PyTorch training, in the notebook where it broke.

    %load_ext nbdebug
    %nan_trace train_step(batch)

Each magic has a function of the same name here, for scripts; both answer with a Report.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "Checkpoints",
    "EarlyStop",
    "Edit",
    "Finding",
    "Fix",
    "Link",
    "NonFiniteStep",
    "Report",
    "Where",
    "add_pages",
    "bottleneck",
    "check_adapter",
    "check_checkpoint",
    "check_config",
    "check_data",
    "check_diffusion",
    "check_environment",
    "check_loader",
    "check_notebook",
    "check_outputs",
    "check_ranks",
    "compare",
    "describe",
    "diagnose",
    "explain",
    "first_aid",
    "fit",
    "free",
    "generation",
    "grad_watch",
    "guard",
    "hang_watch",
    "incident",
    "keep_fp32",
    "mem",
    "monitor",
    "nan_trace",
    "open_record",
    "perplexity",
    "precision",
    "preflight",
    "read_log",
    "resume_proof",
    "schema_from",
    "smallest",
    "step_through",
    "stop_at",
]
__version__ = "0.1.0"

_HOMES = {
    "EarlyStop": "tools.training.regularizers",
    "Edit": "report",
    "Finding": "report",
    "Fix": "report",
    "Link": "report",
    "Report": "report",
    "Where": "report",
    "explain": "tools.explain",
    "add_pages": "registry",
    "nan_trace": "tools.nan.nan_trace",
    "guard": "tools.guard.guard",
    "grad_watch": "tools.grad_watch.grad_watch",
    "diagnose": "tools.training.diagnose",
    "preflight": "tools.training.preflight",
    "mem": "tools.memory.mem",
    "fit": "tools.memory.fit",
    "free": "tools.memory.free",
    "stop_at": "tools.breakpoints.stop_at",
    "step_through": "tools.stepper.step_through",
    "check_config": "tools.config.check_config",
    "schema_from": "tools.config.schema_from",
    "Checkpoints": "tools.checkpoint.checkpoints",
    "resume_proof": "tools.checkpoint.resume_proof",
    "check_checkpoint": "tools.checkpoint.check_checkpoint",
    "check_environment": "tools.environment.check_environment",
    "check_data": "tools.data.check_data",
    "bottleneck": "tools.speed.bottleneck",
    "check_loader": "tools.data.check_loader",
    "generation": "tools.speed.generation",
    "perplexity": "tools.quality.perplexity",
    "check_ranks": "tools.distributed.check_ranks",
    "hang_watch": "tools.distributed.hang_watch",
    "check_outputs": "tools.quality.check_outputs",
    "check_adapter": "tools.quality.check_adapter",
    "check_diffusion": "tools.quality.check_diffusion",
    "compare": "tools.quality.compare",
    "check_notebook": "tools.notebook.check_notebook",
    "precision": "tools.precision.precision",
    "keep_fp32": "tools.precision.casting",
    "describe": "tools.first_aid.describe",
    "smallest": "tools.first_aid.smallest",
    "first_aid": "tools.first_aid.first_aid",
    "NonFiniteStep": "tools.guard.step",
    "incident": "tools.monitor.incident",
    "monitor": "tools.monitor.monitor",
    "read_log": "tools.monitor.read_log",
    "open_record": "tools.guard.record.open_record",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import nbdebug` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nbdebug' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nbdebug.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nbdebug`: register the magics."""
    from nbdebug import magics

    magics.register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbdebug`: remove the magics, and end the watches that are on."""
    from nbdebug import magics

    magics.unregister(shell)
