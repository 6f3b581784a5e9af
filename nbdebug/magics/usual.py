"""What a magic takes where its options name nothing: the user's variables of usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

USUAL = {
    "loss_fn": ("loss_fn", "compute_loss", "criterion"),
    "train_loader": ("train_loader", "train_dl", "train_dataloader", "trainloader", "loader"),
    "val_loader": ("val_loader", "val_dl", "val_dataloader", "valid_loader", "valloader", "test_loader"),
    "scheduler": ("scheduler", "lr_scheduler", "sched"),
}
"""Names by which these are found among the user's variables where no option names them, in this order."""


def found(kind: str, name: str | None, names: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, value) of what the option names, or of the first usual name that the user has; ("", None) for none."""
    if name is None:
        usual = next((n for n in USUAL[kind] if names.get(n) is not None), "")
        return usual, names.get(usual)
    try:
        return name, eval(name, dict(names))
    except Exception as wrong:  # whatever it raises, it names nothing
        raise UsageError(f"--{kind.replace('_', '-')} {name!r} names nothing: {wrong}") from None


def refused(wrong: BaseException) -> bool:
    """Whether nbdebug itself refused its arguments, with none of the user's code to blame."""
    trace = wrong.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("nbdebug.")
