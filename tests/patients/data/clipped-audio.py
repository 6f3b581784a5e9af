"""A recording was amplified too loud; in the twin its peak is just at full scale."""

from types import SimpleNamespace

from tests.media import sound, sounds

CODE, NAMES = "data/clipped-audio", ("s5.wav",)


def training(sick):
    def make(folder):
        paths = sounds(folder)
        sound(paths[5], 70_000 if sick else 32_767)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
