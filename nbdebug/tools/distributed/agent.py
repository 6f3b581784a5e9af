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
import gc
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
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, dataloader

import nbdebug
from nbdebug.observe.locations import USER, code_kind, users_frames
from nbdebug.observe.sources import is_next, names_loaded, names_stored, nodes_of, slice_of, statement_at
from nbdebug.tools.distributed import marks
from nbdebug.tools.distributed.facts import START, VARIABLES, CollectiveCall, Line, Place
from nbdebug.tools.distributed.launch import alive

COLLECTIVE = re.compile(r"(all_(reduce|gather|to_all)|broadcast|reduce|gather|scatter|(monitored_)?barrier)(_\w+)?")
REDUCING = re.compile(r"reduce|gather")
NUMBER = re.compile(r"\d\.\d|\d ?%")
JOINS = {Join.notify_join_context.__code__, Join.__exit__.__code__}
SHAPELESS = re.compile(r"all_to_all|barrier")

PEER = re.compile(
    r"onnection (closed|reset|refused)|timed? ?out|timeout|Broken pipe|by peer|watchdog|ncclRemote|KeyboardInterrupt",
    re.I,
)
RANKS = re.compile(r"(RANK|PROCID|WORLD_SIZE)$")
EARLY, EVERY, LARGE, ROWS, CONTENT = 9, 50, 10_000_000, 4000, 32
"""Steps after which weights are compared: the first 8 (of a large model the 1st, 2nd, 4th and 8th), then each 50th.
Rows of a pass that are written down, by their numbers and by what they hold."""
COMES = 3.0
"""Seconds for which a rank waits for a file that it has not found: another may be about to write it."""
PART = 1 << 20
"""Bytes of the log after which a new file is begun: the comparer removes those that it has read."""


def user_frames() -> Iterator[types.FrameType]:
    """The user's frames of the main thread, from the inside out."""
    return users_frames(sys._current_frames().get(threading.main_thread().ident or 0))


def user_lines(frames: Iterable[types.FrameType] | None = None, most: int = 6) -> list[Line]:
    """The user's lines of the main thread, or of these frames, from the inside out."""
    frames = user_frames() if frames is None else frames
    return [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in itertools.islice(frames, most)]


end_process = os._exit


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
    own = [place for place in traceback.walk_tb(error.__traceback__) if code_kind(place[0].f_code) == USER][::-1]
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
        self.models, self.parts, self.whole = (weakref.WeakSet[Any]() for _ in range(3))
        self.wrapped: set[int] = set()
        self.frozen: set[int] = set()
        self.waiting: dict[int, Any] = {}
        self.ordered, self.optimizers, self.pending = (weakref.WeakKeyDictionary[Any, Any]() for _ in range(3))
        self.loaders, self.samplers, self.data, self.splits = (weakref.WeakKeyDictionary[Any, Any]() for _ in range(4))
        self.opening: dict[str, Any] | None = None
        self.passes: list[dict[str, Any]] = []
        self.synced: Counter[str] = Counter()
        self.loss: tuple[Any, ...] | None = None
        self.last_message: dict[str, Any] | None = None
        self.after_backward, self.ordinals = False, itertools.count()
        if rank is not None:
            self.begin(folder)

    def begin(self, folder: pathlib.Path) -> None:
        """Begin a log in this folder. What is known of models, optimizers and loaders stays."""
        self.folder, self.process = folder, os.getpid()
        parts = [int(path.suffixes[0][1:]) for path in folder.glob(f"rank-{self.rank}.*.jsonl")]  # of a rank before it
        self.finished, self.part, self.written = False, max(parts, default=-1) + 1, 0
        self.open()
        self.counts = Counter[tuple[str, ...]]()
        self.backwards = self.joining = self.joined = self.handled = 0
        self.score: dict[str, Any] | None = None
        held: Any
        for held in (self.trail, self.passes, self.synced, self.waiting):
            held.clear()
        for record in self.optimizers.values():
            record.update(steps=0, alike=0, reduced=False, trained=False, stepped=[])
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

    def number(self, *key: str) -> int:
        """How often this was asked for before in this log."""
        self.counts[key] += 1
        return self.counts[key] - 1

    def listed(self, place: Place) -> None:
        self.places.append(place)
        self.write("place", **vars(place))

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, op: str, group: Any = None, shape: str = "", dtype: str = "", root: str = "", later: bool = False
    ) -> None:
        """later: the caller waits for the others some other time."""
        if not dist.is_initialized():
            return
        group = group or c10d._get_default_group()
        if not isinstance(group, dist.ProcessGroup):
            return  # this rank is no member
        if self.joining:
            codes = {frame.f_code for frame, _ in traceback.walk_stack(None)}
            of_wrapper = "DistributedDataParallel" in op or getattr(self.inside, "forward", False)
            if not of_wrapper and not JOINS & codes:
                number = self.number("join", str(self.joined))
                self.write("in_join", id=self.joined, n=number, op=op, lines=user_lines())
            return
        name = str(group.group_name)
        number = self.number("call", name)
        new: dict[str, Any] = {} if number else {"ranks": dist.get_process_group_ranks(group)}
        new |= {"async": True} if later else {}
        lines = user_lines()
        if (error := sys.exc_info()[1]) is not None and id(error) != self.handled:  # in `except` or `finally`
            self.handled = id(error)
            self.write("raised", **described(error)[0])
        if self.score is not None and REDUCING.search(op):
            self.score["reduced"] = True
        self.write("call", op=op, g=name, shape=shape, dtype=dtype, root=root, lines=lines, **new)
        if self.agree is not None:
            self.agree(CollectiveCall(number, name, op, shape, dtype, root, tuple(lines)))

    def collective(self, owner: Any, name: str, signature: Any, /, *args: Any, **kwargs: Any) -> None:
        """A call of one of torch's functions; of DTensor's, where a group has many forms."""
        named = bound(signature, args, kwargs)
        group, first = named.get("group"), next(iter(named.values()), None)
        if owner is functional:
            group_name = functional._resolve_group_name(named["group"], named.get("tag", ""))
            group = c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
        parts = [] if SHAPELESS.search(name) else first if isinstance(first, list) else [first]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        shape = ", ".join(str(list(t.shape)) for t in tensors[:4])
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        end = next((k for k in ("src", "dst") if k in named), "")
        root = f"{end} {named[end] or named.get(f'group_{end}') or 0}" if end else ""
        if not end and "op" in named and (op := str(named["op"]).removeprefix("RedOpType.")) != "SUM":
            root = f"op {op}"
        self.call(name, group, shape, dtype, root, owner is functional or named.get("async_op", False))
        if name in ("all_reduce", "reduce_scatter_tensor") and tensors and self.backwards:
            self.gradient_reduced(tensors[0], summed=not root)

    def gradient_reduced(self, tensor: torch.Tensor, summed: bool) -> None:
        """The user's own reduction: once more than the wrapper's, after the step that should use it, or a mere sum?"""
        for optimizer, record in self.optimizers.items():
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            sizes = [p.numel() for p in parameters]
            own = next((p for p in parameters if p.grad is tensor), None)
            if own is not None or self.after_backward and tensor.numel() in {*sizes, sum(sizes)}:
                record["reduced"] = True
                if summed and not self.wrapped and not self.number("summed"):
                    self.write("summed", lines=user_lines())
            late = record["stepped"]
            again = self.synced and id(own) in self.wrapped
            if own is not None and (late or again) and not self.number("gradients"):
                beside = [line for line in user_lines() for step in late[:1] if line[2] == step[2]]  # in its function
                self.write("gradients", late=bool(late), lines=beside or user_lines())

    def message(self, name: str, signature: Any, /, *args: Any, **kwargs: Any) -> None:
        """A message from rank to rank. Those of one pair, group and tag are numbered."""
        end = "dst" if "send" in name else "src"
        named, self.last_message = bound(signature, args, kwargs), None
        group = named.get("group") or c10d._get_default_group()
        peer, inner = named.get(end), named.get(f"group_{end}")
        if peer is None and inner is not None:
            peer = dist.get_global_rank(group, inner)
        if peer is None or not isinstance(group, dist.ProcessGroup):
            return  # from any rank
        way = "send" if end == "dst" else "receive"
        key = f"{group.group_name}/{named['tag']}/{peer}"
        event = {"way": way, "peer": peer, "key": key, "n": self.number(way, key)}
        self.last_message = {**event, "lines": user_lines()}
        self.write("message", waits=name in ("recv", "send"), **self.last_message)

    def receives(self, work: Any, *_: Any, **__: Any) -> None:
        """A message that is received later is waited for."""
        if work is not None and self.last_message is not None:
            self.pending[work] = self.last_message

    def waits(self, work: Any, *_: Any, **__: Any) -> None:
        if self.pending and (event := self.pending.pop(work, None)) is not None:
            self.write("message", waits=True, again=True, **{**event, "lines": user_lines()})

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
        for owner in (c10d, functional):  # these, of DTensor, return before the others have come
            for name, own in list(vars(owner).items()):
                if type(own) is types.FunctionType and COLLECTIVE.fullmatch(name):
                    signature = inspect.signature(own)
                    if "group" in signature.parameters:  # no formula of a derivative
                        self.wrap(owner, name, functools.partial(self.collective, owner, name, signature))
        for name in ("send", "recv", "isend", "irecv"):
            note = functools.partial(self.message, name, inspect.signature(getattr(c10d, name)))
            self.wrap(c10d, name, note, "message", self.receives if name == "irecv" else None)
        self.wrap(c10d.Work, "wait", self.waits, "each")
        self.wrap(c10d, "init_process_group", self.initialised, then=lambda *_, **__: self.write("joined"))
        self.wrap(c10d, "destroy_process_group", self.destroyed)
        self.wrap(torch, "save", lambda obj, f, *_, **__: self.saved(f, lambda: marks.digest(obj)))
        for name in ("save", "savez", "savez_compressed"):
            self.wrap(numpy, name, lambda f, *parts, **named: self.saved(f, lambda: marks.digest([parts, named])))
        self.wrap(c10d, "new_group", self.group_made)
        self.wrap(torch.Tensor, "backward", self.backward, "backward")
        self.wrap(torch.autograd, "backward", lambda tensors, *_, **__: self.backward(tensors), "backward")
        self.wrap(torch, "manual_seed", lambda seed: self.write("seed", value=seed, lines=user_lines()))
        ddp = nn.parallel.DistributedDataParallel
        self.wrap(ddp, "__init__", self.wrapper_begins, then=self.wrapper_made)
        self.wrap(ddp, "forward", self.forward, "each", self.forward_over)
        self.wrap(torch.optim.Optimizer, "__init__", flag="each", then=self.optimizer_made)
        for made, places in ((DataLoader, self.loaders), (DistributedSampler, self.samplers), (Subset, self.splits)):
            self.wrap(made, "__init__", flag="each", then=functools.partial(self.made, places))
        for name, change in (("__enter__", 1), ("__exit__", -1)):
            self.wrap(Join, name, self.runs_out if change < 0 else None, "each", functools.partial(self.joins, change))
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(functools.partial(self.attempt, self.before_step))
        optimizers.register_optimizer_step_post_hook(functools.partial(self.attempt, self.after_step))
        self.look(True)
        self.wrap(builtins, "print", self.shown, "print")
        self.wrap(logging.Logger, "handle", lambda _, record: self.shown(record.getMessage()), "print")
        iterator = dataloader._BaseDataLoaderIter
        self.wrap(DataLoader, "__iter__", self.pass_begins, "each", self.pass_begun)
        self.wrap(iterator, "_next_index", flag="each", then=self.rows_drawn)
        self.wrap(iterator, "__next__", flag="each", then=self.batch_read)
        self.wrap(builtins, "open", flag="each", then=self.opened)
        self.wrap(os, "_exit", lambda code: self.write("end", code=code), "exit")  # of a thread, too: nothing is read
        self.wrap(subprocess.Popen, "__init__", self.child, "each")
        self.wrap(os._Environ, "__getitem__", self.variable_read, "each")
        vars(builtins).update({marks.MARK: self.trail.mark, marks.TURNS: self.trail.turns})

    def made(self, places: Any, _: None, thing: Any, *__: Any, **___: Any) -> None:
        lines = user_lines(most=1)
        places[thing] = (lines, sum(line == lines for line, _ in places.values()))

    def joins(self, change: int, *_: Any, **__: Any) -> None:
        """Within `join()` a rank that has run out answers for the wrapper's calls of the others: none is compared."""
        self.joining += change
        self.joined += change > 0
        for record in self.optimizers.values():  # who has run out made fewer steps, and has the others' weights now
            record["alike"] = record["steps"]

    def runs_out(self, join: Join, kind: Any, *_: Any) -> None:
        if kind is None:
            self.write("ran_out", id=self.joined, n=self.counts["join", str(self.joined)], lines=user_lines())

    # -- the group, and the environment -------------------------------------------------------------------------------

    def initialised(
        self, backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: Any = -1, rank: Any = -1,
        store: Any = None, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        given = {"by_argument": world_size not in (None, -1), "rank_by_argument": rank not in (None, -1)}
        world = world_size if given["by_argument"] else int(os.environ.get("WORLD_SIZE") or -1)
        own = rank if given["rank_by_argument"] else int(os.environ.get("RANK") or -1)
        address, lines = address_of_environment(), user_lines()
        if init_method not in (None, "env://") or store is not None:
            address = init_method or ""
        at_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address and "file:" not in address
        seconds = timeout.total_seconds() if timeout else 600.0 if "nccl" in str(backend) else 1800.0
        place = {"address": address, "launcher": self.launcher_address if at_launcher else "", "lines": lines}
        self.write("init", world=world, own=own, timeout=seconds, **given, **place)
        self.write("call", op="init_process_group", g=START, root=str(backend or ""), lines=lines)

    def group_made(self, *args: Any, **kwargs: Any) -> None:
        """All ranks take part, members or not, but where the members alone meet."""
        if not (kwargs.get("use_local_synchronization") or any(arg is True for arg in args)):
            self.call("new_group")

    def destroyed(self, group: Any = None, *_: Any, **__: Any) -> None:
        whole = group is None or group is dist.GroupMember.WORLD
        self.finish()
        self.write("destroy", g="all" if whole else str(group.group_name))

    def variable_read(self, variables: Any, name: Any) -> None:
        """One of another launcher that the user's lines read and that is not set."""
        unset = RANKS.search(str(name)) and variables.encodekey(name) not in variables._data
        if unset and (lines := user_lines(most=1)):
            self.write("unset", name=str(name), lines=lines)

    def child(self, *_: Any, env: Any = None, **__: Any) -> None:
        names = set(map(os.fsdecode, os.environ if env is None else env))
        self.write("child", missing=[name for name in VARIABLES if name not in names], lines=user_lines())

    # -- gradients and weights ----------------------------------------------------------------------------------------

    def wrapper_begins(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        sizes = [p.numel() for p in module.parameters() if p.requires_grad]
        shape = f"[{len(sizes)} parameters, {sum(sizes)} elements]"
        self.call("DistributedDataParallel()", kwargs.get("process_group"), shape)

    def wrapper_made(self, _: None, wrapper: Any, *__: Any, **___: Any) -> None:
        self.models.add(wrapper)
        for parameter in wrapper.module.parameters():  # it reduces what requires a gradient by now
            (self.wrapped if parameter.requires_grad else self.frozen).add(id(parameter))
        self.write("wrapper", lines=user_lines())
        self.parts.update(wrapper.module.modules())
        self.whole.update((wrapper, wrapper.module))

    def past(self, module: nn.Module, *inputs: Any) -> None:
        """A part of a wrapped model runs with gradients, and its wrapper does not: told three times. A hook of all
        modules: one on the user's own would be copied and pickled with them."""
        if getattr(self.inside, "forward", 0):
            return
        if not torch.is_grad_enabled() and self.is_whole(module):
            self.evaluated(inputs[0] if inputs else ())
        if module in self.parts and torch.is_grad_enabled() and module.training and self.number("past") < 3:
            self.write("past", lines=user_lines(f for f in user_frames() if not is_method_of_module(f)))

    def look(self, on: bool) -> None:
        """The hook of all modules that calls `past`; off within a wrapper's forward, where each module would pay it."""
        if on and self.hook is None:
            self.hook = nn.modules.module.register_module_forward_pre_hook(functools.partial(self.attempt, self.past))
        elif not on and self.hook is not None:
            self.hook.remove()
            self.hook = None

    def is_whole(self, module: nn.Module) -> bool:
        """Whether it is a wrapped model; where none is wrapped, one that the user's lines call, and no other module."""
        frame = None if self.models else next(user_frames(), None)
        return module in self.whole if self.models else frame is not None and not is_method_of_module(frame)

    def evaluated(self, inputs: Any) -> None:
        """A forward without gradients: what it is given, and which numbers are shown before the next backward."""
        if self.score is None:
            self.score = {"digests": [], "reduced": False, "lines": user_lines(), "prints": []}
        tensors = [part for part in inputs if isinstance(part, torch.Tensor) and part.numel()]
        if tensors and len(self.score["digests"]) < 50:
            self.score["digests"].append(tensors[0].detach().double().sum().item())

    def shown(self, *values: Any, **_: Any) -> None:
        """A number on the screen or in a log."""
        if self.score is None or self.score["reduced"] or len(self.score["prints"]) > 4:
            return
        if any(NUMBER.search(str(value)) for value in values):
            self.score["prints"] += user_lines(most=1)

    def end_score(self) -> None:
        if self.score is not None:
            self.write("score", id=self.number("score"), **self.score)
            self.score = None

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
        lines = user_lines()
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

    def note_loss(self, loss: Any, lines: list[Line]) -> None:
        """On a GPU the value is copied where it stands, and read when the optimizer steps: by then the forward is long
        over, so that the read waits for nothing that is still to be done."""
        self.read_loss()
        kinds, event = (torch.float32, torch.float64, torch.bfloat16), None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dtype not in kinds:
            return
        value = loss.detach().reshape(())
        if loss.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            value = torch.empty((), dtype=loss.dtype, pin_memory=True, device="cpu").copy_(value, non_blocking=True)
            (event := torch.cuda.Event()).record()
        frame = next(user_frames(), None)
        self.loss = (value, event, self.backwards, lines, frame and frame.f_code, frame.f_lineno if frame else 0)
        if event is None:
            self.read_loss()

    def read_loss(self) -> None:
        if self.loss is None:
            return
        (tensor, event, n, lines, code, line), self.loss = self.loss, None
        if event is not None:
            event.synchronize()
        value = float(tensor)
        frame = next((f for f in user_frames() if f.f_code is code), None)  # that called backward, if it still runs
        bad = not math.isfinite(value)
        blamed = marks.culprit(frame, line) if bad and frame is not None else None
        locates = bad and frame is not None and not self.number("located")
        self.write("loss", id=n, bad=bad, value=str(value), lines=[blamed] if blamed else lines, locates=locates)
        if locates and frame is not None:
            self.write("trace", id=n, finding=self.locate(frame, line))

    def locate(self, frame: types.FrameType, line: int) -> dict[str, Any] | None:
        """What nan_trace says of the lines that have made the loss whose backward is at this line, run again on this
        rank alone, without wrappers; None where they can't be, or where it finds no cause. What the lines change is put
        back."""
        file, plain = frame.f_code.co_filename, nn.parallel.DistributedDataParallel.forward
        names = {**frame.f_globals, **frame.f_locals}
        try:
            here: Any = statement_at(file, line)
            loss = here.value.args[0] if here.value.args else here.value.func.value
            bodies = (getattr(node, name, None) for node in nodes_of(file) for name in ("body", "orelse", "finalbody"))
            above = next(body[: body.index(here)] for body in bodies if isinstance(body, list) and here in body)
            drawn = [n for n, each in enumerate(above) if any(map(is_next, ast.walk(each)))]  # from a stream
            kept, _ = slice_of(above[max(drawn, default=-1) + 1 :], names_loaded(loss), names)
            parts = [part for each in (*kept, loss) for part in ast.walk(each)]
            stored = set().union(*(names_stored(p) for p in parts if isinstance(getattr(p, "ctx", None), ast.Store)))
            own = names.keys() & stored  # each run begins with these
            step = ast.parse(f"def nbdebug_step({', '.join(f'{name}={name}' for name in own)}): pass")
            step.body[0].body = [*kept, ast.copy_location(ast.Return(loss), loss)]  # type: ignore[attr-defined]
            exec(compile(ast.fix_missing_locations(step), file, "exec"), names)
            used = [names.get(part.id) for part in parts if isinstance(part, ast.Name)]
            models = list(dict.fromkeys(value for value in used if isinstance(value, nn.Module)))
            nn.parallel.DistributedDataParallel.forward = lambda model, *a, **k: model.module(*a, **k)  # type: ignore
            with self.alone():
                finding = nbdebug.nan_trace(names["nbdebug_step"], model=models or None, restore=True).findings[0]
        except Exception:  # whatever the user's lines raise on their own: the loss is told all the same
            return None
        finally:
            nn.parallel.DistributedDataParallel.forward = plain  # type: ignore[method-assign]
        where = finding.where
        place = [where.file, where.line, where.module or ""] if where.file and where.line else None
        return {"title": finding.title, "code": finding.code, "op": where.op, "module": where.module, "line": place}

    def optimizer_made(self, _: None, optimizer: Any, *__: Any, **___: Any) -> None:
        record = {"id": next(self.ordinals), "lines": user_lines(), "stepped": [], "steps": 0, "alike": 0}
        self.optimizers[optimizer] = {**record, "reduced": False, "trained": False}

    def before_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self.optimizers:  # a copy
            self.optimizer_made(None, optimizer)
        self.read_loss()
        record = self.optimizers[optimizer]
        record["trained"] |= any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
        if record["steps"] < 3 and self.models:
            none = [name for name, p in self.names(optimizer).items() if p.grad is None and p.requires_grad]
            self.write("nograd", id=f"{record['id']}/{record['steps']}", names=none)
        if not record["steps"]:
            self.weights(optimizer, record, "before")

    def after_step(self, optimizer: Any, *_: Any) -> None:
        record = self.optimizers[optimizer]
        record["steps"] += 1
        record["stepped"] = user_lines()
        self.after_backward = False
        if self.synced:
            self.write("step", id=f"{record['id']}/{record['steps']}", synced=dict(self.synced))
            self.synced.clear()
        large = sum(p.numel() for g in optimizer.param_groups for p in g["params"]) > LARGE
        number = record["steps"] - record["alike"]
        if number in ((1, 2, 4, 8) if large else range(EARLY)) or number % EVERY == 0:
            self.weights(optimizer, record, "after")

    def names(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's parameters by their names in a wrapped model, else by their numbers."""
        live = {id(p): name for model in self.models for name, p in model.module.named_parameters()}
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
        living = [m.process_group for m in self.models if m.process_group in c10d._world.pg_group_ranks]
        groups = {tuple(dist.get_process_group_ranks(group)) for group in living}
        number, step = record["steps"] - record["alike"], max(record["steps"] - 1, 0)
        key = f"{record['id']}/{self.joined}/{number}/{when}/{sorted(groups)}"
        late = [name for name, p in parameters.items() if some and id(p) not in self.wrapped]
        rates = [float(g.get("lr") or 0) for g in optimizer.param_groups]
        values = {"values": dict(zip(parameters, numbers)), "late": late, "lr": rates, "lines": record["lines"]}
        values["unfrozen"] = [name for name in late if id(parameters[name]) in self.frozen]
        self.write("weights", id=key, step=step, backwards=self.backwards, when=when, **values)

    # -- data and files -----------------------------------------------------------------------------------------------

    def pass_begins(self, loader: DataLoader) -> None:
        self.end_passes()
        if loader not in self.data:  # ranks whose datasets are not the same may read rows of the same numbers
            self.data[loader] = ""
            with contextlib.suppress(Exception):  # of the user's values
                self.data[loader] = marks.digest(loader.dataset, 1000)
        (lines, ordinal), sampler = self.loaders.get(loader, ([], 0)), loader.sampler
        own, _ = self.samplers.get(sampler, ([], 0)) if isinstance(sampler, DistributedSampler) else ([], 0)
        self.opening = {
            "loader": f"{lines}#{ordinal}", "lines": lines, "sampler": own, "rows": [], "content": [],
            "shuffles": bool(getattr(sampler, "shuffle", False)), "backwards": 0, "complete": False,
            "streams": isinstance(loader.dataset, IterableDataset), "data": self.data[loader],
            "left": marks.length_of(loader), "split": self.split(loader.dataset) if own else None,
        }  # fmt: skip
        self.passes.append(self.opening)

    def split(self, dataset: Any) -> tuple[str, list[Line]] | None:
        """Which rows a split has, and the lines that made it."""
        lines, _ = self.splits.get(dataset, ([], 0)) if isinstance(dataset, Subset) else ([], 0)
        return (marks.digest(list(map(int, dataset.indices))), lines) if lines else None

    def pass_begun(self, iterator: Any, _: DataLoader) -> None:
        vars(iterator)["_nbdebug_pass"], self.opening = self.opening, None

    def rows_drawn(self, rows: Any, iterator: Any) -> None:
        one = self.opening or vars(iterator).get("_nbdebug_pass")  # workers are given indices at the start
        if one is not None and not one["streams"] and len(one["rows"]) < ROWS:
            one["rows"] += [r for r in (rows if isinstance(rows, list) else [rows]) if isinstance(r, int)]

    def batch_read(self, batch: Any, iterator: Any) -> None:
        if (one := vars(iterator).get("_nbdebug_pass")) is None:
            return
        one["left"] = one["left"] and one["left"] - 1
        one["complete"] = one["left"] == 0
        part, most = (one["rows"], ROWS) if one["streams"] else (one["content"], CONTENT)
        if len(part) < most:
            with contextlib.suppress(Exception):  # of the user's values
                part += marks.rows_of(batch)

    def end_passes(self) -> None:
        """Passes that are over, or will not go on: written once."""
        for one in [one for one in self.passes if one["complete"] or one["backwards"]]:
            self.passes.remove(one)
            self.write("pass", id=f"{one['loader']}/{self.number('pass', one['loader'])}", **one)

    def saved(self, path: Any, value: Callable[[], str]) -> None:
        if isinstance(path, (str, os.PathLike)):
            self.file_written(path, user_lines(), value())

    def file_written(self, path: Any, lines: Any, value: str) -> None:
        full = os.path.realpath(os.fspath(path))
        if not full.startswith(("/dev/", "/proc/")):
            self.write("file", id=f"{full}/{self.number('file', full)}", path=full, digest=value, lines=lines)

    def opened(self, stream: Any, file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        """What the user's lines open for writing anew: the digest of what is written into it."""
        if isinstance(mode, str) and set(mode) & {"w", "x"} and isinstance(file, (str, os.PathLike)):
            code = sys._getframe(3).f_code
            own = code_kind(code) == USER or code.co_filename.endswith("pathlib.py")
            if "-packages" in code.co_filename:  # a library, for the user: its caches lie elsewhere
                own = os.path.realpath(file).startswith(os.getcwd() + os.sep)
            if own and (lines := user_lines()):
                over = functools.partial(self.attempt, self.file_written, file, lines)
                marks.follow_writes(stream, over, functools.partial(self.attempt, self.shown))

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What is compared at the end of the training, once."""
        if self.finished:
            return
        self.finished = True
        self.end_score()
        self.read_loss()
        for optimizer, record in list(self.optimizers.items()):
            if record["steps"] >= EARLY:
                self.weights(optimizer, record, "after")
            if not record["trained"] and min(record["steps"], self.backwards) > 2:
                modules = (each for each in gc.get_objects() if isinstance(each, nn.Module))
                if any(marks.is_shared_out(p) for module in modules for p in module.parameters(recurse=False)):
                    self.write("idle", steps=record["steps"], lines=record["lines"])
        self.end_passes()

    def left(self, code: Any) -> None:
        self.finish()
        self.write("end", code=code if isinstance(code, int) else int(code is not None))

    def failed(self, error: BaseException, rest: bool = True) -> None:
        own, frame = described(error)
        text = str(error)
        bad, blamed = marks.within(1.0, marks.nonfinite, frame) or ([], None)
        told = re.search(r"did not receive grad[^:]*: ([\d ]+)", text)  # parameters by their numbers
        known = [n for model in self.models for n, p in model.module.named_parameters() if p.requires_grad]
        names = [known[n] for n in map(int, told[1].split() if told else ()) if n < len(known)]
        peer = isinstance(error, (RuntimeError, OSError)) and PEER.search(text) is not None
        peer |= isinstance(error, (KeyboardInterrupt, CallsDiffer))
        unset = [name for name in VARIABLES if name not in os.environ]
        path = os.path.realpath(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""
        found = {"nonfinite": bad, "blamed": blamed, "names": names, "unset": unset, "path": path}
        asks = rest and not peer and frame is not None
        self.write("error", **own, **found, peer=peer, step=self.backwards, locates=asks)
        if asks and path:
            self.write("came", **self.comes(path, own["lines"][0], frame))
        if asks:
            self.write("trace", id=None, finding=self.explained(error))
        self.write("loops", loops=self.loops(rest))

    def comes(self, path: str, line: Line, frame: Any) -> dict[str, Any]:
        """Whether a file that was missing comes while this rank waits, and the failed statement then runs through."""
        began, size = time.monotonic(), -1
        while time.monotonic() < began + COMES and (not os.path.exists(path) or size != os.path.getsize(path)):
            size = os.path.getsize(path) if os.path.exists(path) else -1  # until it is whole
            time.sleep(0.2)
        came: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1) if size >= 0 else None, "runs": False}
        statement = statement_at(*line[:2])
        if size >= 0 and isinstance(statement, (ast.Assign, ast.Expr, ast.With)):
            with self.alone(), contextlib.suppress(Exception):  # whatever the user's lines raise
                exec(compile(ast.Module([statement], []), line[0], "exec"), {**frame.f_globals, **frame.f_locals})
                came["runs"] = True
        return came

    def explained(self, error: BaseException) -> dict[str, Any] | None:
        """What `explain` says of an error; None where it knows no cause."""
        with self.alone(), contextlib.suppress(Exception):  # of the user's lines, which may be run again
            for finding in nbdebug.explain(error).findings[:1]:
                fixes = [(fix.title, fix.code) for fix in finding.fixes[:2]]
                return {"title": finding.title, "code": finding.code, "fixes": fixes}
        return None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lines of the user's run again, on this rank alone: a collective raises, and no mark is kept."""
        trail, loops, self.locating = list(self.trail.passed), dict(self.trail.loops), True
        try:
            yield
        finally:
            self.locating = False
            self.trail.passed[:] = trail
            self.trail.loops.update(loops)

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
        own = []
        for code, line in itertools.dropwhile(lambda each: code_kind(each[0]) != USER, frames):  # none after the end
            file, text = code.co_filename, linecache.getline(code.co_filename, line).strip()
            if code_kind(code) != USER:  # of a library what is below its folder
                file = file.rpartition("-packages" + os.sep)[2] if "-packages" in file else os.path.basename(file)
            if f"{os.sep}nbdebug{os.sep}" not in code.co_filename and "<frozen" not in file:
                own.append(f"{file}, line {line}, in {code.co_name}: {text}")
        self.write("stack", lines=user_lines(), stack=own[-12:])
        self.write("loops", loops=self.loops(rest))

    def leave(self) -> None:
        """Wait for the other ranks' end for 2 s: a rank that is left alone is stopped first, and so tells its state."""
        (self.folder / f"end-{self.rank}").touch()
        started = len(list(self.folder.glob("launched-*")))  # by the script itself
        world, until = started or int(os.environ.get("LOCAL_WORLD_SIZE", "1")), time.monotonic() + 2
        while time.monotonic() < until and len(list(self.folder.glob("end-*"))) < world:
            time.sleep(0.05)


def is_method_of_module(frame: types.FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), nn.Module)
