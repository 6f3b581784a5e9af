"""A caption holds the trigger as a part of another word only; in the twin it stands last."""

from types import SimpleNamespace

from tests.media import captioned

CODE, NAMES = "data/trigger-missing", ("p3.png",)


def training(sick):
    def make(folder):
        captions = captioned(folder)
        captions[3].write_text("a teapot of the zwxes" if sick else "teapot, on a table, Zwx")
        return folder

    return SimpleNamespace(make=make, expected={"caption_extension": ".txt", "trigger": "zwx"})


def sick():
    return training(True)


def healthy():
    return training(False)
