"""Settings and names that an earlier cell left behind. Each may be meant, so they are told as notes."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nbdebug.chapters.notebook.cells import History
from nbdebug.chapters.notebook.held import Held
from nbdebug.chapters.notebook.modes import in_eval

SHADOWED = frozenset(
    {
        "list",
        "dict",
        "set",
        "tuple",
        "str",
        "int",
        "float",
        "bool",
        "len",
        "max",
        "min",
        "sum",
        "print",
        "range",
        "type",
        "open",
        "zip",
        "map",
        "filter",
        "sorted",
        "abs",
        "round",
        "any",
        "all",
        "next",
        "iter",
        "isinstance",
        "super",
        "enumerate",
        "property",
        "object",
    }
)
"""Names of Python that other code of the notebook is likely to call; `id`, `input` or `dir` hardly ever are."""
MODULES = ("torch", "nn", "np", "numpy", "pd", "F", "random", "math", "os", "sys", "copy", "time", "json")
"""Names under which nearly everybody has a module."""


def leftovers(names: Mapping[str, Any], held: Held, history: History) -> list[str]:
    """What is worth a word, as sentences."""
    evals = [
        f"`{name}` is in eval mode: dropout is off and batch statistics stay as they are. `{name}.train()` before "
        "you go on training it."
        for name, _ in in_eval(held)
    ]
    return [*evals, *_settings(history), *_shadows(names, history), *_files()]


def _settings(history: History) -> list[str]:
    found = []
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        found.append(
            (
                "Gradients are off for the whole session" + _since(history, "set_grad_enabled", "no_grad"),
                "torch.set_grad_enabled(True)",
            )
        )
    if torch.is_inference_mode_enabled():
        found.append(
            (
                "Inference mode is on for the whole session" + _since(history, "inference_mode"),
                "leave it by __exit__, or restart",
            )
        )
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        found.append(
            ("Autocast is on for the whole session" + _since(history, "autocast"), "leave it by __exit__, or restart")
        )
    if torch.is_anomaly_enabled():
        found.append(
            (
                "Autograd's anomaly mode is on, and makes each step several times slower" + _since(history, "anomaly"),
                "torch.autograd.set_detect_anomaly(False)",
            )
        )
    if torch.get_default_dtype() != torch.float32:
        found.append(
            (
                f"New tensors are {str(torch.get_default_dtype()).removeprefix('torch.')} by default"
                + _since(history, "set_default_dtype", "set_default_tensor_type"),
                "torch.set_default_dtype(torch.float32)",
            )
        )
    if torch.are_deterministic_algorithms_enabled():
        found.append(
            (
                "Only deterministic algorithms are allowed, which is slower and makes some ops fail"
                + _since(history, "deterministic"),
                "torch.use_deterministic_algorithms(False)",
            )
        )
    return [f"{what}. If that is not meant: `{how}`." for what, how in found]


def _since(history: History, *words: str) -> str:
    """ ", since In [4]" where a cell says it."""
    cells = list(history.saying(*words))
    return f", since In [{cells[-1].number}]" if cells else ""


def _shadows(names: Mapping[str, Any], history: History) -> list[str]:
    notes = []
    for name in sorted(SHADOWED & names.keys()):
        if names[name] is not getattr(builtins, name):
            notes.append(
                f"`{name}` is a variable of yours{_bound(name, history)}, so Python's own {name}() can't be "
                f"called in the notebook. `del {name}` brings it back."
            )
    for name in MODULES:
        if (
            name in names
            and type(names[name]) is not type(sys)
            and any(b.how == "import" and name in (b.path,) for b in history.bindings(name))
        ):
            notes.append(f"`{name}` was imported, and is a {type(names[name]).__name__} now{_bound(name, history)}.")
    return notes


def _bound(name: str, history: History) -> str:
    bindings = [b for b in history.bindings(name) if b.how != "import"]
    return f" (In [{bindings[-1].number}])" if bindings else ""


def _files() -> list[str]:
    """Files beside the notebook whose name is that of a package: `import` takes the file."""
    notes = []
    for name in (
        "torch",
        "numpy",
        "random",
        "json",
        "copy",
        "math",
        "typing",
        "types",
        "logging",
        "queue",
        "tokenize",
        "string",
        "token",
        "code",
        "dataclasses",
        "datasets",
        "transformers",
        "torchvision",
    ):
        file = os.path.join(os.getcwd(), f"{name}.py")
        if os.path.isfile(file):
            notes.append(
                f"{name}.py lies in the notebook's folder: `import {name}` takes it in place of the package. "
                "Give it another name."
            )
    return notes
