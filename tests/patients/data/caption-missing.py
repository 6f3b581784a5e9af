"""Two captions have another name than their picture."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/caption-missing", ("p1.png", "p4.png")


def training(sick):
    def make(folder):
        captions = captioned(folder)
        for caption in (captions[1], captions[4]) if sick else ():
            caption.rename(caption.with_name(f"{caption.stem}_caption.txt"))
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
