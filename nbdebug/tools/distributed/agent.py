"""In a rank: what the user's program does is written down.

Each event is a line of JSON in the rank's own file, written before the call that it tells of: gloo may abort the
process in it. Torch's functions are wrapped in this process alone, which ends with the script. A thread ends the
process when the comparer asks for it, wherever its main thread waits.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import itertools
import json
import linecache
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import threading
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, dataloader

import nbdebug
from nbdebug.observe.locations import USER, kind_of
from nbdebug.process import alive
from nbdebug.tools.distributed import marks, paths
from nbdebug.tools.distributed.facts import START, CollectiveCall, Place

COLLECTIVES = (
    "all_reduce broadcast reduce all_gather all_gather_into_tensor all_gather_single gather scatter reduce_scatter "
    "reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single barrier monitored_barrier "
    "all_gather_object broadcast_object_list gather_object scatter_object_list all_reduce_coalesced "
    "all_gather_coalesced"
).split()
FUNCTIONAL = (
    "all_reduce broadcast all_gather_tensor all_gather_single reduce_scatter_tensor reduce_scatter_single "
    "all_to_all_single"
).split()
"""Of DTensor; they return before the others have come."""
REDUCING = re.compile(r"reduce|gather")
NUMBER = re.compile(r"\d\.\d|\d ?%")
SHAPELESS = {"all_to_all", "all_to_all_single", "barrier", "monitored_barrier"}
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PEER = re.compile(
    r"onnection (closed|reset|refused)|timed? ?out|timeout|Broken pipe|by peer|watchdog|ncclRemote|KeyboardInterrupt",
    re.I,
)
RANKS = re.compile(r"(RANK|PROCID|WORLD_SIZE)$")
EARLY, EVERY, LARGE, ROWS, CONTENT = 9, 50, 10_000_000, 4000, 32
"""Steps after which weights are compared: the first 8 (of a large model the 1st, 2nd, 4th and 8th), then each 50th.
Rows of a pass that are written down, by their numbers and by what they hold."""
PART = 1 << 20
"""Bytes of the log after which a new file is begun: the comparer removes those that it has read."""


def user_lines(frame: types.FrameType | None, most: int = 6) -> list[tuple[str, int, str]]:
    """The user's lines on a stack, from the inside out; in another thread than the main one, those of that."""
    if threading.current_thread() is not threading.main_thread():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[tuple[str, int, str]] = []
    while frame is not None and len(lines) < most:
        code = frame.f_code
        if _kind(code) == USER:
            lines.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return lines


end_process = os._exit
_kind = functools.lru_cache(maxsize=4096)(kind_of)


def address_of_environment() -> str:
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


class CallsDiffer(RuntimeError):
    """A rank is about to make another call than a rank that was there first; raised before the call, where `agree` is
    set. In gloo such a call may abort the process."""


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names; none where they do not fit: the call itself will say so."""
    try:
        arguments = signature.bind(*args, **kwargs)
    except TypeError:
        return {"tag": 0}
    arguments.apply_defaults()
    return arguments.arguments


def described(error: BaseException) -> tuple[dict[str, Any], types.FrameType | None]:
    """An error as plain values, and the user's innermost frame in it."""
    own = [place for place in traceback.walk_tb(error.__traceback__) if _kind(place[0].f_code) == USER][::-1]
    lines = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in own[:8]]
    return {"type": type(error).__name__, "text": str(error)[:2000], "lines": lines}, own[0][0] if own else None


class Agent:
    """One rank's observer. rank: None for one that writes nothing until `begin`. agree: is asked before each call."""

    def __init__(self, folder: pathlib.Path, rank: int | None) -> None:
        self.folder, self.rank, self.process, self.file = folder, rank, 0, -1
        self.places: list[Place] = []
        self.launcher_address = address_of_environment()
        self.trail, self.inside, self.lock = marks.Trail(), threading.local(), threading.RLock()
        self.agree: Callable[[CollectiveCall], None] | None = None
        self.hook: Any = None
        self.locating = False
        self.models: list[weakref.ref[Any]] = []
        self.parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.wrapped: dict[int, str] = {}
        self.waiting: dict[int, Any] = {}
        self.ordered: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.data: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.samplers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.opening: dict[str, Any] | None = None
        self.passes: list[dict[str, Any]] = []
        self.synced: Counter[str] = Counter()
        self.late_loss: tuple[Any, ...] | None = None
        self.last_message: dict[str, Any] | None = None
        self.pending: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.after_backward, self.ordinals = False, itertools.count()
        if rank is not None:
            self.begin(folder)

    def begin(self, folder: pathlib.Path) -> None:
        """Begin a log in this folder. What is known of models, optimizers and loaders stays."""
        self.folder, self.process = folder, os.getpid()
        parts = [int(path.suffixes[0][1:]) for path in folder.glob(f"rank-{self.rank}.*.jsonl")]  # of a rank before it
        self.finished, self.part, self.written = False, max(parts, default=-1) + 1, 0
        self.open()
        self.numbers, self.pass_counts, self.writes = Counter[str](), Counter[str](), Counter[str]()
        self.backwards, self.joining, self.bypassed, self.located = 0, 0, 0, False
        self.handled = 0
        self.score: dict[str, Any] | None = None
        self.scores, self.messages = 0, Counter[str]()
        self.trail.clear()
        self.passes.clear()
        self.synced.clear()
        self.waiting.clear()
        for record in self.optimizers.values():
            record.update(steps=0, reduced=False, stepped=[])
        self.write("start", pid=self.process, version=torch.__version__)
        for place in self.places:  # of the script, and of functions that earlier cells have made
            self.write("place", **vars(place))

    def open(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        path = self.folder / f"rank-{self.rank}.{self.part}.jsonl"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, /, **fields: Any) -> None:
        if os.getpid() != self.process:
            return  # a loader's worker, or the process that starts the ranks
        passed = self.trail.take()
        event = {"k": kind, "t": time.time(), **fields, **({"m": passed} if passed else {})}
        with self.lock:  # the thread that watches writes as well
            self.written += os.write(self.file, (json.dumps(event, default=str) + "\n").encode())
            if self.written > PART:
                self.part, self.written = self.part + 1, 0
                self.open()

    def listed(self, place: Place) -> None:
        self.places.append(place)
        self.write("place", **vars(place))

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, op: str, group: Any = None, shape: str = "", dtype: str = "", root: str = "", later: bool = False
    ) -> None:
        """later: the caller waits for the others some other time."""
        if self.joining or not dist.is_initialized():
            return
        group = group or c10d._get_default_group()
        if not isinstance(group, dist.ProcessGroup):
            return  # this rank is no member
        name = str(group.group_name)
        number = self.numbers[name]
        new: dict[str, Any] = {} if number else {"ranks": dist.get_process_group_ranks(group)}
        new |= {"async": True} if later else {}
        self.numbers[name] += 1
        lines = user_lines(sys._getframe(2))
        if (error := sys.exc_info()[1]) is not None and id(error) != self.handled:  # in `except` or `finally`
            self.handled = id(error)
            self.write("raised", **described(error)[0])
        if self.score is not None and REDUCING.search(op):
            self.score["reduced"] = True
        self.write("call", op=op, g=name, shape=shape, dtype=dtype, root=root, lines=lines, **new)
        if self.agree is not None:
            self.agree(CollectiveCall(number, name, op, shape, dtype, root, tuple(lines)))

    def collective(self, owner: Any, name: str) -> Callable[..., None]:
        """What notes the calls of one of torch's functions; of DTensor's, where a group has many forms."""
        signature = inspect.signature(getattr(owner, name))

        def note(*args: Any, **kwargs: Any) -> None:
            named = bound(signature, args, kwargs)
            group, first = named.get("group"), next(iter(named.values()), None)
            if owner is functional:
                group_name = functional._resolve_group_name(named["group"], named.get("tag", ""))
                group = c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
            tensors = [t for t in (first if isinstance(first, list) else [first]) if isinstance(t, torch.Tensor)]
            tensors = [] if name in SHAPELESS else tensors
            shape = ", ".join(str(list(t.shape)) for t in tensors[:4])
            dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
            end = next((k for k in ("src", "dst") if k in named), "")
            root = f"{end} {named[end] or named.get(f'group_{end}') or 0}" if end else ""
            if not end and "op" in named and (op := str(named["op"]).removeprefix("RedOpType.")) != "SUM":
                root = f"op {op}"
            self.call(name, group, shape, dtype, root, owner is functional or named.get("async_op", False))
            if name in ("all_reduce", "reduce_scatter_tensor") and tensors and self.backwards:
                self.gradient_reduced(tensors[0])

        return note

    def gradient_reduced(self, tensor: torch.Tensor) -> None:
        """The user's own reduction: once more than the wrapper's, or after the step that should use it?"""
        for optimizer, record in self.optimizers.items():
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            sizes = [p.numel() for p in parameters]
            own = next((p for p in parameters if p.grad is tensor), None)
            if own is not None or self.after_backward and tensor.numel() in {*sizes, sum(sizes)}:
                record["reduced"] = True
            late = record["stepped"]
            again = self.synced and id(own) in self.wrapped
            if own is not None and (late or again) and not self.numbers["gradients"]:
                self.numbers["gradients"] += 1
                lines = user_lines(sys._getframe(1))
                beside = [line for line in lines for step in late[:1] if line[2] == step[2]]  # in the step's function
                self.write("gradients", late=bool(late), lines=beside or lines)

    def message(self, name: str) -> Callable[..., None]:
        """What notes the messages from rank to rank. Those of one pair, group and tag are numbered."""
        signature, end = inspect.signature(getattr(c10d, name)), "dst" if "send" in name else "src"

        def note(*args: Any, **kwargs: Any) -> None:
            named, self.last_message = bound(signature, args, kwargs), None
            group = named.get("group") or c10d._get_default_group()
            peer, inner = named.get(end), named.get(f"group_{end}")
            if peer is None and inner is not None:
                peer = dist.get_global_rank(group, inner)
            if peer is None or not isinstance(group, dist.ProcessGroup):
                return  # from any rank
            way = "send" if end == "dst" else "receive"
            key = f"{group.group_name}/{named['tag']}/{peer}"
            number, self.messages[key + way] = self.messages[key + way], self.messages[key + way] + 1
            event = {"way": way, "peer": peer, "key": key, "n": number}
            self.last_message = {**event, "lines": user_lines(sys._getframe(3))}
            self.write("message", waits=name in ("recv", "send"), **self.last_message)

        return note

    def receives(self, work: Any, *_: Any, **__: Any) -> None:
        """A message that is received later is waited for."""
        if work is not None and self.last_message is not None:
            self.pending[work] = self.last_message

    def waits(self, work: Any, *_: Any, **__: Any) -> None:
        if self.pending and (event := self.pending.pop(work, None)) is not None:
            self.write("message", waits=True, again=True, **{**event, "lines": user_lines(sys._getframe(2))})

    def attempt(self, note: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> None:
        """The error boundary: a fault of ours does not reach the user's program, and is told in the report."""
        try:
            if note is not None:
                note(*args, **kwargs)
        except CallsDiffer:
            raise
        except Exception as fault:
            self.write("fault", error=f"{type(fault).__name__}: {fault}")

    def wrap(self, owner: Any, name: str, note: Any = None, flag: str = "call", then: Any = None) -> None:
        """Call `note` with the arguments before the outermost call of functions that share a flag, and `then` with the
        value, too, after it; with the flag "each" before and after each call."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if flag != "each" and torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            if self.locating and flag in ("call", "message"):
                raise RuntimeError("the other ranks do not take part in this")
            if flag != "each" and getattr(self.inside, flag, False):
                return plain(*args, **kwargs)
            setattr(self.inside, flag, True)
            try:
                self.attempt(note, *args, **kwargs)
                value = plain(*args, **kwargs)
                self.attempt(then, value, *args, **kwargs)
                return value
            finally:
                setattr(self.inside, flag, False)

        for place in {owner, dist} if owner is c10d else {owner}:
            if hasattr(place, name):
                setattr(place, name, noted)

    def install(self) -> None:
        for owner, names in ((c10d, COLLECTIVES), (functional, FUNCTIONAL)):
            for name in filter(functools.partial(hasattr, owner), names):
                self.wrap(owner, name, self.collective(owner, name))
        for name in ("send", "recv", "isend", "irecv"):
            self.wrap(c10d, name, self.message(name), "message", self.receives if name == "irecv" else None)
        self.wrap(c10d.Work, "wait", self.waits, "each")
        self.wrap(c10d, "init_process_group", self.initialised, then=lambda *_, **__: self.write("joined"))
        self.wrap(c10d, "destroy_process_group", self.destroyed)
        self.wrap(torch, "save", lambda obj, f, *_, **__: self.saved(f, lambda: marks.digest(obj)))
        for name in ("save", "savez", "savez_compressed"):
            self.wrap(numpy, name, lambda f, *parts, **named: self.saved(f, lambda: marks.digest([parts, named])))
        self.wrap(c10d, "new_group", self.group_made)
        self.wrap(torch.Tensor, "backward", self.backward, "backward")
        self.wrap(torch.autograd, "backward", lambda tensors, *_, **__: self.backward(tensors), "backward")
        self.wrap(torch, "manual_seed", lambda seed: self.write("seed", value=seed, lines=user_lines(sys._getframe(2))))
        ddp = nn.parallel.DistributedDataParallel
        self.wrap(ddp, "__init__", self.wrapper_begins, then=self.wrapper_made)
        self.wrap(ddp, "forward", self.forward, "each", self.forward_over)
        self.wrap(torch.optim.Optimizer, "__init__", flag="each", then=self.optimizer_made)
        for made, places in ((DataLoader, self.loaders), (DistributedSampler, self.samplers)):
            self.wrap(made, "__init__", flag="each", then=functools.partial(self.made, places))
        for name, change in (("__enter__", 1), ("__exit__", -1)):
            self.wrap(Join, name, flag="each", then=functools.partial(self.joins, change))
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(functools.partial(self.attempt, self.before_step))
        optimizers.register_optimizer_step_post_hook(functools.partial(self.attempt, self.after_step))
        self.look(True)
        self.wrap(builtins, "print", self.shown, "print")
        self.wrap(logging.Logger, "handle", lambda _, record: self.shown(record.getMessage()), "print")
        self.install_loader()
        self.install_files()
        self.wrap(os, "_exit", lambda code: self.write("end", code=code), "exit")  # of a thread, too: nothing is read
        sys.addaudithook(self.audit)
        self.install_environment()
        vars(builtins).update({marks.MARK: self.trail.mark, marks.TURNS: self.trail.turns})

    def made(self, places: Any, _: None, thing: Any, *__: Any, **___: Any) -> None:
        lines = user_lines(sys._getframe(3))
        ordinal = sum(line == lines[:1] for line, _ in places.values())
        places[thing] = (lines[:1], ordinal)

    def joins(self, change: int, *_: Any, **__: Any) -> None:
        """Within `join()` a rank that has run out answers for the others: nothing is compared."""
        self.joining += change

    # -- the group, and the environment -------------------------------------------------------------------------------

    def initialised(
        self, backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: Any = -1, rank: Any = -1,
        store: Any = None, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        world, own = (None if value == -1 else value for value in (world_size, rank))
        address, lines = address_of_environment(), user_lines(sys._getframe(2))
        at_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if init_method not in (None, "env://") or store is not None:
            address = init_method or ""
        self.write(
            "init",
            world=int(os.environ.get("WORLD_SIZE") or -1) if world is None else world,
            own=int(os.environ.get("RANK") or -1) if own is None else own,
            by_argument=world is not None,
            rank_by_argument=own is not None,
            address=address,
            launcher=self.launcher_address if at_launcher and address and "file:" not in address else "",
            timeout=timeout.total_seconds() if timeout else 600.0 if "nccl" in str(backend) else 1800.0,
            lines=lines,
        )
        self.write("call", op="init_process_group", g=START, root=str(backend or ""), lines=lines)

    def group_made(self, *args: Any, **kwargs: Any) -> None:
        """All ranks take part, members or not, but where the members alone meet."""
        if not (kwargs.get("use_local_synchronization") or any(arg is True for arg in args)):
            self.call("new_group")

    def destroyed(self, group: Any = None, *_: Any, **__: Any) -> None:
        whole = group is None or group is dist.GroupMember.WORLD
        self.finish()
        self.write("destroy", g="all" if whole else str(group.group_name))

    def install_environment(self) -> None:
        """Variables of other launchers that the user's lines read and that are not set."""
        plain = os._Environ.__getitem__

        def read(variables: Any, name: Any) -> Any:
            try:
                return plain(variables, name)
            except KeyError:
                lines = user_lines(sys._getframe(1), 1) if RANKS.search(str(name)) else []
                if lines:
                    self.write("unset", name=str(name), lines=lines)
                raise

        os._Environ.__getitem__ = read  # type: ignore[method-assign]

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and os.getpid() == self.process:
            variables = os.environ if args[3] is None else args[3]
            missing = [name for name in VARIABLES if name not in variables and name.encode() not in variables]
            self.write("child", missing=missing, lines=user_lines(sys._getframe(1)))

    # -- gradients and weights ----------------------------------------------------------------------------------------

    def wrapper_begins(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        sizes = [p.numel() for p in module.parameters() if p.requires_grad]
        shape = f"[{len(sizes)} parameters, {sum(sizes)} elements]"
        self.call("DistributedDataParallel()", kwargs.get("process_group"), shape)

    def wrapper_made(self, _: None, wrapper: Any, *__: Any, **___: Any) -> None:
        self.models.append(weakref.ref(wrapper))
        self.wrapped |= {id(p): name for name, p in wrapper.module.named_parameters()}
        self.write("wrapper", lines=user_lines(sys._getframe(2)))
        self.parts.update(wrapper.module.modules())
        self.whole.update((wrapper, wrapper.module))

    def past(self, module: nn.Module, *inputs: Any) -> None:
        """A part of a wrapped model runs with gradients, and its wrapper does not: told three times. A hook of all
        modules: one on the user's own would be copied and pickled with them."""
        if getattr(self.inside, "forward", 0):
            return
        if not torch.is_grad_enabled() and self.is_whole(module):
            self.evaluated(inputs[0] if inputs else ())
        if module not in self.parts or not torch.is_grad_enabled() or not module.training:
            return
        frame: types.FrameType | None = sys._getframe(1)
        if self.bypassed < 3:
            self.bypassed += 1
            while frame is not None and (
                _kind(frame.f_code) != USER or isinstance(frame.f_locals.get("self"), nn.Module)
            ):
                frame = frame.f_back
            self.write("past", lines=user_lines(frame))

    def look(self, on: bool) -> None:
        """The hook of all modules that calls `past`; off within a wrapper's forward, where each module would pay it."""
        if on and self.hook is None:
            self.hook = nn.modules.module.register_module_forward_pre_hook(functools.partial(self.attempt, self.past))
        elif not on and self.hook is not None:
            self.hook.remove()
            self.hook = None

    def is_whole(self, module: nn.Module) -> bool:
        """Whether it is a wrapped model; where none is wrapped, one that the user's lines call, and no other module."""
        if self.models:
            return module in self.whole
        frame = user_frame(sys._getframe(2))
        return frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module)

    def evaluated(self, inputs: Any) -> None:
        """A forward without gradients: what it is given, and which numbers are shown before the next backward."""
        if self.score is None:
            self.score = {"digests": [], "reduced": False, "lines": user_lines(sys._getframe(2)), "prints": []}
        tensors = [part for part in inputs if isinstance(part, torch.Tensor) and part.numel()]
        if tensors and len(self.score["digests"]) < 50:
            self.score["digests"].append(tensors[0].detach().double().sum().item())

    def shown(self, *values: Any, **_: Any) -> None:
        """A number on the screen or in a log."""
        if self.score is None or self.score["reduced"] or len(self.score["prints"]) > 4:
            return
        if any(NUMBER.search(str(value)) for value in values):
            self.score["prints"] += user_lines(sys._getframe(2), 1)

    def end_score(self) -> None:
        if self.score is not None:
            self.write("score", id=self.scores, **self.score)
            self.scores, self.score = self.scores + 1, None

    def forward(self, wrapper: Any, *_: Any, **__: Any) -> None:
        self.inside.forward = 1
        self.look(False)
        if wrapper.will_sync_module_buffers():
            self.call("buffers of DistributedDataParallel", wrapper.process_group)
        if torch.is_grad_enabled():
            if self.ordered.get(wrapper) is False:  # once, in the forward after the first backward
                self.ordered[wrapper] = True
                self.call("bucket order of DistributedDataParallel", wrapper.process_group)
            if wrapper.require_backward_grad_sync:
                self.waiting[id(wrapper)] = wrapper

    def forward_over(self, *_: Any, **__: Any) -> None:
        self.inside.forward = 0
        self.look(True)

    def backward(self, tensors: Any = None, *_: Any, **__: Any) -> None:
        self.forward_over()
        self.end_score()
        lines = user_lines(sys._getframe(2))
        for wrapper in self.waiting.values():
            self.call("backward of DistributedDataParallel", wrapper.process_group)
            if wrapper.static_graph or not wrapper.find_unused_parameters:
                self.ordered.setdefault(wrapper, False)
            self.synced[f"{lines[0][0]}:{lines[0][1]}" if lines else ""] += 1
        self.waiting.clear()
        self.note_loss(tensors, lines)
        self.backwards, self.after_backward = self.backwards + 1, True
        for record in self.optimizers.values():
            record["stepped"] = []
        for one in self.passes:
            one["backwards"] += 1

    def note_loss(self, tensors: Any, lines: list[tuple[str, int, str]]) -> None:
        """On a GPU the value is copied where it stands, and read when the optimizer steps: by then the forward is long
        over, so that the read waits for nothing that is still to be done."""
        self.read_late_loss()
        frame = user_frame(sys._getframe(3))
        if (
            isinstance(tensors, torch.Tensor)
            and tensors.numel() == 1
            and tensors.dtype in (torch.float32, torch.float64, torch.bfloat16)
            and not (tensors.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            loss = tensors.detach().reshape(())
            if not loss.is_cuda:
                self.write_loss(float(loss), self.backwards, lines, frame, frame.f_lineno if frame else 0)
                return
            value = torch.empty((), dtype=loss.dtype, pin_memory=True, device="cpu").copy_(loss, non_blocking=True)
            (event := torch.cuda.Event()).record()
            place = (frame.f_code, frame.f_lineno) if frame else (None, 0)
            self.late_loss = (value, event, self.backwards, lines, *place)

    def read_late_loss(self) -> None:
        if self.late_loss is None:
            return
        (value, event, n, lines, code, line), self.late_loss = self.late_loss, None
        event.synchronize()
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:  # the function that called backward, if it still runs
            frame = frame.f_back
        self.write_loss(float(value), n, lines, frame, line)

    def write_loss(self, value: float, n: int, lines: Any, frame: types.FrameType | None, line: int) -> None:
        """frame: of the user's function that called backward, at this line."""
        bad = not math.isfinite(value)
        blamed = marks.culprit(frame, line) if bad and frame is not None else None
        locates, self.located = bad and frame is not None and not self.located, self.located or bad
        self.write("loss", id=n, bad=bad, value=str(value), lines=[blamed] if blamed else lines, locates=locates)
        if locates and frame is not None:
            self.write("trace", id=n, finding=self.locate(frame, line))

    def locate(self, frame: types.FrameType, line: int) -> dict[str, Any] | None:
        """What nan_trace says of the lines that have made the loss whose backward is at this line, run again on this
        rank alone, without wrappers; None where they can't be, or where it finds no cause. What the lines change is put
        back."""
        file, plain = frame.f_code.co_filename, nn.parallel.DistributedDataParallel.forward
        names = {**frame.f_globals, **frame.f_locals}
        trail, loops = list(self.trail.passed), dict(self.trail.loops)
        try:
            body, loss = paths.computation(ast.parse("".join(linecache.getlines(file))), line)
            last = ast.copy_location(ast.Return(loss), loss)
            step = ast.parse("def nbdebug_step(): pass")
            step.body[0].body = [*body, last]  # type: ignore[attr-defined]
            exec(compile(step, file, "exec"), names)
            models = [
                v for n, v in names.items() if isinstance(v, nn.Module) and any(n in paths.names_in(s) for s in body)
            ]
            self.locating = True
            nn.parallel.DistributedDataParallel.forward = lambda model, *a, **k: model.module(*a, **k)  # type: ignore
            finding = nbdebug.nan_trace(names["nbdebug_step"], model=models or None, restore=True).findings[0]
        except Exception:  # whatever the user's lines raise on their own: the loss is told all the same
            return None
        finally:
            self.locating = False
            nn.parallel.DistributedDataParallel.forward = plain  # type: ignore[method-assign]
            self.trail.passed[:] = trail
            self.trail.loops.update(loops)
        where = finding.where
        place = [where.file, where.line, where.module or ""] if where.file and where.line else None
        return {"title": finding.title, "code": finding.code, "op": where.op, "module": where.module, "line": place}

    def optimizer_made(self, _: None, optimizer: Any, *__: Any, **___: Any) -> None:
        lines = user_lines(sys._getframe(2))
        record = {"id": next(self.ordinals), "steps": 0, "lines": lines, "reduced": False, "stepped": []}
        self.optimizers[optimizer] = record

    def before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self.optimizers:  # a copy
            self.optimizer_made(None, optimizer)
        self.read_late_loss()
        record = self.optimizers[optimizer]
        if record["steps"] < 3 and self.models:
            none = [name for name, p in self.names(optimizer).items() if p.grad is None and p.requires_grad]
            self.write("nograd", id=f"{record['id']}/{record['steps']}", names=none)
        if not record["steps"]:
            self.weights(optimizer, record, "before")

    def after_step(self, optimizer: Any, *_: Any) -> None:
        record = self.optimizers[optimizer]
        record["steps"] += 1
        record["stepped"] = user_lines(sys._getframe(1))
        self.after_backward = False
        if self.synced:
            self.write("step", id=f"{record['id']}/{record['steps']}", synced=dict(self.synced))
            self.synced.clear()
        large = sum(p.numel() for g in optimizer.param_groups for p in g["params"]) > LARGE
        if record["steps"] in ((1, 2, 4, 8) if large else range(EARLY)) or record["steps"] % EVERY == 0:
            self.weights(optimizer, record, "after")

    def names(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's parameters by their names in a wrapped model, else by their numbers."""
        models = [model for made in self.models if (model := made()) is not None]
        live = {id(p): name for model in models for name, p in model.module.named_parameters()}
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        return {live.get(id(p), f"parameter {n}"): p for n, p in enumerate(parameters)}

    def weights(self, optimizer: Any, record: dict[str, Any], when: str) -> None:
        parameters = {name: p for name, p in self.names(optimizer).items() if p.is_floating_point()}
        some = any(not name.startswith("parameter ") for name in parameters)
        if not (some or record["reduced"]) or any(map(marks.is_shared_out, parameters.values())):
            return
        double = {"dtype": torch.float64}
        with torch.no_grad():  # without copies in float64; one read
            sums = [torch.stack((p.sum(**double), torch.linalg.vector_norm(p, **double))) for p in parameters.values()]
            numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
        groups = {
            tuple(dist.get_process_group_ranks(m.process_group))
            for made in self.models
            if (m := made()) is not None and m.process_group in c10d._world.pg_group_ranks
        }
        self.write(
            "weights",
            id=f"{record['id']}/{record['steps']}/{when}/{sorted(groups)}",
            step=max(record["steps"] - 1, 0),
            backwards=self.backwards,
            when=when,
            values=dict(zip(parameters, numbers)),
            late=[name for name, p in parameters.items() if some and id(p) not in self.wrapped],
            lr=[float(g.get("lr") or 0) for g in optimizer.param_groups],
            lines=record["lines"],
        )

    # -- data and files -----------------------------------------------------------------------------------------------

    def install_loader(self) -> None:
        plain_iter, plain_index, plain_next = (
            DataLoader.__iter__,
            dataloader._BaseDataLoaderIter._next_index,
            dataloader._BaseDataLoaderIter.__next__,
        )
        agent = self

        def begin(loader: DataLoader) -> Any:
            agent.end_passes()
            lines, ordinal = agent.loaders.get(loader, ((), 0))
            sampler = loader.sampler
            own = agent.samplers.get(sampler, ((), 0)) if isinstance(sampler, DistributedSampler) else ((), 0)
            streams = isinstance(loader.dataset, IterableDataset)
            agent.opening = {
                "loader": f"{lines[:1]}#{ordinal}", "lines": list(lines), "sampler": list(own[0]), "rows": [],
                "shuffles": bool(getattr(sampler, "shuffle", False)), "backwards": 0, "complete": False,
                "streams": streams, "data": agent.fingerprint(loader), "content": [],
            }  # fmt: skip
            agent.passes.append(agent.opening)
            iterator = plain_iter(loader)
            vars(iterator)["_nbdebug_pass"], agent.opening = agent.opening, None
            return iterator

        def index(self: Any) -> Any:
            rows = plain_index(self)
            current = agent.opening or getattr(self, "_nbdebug_pass", None)  # workers are given indices at the start
            if current is not None and not current["streams"] and len(current["rows"]) < ROWS:
                current["rows"] += [r for r in (rows if isinstance(rows, list) else [rows]) if isinstance(r, int)]
            return rows

        def following(self: Any) -> Any:
            current = getattr(self, "_nbdebug_pass", None)
            try:
                batch = plain_next(self)
            except StopIteration:
                if current is not None:
                    current["complete"] = True
                raise
            if current is not None:
                part = current["rows" if current["streams"] else "content"]
                if len(part) < (ROWS if current["streams"] else CONTENT):
                    with contextlib.suppress(Exception):  # of the user's values
                        part += marks.rows_of(batch)
            return batch

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter._next_index = index  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]

    def fingerprint(self, loader: DataLoader) -> str:
        """Of what a loader's dataset holds: ranks whose datasets are not the same may read rows of the same numbers."""
        if loader not in self.data:
            self.data[loader] = ""
            with contextlib.suppress(Exception):  # of the user's values
                self.data[loader] = marks.digest(loader.dataset, 1000)
        return self.data[loader]

    def end_passes(self) -> None:
        """Passes that are over, or will not go on: written once."""
        counts = self.pass_counts
        for one in [one for one in self.passes if one["complete"] or one["backwards"]]:
            self.passes.remove(one)
            self.write("pass", id=f"{one['loader']}/{counts[one['loader']]}", **one)
            counts[one["loader"]] += 1

    def saved(self, path: Any, value: Callable[[], str]) -> None:
        if isinstance(path, (str, os.PathLike)):
            lines = user_lines(sys._getframe(3))
            self.file_written(path, lines, value())

    def file_written(self, path: Any, lines: Any, value: str) -> None:
        full = os.path.realpath(os.fspath(path))
        if not full.startswith(("/dev/", "/proc/")):
            self.write("file", id=f"{full}/{self.writes[full]}", path=full, digest=value, lines=lines)
            self.writes[full] += 1

    def install_files(self) -> None:
        """What the user's lines open for writing anew: the digest of what is written into it."""
        plain, agent = builtins.open, self

        @functools.wraps(plain)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            stream = plain(file, mode, *args, **kwargs)
            if isinstance(mode, str) and set(mode) & {"w", "x"} and isinstance(file, (str, os.PathLike)):
                frame = sys._getframe(1)
                own = _kind(frame.f_code) == USER or frame.f_code.co_filename.endswith("pathlib.py")
                if "-packages" in frame.f_code.co_filename:  # a library, for the user: its caches lie elsewhere
                    own = os.path.realpath(file).startswith(os.getcwd() + os.sep)
                lines = user_lines(frame) if own else []
                if lines:
                    over = functools.partial(agent.attempt, agent.file_written, file, lines)
                    marks.follow_writes(stream, over, functools.partial(agent.attempt, agent.shown))
            return stream

        builtins.open = opened

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What is compared at the end of the training, once."""
        if self.finished:
            return
        self.finished = True
        self.end_score()
        self.read_late_loss()
        for optimizer, record in list(self.optimizers.items()):
            if record["steps"] >= EARLY:
                self.weights(optimizer, record, "after")
        self.end_passes()

    def left(self, code: Any) -> None:
        self.finish()
        self.write("end", code=code if isinstance(code, int) else int(code is not None))

    def failed(self, error: BaseException, rest: bool = True) -> None:
        own, frame = described(error)
        text = str(error)
        bad, blamed = marks.within(1.0, marks.nonfinite, frame) or ([], None)
        names = self.unused_names(text)
        peer = (
            bool(PEER.search(text))
            and isinstance(error, (RuntimeError, OSError))
            or isinstance(error, (KeyboardInterrupt, CallsDiffer))
        )
        self.write(
            "error", **own, peer=peer,
            nonfinite=bad, blamed=blamed, step=self.backwards, names=names,
            unset=[name for name in VARIABLES if name not in os.environ],
        )  # fmt: skip
        self.write("loops", loops=self.loops(rest))

    def unused_names(self, text: str) -> list[str]:
        """The parameters that torch's message gives by their numbers."""
        match = re.search(r"did not receive grad[^:]*: ([\d ]+)", text)
        model = next((m for made in self.models if (m := made()) is not None), None)
        if match is None or model is None:
            return []
        names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        return [names[int(n)] for n in match[1].split() if int(n) < len(names)]

    def loops(self, rest: bool = True) -> dict[int, int]:
        """The turns of each loop as it ran last; of one that goes on, with those that are left (looked for 1 s). rest:
        use up the user's iterators for it, where the process ends anyway."""
        totals: dict[int, int] = {}

        def count() -> None:
            for number, (turns, length, iterator) in list(self.trail.loops.items()):
                totals[number] = turns if length is None else length
                if rest and length is None and not isinstance(iterator, dataloader._BaseDataLoaderIter):
                    with contextlib.suppress(BaseException):  # the user's iterator, in the middle of its work
                        totals[number] += sum(1 for _ in iterator)

        marks.within(1.0, count)
        return dict(totals)

    def observe(self, work: Callable[..., Any], *args: Any) -> None:
        """Do this, as all that a rank does. What it raises passes through, after it was written down."""
        threading.Thread(target=self.watch, daemon=True, name="nbdebug ranks").start()
        try:
            work(*args)
            self.left(0)
        except SystemExit as left:
            if left.code and isinstance(left.__context__, Exception):  # sys.exit(1) in the user's `except`
                self.failed(left.__context__)
            else:
                self.left(left.code)
            raise
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.leave()

    def watch(self) -> None:
        """End this process when the comparer says so, or the launcher was killed. The main thread may wait in C++."""
        path = self.folder / "launcher"
        launcher = int(path.read_text()) if path.exists() else None
        asked = 0
        while not (self.process and (self.folder / "stop").exists()):
            if len(questions := list(self.folder.glob("ask-*"))) > asked:
                asked = len(questions)
                self.write_state(rest=False)
            if launcher is not None and not alive(launcher):
                shutil.rmtree(self.folder, ignore_errors=True)
                end_process(1)
            time.sleep(0.1)
        self.write_state()
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(1)

    def write_state(self, rest: bool = True) -> None:
        """Where the main thread stands, and how far its loops are."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [(each.f_code, line) for each, line in traceback.walk_stack(frame)][::-1]
        while frames and _kind(frames[0][0]) != USER:  # above the user's first line; none where it has ended
            del frames[0]
        own = []
        for code, line in frames:
            file, text = code.co_filename, linecache.getline(code.co_filename, line).strip()
            if _kind(code) != USER:  # of a library what is below its folder
                file = file.rpartition("-packages" + os.sep)[2] if "-packages" in file else os.path.basename(file)
            if f"{os.sep}nbdebug{os.sep}" not in code.co_filename and "<frozen" not in file:
                own.append(f"{file}, line {line}, in {code.co_name}: {text}")
        self.write("stack", lines=user_lines(frame) if frame else [], stack=own[-12:])
        self.write("loops", loops=self.loops(rest))

    def leave(self) -> None:
        """Wait for the other ranks' end for 2 s: a rank that is left alone is stopped first, and so tells its state."""
        (self.folder / f"end-{self.rank}").touch()
        started = len(list(self.folder.glob("launched-*")))  # by the script itself
        world, until = started or int(os.environ.get("LOCAL_WORLD_SIZE", "1")), time.monotonic() + 2
        while time.monotonic() < until and len(list(self.folder.glob("end-*"))) < world:
            time.sleep(0.05)


def user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and _kind(frame.f_code) != USER:
        frame = frame.f_back
    return frame
