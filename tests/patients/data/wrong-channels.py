"""One recording is in stereo."""

from types import SimpleNamespace

from tests.media import sound, sounds

CODE, NAMES = "data/wrong-channels", ("s4.wav",)


def training(sick):
    def make(folder):
        paths = sounds(folder)
        if sick:
            sound(paths[4], channels=2)
        return folder

    return SimpleNamespace(make=make, expected={"channels": 1})


def sick():
    return training(True)


def healthy():
    return training(False)
