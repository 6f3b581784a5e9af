"""The file to import lies in a folder beside, which Python does not search."""

import importlib
import os
import pathlib
import sys
import tempfile
from types import SimpleNamespace

EXPECT = {"code": "error/module-not-found", "names": ["augment_p8", "src"]}


def build(fixed=False):
    root = pathlib.Path(tempfile.mkdtemp())
    (root / "src").mkdir()
    (root / "src" / "augment_p8.py").write_text("FLIP = 0.5\n")
    sys.modules.pop("augment_p8", None)
    os.chdir(root)
    if fixed:
        sys.path.insert(0, str(root / "src"))
    importlib.invalidate_caches()

    def trigger():
        import augment_p8

        return augment_p8.FLIP

    return SimpleNamespace(trigger=trigger)
