"""A picture is a link to a file that was moved."""

from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/unreadable-file", ("p9.png",)


def training(sick):
    def make(folder):
        pictures(folder)
        if sick:
            (folder / "p9.png").symlink_to(folder / "moved.png")
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
