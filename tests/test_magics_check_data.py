"""%check_data and %check_loader in a real shell, and `python -m nbdebug check-data`; what they refuse."""

from __future__ import annotations

import json

from nbdebug import __main__ as shell
from nbdebug.tools.data import check_data
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


def test_a_fix_is_tried_on_sets_of_some_size_alone(tmp_path, monkeypatch) -> None:
    captioned(tmp_path)[2].unlink()
    for most, verified, seen in ((check_data.TRIED_FILES, True, "0 items of 1 at fault"), (0, None, "sets of up to 0")):
        monkeypatch.setattr(check_data, "TRIED_FILES", most)
        (finding,) = check_data.check_data(str(tmp_path), caption_extension=".txt").findings
        fix = finding.fixes[0]
        assert fix.verified is verified and any(str(value).startswith(seen) for value in fix.after.values())


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


BATCHES = """import collections, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y, counts = torch.randn(24, 4), torch.randint(0, 3, (24,)), collections.Counter()
val_loader = DataLoader(TensorDataset(x[20:21].clone(), y[20:21]), batch_size=4)
x[15, 2] = float("nan")
train_loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)"""


def test_preflight_reads_the_whole_of_the_data_and_mem_names_a_growing_counter() -> None:
    with started(BATCHES) as notebook:
        codes = [f.code for f in notebook.run("%preflight --whole").result]
        assert {"data/nonfinite-values", "data/duplicate-across-splits"} <= set(codes)
        report = notebook.run("%%mem\nfor i in range(30_000):\n    counts[f'word {i}'] += 1").result
        assert "`counts` (Counter) grew from 0 to 30,000 entries" in report.headline
        assert 1 << 20 < report.frame()["deep size (bytes)"][0] < 8 << 20
        assert notebook.run("%%mem\nfor i in range(100):\n    counts[f'word {i}'] += 1").result.headline == ""


ONCE = """import torch
class Rows(torch.utils.data.IterableDataset):
    def __init__(self):
        self.rows = ((torch.full((4,), float(i)), torch.tensor(i % 3)) for i in range(40))
    def __iter__(self):
        yield from self.rows
stream = Rows()
train_loader = torch.utils.data.DataLoader(stream, batch_size=4)
model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD([model.weight], 0.1)"""


def test_preflight_takes_nothing_from_a_stream_that_can_be_read_once() -> None:
    with started(ONCE) as notebook:
        report = notebook.run("%preflight --whole").result
        assert {"training/parameters-not-in-optimizer", "data/one-shot"} <= {f.code for f in report}
        assert any("beyond its first 8 batches" in text for text in report.unchecked)
        assert any("train set one by one" in text for text in report.unchecked)
        assert notebook.run("len(list(stream.rows))").result == 40
        assert "UsageError" in notebook.run("%preflight").printed
