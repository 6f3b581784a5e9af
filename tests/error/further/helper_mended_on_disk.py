"""A helper's file was mended after the import; the call fails as before."""

import importlib
import pathlib
import sys
import tempfile
from types import SimpleNamespace

import torch

EXPECT = {"code": "error/stale-import", "names": ["metric_x7"]}
OLD = "def score(a, b):\n    return (a - b.T).abs().mean(3)\n"
NEW = "\n\ndef score(a, b):\n    return (a - b).abs().mean()\n"


def build(fixed=False):
    folder = pathlib.Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    (folder / "metric_x7.py").write_text(OLD)
    sys.modules.pop("metric_x7", None)
    importlib.invalidate_caches()
    import metric_x7

    (folder / "metric_x7.py").write_text(NEW)
    if fixed:
        importlib.reload(metric_x7)

    def trigger():
        return metric_x7.score(torch.rand(3, 3), torch.rand(3, 3))

    return SimpleNamespace(trigger=trigger)
