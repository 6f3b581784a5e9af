"""A box has no width after rounding."""

from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/invalid-box", ("boxes.csv#1",)


def training(sick):
    def make(folder):
        pictures(folder, 2)
        lines = ["image,x1,y1,x2,y2", "p0.png,0,0,40,40", f"p1.png,7,3,{7 if sick else 8},9"]
        (folder / "boxes.csv").write_text("\n".join(lines))
        return folder

    return SimpleNamespace(make=make, expected={"boxes": ["x1", "y1", "x2", "y2"], "image": "image"})


def sick():
    return training(True)


def healthy():
    return training(False)
