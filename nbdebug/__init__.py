"""nbdebug: name the cause of a broken PyTorch training, in the notebook where it broke.

    %load_ext nbdebug
    %nan_trace train_step(batch)

Each magic has a function of the same name here, for scripts; both answer with a Report.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "Finding",
    "Fix",
    "Link",
    "NonFiniteStep",
    "Report",
    "Where",
    "check_notebook",
    "diagnose",
    "explain",
    "fit",
    "free",
    "grad_watch",
    "guard",
    "keep_fp32",
    "mem",
    "nan_trace",
    "open_record",
    "precision",
    "preflight",
    "step_through",
    "stop_at",
]
__version__ = "0.1.0"

_HOMES = {
    "Finding": "finding",
    "Fix": "finding",
    "Link": "finding",
    "Report": "finding",
    "Where": "finding",
    "explain": "explaining",
    "nan_trace": "chapters.nan.trace",
    "guard": "chapters.nan.guard.watch",
    "grad_watch": "chapters.training.watch.watch",
    "diagnose": "chapters.training.diagnose",
    "preflight": "chapters.training.preflight",
    "mem": "chapters.memory.mem",
    "fit": "chapters.memory.fit",
    "free": "chapters.memory.free",
    "stop_at": "stop.handle",
    "step_through": "stepper.stepper",
    "check_notebook": "notebook_check",
    "precision": "chapters.precision.precision",
    "keep_fp32": "chapters.precision.keep",
    "NonFiniteStep": "chapters.nan.guard.trip",
    "open_record": "chapters.nan.guard.opening",
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
    """`%unload_ext nbdebug`: take the magics away, and the guard that is on."""
    from nbdebug import magics

    magics.unregister(shell)
