"""The public names, and what `import nbdebug` costs and touches: nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

import nbdebug

ROOT = pathlib.Path(__file__).resolve().parents[1]


def in_a_fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    return done.stdout


def test_all_is_complete_sorted_and_importable() -> None:
    assert nbdebug.__all__ == sorted(nbdebug.__all__)
    assert set(nbdebug.__all__) == set(nbdebug._HOMES)
    for name in nbdebug.__all__:
        assert getattr(nbdebug, name).__name__ == name
        assert getattr(nbdebug, name).__doc__, f"nbdebug.{name} says nothing of itself"
        assert name in dir(nbdebug)


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="nan_trace_"):
        nbdebug.nan_trace_


def test_import_brings_nothing_heavy_and_says_nothing() -> None:
    printed = in_a_fresh_python("import sys, nbdebug; print([m for m in sys.modules])")
    loaded = {name.split(".")[0] for name in eval(printed)}
    assert not loaded & {"torch", "numpy", "pandas", "IPython", "ipywidgets", "matplotlib", "tqdm", "traitlets", "ipdb"}


def test_load_ext_brings_no_torch_and_no_matplotlib() -> None:
    printed = in_a_fresh_python("""
import sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell(config=config)
before = set(sys.modules)
import nbdebug
nbdebug.load_ipython_extension(shell)
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
""")
    assert not set(eval(printed)) & {"torch", "numpy", "pandas", "matplotlib", "ipywidgets"}


SNAPSHOT = """
import json, logging, os, pkgutil, importlib, sys, threading, warnings
import numpy, torch, IPython.core.interactiveshell, matplotlib, pandas  # the libraries' own side effects come first
from torch.nn.modules import module

def state():
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "threads": [t.name for t in threading.enumerate()],
        "hooks": [str(sys.excepthook), str(sys.displayhook), str(sys.gettrace()), str(sys.getprofile())],
        "logging": [str(logging.getLogger().handlers), logging.getLogger().level],
        "random": torch.random.get_rng_state().tolist(), "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()), "anomaly": torch.is_anomaly_enabled(),
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "module hooks": [len(h) for h in (module._global_forward_hooks, module._global_forward_pre_hooks,
                                          module._global_backward_hooks)],
        "functions": {f"{owner.__name__}.{name}": id(value) for owner in (torch, torch.Tensor, torch.nn.Module,
                      torch.optim.Optimizer, torch.autograd.Function, torch.nn.functional)
                      for name, value in vars(owner).items() if callable(value)},
    }

before = state()
import nbdebug
names = [m.name for m in pkgutil.walk_packages(nbdebug.__path__, "nbdebug.")
         if not m.name.endswith("__main__") and ".integrations." not in m.name]  # those import other packages
for name in names:
    importlib.import_module(name)
after = state()
changed = {key for key in before if before[key] != after[key]}
print(json.dumps({"modules": names, "changed": sorted(changed)}))
"""


def test_importing_every_module_changes_nothing_outside() -> None:
    seen = json.loads(in_a_fresh_python(SNAPSHOT))
    assert len(seen["modules"]) > 10
    assert seen["changed"] == []
