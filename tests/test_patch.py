"""A tried edit as a diff, and made: a new cell below, a file with its old text beside it, and never unasked."""

from __future__ import annotations

import subprocess

import pytest

from nbdebug.report import Edit, Finding, Fix, Report
from tests.shell import started

SOURCE = "import torch\n\n\ndef loss(p):\n    return torch.log(p)\n"
EDIT = Edit("", 5, 5, "    return torch.log(p)", "    return torch.log(p.clamp_min(1e-8))")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def report(edit, verified=True):
    return Report("ask()", (Finding("nan/log-of-nonpositive", "log", fixes=(Fix.of("Above zero.", edit, verified),)),))


def of(path):
    return report(Edit(str(path), *list(vars(EDIT).values())[1:]))


def test_a_patch_is_a_diff_that_the_tools_of_unix_apply(file):
    asked = of(file)
    assert "-    return torch.log(p)\n+    return torch.log(p.clamp_min(1e-8))\n" in asked.patch()
    subprocess.run(["patch", "-p0", str(file)], input=asked.patch(), text=True, check=True, capture_output=True)
    assert "clamp_min" in file.read_text(encoding="utf-8")


def test_a_file_is_written_only_when_asked_and_its_old_text_is_saved(file, capsys):
    of(file).apply()
    assert file.read_text(encoding="utf-8") == SOURCE and "Nothing is written yet" in capsys.readouterr().out
    of(file).apply(write=True)
    assert file.read_text(encoding="utf-8") == SOURCE.replace("log(p)", "log(p.clamp_min(1e-8))")
    assert (file.parent / "train.py.before").read_text(encoding="utf-8") == SOURCE


def test_a_file_that_has_changed_since_is_refused(file):
    file.write_text("# a new first line\n" + SOURCE, encoding="utf-8")
    with pytest.raises(ValueError, match="no longer reads"):
        of(file).apply(write=True)
    assert "clamp_min" not in file.read_text(encoding="utf-8")


def test_line_ends_of_windows_stay(file):
    file.write_bytes(SOURCE.replace("\n", "\r\n").encode())
    of(file).apply(write=True)
    assert file.read_bytes() == SOURCE.replace("log(p)", "log(p.clamp_min(1e-8))").replace("\n", "\r\n").encode()


@pytest.mark.parametrize("verified", [None, False])
def test_what_was_not_tried_is_not_applied(verified):
    with pytest.raises(ValueError, match="no fix of it is a tried edit"):
        report(EDIT, verified).patch()


def test_views_show_the_old_line_and_the_new_one(file):
    asked = of(file)
    assert "- return torch.log(p)\n    + return torch.log(p.clamp_min(1e-8))" in str(asked)
    html = asked._repr_mimebundle_()["text/html"]
    assert "- return torch.log(p)</span>" in html and "+ return torch.log(p.clamp_min(1e-8))</span>" in html


def test_in_a_notebook_the_mended_cell_comes_below_and_does_not_run():
    with started("import nbdebug, torch") as book:
        book.run("def loss(p):\n    return torch.log(p)")
        book.run(
            "edit = nbdebug.Edit('x', 2, 2, '    return torch.log(p)', '    return torch.log(p.abs())', 'In [3]')\n"
            "nbdebug.Report('ask()', (nbdebug.Finding('nan/x', 'x', fixes=(nbdebug.Fix.of('x', edit, True),)),))"
        )
        shown = book.run("%nbdebug apply").shown
        assert "In [3] with this change" in shown
        assert book.shell.rl_next_input == "def loss(p):\n    return torch.log(p.abs())"
        assert book.run("%nbdebug off").error is None


def test_with_nothing_to_apply_the_magic_says_so():
    with started("import nbdebug") as book:
        assert "No report of this session" in book.run("%nbdebug apply").printed


def test_a_report_that_can_not_be_saved_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.txt"
    report(EDIT).save(path)
    before = path.read_bytes()

    def full(path, data):
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError):
        report(EDIT).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_report_is_saved_through_a_link_and_keeps_the_rights_of_the_file(tmp_path):
    path, link = tmp_path / "report.txt", tmp_path / "latest.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert report(EDIT).save(link) == link
    assert link.is_symlink() and "log" in path.read_text() and path.stat().st_mode & 0o777 == 0o640


CELL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter([torch.rand(4, 3), torch.rand(4, 3)])
scale = torch.tensor([[1.0], [0.0], [2.0], [1.0]])

def step():
    x = next(batches)
    loss = torch.log(model(x).abs() * scale).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_the_fix_of_a_traced_cell_is_tried_applied_and_cures():
    with started(CELL) as book:
        said = book.run("report = %nan_trace step()\nreport").shown
        assert "Tried: this text, on the failing step and 1 more; it works" in said
        assert (
            "In [2], line 11" in said and "+ loss = torch.log((model(x).abs() * scale).clamp_min(1e-8)).mean()" in said
        )
        assert book.run("len(list(batches))").result == 1
        assert "In [2] with this change" in book.run("%nbdebug apply").printed
        book.run(book.shell.rl_next_input)
        assert book.run("float(step())").result < 0
