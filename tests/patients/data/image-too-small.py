"""A thumbnail lies among the photographs."""

from types import SimpleNamespace

from tests.media import picture, pictures

CODE, NAMES = "data/image-too-small", ("p5.png",)


def training(sick):
    def make(folder):
        paths = pictures(folder)
        if sick:
            picture(5, (60, 24)).save(paths[5])
        return folder

    return SimpleNamespace(make=make, expected={"min_size": 32})


def sick():
    return training(True)


def healthy():
    return training(False)
