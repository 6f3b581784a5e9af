"""Texts in Windows-1252 with quotes of a word processor, one of them empty; no text of its twin is."""

from types import SimpleNamespace

CODE, NAMES = "data/empty-text", ("notes.csv#7",)


def training(sick):
    def make(folder):
        notes = [f"Zoë said it’s „gut“ {number}" for number in range(20)]
        notes[7] = "  " if sick else notes[7]
        lines = ["note;mood", *(f"{note};{number % 3}" for number, note in enumerate(notes))]
        (folder / "notes.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
        return folder

    return SimpleNamespace(make=make, expected={"text": "note", "label": "mood"})


def sick():
    return training(True)


def healthy():
    return training(False)
