"""An annotation in the form of COCO lies beyond its picture; its twin ends at the edge."""

import json
from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/invalid-box", ("instances.json#2",)


def training(sick):
    def make(folder):
        paths = pictures(folder, 4)
        images = [{"id": i, "file_name": path.name, "width": 40, "height": 40} for i, path in enumerate(paths)]
        boxes = [[4, 4, 20, 30], [0, 0, 40, 40], [15, 5, 40 if sick else 25, 10], [1, 2.5, 3, 4]]
        rows = [{"id": i, "image_id": i, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)]
        value = {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "bee"}]}
        (folder / "instances.json").write_text(json.dumps(value))
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
