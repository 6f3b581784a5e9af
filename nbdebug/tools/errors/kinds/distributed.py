"""A failure between processes: NCCL's or gloo's message, the launcher's variables, the model that DDP wraps."""

from __future__ import annotations

import ast
import os
import re

import torch

from nbdebug.observe.sources import edit_of
from nbdebug.observe.variables import registered
from nbdebug.report import Edit
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.rules.distributed import Collective
from nbdebug.tools.errors.sandbox import CannotRun, Sandbox
from nbdebug.tools.errors.values import expression, operands, statement, value_of

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and env:// needs."""
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "duplicate gpu",
        re.compile(
            r"Duplicate GPU detected ?: rank (?P<rank>\d+) and rank (?P<other>\d+) both on CUDA "
            r"device (?P<device>\w+)"
        ),
    ),
    ("unused parameters", re.compile(r"Expected to have finished reduction in the prior iteration")),
    ("marked twice", re.compile(r"Expected to mark a variable ready only once")),
    ("no group", re.compile(r"Default process group has not been initialized")),
    ("twice", re.compile(r"[Tt]rying to initialize the default process group twice")),
    ("environment", re.compile(r"environment variable (?P<variable>\w+) expected, but not set")),
    ("port in use", re.compile(r"(?:port: (?P<port>\d+).*?)?(?:EADDRINUSE|[Aa]ddress already in use)", re.DOTALL)),
    ("not built", re.compile(r"doesn't have NCCL built in|NCCL is not available|nccl.* not compiled", re.IGNORECASE)),
    ("no gpu", re.compile(r"ProcessGroupNCCL is only supported with GPUs")),
    (
        "cpu tensor",
        re.compile(
            r"No backend type associated with device type (?P<device>\w+)|Tensors must be CUDA and "
            r"dense"
        ),
    ),
    (
        "other models",
        re.compile(
            r"DDP expects same model across all ranks.*?Rank (?P<rank>\d+) has (?P<mine>\d+) params"
            r", while rank (?P<other>\d+) has inconsistent (?P<theirs>\d+)|"
            r"params\[(?P<parameter>\d+)\] in this process with sizes (?P<sizes>\[.*?\]) appears"
        ),
    ),
    ("mismatch", re.compile(r"Detected mismatch between collectives on ranks")),
    ("joined", re.compile(r"(?P<there>\d+)/(?P<all>\d+) clients joined")),
    (
        "timeout",
        re.compile(
            r"(?:collective operation timeout.*?)?OpType=(?P<operation>\w+).*?Timeout\(ms\)="
            r"(?P<limit>\d+)|collective operation timeout|"
            r"Timed out waiting (?P<waited>\d+)ms for (?P<what>\w+) operation",
            re.DOTALL,
        ),
    ),
    ("refused", re.compile(r"client socket has (?:failed|timed out)|Connection refused|failed to connect to")),
    ("closed", re.compile(r"Connection closed by peer|Connection reset by peer|ncclRemoteError|remote process exited")),
    ("usage", re.compile(r"ncclInvalidUsage|ncclInvalidArgument|invalid usage")),
    ("system", re.compile(r"ncclSystemError|unhandled system error")),
    ("cuda", re.compile(r"ncclUnhandledCudaError|unhandled cuda error")),
    ("internal", re.compile(r"ncclInternalError|internal error")),
)
"""(kind, pattern), the narrow before the wide."""
ABOUT = re.compile(
    r"nccl|gloo|process group|distributed|DistributedDataParallel|collective|rendezvous|c10d|TCPStore|"
    r"ProcessGroup|clients joined|DDP|finished reduction|ready only once|No backend type|socket",
    re.IGNORECASE,
)
OWN = re.compile(
    r"nccl|gloo|reduction in the prior|ready only once|clients joined|DDP expects|process group has not|"
    r"mismatch between collectives|collective operation timeout",
    re.IGNORECASE,
)
TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
FOLDER = re.compile(r"[\\/]torch[\\/](distributed|nn[\\/]parallel)[\\/]")


def detect(context: ErrorContext) -> Collective | None:
    if not (
        context.type in TYPES
        or context.type in ("RuntimeError", "ValueError", "OSError", "TimeoutError")
        and ABOUT.search(context.message)
    ):
        return None
    near = any(FOLDER.search(frame.site.file) for frame in context.trail)
    if context.type not in TYPES and not near and not OWN.search(context.message):
        return None  # a socket of the user's own
    recognised = next(((kind, match) for kind, pattern in KINDS if (match := pattern.search(context.message))), None)
    if recognised is None:
        return None
    what, groups = recognised
    values = tuple((key, value) for key, value in groups.groupdict().items() if value)
    model, unused = _unused(context) if what == "unused parameters" else ("", ())
    arguments = operands(context.users[0]) if context.users else ()
    tensors = tuple(f"{text} on {value.device}" for text, value in arguments if is_tensor(value))[:5]
    alone = what == "no group" and "RANK" not in os.environ
    edit, runs = _group_of_one(context) if alone else (None, None)
    return Collective(
        context.raised(),
        what,
        values,
        tuple(name for name in VARIABLES if name in os.environ),
        tuple(name for name in VARIABLES if name not in os.environ),
        _backend(),
        os.environ.get("RANK", ""),
        os.environ.get("WORLD_SIZE", ""),
        torch.cuda.device_count(),
        _version(),
        unused,
        model,
        tensors,
        edit,
        runs,
    )


def _group_of_one(context: ErrorContext) -> tuple[Edit | None, bool | None]:
    """(the failing line behind one that makes a group of this process alone, whether the failing call runs in it: on
    copies of its tensors; the group is ended again)."""
    frame = context.users[0] if context.users else None
    line, call = (statement(frame), expression(frame)) if frame is not None else (None, None)
    if frame is None or line is None or hasattr(line, "body"):
        return None, None
    call = getattr(line, "value", None) if call in (None, line) else call  # before Python 3.11 no columns tell
    space = {**frame.globals, **frame.names}
    home = (
        "torch.distributed" if "torch" in space else next((n for n, v in space.items() if v is torch.distributed), "")
    )
    if not home or not torch.distributed.is_gloo_available():
        return None, None
    pad = "\n" + " " * line.col_offset
    made = f'init_process_group("gloo", store={home}.HashStore(), rank=0, world_size=1)'
    edit = edit_of(frame.site.file, {line: f"if not {home}.is_initialized():{pad}    {home}.{made}{pad}{{raw}}"})
    runs = None
    if isinstance(call, ast.Call) and not torch.distributed.is_initialized():
        function = value_of(call.func, frame)
        if str(getattr(function, "__module__", "")).startswith("torch.distributed."):
            store = vars(torch.distributed)["HashStore"]()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                box = Sandbox()
                args = [box.evaluate(arg, frame) for arg in call.args]
                function(*args, **{k.arg: box.evaluate(k.value, frame) for k in call.keywords if k.arg})
                runs = True
            except (CannotRun, RuntimeError, ValueError, TypeError):
                pass
            finally:
                torch.distributed.destroy_process_group()
    return edit, runs


def _backend() -> str:
    distributed = torch.distributed
    return str(distributed.get_backend()) if distributed.is_available() and distributed.is_initialized() else ""


def _version() -> str:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _unused(context: ErrorContext) -> tuple[str, tuple[str, ...]]:
    """(name, parameters without a gradient) of the model that DDP wraps."""
    for frame in reversed(context.trail):
        wrapped = frame.module
        if wrapped is not None and type(wrapped).__name__ == "DistributedDataParallel":
            inner = registered(wrapped, "_modules").get("module")
            lacking = (
                [
                    name
                    for name, parameter in torch.nn.Module.named_parameters(inner)
                    if parameter.requires_grad and parameter.grad is None
                ]
                if inner is not None
                else []
            )
            name = next((n for n, value, _ in context.variables() if value is wrapped and n != "self"), "model")
            return name, tuple(lacking[:30])
    return "", ()
