"""add_pages(): causes of one's own beside ours, and pages that are refused with their line."""

from __future__ import annotations

import pytest

import nbdebug
from nbdebug import __main__ as shell
from nbdebug import registry
from tests.shell import started


@pytest.fixture(autouse=True)
def no_pages(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    with open("team.md", "w", encoding="utf-8") as file:
        file.write(text)
    return "team.md"


TWO = (
    registry.FORM
    + """
# team/dead-mount: The data disk is not mounted
## Symptom
`Transport endpoint is not connected`
## Cause
The node was started anew.
## Confirm
`ls /data`
## Fix
```
# as root
mount /data
```
## Read more
https://wiki.example.org/mounts
"""
)


def test_own_pages_stand_beside_ours() -> None:
    ours = registry.rules()
    assert nbdebug.add_pages(write(TWO)) == ("team/old-labels", "team/dead-mount")
    assert registry.rules()[: len(ours)] == ours and len(registry.rules()) == len(ours) + 2
    assert registry.rules("nan") == tuple(r for r in ours if r.chapter == "nan")
    page = registry.look_up("dead-mount")
    assert page.reference == "https://wiki.example.org/mounts" and "# as root mount /data" in page.fix
    assert "team/old-labels" in registry.listing() and "What you see" in page.text() and page.check(None) is None
    assert nbdebug.add_pages(write(registry.FORM)) == ("team/old-labels",), "the file's pages are replaced"
    assert len(registry.rules()) == len(ours) + 1


def test_explain_offers_a_page_whose_symptom_stands_in_an_unknown_error() -> None:
    nbdebug.add_pages(write(TWO))
    report = nbdebug.explain(OSError("[Errno 107] Transport endpoint is not connected: '/data'"), names={})
    assert [f.code for f in report] == ["team/dead-mount"] and "mount /data" in report.findings[0].fixes[0].title
    assert nbdebug.explain("OSError: Transport endpoint is not connected\n ").findings[0].code == "team/dead-mount"
    assert not nbdebug.explain(OSError("something else went wrong"), names={}).findings


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("# team/old-labels: The", "# old labels: The", 1, "begins with"),
        ("# team/old-labels:", "# nan/overflow:", 1, "already"),
        ("## Cause\n", "## Reason\n", 4, "'Reason' is none of"),
        ("## Cause\n", "## Symptom\n", 4, "stands twice"),
        ("## Fix\nRun `export_labels.py`.\n", "", 1, "no section `## Fix`"),
        ("Run `export_labels.py`.\n", "", 8, "is empty"),
        ("## Symptom\n", "hello\n## Symptom\n", 2, "text before"),
        ("# team/old-labels: The labels", "Our pages\n# team/x: The labels", 1, "begins with"),
    ],
)
def test_a_malformed_page_is_refused_with_its_line(old: str, new: str, line: int, words: str) -> None:
    before = registry.rules()
    with pytest.raises(ValueError, match=f"team.md, line {line}: .*{words}"):
        nbdebug.add_pages(write(registry.FORM.replace(old, new)))
    assert registry.rules() == before
    with pytest.raises(ValueError, match="no page"):
        nbdebug.add_pages(write(""))


def test_the_magic_and_the_shell_show_them(capsys) -> None:
    with started("import nbdebug") as book:
        book.run(f"nbdebug.add_pages({write(TWO)!r})")
        assert "not mounted" in book.run("%explain team/dead-mount").shown
        assert "team/old-labels" in book.run("%nbdebug catalogue").shown
    registry._added.clear()
    assert shell.main(["explain", "--pages", "team.md", "old-labels"]) == 0
    assert "last year" in capsys.readouterr().out
    assert shell.main(["catalogue", "--pages", "none.md"]) == 2
