"""The tagger failed on a picture, and its file was written."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/caption-empty", ("p3.png",)


def training(sick):
    def make(folder):
        captions = captioned(folder)
        if sick:
            captions[3].write_text(" \n")
        return folder

    return SimpleNamespace(make=make, expected={"caption_extension": ".txt"})


def sick():
    return training(True)


def healthy():
    return training(False)
