"""A single file has the name of the package that was meant."""

import importlib
import pathlib
import sys
import tempfile
from types import SimpleNamespace

EXPECT = {"code": "error/module-not-found", "names": ["utils_q3", "utils_q3.metrics"]}


def build(fixed=False):
    root = pathlib.Path(tempfile.mkdtemp())
    if fixed:
        (root / "utils_q3").mkdir()
        (root / "utils_q3" / "__init__.py").write_text("")
        (root / "utils_q3" / "metrics.py").write_text("def f1(p, t):\n    return 1.0\n")
    else:
        (root / "utils_q3.py").write_text("def seed_all(s):\n    return s\n")
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    sys.modules.pop("utils_q3", None)

    def trigger():
        from utils_q3.metrics import f1

        return f1([1], [1])

    return SimpleNamespace(trigger=trigger)
