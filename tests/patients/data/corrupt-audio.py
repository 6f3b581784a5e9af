"""A copy stopped in the middle of a recording."""

from types import SimpleNamespace

from tests.media import sounds

CODE, NAMES = "data/corrupt-audio", ("s3.wav",)


def training(sick):
    def make(folder):
        paths = sounds(folder)
        if sick:
            paths[3].write_bytes(paths[3].read_bytes()[:1500])
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
