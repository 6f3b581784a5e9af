"""An argument was added to a helper's file after the import; the call with it fails: unexpected keyword argument."""

import importlib
import pathlib
import sys
import tempfile
from types import SimpleNamespace

import torch

EXPECT = {"code": "error/stale-import", "names": ["losses_w4", "focal"]}
OLD = "def focal(p, t):\n    return ((1 - p) ** 2 * t).mean()\n"
NEW = "def focal(p, t, gamma=2.0):\n    return ((1 - p) ** gamma * t).mean()\n"


def build(fixed=False):
    folder = pathlib.Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    file = folder / "losses_w4.py"
    file.write_text(OLD)
    sys.modules.pop("losses_w4", None)
    importlib.invalidate_caches()
    import losses_w4
    from losses_w4 import focal

    file.write_text(NEW)
    if fixed:
        importlib.reload(losses_w4)
        from losses_w4 import focal

    def sweep():
        return {g: float(focal(torch.rand(4), torch.ones(4), gamma=g)) for g in (1.0, 2.0)}

    return SimpleNamespace(trigger=sweep)
