"""What torchmetrics says of the cases of `quality`, beside what nbdebug says: on the broken program and on its repaired
twin.

    python -m tests.benchmarks.quality FOLDER       prints a table in Markdown

torchmetrics gives numbers to compare, and no verdict: of each kind its nearest function is asked, with settings that a
careful person would choose. Distances between sets of pictures need torch-fidelity and a network's weights, and
`evaluate` loads what it measures with from the network: neither is asked.
"""

from __future__ import annotations

import pathlib
import runpy
import sys
import types
from typing import Any

import torch

from tests.cases.asking import ask_quality


def build(path: pathlib.Path, fixed: bool) -> types.SimpleNamespace:
    names = runpy.run_path(str(path))
    ns: types.SimpleNamespace = names["build"](fixed=fixed)
    return ns


def pictures(given: Any) -> torch.Tensor:
    return torch.from_numpy(given).permute(0, 3, 1, 2).float() / 255


def rival(ns: types.SimpleNamespace) -> str:
    """The function of torchmetrics, and its number."""
    import torchmetrics

    if hasattr(ns, "logits"):
        metric = torchmetrics.text.Perplexity(ignore_index=ns.pad_id)
        value = metric(ns.logits[:, :-1], ns.tokens[:, 1:])
        return f"`Perplexity(ignore_index=…)` {float(value):.2f}; the program reports {ns.evaluate():.2f}"
    if not hasattr(ns, "generated"):
        return "has no function for one text alone"
    some, known = pictures(ns.generated), pictures(ns.training)
    similarity = torchmetrics.functional.image.structural_similarity_index_measure
    nearest = [
        float(similarity(one.expand_as(known), known, data_range=1.0, reduction="none").max()) for one in some[:16]
    ]
    return f"SSIM with the nearest of training: {min(nearest):.2f} to {max(nearest):.2f}"


def ours(ns: types.SimpleNamespace) -> str:
    report = ask_quality(ns)
    return f"`{report.findings[0].code}`: {report.findings[0].title}" if report.findings else "silent"


def main(folder: str) -> None:
    print("| case | | nbdebug | torchmetrics |\n|---|---|---|---|")
    for path in sorted(pathlib.Path(folder).glob("*.py")):
        for fixed in (False, True):
            twin = "repaired" if fixed else "broken"
            print(f"| {path.stem} | {twin} | {ours(build(path, fixed))} | {rival(build(path, fixed))} |")


if __name__ == "__main__":
    main(sys.argv[1])
