"""A box in the form of YOLO (class, centre, size) has no width; its twin is narrow."""

from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/invalid-box", ("p1.txt#1",)


def training(sick):
    def make(folder):
        for number, path in enumerate(pictures(folder, 4)):
            width = 0 if sick and number == 1 else 0.01
            path.with_suffix(".txt").write_text(f"{number % 2} 0.5 0.5 1 1\n1 0.25 0.3 {width} 0.2\n")
        return folder

    return SimpleNamespace(make=make, expected={"num_classes": 2})


def sick():
    return training(True)


def healthy():
    return training(False)
