"""The pictures of README, taken anew from the product: `python -m tests.browser.pictures FOLDER`.

Each is a cell of a notebook in JupyterLab with its output; the figure is `report.figure()` as a file. The first two
cells of README's example are read from README itself, so that picture and text stay the same.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import sys
import tempfile
import types
from typing import Any

from tests.browser.lab import Book, Lab
from tests.browser.test_nbdebug import SETUP
from tests.views import gallery

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOOP = """%%nan_trace
for batch in torch.arange(40).split(10):
    loss = nn.functional.mse_loss(model(texts[batch])[:, 0], stars[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()"""


def main(folder: str) -> None:
    from playwright.sync_api import sync_playwright

    into = pathlib.Path(folder)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as place:
        browser = playwright.chromium.launch(executable_path=gallery.CHROMIUM, args=gallery.ARGUMENTS)
        sharp = types.SimpleNamespace(new_page=functools.partial(browser.new_page, device_scale_factor=1.5))
        lab = Lab(pathlib.Path(place) / "lab", sharp)
        try:
            lab.wait_ready()
            take(lab, into)
        finally:
            lab.close()
            browser.close()


def take(lab: Lab, into: pathlib.Path) -> None:
    fence = re.search(
        r"The cell before it</summary>\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert fence
    figure = f"Out[2].figure().savefig({str(into.resolve() / 'figure.png')!r}, dpi=110)"
    book = shot(lab, [fence[1].strip(), LOOP, figure], into / "report.png", 1)
    book.close()
    calls, model = (cell for cell in cells("05_errors") if "class Ear" in cell or "%xmode" in cell)
    shot(lab, [calls, model, "ear(calls[:8])", "%explain"], into / "explain.png", 2, 3).close()
    zero = cells("02_training")
    first = next(place for place, cell in enumerate(zero) if "birds = torch.where" in cell)
    ask = next(place for place, cell in enumerate(zero) if place > first and cell.startswith("%diagnose"))
    setup = [
        zero[0],
        zero[1],
        *(cell for cell in zero[first:ask] if "%preflight" not in cell and "measure(" not in cell),
    ]
    made = next(cell for cell in reversed(zero[first:ask]) if "optimizer =" in cell).replace("%preflight", "")
    shot(lab, [*setup, made, zero[ask]], into / "diagnose.png", len(setup) + 1).close()
    panel(lab, into / "panel.png")


def cells(notebook: str) -> list[str]:
    """The code cells of a notebook."""
    book = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def shot(lab: Lab, sources: list[str], path: pathlib.Path, *places: int) -> Book:
    """Run these cells, also those after one that fails; a picture of the cells at `places`, one below the other."""
    book = lab.open(sources, path.stem)
    for place in range(len(sources)):
        run(book, place)
    clip(book, path, *places)
    return book


def run(book: Book, place: int) -> None:
    book.cell(place).locator(".jp-InputPrompt").click()
    book.command("notebook:run-cell")
    book.page.wait_for_timeout(500)
    book.wait_idle(300)


def clip(book: Book, path: pathlib.Path, *places: int) -> None:
    book.page.add_style_tag(content=".jp-cell-toolbar {display: none} .jp-Collapser {visibility: hidden}")
    book.page.set_viewport_size({"width": 1100, "height": 2600})
    book.page.wait_for_timeout(1500)
    book.cell(places[0]).evaluate("cell => cell.scrollIntoView({block: 'start'})")  # the notebook may be at its end
    book.page.mouse.move(0, 0)  # nothing is highlighted
    book.page.wait_for_timeout(500)
    boxes: list[Any] = [book.cell(place).bounding_box() for place in places]
    top, bottom = boxes[0]["y"], boxes[-1]["y"] + boxes[-1]["height"]
    area = {"x": boxes[0]["x"], "y": top, "width": boxes[0]["width"], "height": bottom - top}
    book.page.screenshot(path=str(path), clip=area)


def panel(lab: Lab, path: pathlib.Path) -> None:
    loop = "for _ in range(60):\n    step()"
    book = lab.open([SETUP, "%nan_trace net(x).log().mean().backward()", "%nbdebug", loop, "step().item()"], "panel")
    for place in range(3):
        run(book, place)
    for name, place in (("Gradients", 3), ("Trace next step", 4)):
        book.output(2).get_by_role("button", name=name).click()
        book.page.wait_for_timeout(1500)
        run(book, place)
    book.output(2).get_by_role("button", name="Refresh").click()
    book.page.wait_for_timeout(2000)
    clip(book, path, 2)
    book.close()


if __name__ == "__main__":
    main(sys.argv[1])
