"""What the five founding documents ask for, item by item, and the test or the notebook's part where each is shown.

`coverage.txt` holds a line for each item: its number, what the document says, the places, the gap if there is one, and
what the tool says instead where the advice is wrong. A place is `chapter/name` (a patient: sick it is named, healed it
is left in peace), `file.py::test_name`, or `01#Heading` (a part of a notebook, which runs in the tests as well).

`python -m tests.test_coverage` writes coverage.md from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re

HERE = pathlib.Path(__file__).parent
TABLE, PAGE = HERE / "coverage.txt", HERE / "coverage.md"
DOCUMENTS = {
    "S0": "Chapter 37: Debugging & Troubleshooting",
    "S1": "Module 7: Troubleshooting Guide (LoRA)",
    "S2": "Troubleshooting Tips: the NaN playbook",
    "S3": "Training issues of a text classifier: zero loss, devices",
    "S4": "Troubleshooting a distributed training",
}
ITEMS = {"S0": 55, "S1": 86, "S2": 38, "S3": 40, "S4": 57}


@dataclasses.dataclass(frozen=True)
class Item:
    """gap: empty, or `partly: …`, or `missing: …`; instead: what the tool says where the document is wrong."""

    number: str
    text: str
    places: tuple[str, ...]
    gap: str
    instead: str


def items() -> list[Item]:
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        number, text, places, gap, instead = (part.strip() for part in line.split("|"))
        found.append(Item(number, text, tuple(place for place in places.split("; ") if place), gap, instead))
    return found


def exists(place: str) -> bool:
    if "::" in place:
        file, test = place.split("::")
        return (HERE / file).is_file() and f"def {test}(" in (HERE / file).read_text(encoding="utf-8")
    if "#" in place:
        return place in headings()
    return (HERE / "patients" / f"{place}.py").is_file()


@functools.cache
def headings() -> frozenset[str]:
    """`01#Ask`: the number of a notebook, and a heading in it."""
    found = set()
    for path in (HERE.parent / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                for heading in re.findall(r"^#+ (.*)$", "".join(cell["source"]), re.MULTILINE):
                    found.add(f"{path.name.partition('_')[0]}#{heading}")
    return frozenset(found)


def page() -> str:
    every = items()
    rows = []
    for part in DOCUMENTS:
        of_it = [item for item in every if item.number.startswith(part)]
        gaps = [sum(item.gap.startswith(kind) for item in of_it) for kind in ("partly", "missing")]
        rows.append((part, len(of_it) - sum(gaps), *gaps))
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    lines = [
        "# What the founding documents ask for, and where it is shown",
        "",
        "Written by `python -m tests.test_coverage` from `coverage.txt`; a test looks for each place. A place is a",
        "patient (`chapter/name`, in `tests/patients`), a test, or a part of a notebook; all of them run in the tests.",
        "",
        "| document | works | partly | missing |",
        "|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    for part, title in DOCUMENTS.items():
        lines += [
            "",
            f"## {part}: {title}",
            "",
            "| item | asked | shown in | works | in place of the advice, where that is wrong |",
            "|---|---|---|---|---|",
        ]
        for item in every:
            if item.number.startswith(part):
                places = "<br>".join(f"`{place}`" for place in item.places) or "–"
                lines.append(f"| {item.number} | {item.text} | {places} | {item.gap or 'yes'} | {item.instead} |")
    return "\n".join(lines) + "\n"


def test_every_item_has_a_place_that_exists_or_says_what_is_missing() -> None:
    every = items()
    numbers = [f"{part}-{i:02d}" for part, count in ITEMS.items() for i in range(1, count + 1)]
    assert [item.number for item in every] == numbers
    for item in every:
        assert item.places or item.gap.startswith("missing: "), f"{item.number}: no place"
        assert not item.gap or item.gap.startswith(("partly: ", "missing: ")), item
        lost = [place for place in item.places if not exists(place)]
        assert not lost, f"{item.number}: {lost} is not there any more: name another place in coverage.txt"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.test_coverage`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
