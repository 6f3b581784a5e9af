"""The fault alone: a script and a safetensors file that fail at the same op, without the model and without nbdebug."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.recorder import Op
from nbdebug.report import Report
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.origins import EMPTIES, Origin
from nbdebug.tools.nan.trials import FixTrial

_SCRIPT = '''"""{title}

{code}, found by nbdebug. This script needs torch and safetensors only; it fails at the same op.
"""
import pathlib

import torch
from safetensors.torch import load_file

tensors = load_file(pathlib.Path(__file__).with_name("{file}"))
{gradients}args = {args}
kwargs = {kwargs}
result = torch.ops.{op}(*args, **kwargs)
results = result if isinstance(result, (list, tuple)) else [result]
{rest}
for name, tensor in checked.items():
    bad = ~torch.isfinite(tensor)
    print(f"{{name}}: {{int(bad.sum())}} of {{tensor.numel()}} elements are not finite")
if all(bool(torch.isfinite(t).all()) for t in checked.values()):
    raise SystemExit("It did not fail here.")
'''
_WANT_GRADIENTS = """\
for tensor in tensors.values():
    tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
"""
_FORWARD = """\
checked = {f"result {i}": t for i, t in enumerate(results) if isinstance(t, torch.Tensor)}
checked = checked or {n: t for n, t in tensors.items() if t.is_floating_point()}"""


class _Reached(Exception):
    """Ends a replay once the op at fault has been reached."""


@dataclasses.dataclass
class Reproduction:
    """What the op at fault was given, and, for a fault in backward, the gradients that came to its results. args and
    kwargs are None until they have been copied."""

    func: Any
    args: Any
    kwargs: Any
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, origin: Origin, op: Op | None, trial: FixTrial, facts: NanFacts) -> Reproduction | None:
        """From the tape where the step can be replayed, else from the snapshot taken at the origin;
        None if neither will do."""
        backward = facts.target.kind == "gradient" and origin.storage is None and not origin.custom
        if origin.op is not None and origin.op.name in EMPTIES:
            return None  # what was in unwritten memory can't be had again
        snapshot = origin.snapshot
        from_snapshot = None if snapshot.func is None else cls(snapshot.func, (), dict(snapshot.tensors))
        if op is None:
            return from_snapshot
        if not backward and origin.op is op and from_snapshot is not None:
            return from_snapshot
        if backward and (known := trial.reproductions.get(op.index)) is not None and known.complete:
            return known
        if not trial.why_not and not facts.origin.earlier_step:
            with contextlib.suppress(Exception):  # then the snapshot has to do
                return cls._from_tape(op, trial, backward)
        return from_snapshot

    @classmethod
    def _from_tape(cls, op: Op, trial: FixTrial, backward: bool) -> Reproduction:
        reproductions: list[Reproduction] = []

        def record(func: Any, args: Any, kwargs: Any) -> Any:
            reproductions.append(cls.of_call(func, args, kwargs))
            if not backward:
                raise _Reached  # the rest of the step is not needed
            out = func(*args, **kwargs)
            reproductions[-1].copy_gradients_of(out)
            return out

        with contextlib.suppress(_Reached):
            trial.replay({op.index: record})
        return reproductions[-1]

    @classmethod
    def of_call(cls, func: Any, args: Any, kwargs: Any) -> Reproduction:
        """Of an op that is about to run: with copies of what it is given."""
        reproduction = cls(func, None, None)
        reproduction.copy_arguments(args, kwargs)
        return reproduction

    def copy_arguments(self, args: Any, kwargs: Any) -> None:
        """Copy what the op is given, at its first run."""
        if self.args is None:
            self.args, self.kwargs = _copy(args), _copy(kwargs)

    @property
    def complete(self) -> bool:
        """Whether all is there for a fault in backward."""
        return self.args is not None and bool(self.gradients)

    def copy_gradients(self, gradients: tuple) -> None:
        """Copy the gradients of the op's results, in order."""
        self.gradients = {n: g.detach().clone() for n, g in enumerate(gradients) if g is not None}

    def copy_gradients_of(self, out: Any) -> None:
        """Copy the gradients when they come to what the op gave."""

        def note(n: int, gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            with _disable_current_modes():  # no part of the step
                self.gradients.setdefault(n, gradient.detach().clone())

        for n, result in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.register_hook(functools.partial(note, n))

    def __call__(self, folder: pathlib.Path, report: Report) -> pathlib.Path:
        """Write the script and its tensors into `folder`; returns the script's path."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        finding = report.findings[0]
        name = finding.code.replace("/", "_").replace("-", "_")
        tensors: dict[str, torch.Tensor] = {}
        args = _source(self.args, "arg", tensors)
        kwargs = _source(self.kwargs, "kwarg", tensors)
        tensors |= {f"gradient_{n}": g.contiguous().cpu() for n, g in self.gradients.items()}
        save_file(tensors, folder / f"{name}.safetensors")
        script = _SCRIPT.format(
            title=" ".join(finding.title.replace("\\", "/").replace('"""', "'''").split()),
            code=finding.code,
            file=f"{name}.safetensors",
            gradients=_WANT_GRADIENTS if self.gradients else "",
            args=args or "()",
            kwargs=kwargs or "{}",
            op=self.func,
            rest=self._backward() if self.gradients else _FORWARD,
        )
        path = folder / f"{name}.py"
        path.write_text(script, encoding="utf-8")
        return path

    def _backward(self) -> str:
        gradients = ", ".join(f'{n}: tensors["gradient_{n}"].detach()' for n in self.gradients)
        return (
            f"gradients = {{{gradients}}}\n"
            "torch.autograd.backward([results[n] for n in gradients], list(gradients.values()))\n"
            'checked = {f"gradient of {n}": t.grad for n, t in tensors.items() if t.grad is not None}'
        )


def _copy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {k: _copy(v) for k, v in tree.items()}
    return type(tree)([_copy(v) for v in tree]) if isinstance(tree, (list, tuple)) else tree


def _source(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """A value as Python source; tensors go to the file. Raises ValueError for what has no source form."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().resolve_conj().contiguous().cpu().clone()
        return f'tensors["{name}"]'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_source(v, f'{name}_{k}', tensors)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = [_source(v, f"{name}_{i}", tensors) for i, v in enumerate(value)]
        if isinstance(value, list):
            return f"[{', '.join(inner)}]"
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if isinstance(value, float) and value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return 'torch.device("cpu")'
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    raise ValueError(f"the op's argument {name} ({type(value).__name__}) can't be written into a script")
