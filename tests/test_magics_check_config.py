"""%check_config in a real shell: a file or a variable, a schema among the variables, and what it refuses."""

from __future__ import annotations

import nbdebug
from tests.shell import started

SETUP = """import pathlib, dataclasses
@dataclasses.dataclass
class Train:
    lr: float = 0.1
    epochs: int = 3
path = pathlib.Path("run.yaml")
path.write_text("lr: 1e-4\\nepochs: 3\\n")
good = {"lr": 0.1}"""


def test_a_file_a_variable_and_a_schema(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with started(SETUP) as notebook:
        done = notebook.run("%check_config run.yaml --schema Train")
        assert [f.code for f in done.result] == ["config/wrong-type"] and "1.0e-4" in done.shown
        assert done.result.question == "%check_config" and isinstance(done.result, nbdebug.Report)
        assert notebook.run("%check_config good").result.ok and notebook.run("%check_config good;").shown.strip() == ""
        for line in ("none.yaml", "nothing", "3", ""):
            assert "UsageError" in notebook.run(f"%check_config {line}").printed, line
        assert "the mended line" in " ".join(notebook.run("%check_config -h").printed.split())
