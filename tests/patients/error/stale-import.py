"""A loss in a file beside the notebook is mended, and its import cell is run again: the old one goes on."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, CELL, NAMES = "error/stale-import", 3, ["patient_losses", "hinge", "reload"]
TEXT = "def hinge(scores, labels):\n    return (1 {} scores * labels).clamp(min=0).mean()\n"


def notebook(again):
    folder = tempfile.TemporaryDirectory()
    path = str(pathlib.Path(folder.name) / "patient_losses.py")
    return SimpleNamespace(
        folder=folder,
        cells=[
            f"import pathlib, sys, torch\nsys.path.insert(0, {folder.name!r})\n"
            f"pathlib.Path({path!r}).write_text({TEXT.format('+')!r})\nNone",
            "import importlib\nfrom patient_losses import hinge\nbefore = hinge(torch.ones(3), torch.ones(3))",
            f"pathlib.Path({path!r}).write_text({TEXT.format('-')!r} + '# mended')\nNone",
            again,
            "after = hinge(torch.ones(3), torch.ones(3))",
        ],
    )


def sick():
    return notebook("from patient_losses import hinge")


def healthy():
    return notebook("import patient_losses\nimportlib.reload(patient_losses)\nfrom patient_losses import hinge")
