"""A package imports a module that is not there, three imports below the user's own."""

import importlib
import pathlib
import sys
import tempfile
from types import SimpleNamespace

EXPECT = {"code": "error/module-not-found", "names": ["wandbx"]}


def build(fixed=False):
    root = pathlib.Path(tempfile.mkdtemp())
    pkg = root / "engine_k5"
    pkg.mkdir()
    (pkg / "__init__.py").write_text("from .loop import train\n")
    (pkg / "loop.py").write_text("from .log import Logger\n\n\ndef train():\n    return Logger().n\n")
    (pkg / "log.py").write_text(("" if fixed else "import wandbx\n") + "\n\nclass Logger:\n    n = 3\n")
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    for name in [k for k in sys.modules if k.startswith("engine_k5")]:
        del sys.modules[name]

    def trigger():
        from engine_k5 import train

        return train()

    return SimpleNamespace(trigger=trigger)
