"""An `Edit` as a unified diff, and made: the mended cell below the present one, or the file written.

Nothing is run, and nothing is overwritten without being asked: a file is written only on request, its old text is saved
beside it, and it stays as it is when the lines are no longer those that the edit is for.
"""

from __future__ import annotations

import contextlib
import difflib
import linecache
import os
import pathlib
import shutil
import sys
from typing import Any

from nbdebug.report import Edit


def diff(edit: Edit) -> str:
    """The change with three lines around it, as `diff -u` prints it."""
    old = _lines(edit)
    if old is None:  # the source is gone, or has other lines by now: the change alone
        old = [""] * (edit.line - 1) + edit.old.split("\n")
    name = edit.cell or edit.file
    new = _mended(old, edit)
    return "\n".join([*difflib.unified_diff(old, new, name, name, lineterm=""), ""])


def apply(edit: Edit, write: bool = False) -> None:
    """See `Report.apply`."""
    old = _lines(edit)
    if old is None:
        raise ValueError(
            f"{edit.place} no longer reads as when the fix was tried, so nothing is changed. "
            "Ask again, or make the change by hand:\n" + diff(edit)
        )
    new = "\n".join(_mended(old, edit))
    if edit.cell is not None:
        shell = _shell()
        if shell is None:
            raise ValueError(f"{edit.cell} is a cell of a notebook that does not run here.")
        shell.set_next_input(new)
        print(f"The cell below is {edit.cell} with this change. It has not been run.\n\n{diff(edit)}", end="")
        return
    print(diff(edit), end="")
    if not write:
        print(f"Nothing is written yet: write=True (%nbdebug apply --write) changes {edit.file}.")
        return
    path = pathlib.Path(edit.file)
    backup = next(p for n in range(10**6) if not (p := path.with_name(f"{path.name}.before{n or ''}")).exists())
    before = path.read_bytes()
    backup.write_bytes(before)
    mended = new + "\n" * before.endswith(b"\n")
    write_whole(path, mended.replace("\n", "\r\n") if b"\r\n" in before else mended)
    linecache.checkcache(str(path))
    print(f"{path} is written; its old text is in {backup.name}. Import it again, or restart, to run the new one.")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file. Whatever fails, it is the whole new one or the old one. Raises OSError, UnicodeEncodeError."""
    data, target = text.encode("utf-8"), path.resolve()  # a link stays one
    if target.exists() and not target.is_file():  # a pipe, a terminal
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _lines(edit: Edit) -> list[str] | None:
    """The lines of the cell as it was typed, or of the file as it is now; None where the edit does not fit them."""
    text = _cell_text(edit.cell) if edit.cell is not None else _file_text(edit.file)
    lines = [] if text is None else text.split("\n")
    old = lines[edit.line - 1 : edit.end_line]
    return lines if "\n".join(old) == edit.old else None


def _file_text(file: str) -> str | None:
    try:
        return pathlib.Path(file).read_bytes().decode("utf-8").replace("\r\n", "\n").removesuffix("\n")
    except (OSError, ValueError):
        return None


def _cell_text(cell: str) -> str | None:
    history = getattr(getattr(_shell(), "history_manager", None), "input_hist_raw", [])
    number = int(cell.removeprefix("In [").removesuffix("]"))
    return history[number].rstrip("\n") if number < len(history) else None


def _shell() -> Any:
    """The running IPython shell, or None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find() if find is not None else None


def _mended(lines: list[str], edit: Edit) -> list[str]:
    return [*lines[: edit.line - 1], *edit.new.split("\n"), *lines[edit.end_line :]]
