"""A recording of another source; nothing was said of the rate."""

from types import SimpleNamespace

from tests.media import sound, sounds

CODE, NAMES = "data/wrong-sample-rate", ("s2.wav",)


def training(sick):
    def make(folder):
        paths = sounds(folder)
        if sick:
            sound(paths[2], rate=11_025)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
