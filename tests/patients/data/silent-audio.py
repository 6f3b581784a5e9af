"""The microphone was muted; in the twin it was far away."""

from types import SimpleNamespace

from tests.media import sound, sounds

CODE, NAMES = "data/silent-audio", ("s1.wav",)


def training(sick):
    def make(folder):
        paths = sounds(folder)
        sound(paths[1], 0 if sick else 20)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
