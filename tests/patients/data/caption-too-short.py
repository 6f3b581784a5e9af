"""A single word stands in place of a sentence; in the twin it is four characters of Chinese."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/caption-too-short", ("p5.png",)


def training(sick):
    def make(folder):
        captions = captioned(folder)
        captions[5].write_text("teapot" if sick else "\u4e00\u4e2a\u8336\u58f6", encoding="utf-8")
        return folder

    return SimpleNamespace(make=make, expected={"caption_extension": ".txt", "min_words": 3})


def sick():
    return training(True)


def healthy():
    return training(False)
