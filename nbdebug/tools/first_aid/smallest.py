"""`smallest(step, model)`: the failing program shrunk while it fails in the same way, as a script that runs alone.

The program is the user's own functions, as text, and the objects that they use, copied. Steps, batch rows, layers and
widths are taken away, one after the other; each try runs the functions on a fresh copy of the objects, with the same
seed. A try counts where it fails alike: an exception of the same type, at the same line of the user's, with the same
message but for the number of rows; or the same cause of the same op by `nan_trace`. Nothing of the user's changes.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import linecache
import pathlib
import re
import subprocess
import sys
import textwrap
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import nbdebug
from nbdebug.bisection import ddmin
from nbdebug.interrupts import interruptible
from nbdebug.observe.locations import cell_name
from nbdebug.observe.modules import eager
from nbdebug.observe.rerun import has_nonfinite, map_tensors
from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.sources import codes_of, nodes_of, source
from nbdebug.observe.tensors import loss_in, tensors_in
from nbdebug.observe.validation import check_count
from nbdebug.observe.variables import closure_variables, is_user_module, named_modules, reachable_objects
from nbdebug.report import Finding, Report, Symptom, Table
from nbdebug.text import clip, count, listed, module_name
from nbdebug.tools.nan.probe import Probe
from nbdebug.tools.nan.report import cause_of

FILE = "<smallest>"
PLAIN = (int, float, str, bool, type(None))
ELEMENTWISE = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "ELU", "Softplus", "Dropout", "Identity")
"""Layers that don't care how wide they are."""
SCRIPT = '''"""{title}

Made by nbdebug: {sizes}. It needs torch{beside}, and {fails}.
"""

from __future__ import annotations

{imports}

{sources}

globals().update(torch.load(pathlib.Path(__file__).with_name("{data}"), weights_only=False))  # {names}

torch.manual_seed(0)
for _ in range({steps}):
    loss = {call}
'''
CHECK = """
tensors = [(n, v) for model in ({models},) for n, p in model.named_parameters() for v in (p, p.grad) if v is not None]
bad = [name for name, value in tensors if not value.isfinite().all()]
if isinstance(loss, torch.Tensor) and not loss.isfinite().all():
    bad.append("the loss")
assert not bad, f"not finite: {{', '.join(bad)}}"
"""


@dataclasses.dataclass(frozen=True)
class ProgramFailure:
    """How a program fails. kind: of an exception its type, of a NaN the cause; at: the innermost line of the user's, or
    the op; message: of the exception; rows: of the batch; step: in which, from 0; explain: what gives the report."""

    kind: str
    at: str
    message: str
    rows: int
    step: int
    explain: Callable[[], Report]

    def alike(self, other: ProgramFailure | None) -> bool:
        """The same; numbers in the message may differ by the number of rows alone."""
        if other is None or (self.kind, self.at) != (other.kind, other.at):
            return False
        words, numbers = re.split(r"\d+", self.message), list(map(int, re.findall(r"\d+", self.message)))
        if words != re.split(r"\d+", other.message):
            return False
        pairs = zip(numbers, map(int, re.findall(r"\d+", other.message)), strict=True)
        return all(a == b or self.rows and a % self.rows == 0 and a // self.rows * other.rows == b for a, b in pairs)


@dataclasses.dataclass
class FailingProgram:
    """The user's functions and classes as text, and the objects that they use. imports: lines; sources: texts, by name;
    classes: the user's own; objects: by name; call: "step(batch)"; beside: files that the script imports, and the
    folders in which Python finds their modules."""

    call: str = ""
    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    classes: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain: dict[str, str] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, str] = dataclasses.field(default_factory=dict)
    outer: dict[str, Any] = dataclasses.field(default_factory=dict)

    # -- what it is made of -------------------------------------------------------------------------------------------

    def add(self, name: str, value: Any) -> None:
        """Take a name that the program uses, and what that uses. Raises ValueError for two things of one name."""
        if name in self.outer:
            if self.outer[name] is not value:
                raise ValueError(f"the program uses two things called {name!r}: give one of them another name")
            return
        if getattr(builtins, name, self) is value or name.startswith("__"):
            return
        self.outer[name] = value
        if isinstance(value, types.ModuleType):
            self.imports[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif isinstance(value, types.FunctionType) and _is_users(value.__module__):
            self._function(name, value)
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and self._import(name, value):
            pass
        elif isinstance(value, type):
            self._class(name, value)
        elif type(value) in PLAIN:
            self.plain[name] = f"{name} = {value!r}"
        else:
            self._object(name, value)

    def _import(self, name: str, value: Any) -> bool:
        module, word = str(getattr(value, "__module__", "") or ""), str(value.__name__)
        if isinstance(value, types.BuiltinFunctionType) and getattr(torch._C._nn, word, None) is value:
            module = "torch._C._nn"
        elif module == "__main__" or getattr(sys.modules.get(module), word, None) is not value:
            return False
        self.imports[name] = f"from {module} import {word}{f' as {name}' if word != name else ''}"
        if is_user_module(module):
            file = str(getattr(sys.modules[module], "__file__", None) or f"{module}.py")
            self.beside[file] = str(pathlib.Path(file).resolve().parents[module.count(".")])
        return True

    def _function(self, name: str, function: types.FunctionType) -> None:
        own: Any = inspect.unwrap(function)  # of a decorated one, whose decorators are written with it
        code = own.__code__
        kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
        node: Any = next(
            (n for n in nodes_of(code.co_filename) if isinstance(n, kind) and _begin(n) == code.co_firstlineno), None
        )
        if node is None:
            raise ValueError(f"the source of {name!r} is not known, so that it can't be written into a script")
        if kind is ast.Lambda:
            text = f"{name} = {source(code.co_filename, node)}"
        else:
            text = _text(code.co_filename, node)
            text += f"\n\n\n{name} = {own.__name__}" if name != own.__name__ else ""
        self._uses(own)
        self._names(_when_defined(node), own.__globals__)
        self.sources[name] = text

    def _uses(self, function: types.FunctionType) -> None:
        names = {n for code in codes_of(function.__code__) for n in code.co_names}
        space = function.__globals__
        for name, value in {**{n: space[n] for n in names if n in space}, **closure_variables(function)}.items():
            if name != "__class__":  # of super()
                self.add(name, value)

    def _names(self, parts: Iterable[ast.AST], space: Mapping[str, Any]) -> None:
        """Take the names in these parts of the source."""
        for part in (inside for one in parts for inside in ast.walk(one)):
            if isinstance(part, ast.Name) and part.id in space:
                self.add(part.id, space[part.id])

    def _class(self, name: str, kind: type) -> None:
        files = [v.__code__.co_filename for v in vars(kind).values() if isinstance(v, types.FunctionType)]
        for base in kind.__mro__[1:-1]:
            if _is_users(base.__module__):
                self.add(base.__name__, base)
        module: Any = sys.modules.get(module_name(kind))
        cells = [file for file in reversed(list(linecache.cache)) if cell_name(str(file))]
        files += [str(getattr(module, "__file__", None) or ""), *cells]
        for file, node in ((one, node) for one in dict.fromkeys(files) for node in nodes_of(one)):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                for method in (part.name for part in node.body if isinstance(part, ast.FunctionDef)):
                    value: Any = vars(kind).get(method)
                    function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
                    if isinstance(function, types.FunctionType):
                        self._uses(function)
                self._names(_when_defined(node), vars(module) if module is not None else {})
                self.classes[name] = kind
                self.sources[name] = _text(file, node)
                return
        raise ValueError(f"the source of the class {name!r} is not known, so that it can't be written into a script")

    def _object(self, name: str, value: Any) -> None:
        for inside in itertools.chain([value], (thing for _, thing in reachable_objects({name: value}))):
            for kind in type(inside).__mro__[:-1]:
                if _is_users(module_name(kind)) and not isinstance(
                    inside, (type, types.FunctionType, types.ModuleType)
                ):
                    self.add(kind.__name__, kind)
        self.objects[name] = value.detach() if isinstance(value, torch.Tensor) and not value.is_leaf else value

    # -- running it ---------------------------------------------------------------------------------------------------

    def text(self, classes: bool = False) -> str:
        """Constants and functions; with the classes, as in the script, or without, as in a try."""
        kinds = [text for name, text in self.sources.items() if name in self.classes and classes]
        functions = [text for name, text in self.sources.items() if name not in self.classes]
        return "\n\n\n".join(part for part in ("\n".join(self.plain.values()), *kinds, *functions) if part)

    def space(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The names of the program with these objects, its functions made anew."""
        text = self.text()
        linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)
        names: dict[str, Any] = {"__name__": "__main__", **self.classes}
        for line in self.imports.values():
            exec(line, names)
        exec(compile(text, FILE, "exec"), names)
        names.update(objects)
        return names

    def fails(self, objects: Mapping[str, Any], steps: int, rows: int) -> ProgramFailure | None:
        """How it fails on a copy of these objects."""
        names = self.space(copy.deepcopy(dict(objects)))
        models = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
        call = compile(self.call, FILE, "eval")
        with _as_in_the_script():
            for step in range(steps):
                before = copy.deepcopy({name: names[name] for name in objects})
                state = torch.get_rng_state()
                try:
                    loss = eval(call, names)
                except Exception as error:
                    return _of_error(error, names, rows, step)
                if _is_bad(loss, models):
                    torch.set_rng_state(state)
                    return self._of_nan(before, rows, step)
        return None

    def _of_nan(self, objects: dict[str, Any], rows: int, step: int) -> ProgramFailure | None:
        """The cause in this step, which begins with these objects."""
        own = copy.deepcopy(objects)
        call = self._call(own)
        models, optimizers = _of_kind(own, nn.Module), _of_kind(own, torch.optim.Optimizer)
        with contextlib.closing(Probe(models, optimizers)) as probe, eager(), probe:
            probe.begin_step(0)
            detection = probe.end_step(call())
            if detection is None:
                return None
            finding = cause_of(probe, detection)[0]

        def explain() -> Report:
            fresh = copy.deepcopy(objects)
            parts = _of_kind(fresh, nn.Module), _of_kind(fresh, torch.optim.Optimizer)
            return nbdebug.nan_trace(self._call(fresh), model=parts[0] or None, optimizer=parts[1] or None)

        return ProgramFailure(finding.code, str(finding.where.op), "", rows, step, explain)

    def _call(self, objects: Mapping[str, Any]) -> Callable[[], Any]:
        names, code = self.space(objects), compile(self.call, FILE, "eval")
        return lambda: eval(code, names)


def _of_kind(objects: Mapping[str, Any], kind: type) -> dict[str, Any]:
    return {name: value for name, value in objects.items() if isinstance(value, kind)}


@contextlib.contextmanager
def _as_in_the_script() -> Iterator[None]:
    """With its seed and gradients; the user's random numbers stay, and nothing warns at each try."""
    with same_random_numbers(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def _begin(node: Any) -> int:
    """The first line of a definition, its decorators included."""
    return min([one.lineno for one in getattr(node, "decorator_list", [])], default=node.lineno)


def _text(file: str, node: Any) -> str:
    return textwrap.dedent("".join(linecache.getlines(file)[_begin(node) - 1 : node.end_lineno])).rstrip()


def _when_defined(node: Any) -> Iterator[ast.AST]:
    """The parts of a definition that run when it is made: decorators, bases, defaults, the body of a class."""
    yield from getattr(node, "decorator_list", [])
    if isinstance(node, ast.ClassDef):
        yield from (*node.bases, *(keyword.value for keyword in node.keywords))
        for part in node.body:
            yield from _when_defined(part) if isinstance(part, (ast.FunctionDef, ast.ClassDef)) else [part]
    else:
        yield from (part for part in (*node.args.defaults, *node.args.kw_defaults) if part is not None)


def _is_users(module: Any) -> bool:
    return type(module) is str and is_user_module(module)


def _is_bad(loss: Any, models: Mapping[str, nn.Module]) -> bool:
    values = [loss, *([loss_in(loss)] if not isinstance(loss, torch.Tensor) else [])]
    if any(has_nonfinite(t) for t in tensors_in(values)) or isinstance(loss, float) and loss - loss != 0:
        return True
    parameters = [p for model in models.values() for p in model.parameters()]
    return any(has_nonfinite(t) for p in parameters for t in (p, p.grad) if t is not None)


def _of_error(error: Exception, names: dict[str, Any], rows: int, step: int) -> ProgramFailure:
    trail = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in trail if frame.filename == FILE or nn.__file__[:-12] not in frame.filename]
    at = " / ".join(f"{frame.name}: {frame.line}" for frame in own[-1:]) + f" / {trail[-1].name}"
    explain = functools.partial(nbdebug.explain, error, names=names)
    return ProgramFailure(type(error).__name__, at, str(error), rows, step, explain)


# -- shrinking --------------------------------------------------------------------------------------------------------


@interruptible
def smallest(
    step: Callable[..., Any],
    model: Any = None,
    *,
    batch: Any = None,
    steps: int = 1,
    folder: str = "smallest",
    seconds: float = 60.0,
) -> Report:
    """Shrink a failing program while it fails in the same way, and write it as a script that runs alone.

    step: your training step, a function of a batch (then with `batch`) or without arguments, that raises or gives a NaN
    within `steps` calls. model: it is taken from what the step uses where it is not given. Taken away are steps, rows
    of the batch, layers of every Sequential and ModuleList, and widths between two Linear layers. folder: gets
    smallest.py, and smallest.pt with your own objects (a pickle, as torch.save writes it). seconds: for the tries.

    The script is run, and the report says whether it fails alike. `report.facts["script"]` is its path,
    `report.frame()` what was taken away. Nothing of yours changes. Raises ValueError where the step does not fail, or
    uses something that can't be copied or written down.
    """
    check_count(steps, "steps")
    until = time.monotonic() + seconds
    program = _program(step, model, batch)
    objects = program.objects
    rows = _rows(objects, batch is not None)
    try:
        first = program.fails(objects, steps, rows)
    except (TypeError, RuntimeError, NameError) as fault:
        raise ValueError(
            f"smallest runs the step on copies, and something of it can't be copied or written down: {fault}"
        ) from None
    if first is None:
        raise ValueError(f"The step does not fail in {count(steps, 'call')}, so there is nothing to shrink.")
    shrinking = Shrinking(program, first, objects, rows, until)
    shrinking.steps(steps)
    shrinking.rows()
    shrinking.layers()
    shrinking.widths()
    final = program.fails(shrinking.objects, shrinking.length, shrinking.size) or first
    with _as_in_the_script():
        told = final.explain()
    path = _write(program, shrinking, final, told, pathlib.Path(folder))
    return _report(shrinking, final, told, path, _runs_alone(path, final))


def _program(step: Any, model: Any, batch: Any) -> FailingProgram:
    if not isinstance(step, types.FunctionType):
        raise ValueError(f"smallest takes a function of yours, such as train_step; got {type(step).__name__}")
    program = FailingProgram()
    name = "step" if step.__name__ == "<lambda>" else step.__name__
    program.add(name, step)
    program.call = f"{name}()"
    if batch is not None:
        if "batch" in program.outer:
            raise ValueError("the step uses a variable called 'batch' beside its argument: give it another name")
        program.add("batch", batch)
        program.call = f"{name}(batch)"
        if type(batch) in PLAIN:
            raise ValueError("batch is a tensor, or tensors in a list or dict")
    if model is not None and not any(value is model for value in program.objects.values()):
        program.add("model", model)
    return program


def _data(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that are data: no model, optimizer, scheduler or generator."""
    return {n: v for n, v in objects.items() if isinstance(v, (torch.Tensor, list, tuple, dict)) and tensors_in(v)}


def _rows(objects: Mapping[str, Any], given: bool) -> int:
    """The rows of the batch: the first dimension that most of the data have; 0 where there is none."""
    data = {"batch": objects["batch"]} if given and "batch" in objects else _data(objects)
    sizes = collections.Counter(t.shape[0] for v in data.values() for t in tensors_in(v) if t.dim())
    return sizes.most_common(1)[0][0] if sizes else 0


@dataclasses.dataclass
class Shrinking:
    """The program as small as it is by now. objects: of it; size: rows; length: steps; lines: what was taken away."""

    program: FailingProgram
    failure: ProgramFailure
    objects: dict[str, Any]
    size: int
    until: float
    length: int = 1
    lines: list[list[Any]] = dataclasses.field(default_factory=list)

    def alike(self, change: Callable[..., None], *args: Any, rows: int | None = None) -> bool:
        """Whether it fails alike with this change, made on a copy: `change(objects, *args)`."""
        if time.monotonic() > self.until:
            return False
        objects = copy.deepcopy(self.objects)
        try:
            change(objects, *args)
            failure = self.program.fails(objects, self.length, self.size if rows is None else rows)
        except Exception:  # of a change that can't be made, or a copy: it is none
            return False
        return self.failure.alike(failure)

    def take(self, change: Callable[..., None], *args: Any) -> None:
        self.objects = copy.deepcopy(self.objects)
        change(self.objects, *args)

    def note(self, what: str, before: Any, after: Any, why: str = "") -> None:
        late = " (the time was over)" if time.monotonic() > self.until else ""
        self.lines.append([what, before, after, (why or ("" if after != before else "it fails otherwise")) + late])

    def steps(self, steps: int) -> None:
        """From the state before the failing step one step is enough, where that fails alike."""
        needed = self.failure.step + 1
        self.length = needed
        if needed > 1:
            names = self.program.space(copy.deepcopy(self.objects))
            with _as_in_the_script():
                for _ in range(needed - 1):
                    eval(self.program.call, names)
            later = copy.deepcopy({name: names[name] for name in self.objects})
            if self.failure.alike(self.program.fails(later, 1, self.size)):
                self.objects, self.length = later, 1
        self.note("steps", steps, self.length)

    def rows(self) -> None:
        if self.size < 2:
            self.note("rows of the batch", self.size, self.size, "no dimension of the data is the batch's")
            return
        size, kept = self.size, list(range(self.size))
        if self.alike(_select, size, kept):
            kept = ddmin(kept, lambda rows: bool(rows) and self.alike(_select, size, rows, rows=len(rows)))
            self.take(_select, size, kept)
            self.size = len(kept)
            self.failure = self.program.fails(self.objects, self.length, self.size) or self.failure
        self.note("rows of the batch", size, len(kept), f"row {listed(kept, 5, '')}" if len(kept) < size else "")

    def layers(self) -> None:
        for path, container in list(_containers(self.objects)):
            number = len(container._modules)
            keep = list(range(number))
            if self.alike(_keep, path, keep):
                keep = ddmin(keep, functools.partial(self.alike, _keep, path))
                self.take(_keep, path, keep)
                self.note(f"layers of {_label(path)}", number, len(keep))

    def widths(self) -> None:
        for path, container in list(_containers(self.objects)):
            for ends in list(_pairs(container)) if isinstance(container, nn.Sequential) else []:
                width = container[ends[0]].out_features
                smaller = (2**i for i in range(20) if 2**i < width)
                new = next((w for w in smaller if self.alike(_narrow, path, ends, w)), width)
                if new < width:
                    self.take(_narrow, path, ends, new)
                self.note(f"units of {_label(path)}[{ends[0]}]", width, new)


def _select(objects: dict[str, Any], size: int, rows: Sequence[int]) -> None:
    """Leave these rows of the data that have so many."""
    for name, value in _data(objects).items():
        objects[name] = map_tensors(value, lambda t: t[list(rows)] if t.dim() and len(t) == size else t)


def _containers(objects: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """((name of the object, path in it), container) of each Sequential and ModuleList, the outer ones first."""
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            for path, module in named_modules(value):
                if type(module) in (nn.Sequential, nn.ModuleList) and module._modules:
                    yield (name, path), module


def _label(path: tuple[str, str]) -> str:
    return ".".join(part for part in path if part)


def _at(objects: Mapping[str, Any], path: tuple[str, str]) -> Any:
    """The container at such a path. Raises StopIteration where it is gone."""
    return next(module for where, module in _containers(objects) if where == path)


def _keep(objects: Mapping[str, Any], path: tuple[str, str], kept: Sequence[int]) -> None:
    """Leave these children of a container; numbered ones are numbered anew. Optimizers forget the others."""
    container = _at(objects, path)
    children = list(container._modules.items())
    numbered = all(name.isdecimal() for name, _ in children)
    left = [children[i] for i in kept]
    container._modules.clear()
    container._modules.update({str(i) if numbered else name: child for i, (name, child) in enumerate(left)})
    _prune(objects)


def _prune(objects: Mapping[str, Any]) -> None:
    """Optimizers hold no parameters of layers that are gone."""
    held = {id(p) for value in objects.values() if isinstance(value, nn.Module) for p in value.parameters()}
    for optimizer in objects.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in held]
            for parameter in [p for p in optimizer.state if id(p) not in held]:
                del optimizer.state[parameter]


def _pairs(container: nn.Sequential) -> Iterator[tuple[int, int]]:
    """Two Linear layers with nothing between them that has a width of its own."""
    first = None
    for i, child in enumerate(container):
        if type(child) is nn.Linear:
            if first is not None:
                yield first, i
            first = i
        elif type(child).__name__ not in ELEMENTWISE:
            first = None


def _narrow(objects: Mapping[str, Any], path: tuple[str, str], ends: tuple[int, int], width: int) -> None:
    one, two = (_at(objects, path)[place] for place in ends)
    one.weight.data, two.weight.data = one.weight.data[:width].clone(), two.weight.data[:, :width].clone()
    if one.bias is not None:
        one.bias.data = one.bias.data[:width].clone()
    one.out_features = two.in_features = width
    for parameter in (p for p in (one.weight, one.bias, two.weight) if p is not None):
        parameter.grad = None
        for optimizer in objects.values():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.state.pop(parameter, None)


# -- the script -------------------------------------------------------------------------------------------------------


def _write(
    program: FailingProgram, shrinking: Shrinking, failure: ProgramFailure, told: Report, folder: pathlib.Path
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, models = folder / "smallest.py", [n for n, v in shrinking.objects.items() if isinstance(v, nn.Module)]
    nan = "/" in failure.kind
    title = told.findings[0].title if told.findings else f"{failure.kind}: {failure.message}"
    imports = sorted({"import pathlib", "import torch", *program.imports.values()})
    if program.beside:
        places = sorted(set(program.beside.values()))
        imports = ["import pathlib", "import sys", f"sys.path[:0] = {places!r}", *imports[1:]]
    text = SCRIPT.format(
        title=clip(title.replace('"""', "'''").replace("\\", "/"), 110).splitlines()[0],
        sizes=", ".join(_sizes(shrinking)) or "nothing could be taken away",
        beside="".join(f", {pathlib.Path(file).name}" for file in sorted(program.beside)),
        fails=f"ends with {failure.kind if not nan else 'an AssertionError: something is not finite'}",
        imports="\n".join(imports),
        sources=program.text(classes=True),
        data="smallest.pt",
        names=", ".join(shrinking.objects),
        steps=shrinking.length,
        call=program.call,
    )
    path.write_text(text + (CHECK.format(models=", ".join(models)) if nan and models else ""), encoding="utf-8")
    try:
        torch.save(shrinking.objects, folder / "smallest.pt")
    except Exception as fault:  # pickle raises what it likes
        raise ValueError(f"the objects of the program can't be saved: {fault}") from None
    return path


def _runs_alone(path: pathlib.Path, failure: ProgramFailure) -> str:
    """ "" where the script fails alike in a process of its own, else what it did."""
    try:
        done = subprocess.run(
            [sys.executable, path.name], cwd=path.parent, capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"{type(fault).__name__} when it was run"
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    expected = (
        "AssertionError: not finite" if "/" in failure.kind else f"{failure.kind}: {failure.message}".splitlines()[0]
    )
    if expected.strip().rstrip(":") in done.stderr:
        return ""
    return f"status {done.returncode}, {clip(last, 120) or 'no message'}"


def _sizes(shrinking: Shrinking) -> list[str]:
    """ "1 of 32 rows of the batch", for each that was made smaller."""
    return [f"{after} of {before} {what}" for what, before, after, _ in shrinking.lines if after != before]


def _report(shrinking: Shrinking, failure: ProgramFailure, told: Report, path: pathlib.Path, otherwise: str) -> Report:
    smaller = _sizes(shrinking)
    proof = f"it was run, and does not fail alike: {otherwise}" if otherwise else "it was run, and fails alike"
    headline = f"`{path}` has {', '.join(smaller) or 'the whole program: nothing could be taken away'}; {proof}."
    findings: tuple[Finding, ...] = told.findings
    symptoms = () if findings else (Symptom(f"{failure.kind}: {clip(failure.message, 200)}"),)
    columns = ("what", "before", "after", "why")
    return Report(
        "smallest(step, model)",
        findings,
        headline=headline,
        symptoms=symptoms,
        tables=(Table("What was taken away", columns, shrinking.lines, open=True),),
        notes=tuple(f"The script imports {file}." for file in sorted(shrinking.program.beside)),
        facts={"script": str(path), "alike": not otherwise},
    )
