"""%check_data and %check_loader in a real shell, and `python -m nbdebug check-data`; what they refuse."""

from __future__ import annotations

import json

from nbdebug import __main__ as shell
from tests.media import captioned, numbers
from tests.shell import started


def test_a_folder_a_variable_and_a_table(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    captioned(tmp_path / "photos")[2].unlink()
    with started("rows = [{'input_ids': [1, 9]}, {'input_ids': [3, 4]}]\nsmall = {'vocab_size': 9}") as notebook:
        done = notebook.run("%check_data photos --caption-extension .txt --size 40x40 --save problems.csv")
        assert [f.code for f in done.result] == ["data/caption-missing"] and "p2.png" in done.shown
        assert "data:image/jpeg" in done.result._repr_mimebundle_()["text/html"]
        assert (tmp_path / "problems.csv").read_text().splitlines()[1].startswith("p2.png,data/caption-missing,")
        assert list(notebook.run("%check_data rows --expected small").result.facts["items"]) == [0]
        for line in ("none.csv", "nothing", "small", "rows --size 12", ""):
            assert "UsageError" in notebook.run(f"%check_data {line}").printed, line


def test_a_loader_and_what_it_is_not(tmp_path, monkeypatch) -> None:
    with started("rows = iter([1.0, 2.0])\ntrain_loader = [[1.0], [2.0]]") as notebook:
        assert notebook.run("%check_loader").result.ok
        assert [f.code for f in notebook.run("%check_loader rows").result] == ["data/one-shot"]
        assert notebook.run("list(rows)").result == [1.0, 2.0], "nothing was taken from it"
        for line in ("nothing", "rows --max-steps 0", "3"):
            assert "UsageError" in notebook.run(f"%check_loader {line}").printed, line


def test_a_shell_gets_a_status(tmp_path, capsys) -> None:
    table = numbers()
    table.loc[3, "a"] = None
    table.to_csv(tmp_path / "t.csv", index=False)
    assert shell.main(["check-data", str(tmp_path)]) == 1 and "t.csv#3" in capsys.readouterr().out
    assert shell.main(["check-data", str(tmp_path), "--expected", json.dumps({"columns": ["b"]})]) == 0
    assert shell.main(["check-data", str(tmp_path / "none")]) == 2
