"""The tagger wrote one sentence beside each picture; in the twin each has its own."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/caption-same", ("p11.png",)


def training(sick):
    def make(folder):
        for caption in captioned(folder, 12) if sick else captioned(folder, 12)[:1]:
            caption.write_text("a teapot stands on a table", encoding="utf-8")
        return folder

    return SimpleNamespace(make=make, expected={"caption_extension": ".txt"})


def sick():
    return training(True)


def healthy():
    return training(False)
