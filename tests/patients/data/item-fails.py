"""The set looks a name up that its list of classes lacks."""

from types import SimpleNamespace

CODE, NAMES = "data/item-fails", ("KeyError", "owl")


class Birds:
    classes = {"crow": 0, "jay": 1}

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return {"index": index, "label": self.classes[self.names[index]]}


def sick():
    return SimpleNamespace(dataset=Birds(["crow", "owl", "jay"]), expected={})


def healthy():
    return SimpleNamespace(dataset=Birds(["crow", "jay"]), expected={})
