"""A class was added to a helper's file after the first import; importing it by its name fails."""

import importlib
import pathlib
import sys
import tempfile
from types import SimpleNamespace

EXPECT = {"code": "error/stale-import", "names": ["heads_v6", "MlpHead"]}


def build(fixed=False):
    folder = pathlib.Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    file = folder / "heads_v6.py"
    file.write_text("class LinearHead:\n    pass\n")
    sys.modules.pop("heads_v6", None)
    importlib.invalidate_caches()
    import heads_v6

    file.write_text("class LinearHead:\n    pass\n\n\nclass MlpHead:\n    depth = 2\n")
    if fixed:
        importlib.reload(heads_v6)

    def make(kind):
        if kind == "mlp":
            from heads_v6 import MlpHead

            return MlpHead().depth
        return heads_v6.LinearHead()

    return SimpleNamespace(trigger=lambda: [make(k) for k in ("linear", "mlp")])
