"""A caption was touched up in an editor that writes Windows-1252."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/caption-encoding", ("p2.png",)


def training(sick):
    def make(folder):
        captions = captioned(folder)
        captions[2].write_bytes("the caf\u00e9 of zwx teapot".encode("cp1252" if sick else "utf-8"))
        return folder

    return SimpleNamespace(make=make, expected={"caption_extension": ".txt"})


def sick():
    return training(True)


def healthy():
    return training(False)
