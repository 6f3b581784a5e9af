"""The ops of some steps: which of them repeat one that was computed before, which a Python loop makes small, which are
double, which wait for a value, and which run again over an input that only grew.

Each op is timed alone, which makes a step many times slower: its times are used as shares only. A value has a number:
the op, the numbers of its inputs, its other arguments; leaves by their content, weights by their version, batches by
their step. Equal numbers are equal values, so an op whose number was there before is work that was done before.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from nbdebug.observe.locations import ENGINE, OPTIMIZER, USER, Site, at_site, code_kind, site_of, users_frames
from nbdebug.observe.ops import WatchMode
from nbdebug.observe.sources import loops_around, names_stored
from nbdebug.observe.step_hooks import Patches
from nbdebug.observe.tensors import base_name, fingerprint, tensors_in
from nbdebug.report import Where
from nbdebug.tools.speed.clock import DRIVERS, users_lines
from nbdebug.tools.speed.rules import NOTHING, EmbeddingTable, LongerInput, Loop, Reads, WorkShare

READ = "local_scalar_dense"
COPIES = frozenset({"clone", "copy", "to_copy", "contiguous", "lift_fresh_copy"})
JOINS, JOINED, STORED = ("cat", "stack"), "joined again", 0.9
"""Ops that join tensors; of the result what the same line has joined before, from which on it is a store that grows."""
VIEWS = frozenset(
    "view reshape expand permute transpose t select slice unsqueeze squeeze alias detach unbind split chunk as_strided "
    "unsafe_view narrow diagonal lift_fresh empty empty_like empty_strided new_empty".split()
)
TABLES = ("embedding_dense", "embedding_bag")
SMALL = 65_536
"""Elements: a kernel of fewer takes a GPU less time than its launch."""
LARGEST_LEAF = 4_000_000
"""Elements: larger leaves are not compared by their content."""
MOST_OPS, LONGEST = 20_000, 5.0
"""Ops of all steps that are noted, and the seconds of each step in which they are."""
ITERATIONS, LOOP_OPS, HALF, QUARTER = 8, 48, 0.5, 0.25
CALLS = 8


@dataclasses.dataclass
class TimedOp:
    """One op. lines: of the user's stack, the outermost first; loops: (head, iteration) around it, the outermost first;
    after: the heads of loops of which it needs an earlier iteration; copies: in words, where it only copies."""

    name: str
    func: Any
    seconds: float
    step: int
    phase: str
    lines: tuple[Site, ...]
    loops: tuple[tuple[Any, int], ...] = ()
    after: frozenset[Any] = frozenset()
    repeated: bool = False
    copies: str = ""
    double: bool = False
    elements: int = 0
    grad: bool = False
    own: bool = False
    inputs: tuple[Any, ...] = ()

    @property
    def line(self) -> Site | None:
        return self.lines[-1] if self.lines else None

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.func, self.phase, self.lines, self.repeated, self.double, self.elements


class OpWatch(WatchMode):
    """salted: whether a step's leaves are other ones in each step though their content is the same (a batch that is the
    same in all steps). first: the first step that is noted; cut: the first of which not all ops are. table, rows_read:
    the largest embedding with a dense gradient, and its rows whose gradient is not zero in a step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is off meanwhile; else each op imports and enters its guard

    def __init__(self, salted: bool) -> None:
        super().__init__()
        self.cut: int | None = None
        self.first, self.step, self.until = 0, 0, 0.0
        self.salted, self.paused, self.noting = salted, False, False
        self.trained: dict[int, Any] = {}
        self._gradients, self._in_backward = set[int](), True
        self.table, self.rows_read, self._filled = None, 0, set[tuple[int, ...]]()
        self.ops: list[TimedOp] = []
        self.sequences: list[Sequence] = []
        self.free_calls: collections.Counter[int] = collections.Counter()
        self.data_loops: set[Any] = set()
        self.attentions: list[tuple[Site | None, str]] = []
        self._batches, self._numbers, self._after, self._joined = (WeakTensorKeyDictionary() for _ in range(4))
        self._done: set[int] = set()
        self._loops: dict[Any, tuple[Any, int, FrameType]] = {}
        self._sync = torch.cuda.synchronize if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._inside = False

    # -- the run ------------------------------------------------------------------------------------------------------

    def begin_step(self, number: int, trained: dict[int, Any]) -> None:
        """trained: the parameters in optimizers, by their id."""
        self.step, self.trained, self.until = number, trained, time.perf_counter() + LONGEST
        self._loops.clear()

    def begin_anew(self) -> None:
        """The step before this one was cut, and is no whole one: of a loop the first is all that comes before it."""
        if self.cut is not None:
            self.cut, self.first = None, self.step
            self.ops.clear()

    def batch(self, batch: Any) -> None:
        """The tensors of a batch are the step's own, whatever is in them."""
        self._batches.update((tensor, None) for tensor in tensors_in(batch))

    def step_aside(self, aside: bool) -> None:
        """Work that is not the model's begins or ends. A loader is read: the loop around that is one over batches."""
        self.paused = aside
        for frame in users_frames(sys._getframe(1), DRIVERS) if aside else ():
            self.data_loops.update(head for head, _ in _loops_at(frame.f_code, frame.f_lineno or 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin = time.perf_counter()
        if not self.paused and self.cut is None and (len(self.ops) > MOST_OPS or begin > self.until):
            self.cut = self.step
        result = func(*args, **kwargs)
        if self.paused or self.cut is not None:
            return result
        if self._sync is not None:
            self._sync()
        took = time.perf_counter() - begin
        self.noting = True  # what reads a tensor for its number is none of the user's
        try:
            with _disable_current_modes():
                self._note(func, args, kwargs, result, took)
        finally:
            self.noting = False
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, took: float) -> None:
        name, inputs, outputs = base_name(func), tensors_in((args, kwargs)), tensors_in(result)
        frames, phase = _stack(sys._getframe(1).f_back)
        if phase != "backward" and self._in_backward:
            self._gradients = {id(p.grad) for p in self.trained.values() if p.grad is not None}
        self._in_backward = phase == "backward"
        if phase == "backward" and name in TABLES and not outputs[0].is_sparse:
            self._filled.add(tuple(outputs[0].shape))
        elif phase == "optimizer" and self._filled:
            tables = [p for p in self.trained.values() if tuple(p.shape) in self._filled and p.grad is not None]
            self.table = max(tables, key=torch.numel, default=None)
            self.rows_read = 0 if self.table is None else int(self.table.grad.ne(0).any(1).sum())
            self._filled.clear()
        loops = self._loops_around(frames) if phase == "forward" else ()
        known = self._number(func, name, args, kwargs, inputs, outputs)
        joins = name in JOINS and phase == "forward" and self._joins_again(frames, inputs, outputs)
        after = self._dependence(inputs, outputs, loops) if loops else frozenset()
        self.ops.append(
            TimedOp(
                name=name,
                func=func,
                seconds=took,
                step=self.step,
                phase=phase,
                lines=_sites(frames),
                loops=loops,
                after=after,
                repeated=known and phase == "forward" and not after,  # a recurrence at rest repeats nothing
                copies=JOINED if joins else "copied" if name in COPIES else "",
                double=any(t.dtype in (torch.float64, torch.complex128) for t in outputs),
                elements=max((t.numel() for t in outputs), default=0),
                grad=torch.is_grad_enabled(),
                own=bool(inputs) and all(self._is_own(t) for t in inputs),
                inputs=_kept(func, name, args, kwargs, inputs) if loops else (),
            )
        )

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loops_around(self, frames: list[FrameType]) -> tuple[tuple[Any, int], ...]:
        around = []
        for frame in reversed(frames):
            for head, targets in _loops_at(frame.f_code, frame.f_lineno or 0):
                key = (id(frame), *head)
                now = tuple(map(frame.f_locals.get, targets)) or (frame.f_lasti,)
                before, count, _ = self._loops.get(key, ((), -1, frame))
                turned = any(a is not b for a, b in zip(before, now)) if targets else now < before
                count += turned or not before
                self._loops[key] = now, count, frame  # the frame is held: its id is not given to another one
                around.append((key, count))
        return tuple(around)

    def _dependence(self, inputs: list[Any], outputs: list[Any], loops: tuple[tuple[Any, int], ...]) -> frozenset[Any]:
        """The loops of which an input was made in an earlier iteration, or needs such a one."""
        now, after = dict(loops), set()
        for tensor in inputs:
            made, before = self._after.get(tensor, ({}, frozenset()))
            after |= {key for key, count in made.items() if now.get(key, count) > count} | before & now.keys()
        for tensor in outputs:
            self._after[tensor] = now, frozenset(after)
        return frozenset(after)

    def _joins_again(self, frames: list[FrameType], inputs: list[Any], outputs: list[Any]) -> bool:
        """Whether nearly all that is joined is what its line has joined, or given, before."""
        line = site_of(frames[0]) if frames else None
        before = sum(t.numel() for t in inputs if self._joined.get(t) == (line, _version(t)))
        self._joined.update((tensor, (line, _version(tensor))) for tensor in (*inputs, *outputs))
        return line is not None and before >= STORED * outputs[0].numel() > 0

    def _is_own(self, tensor: Any) -> bool:
        """A weight or its gradient."""
        return isinstance(tensor, torch.nn.Parameter) or id(tensor) in self.trained or id(tensor) in self._gradients

    # -- values -------------------------------------------------------------------------------------------------------

    def _number(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]) -> bool:
        """Whether this very value was computed before."""
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(("empty", "new_empty", READ)):
            number = hash(("new", self.step, len(self.ops)))
        else:
            others = tuple(_plain(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))
            number = hash((str(func), tuple(self._number_of(t) for t in inputs), others))
        known = number in self._done and bool(outputs)
        self._done.add(number)
        for place, tensor in enumerate(outputs):
            self._numbers[tensor] = _version(tensor), hash((number, place))
        return known

    def _number_of(self, tensor: Any) -> int:
        now = _version(tensor)
        version, number = self._numbers.get(tensor, (None, 0))
        if version == now:
            return number
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() > LARGEST_LEAF or id(tensor) in self.trained:
            number = hash(("leaf", id(tensor), now))
        elif self.salted or tensor in self._batches:
            number = hash(("batch", self.step, id(tensor), now))
        else:
            try:
                number = hash(fingerprint(tensor))
            except Exception:  # of a tensor without plain values
                number = hash(("leaf", id(tensor)))
        self._numbers[tensor] = now, number
        return number

    # -- calls of models -----------------------------------------------------------------------------------------------

    def watch_calls(self, patches: Patches) -> None:
        """See the outermost calls of modules, attention, and reads that no op tells."""
        patches.put(torch.nn.Module, "__call__", self._module)
        patches.put(torch.nn.functional, "scaled_dot_product_attention", self._attention)
        for name in ("tolist", "numpy"):
            patches.put(torch.Tensor, name, self._read)

    def _attention(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if len(self.attentions) < 200 and not self.paused:
            self.attentions.append((next(iter(users_lines()[-1:]), None), attention_refused(args, kwargs)))
        return original(*args, **kwargs)

    def _read(self, original: Callable[..., Any], tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not (self.paused or self.noting):
            (frames, phase), grad = _stack(sys._getframe(1)), torch.is_grad_enabled()
            self.ops.append(TimedOp(READ, None, 0.0, self.step, phase, _sites(frames), elements=1, grad=grad))
        return original(tensor, *args, **kwargs)

    def _module(self, original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside or self.paused or torch._C._current_autograd_node() is not None:
            return original(module, *args, **kwargs)
        self.free_calls[self.step] += not torch.is_grad_enabled()
        self._inside, begin = True, time.perf_counter()
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._inside = False
        tensors, results = tensors_in([args, kwargs]), tensors_in(output)
        if tensors and results:
            took = time.perf_counter() - begin
            with _disable_current_modes():
                self._extend(module, tensors[0].detach(), results[0].shape, took)
        return output

    def _extend(self, module: Any, tensor: Any, shape: Any, took: float) -> None:
        sequence = next((s for s in reversed(self.sequences) if s.module is module), None)
        if sequence is None or not sequence.goes_on(tensor, shape):
            sequence = Sequence(module, _looping_line(sys._getframe(2)))
            self.sequences.append(sequence)
        sequence.calls.append((tuple(tensor.shape), tuple(shape), took))
        sequence.last = tensor

    # -- answers -------------------------------------------------------------------------------------------------------

    def drop_waits(self) -> None:
        """Gives each op the least time of those like it, in all steps: what else the machine does only adds."""
        least: dict[Any, float] = {}
        for op in self.ops:
            least[op.kind] = min(op.seconds, least.get(op.kind, op.seconds))
        for op in self.ops:
            op.seconds = least[op.kind]

    @property
    def last(self) -> list[TimedOp]:
        """The ops of the last whole step; of a step that is too long, of its beginning."""
        step = self.step if self.cut is None else max(self.cut - 1, self.first)
        return [op for op in self.ops if op.step == step]

    def seconds(self) -> float:
        return _seconds(self.last)

    def reads(self) -> tuple[Reads, ...]:
        """The lines at which values are read, those with most first; torch's own reads are none."""
        steps = {op.step for op in self.ops if op.step} or {0}  # of a loop the first is what stands before an update
        reads = [op for op in self.ops if op.name == READ and op.step in steps and op.phase != "optimizer" and op.lines]
        counts = collections.Counter(op.lines[-1] for op in reads)
        free = collections.Counter(op.lines[-1] for op in reads if not op.grad)
        calls = sum(self.free_calls[step] for step in steps) / len(steps)
        return tuple(
            Reads(at_site(Where(), site), n / len(steps), free[site] / len(steps), calls)
            for site, n in counts.most_common(20)
        )

    def double(self) -> float:
        return _seconds(op for op in self.last if op.double) / self.seconds()

    def embedding(self, where: Callable[[Any], Where]) -> EmbeddingTable | None:
        """where: gives the user's line for a weight."""
        if self.table is None:
            return None
        backward = [op for op in self.last if op.phase == "backward"]
        fills = _seconds(op for op in backward if op.name in TABLES and op.elements == self.table.numel())
        weights = sum(p.numel() for p in self.trained.values())
        shares = self.table.numel() / weights, fills / _seconds(backward)
        return EmbeddingTable(where(self.table), len(self.table), self.rows_read, *shares)

    def repeated(self) -> WorkShare:
        """What was computed before, or is only copied: the outermost line that does hardly anything else."""
        again = [op for op in self.last if op.repeated]
        copied = [op for op in self.last if op.copies and op.phase == "forward" and not op.repeated]
        joined = [op for op in copied if op.copies == JOINED]
        some = {JOINED: joined, "copied": copied, "computed again": again}
        parts = (self._part(ops, what) for what, ops in some.items() if ops)
        return max(parts, key=lambda part: part.share, default=NOTHING)

    def _part(self, ops: list[TimedOp], what: str) -> WorkShare:
        whole: dict[Site, float] = collections.defaultdict(float)
        inside: dict[Site, float] = collections.defaultdict(float)
        for seconds, some in ((whole, self.last), (inside, ops)):
            for op in some:
                for line in set(op.lines):
                    seconds[line] += op.seconds
        total, forward = _seconds(ops), _seconds(op for op in self.last if op.phase == "forward")
        deep = {site: depth for op in ops for depth, site in enumerate(op.lines)}
        pure = {s: inside[s] / (whole[s] or 1e-9) for s in inside if inside[s] >= 0.5 * total}
        best = max(pure.values(), default=0.0) - 0.005  # what a view or two take on a busy machine
        site = min((s for s in pure if pure[s] >= best), key=lambda s: deep[s], default=None)
        site = ops[-1].line if what == JOINED else site
        return WorkShare(at_site(Where(phase="forward"), site), total / self.seconds(), what, total / forward)

    def growth(self) -> LongerInput | None:
        long = [s for s in self.sequences if len(s.calls) >= CALLS and s.calls[0][1] != s.calls[1][1]]
        if not long:
            return None
        best = max(long, key=lambda s: sum(took for _, _, took in s.calls))
        sizes, times = [size for size, _, _ in best.calls], [took for _, _, took in best.calls]
        few = max(1, len(times) // 4)
        lengths = next(((a, b) for a, b in zip(sizes[0], sizes[-1]) if a != b), (0, 0))
        first, last = statistics.median(times[:few]), statistics.median(times[-few:])
        return LongerInput(at_site(Where(phase="forward"), best.line), len(times), first, last, lengths)

    def loop(self) -> Loop | None:
        """The Python loop that makes most of the forward's ops, where its iterations are free of one another."""
        forward = [op for op in self.last if op.phase == "forward" and op.name not in VIEWS and op.name != READ]
        members: dict[Any, list[tuple[TimedOp, Any, int]]] = collections.defaultdict(list)
        depth: dict[Any, int] = {}
        for op in forward:
            for place, (key, turn) in enumerate(op.loops):
                depth[key[1:]] = place
                members[key[1:]].append((op, key, turn))
        loops = (self._free(head, members[head], forward) for head in sorted(members, key=depth.__getitem__))
        return next((loop for loop in loops if loop is not None), None)

    def _free(self, head: Any, members: list[tuple[TimedOp, Any, int]], forward: list[TimedOp]) -> Loop | None:
        ops = [op for op, _, _ in members]
        iterations, share = 1 + max(turn for _, _, turn in members), len(ops) / len(forward)
        turns = {(key, turn) for _, key, turn in members}
        own = {(key, turn) for op, key, turn in members if op.own}
        elements = statistics.median(op.elements for op in ops)
        free = sum(key not in op.after for op, key, _ in members) / len(ops)
        spent = _seconds(ops) / _seconds(forward)
        enough = iterations >= ITERATIONS and len(ops) >= LOOP_OPS and share >= HALF and spent >= QUARTER
        weights = len(own) > 0.8 * len(turns)  # one by one
        if head in self.data_loops or not enough or elements > SMALL or free < 0.6 or weights:
            return None
        views = sum(op.name in VIEWS and any(key[1:] == head for key, _ in op.loops) for op in self.last)
        where, gain = at_site(Where(phase="forward"), Site(head[0], head[1], "")), batched_gain(ops, views)
        return Loop(where, iterations, len(ops), share, gain, int(elements), spent)


@dataclasses.dataclass
class Sequence:
    """Calls of one module in a row, each with the input of the last one and more. calls: shapes of input and output,
    and the seconds; last: the last input."""

    module: Any
    line: Site | None
    calls: list[tuple[tuple[int, ...], tuple[int, ...], float]] = dataclasses.field(default_factory=list)
    last: Any = None

    def goes_on(self, tensor: Any, shape: Any) -> bool:
        before, outputs = self.calls[-1][:2]
        if len(before) != tensor.dim() or len(shape) != len(outputs):
            return False
        grown = [i for i, (a, b) in enumerate(zip(before, tensor.shape)) if a != b]
        if len(grown) != 1 or tensor.shape[grown[0]] <= before[grown[0]]:
            return False
        return torch.equal(tensor.narrow(grown[0], 0, before[grown[0]]), self.last)


# -- stacks and loops --------------------------------------------------------------------------------------------------


def _seconds(ops: Iterable[TimedOp]) -> float:
    return sum(op.seconds for op in ops) or 1e-9


def _stack(frame: FrameType | None) -> tuple[list[FrameType], str]:
    """The user's frames, the innermost first, up to autograd's engine; and the phase: whether they end there, or an
    optimizer of torch's runs inside of them. A GPU's backward begins in a thread of its own."""
    frames: list[FrameType] = []
    phase = "forward" if torch._C._current_autograd_node() is None else "backward"
    while frame is not None and frame.f_code not in DRIVERS:
        kind = code_kind(frame.f_code)
        if kind == ENGINE:
            return frames, "backward"
        if kind == USER:
            frames.append(frame)
        elif kind == OPTIMIZER and not frames and phase == "forward":
            phase = "optimizer"
        frame = frame.f_back
    return frames, phase


def _sites(frames: list[FrameType]) -> tuple[Site, ...]:
    """The lines of such frames, the outermost first."""
    return tuple(map(site_of, frames))[::-1]


def _looping_line(frame: FrameType | None) -> Site | None:
    """The user's innermost line that stands in a loop; without a loop the innermost."""
    frames = list(users_frames(frame, DRIVERS))
    chosen = [f for f in frames if _loops_at(f.f_code, f.f_lineno or 0)] or frames
    return site_of(chosen[0]) if chosen else None


@functools.lru_cache(maxsize=4096)
def _loops_at(code: CodeType, line: int) -> tuple[tuple[tuple[str, int], tuple[str, ...]], ...]:
    """The loops around a line of a function, the outermost first: ((file, line of the head), names of its targets)."""
    file = code.co_filename
    if code.co_name in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"):
        targets = tuple(name for name in code.co_varnames if not name.startswith("."))
        return (((file, code.co_firstlineno), targets),)
    first, around = code.co_firstlineno, loops_around(file, line)
    around = [n for n in around if n.lineno >= first and n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0)]
    return tuple(((file, n.lineno), () if isinstance(n, ast.While) else tuple(names_stored(n.target))) for n in around)


def attention_refused(args: Any, kwargs: Any) -> str:
    """Why a call of scaled_dot_product_attention on a GPU runs as plain products; "" where a fused kernel takes it."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, **dict(zip(names, args)), **kwargs}
    query, cuda = call["query"], torch.backends.cuda
    if not query.is_cuda or query.shape[-2] < 2 or query.dtype == torch.float64:
        return ""
    choose: Any = torch._fused_sdp_choice
    try:
        with _disable_current_modes():
            if choose(**call) != 0:
                return ""
    except Exception:  # what torch can't answer is not judged
        return ""
    if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()):
        return "the fused kernels are switched off: `sdpa_kernel` or `torch.backends.cuda.enable_flash_sdp`"
    mask = "a mask" if call["attn_mask"] is not None else "no mask"
    return f"they refuse {str(query.dtype).removeprefix('torch.')}, heads of {query.shape[-1]}, {mask}"


def _plain(value: Any) -> Any:
    """A plain argument as something to hash; other objects (storages, generators) by their identity."""
    simple = isinstance(value, (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout))
    return repr(value) if simple else (type(value).__name__, id(value))


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _kept(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Any]) -> tuple[Any, ...]:
    """The arguments of an op that may be run once more in a batch: small ones, without what it writes to."""
    if kwargs or name in VIEWS or not inputs or func._schema.is_mutable or any(t.numel() > SMALL for t in inputs):
        return ()
    return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in args)


# -- the batched op ----------------------------------------------------------------------------------------------------


def batched_gain(ops: list[TimedOp], views: int, most: int = 64) -> float:
    """How many times longer the ops of a loop take one by one than in one op over all of them, measured on their own
    inputs, several times in turn; 0.0 where none of them could be batched. views: how many there are beside."""
    groups: dict[Any, list[tuple[Any, ...]]] = collections.defaultdict(list)
    for op in ops:
        if op.inputs:
            shape = tuple((tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else repr(a) for a in op.inputs)
            groups[op.func, op.line, shape].append(op.inputs)
    one, all_, tensor = 0.0, 0.0, torch.zeros(4, 4, device="cpu")
    for (func, _, _), members in groups.items():
        with torch.no_grad(), contextlib.suppress(Exception):  # what can't be batched is left out
            if len(members) >= ITERATIONS:
                single, batched = _compare(func, members[:most])
                one, all_ = one + single * len(members), all_ + batched
    view = timeit.timeit(lambda: tensor.select(0, 1), number=200) / 200
    return (one + views * view) / all_ if all_ else 0.0


def _compare(func: Any, members: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Seconds of one call, and of a call for all members. Raises ValueError where no argument tells them apart."""
    stacked, dims = [], list[int | None]()
    for column in zip(*members):
        value = column[0]
        same = not isinstance(value, torch.Tensor) or all(c.data_ptr() == value.data_ptr() for c in column)
        stacked.append(value if same else torch.stack(column))
        dims.append(None if same else 0)
    batched = torch.vmap(func, in_dims=tuple(dims))
    first = [value[:1] if dim == 0 else value for value, dim in zip(stacked, dims)]
    batched(*stacked)
    calls = (
        lambda: [func(*member) for member in members],
        lambda: batched(*stacked),
        lambda: batched(*first),  # what vmap itself takes, which a batched op does not
    )
    rounds = [[timeit.timeit(call, number=1) for call in calls] for _ in range(7)]
    loop, whole, single = (min(column) for column in zip(*rounds))  # what else runs only adds
    one = loop / len(members)
    return one, max(whole - (single - one), one)
