"""The cause of an exception: the first kind of error that recognizes it names it; else the facts of its frames, no
guess.

Plain errors of Python of no known kind get a hint where it is sure: a name, an attribute or a key that exists and is
nearly the missing one, or the arguments that a module's `forward` takes. The user's own strings are not shown, but for
keys of a dict.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch

from nbdebug.observe.frames import Owners
from nbdebug.observe.variables import class_attribute, key_text, members, named_parameters, registered
from nbdebug.report import Finding, Link, Report, Symptom, Table
from nbdebug.text import clip, clip_start, listed, module_name
from nbdebug.tools.errors.context import (
    Candidate,
    ErrorContext,
    candidate_chains,
    exceptions_of_text,
    expression,
    fact,
    is_tensor,
    message_of,
    operands,
    path_text,
    shape_of,
    value_of,
    with_remote_frames,
)
from nbdebug.tools.errors.rules import TensorFact

LINES, WIDTH = 15, 100
"""Lines that the answer takes as text, and columns of one: as much as a person reads below a traceback."""
MOST_MESSAGE = 5
"""Lines of the message."""
MAX_READ = 20_000_000
"""Elements of all tensors together whose range is read: a fifth of a second."""
MAX_ENTRIES = 2
"""Entries of a list or a dict in the table: a history of losses would fill it."""
SURE = 0.75
"""How alike two names must be (difflib's ratio) for one to be offered for the other: one slip in four or five letters.
Our choice: below it, "did you mean" is wrong more often than right."""


def report_of(context: ErrorContext) -> Report:
    """A report without a finding: the whole message, where the error was raised, and the table of the values."""
    message = clip(re.sub(r"\s*\n\s*", " ", context.message.strip()), MOST_MESSAGE * WIDTH - 60)
    headline = f"No cause is known for this {context.type}" + (f": {message}" if message else "")
    notes = notes_of(context)
    used = sum(len(textwrap.wrap(text, WIDTH - 4)) for text in (headline, *notes))
    rows = list(itertools.islice(values(context), max(0, LINES - 7 - used)))
    columns = ("name", "shape", "dtype", "device", "values")
    table = Table("Your values when it failed, those of the failing line first", columns, rows)
    return Report(
        "explain()",
        notes=tuple(notes),
        headline=headline,
        symptoms=(Symptom(headline),),
        tables=(table,) if rows else (),
    )


def notes_of(context: ErrorContext) -> list[str]:
    """Where it was raised, and what was perhaps meant."""
    where, notes = context.raised().where, []
    if where.text or where.place:
        source = f": `{where.text}`" if where.text else ""
        module = f", in module `{where.module}` ({where.module_type})" if where.module else ""
        notes.append(f"Raised from {where.place}{source}{module}.")
    notes += itertools.islice(hints(context), 1)
    notes += [f"It was raised {context.carried.where}."] if context.carried else []
    followed = [type(error).__name__ for error in context.led_to[:3] if type(error) is not type(context.error)]
    notes += [f"{listed(followed)} followed from it."] if followed else []
    return notes


def values(context: ErrorContext) -> Iterator[list[str]]:
    """The rows of the table: tensors, with their ranges as long as that is quick, arrays, tables and paths; of the
    failing line, then of the functions that ran, innermost first. A cell's variables that its line does not name are
    left out: they are there whatever fails."""
    visited: set[int] = set()
    budget = MAX_READ
    for name, value in (*(operands(context.users[0], whole=True) if context.users else ()), *_variables(context)):
        for text, item in _opened(name, value):
            if id(item) in visited:
                continue
            visited.add(id(item))
            if is_tensor(item):
                count = math.prod(shape_of(item) or ())
                tensor = fact(text, item, read=count <= budget)
                budget -= count if count <= budget else 0
                yield [text, str(list(tensor.shape)), tensor.dtype, tensor.device, _range(tensor)]
            elif type(item) is np.ndarray:
                yield [text, str(list(item.shape)), str(item.dtype), "numpy", ""]
            elif _is_table(item):
                columns = [str(column) for column in item.columns[:6]]
                yield [text, str(list(item.shape)), type(item).__name__, "pandas", f"columns {listed(columns, 5, '')}"]
            elif (path := path_text(item)) and (type(item) is not str or _is_known_path(text, path)):
                there = "exists" if os.path.exists(path) else "does not exist"
                yield [text, "", type(item).__name__, "path", f"{clip_start(path, 60)}: {there}"]


def _is_table(value: Any) -> bool:
    return type(value).__name__ == "DataFrame" and module_name(type(value)).partition(".")[0] == "pandas"


def _is_known_path(name: str, path: str) -> bool:
    """Whether a string is a path and no secret that looks like one: its folder exists, or its name says so."""
    folder = os.path.dirname(path)
    return os.path.exists(path) or bool(folder) and os.path.isdir(folder) or "path" in name or "file" in name


def _variables(context: ErrorContext) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables of the functions that ran, innermost first."""
    for frame in context.users:
        yield from frame.names.items()
        if "self" in frame.names:
            yield from ((f"self.{name}", value) for name, value in members(frame.names["self"]).items())


def _opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value), and the tensors and arrays in a list, a tuple or a dict."""
    yield name, value
    if type(value) in (list, tuple, dict):
        inside = value.items() if type(value) is dict else enumerate(value)
        kinds = (torch.Tensor, np.ndarray)
        items = ((f"{name}[{key_text(key)}]", item) for key, item in inside if issubclass(type(item), kinds))
        yield from itertools.islice(items, MAX_ENTRIES)


def _range(tensor: TensorFact) -> str:
    if tensor.low is None or tensor.high is None:
        return "all of them NaN or infinite" if tensor.nonfinite else ""
    bad = f", {tensor.nonfinite} NaN or infinite" if tensor.nonfinite else ""
    return f"{tensor.low:.4g} to {tensor.high:.4g}{bad}"


def hints(context: ErrorContext) -> Iterator[str]:
    """What was perhaps meant, where the names that exist tell it."""
    kind, message = context.type, context.message
    if kind in ("NameError", "UnboundLocalError") and (match := re.search(r"name '(\w+)' is not defined", message)):
        yield from _name(context, match[1])
    elif kind == "AttributeError" and (match := re.search(r"(?:has no|no such) attribute '(\w+)'", message)):
        yield from _attribute(context, match[1])
    elif kind == "KeyError":
        yield from _key(context)
    elif kind == "UnpicklingError" and (match := re.search(r"GLOBAL ([\w.]+) was not an allowed global", message)):
        yield (
            f"The file contains an object of `{match[1]}`, and `torch.load` reads only tensors and plain values "
            "(weights_only=True, the default since torch 2.6). If you trust the file: "
            "`torch.load(path, weights_only=False)`."
        )
    elif kind == "TypeError" and "argument" in message:
        yield from _arguments(context, message)
    yield from (hint for pattern, hint in HINTS.items() if re.search(pattern, message, re.DOTALL))


HINTS = {
    r"returned nan values|invalid values:.*\bnan\b": "The NaN is older than this line: `%nan_trace step()` names the "
    "op, its line and the rows that made it.",
    "negative strides": "The array is a view that runs backwards (`[::-1]`, a flip): its `.copy()` does not.",
    "unscale FP16 gradients": "The weights themselves are float16 (`.half()`, `dtype=torch.float16`): a GradScaler "
    "works with float32 weights and `torch.autocast`; `model.float()` before the optimizer is made.",
    "not supported between instances of '(float|int)' and 'str'|instances of 'str' and '(float|int)'": "One of the "
    "values is text, perhaps a setting that a file or a command line gave, such as a learning rate `1e-3` in YAML; "
    "`float(...)` of it is the number.",
    "'module' object is not callable": "What is called is a module, not the function or class of the same name in it: "
    "`from tqdm import tqdm`, not `import tqdm`.",
    "params argument given to the optimizer": "One tensor goes in a list: `[weight]`.",
}
"""What a message leaves unsaid."""


def _name(context: ErrorContext, name: str) -> Iterator[str]:
    for frame in context.users[:1]:
        for near in _nearest(name, [*frame.names, *frame.globals, *context.names, *vars(builtins)]):
            yield f"`{name}` is not defined; `{near}` is."


def _attribute(context: ErrorContext, name: str) -> Iterator[str]:
    thing = _failing_object(context)
    if thing is None:
        return
    kind = f"`{type(thing).__name__}`"
    near = _nearest(name, [*members(thing), *(key for parent in type(thing).__mro__ for key in vars(parent))])
    if near:
        yield f"{kind} has no `{name}`; it has `{near[0]}`."
    elif issubclass(type(thing), torch.nn.Module) and (children := registered(thing, "_modules")):
        yield f"{kind} has no `{name}`; its modules are {listed(children, 12)}."


def _failing_object(context: ErrorContext) -> Any:
    """The object of an AttributeError: what Python keeps, or the module whose `__getattr__` ran."""
    slot: Any = AttributeError.__dict__.get("obj")
    thing = slot.__get__(context.error) if slot is not None and type(context.error) is AttributeError else None
    if thing is None and context.trail and context.trail[-1].site.function == "__getattr__":
        thing = context.trail[-1].names.get("self")
    return thing


def _key(context: ErrorContext) -> Iterator[str]:
    args = BaseException.__dict__["args"].__get__(context.error)
    missing = args[0] if len(args) == 1 else None
    node = expression(context.users[0]) if context.users and type(missing) is str else None
    for part in ast.walk(node) if node is not None else ():
        if not isinstance(part, ast.Subscript):
            continue
        holder, key = (value_of(one, context.users[0]) for one in (part.value, part.slice))
        if _is_table(holder) and key == missing:
            columns = [column for column in holder.columns if type(column) is str]
            yield from (f"There is no column {missing!r}; there is {near!r}." for near in _nearest(missing, columns))
            yield f"There is no column {missing!r}; the columns are {listed(columns, 12, '')}."
        holder = dict(registered(holder, "_modules")) if type(holder) is torch.nn.ModuleDict else holder
        if type(holder) is not dict or type(key) is not str or key != missing:
            continue
        for near in _nearest(missing, holder):
            yield f"There is no key {missing!r}; there is {near!r}."
        keys = [
            repr(key)
            for key, value in holder.items()
            if type(key) is str and issubclass(type(value), (torch.Tensor, torch.nn.Module))
        ]
        if keys:
            yield f"There is no key {missing!r}; there are {listed(keys, 12, '')}."


def _arguments(context: ErrorContext, message: str) -> Iterator[str]:
    match = re.match(r"(?:[\w.<>]*\.)?(\w+)\(\)", message)
    code = _code_of_callee(context, match[1]) if match else None
    if code is not None and match is not None:
        count = code.co_argcount + code.co_kwonlyargcount
        takes = [name for name in code.co_varnames[:count] if name != "self"]
        more = ["*" + code.co_varnames[count]] if code.co_flags & inspect.CO_VARARGS else []
        yield f"`{match[1]}` takes ({', '.join([*takes, *more])})."


def _code_of_callee(context: ErrorContext, name: str) -> CodeType | None:
    """Of the function that was called with the wrong arguments."""
    if name in ("forward", "__init__") and context.trail and context.trail[-1].module is not None:
        function = class_attribute(context.trail[-1].module, name)
        return getattr(function, "__code__", None) if inspect.isfunction(function) else None
    for frame in context.users[:1]:
        for text, value in operands(frame):
            if text.rpartition(".")[2] == name and type(value) in (FunctionType, MethodType):
                code: CodeType = value.__code__
                return code
    return None


def _nearest(name: str, others: Iterable[Any]) -> list[str]:
    """The one that is nearly this name, or none."""
    names = {other for other in others if type(other) is str and other != name and not other.startswith("__")}
    return difflib.get_close_matches(name, names, n=1, cutoff=SURE)


@dataclasses.dataclass(frozen=True)
class ErrorKind:
    """One kind of error. detect, rule: "module.function" in this folder; the first gives the facts of an exception, or
    None where it is of another kind.

    words, files: patterns of the exception's type and message, and of a file in its traceback. Where either matches
    nothing, the exception is of another kind, and the module of `detect` is not even imported. Words are wider than the
    patterns of `detect` itself (tests/error/test_dispatch.py).
    """

    detect: str
    rule: str
    words: str = ""
    files: str = ""

    def may_apply(self, context: ErrorContext) -> bool:
        return re.search(self.words, f"{context.type}: {context.message}", re.IGNORECASE) is not None and any(
            re.search(self.files, file) for file in ("", *(frame.site.file for frame in context.trail))
        )

    def finding(self, context: ErrorContext) -> Finding | None:
        facts = _function(self.detect)(context)
        finding: Finding | None = _function(self.rule)(facts) if facts is not None else None
        return finding


@functools.cache
def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"nbdebug.tools.errors.{module}"), name)
    return function


COLLATED = r"[\\/]utils[\\/]data[\\/]_utils[\\/](collate|fetch)\.py$"  # whatever is raised there
ON_DEVICE = r"assert|memory access|misaligned|launch|cublas|cudnn"
KINDS = (
    ErrorKind("kinds.dataloader.detect_collate", "rules.dataloader.collate_mismatch", files=COLLATED),
    *(
        ErrorKind(paths.split()[0], paths.split()[1], words)
        for paths, words in {
            "kinds.dataloader.detect_dead_worker rules.dataloader.loader_worker_died": "dataloader|re-initialize|"
            "open files|ancdata|space left|memory|mmap|bootstrap|pickl|local object|lookup|^(connectionreset|eof|"
            "brokenpipe)error",
            "kinds.files.detect_image rules.files.corrupt_image": "UnidentifiedImage|identify image",
            "kinds.files.detect_cut_image rules.files.truncated_image": "truncated|broken (data|png)|premature end|"
            "unrecognized data|incomplete",
            "kinds.files.detect_syntax rules.files.syntax": "decodeerror|(scanner|parser|composer|constructor|reader|"
            "yaml)error",
            "kinds.files.detect_missing rules.files.file_not_found": "^FileNotFound|hub|repo|local folder|"
            "model identifier|404|gated|restricted|offline|local cache|connect to|couldn't reach|entry|can't load|"
            "outgoing|requested files|hfvalid|doesn't exist|does not appear|authenticated|review",
            "kinds.objects.detect_attached rules.calls.attached_to_graph": r"numpy\(\)",
            "kinds.objects.detect_pickle rules.calls.not_picklable": "pickle|local object",
            "kinds.objects.detect_copy rules.calls.deepcopy_of_graph": "deepcopy protocol",
            "kinds.objects.detect_no_iterator rules.calls.not_an_iterator": "is not an iterator|attribute 'next'|"
            "not subscriptable",
            "kinds.objects.detect_unpacking rules.calls.unpack_mismatch": "values to unpack|"
            r"\bstr\b|string indices|by non-int",
            "kinds.objects.detect_wrapped rules.calls.wrapped_object": "object has no attribute",
            "kinds.calls.detect_module rules.calls.incomplete_module": r"required .forward|before Module\.__init__",
            "kinds.calls.detect_name rules.calls.unusable_name": "name should be|name can|already exists|not a string",
            "kinds.calls.detect_order rules.calls.call_order": "Tried to step|_scale is None|initial_lr|inf checks|"
            "has already been called|called after step",
            "kinds.calls.detect_chances rules.calls.not_probabilities": "between 0 and 1|probability|"
            "multinomial distribution|Expected parameter",
            "kinds.calls.detect_length rules.calls.dataset_length": "num_samples|IterableDataset|input lengths|"
            "has no len",
            "kinds.calls.detect rules.calls.wrong_argument": "positional argument|keyword(-only)? argument|"
            "not iterable|not subscriptable|not callable|Module subclass|operand type|tuple of Tensors|got float|"
            "'float'|not float|slice indices|device string|cannot assign|Boolean value|hx|out of bounds|"
            "only optimize Tensors|conditioned on metric|monitored key|not return a loss",
            "kinds.objects.detect_exhausted rules.calls.iterator_exhausted": "stopiteration",
            "kinds.objects.detect rules.calls.not_a_tensor": "must be|no attribute|indices must|unsupported operand|"
            "invalid combination|as element|slice",
            "kinds.backends.detect_collective rules.backends.nccl": "^Dist|nccl|gloo|process|distributed|collective|"
            "rendezvous|c10d|store|clients|DDP|reduction|ready only|backend|socket",
            "kinds.backends.detect_unavailable rules.backends.cuda_unavailable": "cuda|nvidia|driver|device|kernel|"
            "compatible",
            "kinds.backends.detect_index rules.indices.index_out_of_range": ON_DEVICE,
            "kinds.backends.detect_assert rules.backends.device_assert": ON_DEVICE,
            "kinds.devices.detect rules.tensor_attributes.device_mismatch": "device|[cg]pu|cuda|numpy|meta|generator|"
            "tensors (to be )?on",
            "kinds.dtypes.detect rules.tensor_attributes.dtype_mismatch": "type|autocast|overflow|must be tensor|"
            "ndarray|too many dim|byte order|long|indices|one_hot|bool|float|implemented|precision|complex|cast|"
            "integral",
            "kinds.backends.detect_not_started rules.backends.cudnn_not_initialized": "cudnn_status",
            "kinds.backends.detect_attention rules.backends.attention_kernel_missing": "kernel|viable backend|flash",
            "kinds.backends.detect_cudnn rules.backends.cudnn_not_supported": "cudnn|cublas|contiguous|engine|"
            "execution plan|miopen",
            "kinds.indices.detect rules.indices.index_out_of_range": "index|indices|target|out of (range|bounds)|"
            r"out-of-bounds|class values|bincount|'from'|^keyerror: \d+$",
            "autograd.backward_twice.detect autograd.rules.backward_twice": "second time|unpacked|backward",
            "autograd.in_place.detect autograd.rules.inplace_modified": "in-?place|memory location|written-to|out=|"
            "leaf|view",
            "autograd.no_grad.detect autograd.rules.no_grad_path": "grad|graph|parameter list|non-leaf|inference|"
            "attribute|operand|nonetype",
            "kinds.state_dict.detect_model rules.files.state_dict_mismatch": "state.?dict",
            "kinds.state_dict.detect_optimizer rules.files.state_dict_mismatch": "state.?dict|param.?group|"
            "parameter group",
            "kinds.files.detect_module rules.files.module_not_found": "import|module|attribute|pickl|global",
            "shapes.detect.detect shapes.rules.shape_mismatch": r"shape|size|dim|ax[ei]s|\dd\b|\d-d|length|batch|"
            "channel|element|columns|operand|subscript|einsum|hidden|hx|mask|src|feature|kernel|padding|blocks|"
            "target|ctc|weight|array|ind(ex|ices)|vector|matri|divisible|num_groups|grid|convert|ambiguous|unpack",
        }.items()
    ),
)
"""The narrow before the wide."""
MESSAGES = {
    "error/device-mismatch": "is on [CG]PU, but expected|are not at the same device|argument should be a 1D CPU|"
    r"on different device|copy out of meta tensor|type \(torch\.\w+\) and \w+ type \(torch\.cuda|"
    "dense CPU tensors can be pinned",
    "error/dtype-mismatch": r"Input type \(\S+\) and \w+ type|expected scalar type|the same dtype|Found dtype \w+ but|"
    r"implemented for '\w+'|dtype can require gradients|Integer division of tensors|should be a float tensor|"
    "unscale FP16 gradients",
    "error/shape-mismatch": r"multi-target not supported|Expected \d-dimensional input|size mismatch, m1|"
    r"expanded size of the tensor|expected \w+ to be a single integer|mask shape should match|"
    "Tensor with more than one value|only one element tensors|cannot be converted to Scalar",
    "error/loader-worker-died": "re-initialize CUDA in forked|items of ancdata|open shared memory object",
    "error/collate-mismatch": "resize storage that is not resizable",
    "error/out-of-memory": "CUBLAS_STATUS_ALLOC_FAILED",
    "error/attached-to-graph": r"numpy\(\) on Variable",
    "error/not-a-tensor": "expected Tensor as element|invalid combination of arguments|pic should be PIL|"
    "ndarray' object has no attribute",
    "error/wrong-argument": "params argument given to the optimizer|sampler option is mutually|"
    "option could only be specified",
    "environment/version-mismatch": "cannot open shared object|undefined symbol|module '(torch|"
    r"numpy)\S*' has no attribute",
    "checkpoint/not-weights": "invalid load key",
    "distributed/rank-raised": "ChildFailedError",
}
"""Whose page an error has that is known by its words alone: a copied message, with no values. The narrow before the
wide; searched without regard to case."""
CURES = {
    "error/no-grad-path": "autograd.trials.cured",
    "error/non-scalar-backward": "autograd.trials.cured",
    "error/backward-twice": "autograd.trials.cured",
    "error/inplace-modified": "autograd.trials.cured",
    "error/collate-mismatch": "kinds.dataloader.cured",
}
"""What makes edits of the fixes of a code, and tries them elsewhere than from the failing line on."""
MOST_FINDINGS = 5
"""For the members of one group of exceptions together."""


@dataclasses.dataclass
class Explanation:
    """findings: one for each member of a group that is recognized, at most one where there is no group. notes: what
    could not be examined."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def find_causes(
    error: BaseException,
    names: Mapping[str, Any],
    detect_first: Callable[[BaseException], Finding | None] = lambda error: None,
) -> Explanation:
    """The causes of an exception, of those that led to it and of the members of a group. detect_first: another tool's
    finding about one of them, or None."""
    explanation = Explanation()
    for chain in candidate_chains(error):
        for candidate in chain:
            finding = detect_first(candidate.error) or _finding(candidate, names, explanation.notes)
            if finding is not None:
                if finding not in explanation.findings and len(explanation.findings) < MOST_FINDINGS:
                    explanation.findings.append(finding)
                break
    return explanation


def _finding(candidate: Candidate, names: Mapping[str, Any], notes: list[str]) -> Finding | None:
    try:
        context = ErrorContext.of(candidate.error, names, candidate.led_to)
    except Exception as error:  # whatever hostile object is in the frames: the next exception may be readable
        notes.append(f"The frames of the {type(candidate.error).__name__} could not be read ({type(error).__name__}).")
        return None
    finding = _recognized(context, notes)
    return None if finding is None else dataclasses.replace(finding, chain=(*finding.chain, *_aftermath(context)))


def _recognized(context: ErrorContext, notes: list[str]) -> Finding | None:
    """What the first kind says that recognizes an exception."""
    for kind in KINDS:
        try:
            finding = kind.finding(context) if kind.may_apply(context) else None
        except Exception as error:  # a fault of ours, or an object that raises when it is read: the other kinds go on
            name = kind.detect.split(".")[-2].replace("_", " ")
            notes.append(f"nbdebug could not check for {name} here ({type(error).__name__}).")
            continue
        if finding is not None:
            return _in_users_names(context, _proven(context, finding, notes))
    return None


def _in_users_names(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with the user's one model in the code of its suggestions, where these say `model` and the user has no
    such name. A loss with no parameters is no model."""
    space = {**context.names, **{name: value for frame in context.users for name, value in frame.names.items()}}
    trained = [n for n, m in context.owners.models.items() if n in space and any(True for _ in named_parameters(m))]
    if len(trained) != 1 or "model" in space or any("model" in frame.globals for frame in context.users):
        return finding
    fixes = [
        fix
        if fix.edit is not None or re.search(r"\bmodel = ", fix.code)
        else dataclasses.replace(fix, code=re.sub(r"(?<![\w.'\"])model\b(?!['\"])", trained[0], fix.code))
        for fix in finding.fixes
    ]
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _proven(context: ErrorContext, finding: Finding, notes: list[str]) -> Finding:
    """With each fix that is called tried as an edit that was tried; all others are suggestions."""
    way = CURES.get(finding.code, "autograd.trials.edits_tried")
    if context.users:
        try:
            finding = _function(way)(context, finding)
        except Exception as error:
            notes.append(f"nbdebug could not try a fix on the program ({type(error).__name__}).")
    if all(fix.edit is not None or not fix.verified for fix in finding.fixes):
        return finding
    try:
        return cast(Finding, _function("sandbox.proven")(context, finding))
    except Exception as error:
        notes.append(f"nbdebug could not run the program on with a fix ({type(error).__name__}).")
        plain = (dataclasses.replace(fix, verified=None, after={}) if fix.verified else fix for fix in finding.fixes)
        return dataclasses.replace(finding, fixes=tuple(plain))


def contexts_of_text(text: str, names: Mapping[str, Any]) -> list[ErrorContext]:
    """The exceptions of a copied traceback, or a copied message: only their words are known, and no values."""
    contexts = []
    for one in exceptions_of_text(text):
        trail = with_remote_frames(one, [])
        error = type(one.type, (RuntimeError,), {})(one.message)
        contexts.append(ErrorContext(error, trail, names, Owners.among({}, trail), (), one))
    return contexts


def causes_of_text(text: str) -> Explanation:
    """What the words of a copied traceback or message show: the first exception of the chain that is recognized; else
    the pages of the catalogue that have its words among their symptoms."""
    explanation = Explanation()
    for context in contexts_of_text(text, {}):
        finding = _recognized(context, explanation.notes)
        if finding is not None:
            explanation.findings.append(finding)
            break
    return explanation


def _aftermath(context: ErrorContext) -> list[Link]:
    """How the cause reached the user: the process it came from, and the exceptions that followed it."""
    links = [Link(f"it was raised {context.carried.where}")] if context.carried else []
    for error in context.led_to[:5]:
        message = clip(message_of(error).strip().partition("\n")[0], 160)
        links.append(Link(f"`{type(error).__name__}` followed from it: {message}".rstrip(": ")))
    return links


def unknown_error(error: BaseException, names: Mapping[str, Any]) -> Report:
    """The report on an error of no known kind: on the first candidate."""
    candidates = [candidate for chain in candidate_chains(error) for candidate in chain] or [Candidate(error)]
    return report_of(ErrorContext.of(candidates[0].error, names, candidates[0].led_to))
