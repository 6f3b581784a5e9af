"""Where a module could be imported from: files near the user's own, other environments, the names that pip knows."""

from __future__ import annotations

import glob
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

FOLDERS = 400
"""Folders that are looked into."""
DEPTH = 3
SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "dist-packages", "build", "dist"})
PIP = {
    "cv2": "opencv-python",
    "PIL": "Pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "PyYAML",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "dotenv": "python-dotenv",
    "attr": "attrs",
    "dateutil": "python-dateutil",
    "fitz": "PyMuPDF",
    "serial": "pyserial",
    "usb": "pyusb",
    "jwt": "PyJWT",
    "git": "GitPython",
    "magic": "python-magic",
    "docx": "python-docx",
    "pptx": "python-pptx",
    "Levenshtein": "python-Levenshtein",
    "umap": "umap-learn",
    "hydra": "hydra-core",
    "pytorch_lightning": "lightning",
    "faiss": "faiss-cpu",
    "google.protobuf": "protobuf",
    "tensorboardX": "tensorboardX",
    "clip": "open_clip_torch",
    "segment_anything": "segment-anything",
    "sentence_transformers": "sentence-transformers",
    "torch_geometric": "torch-geometric",
    "albumentations": "albumentations",
    "pycocotools": "pycocotools",
}
"""Modules whose package has another name, among those that a training imports."""

WELL_KNOWN = (
    *PIP,
    "accelerate",
    "bitsandbytes",
    "catboost",
    "datasets",
    "deepspeed",
    "diffusers",
    "einops",
    "evaluate",
    "fastai",
    "gradio",
    "huggingface_hub",
    "jax",
    "keras",
    "lightgbm",
    "lightning",
    "matplotlib",
    "monai",
    "networkx",
    "nltk",
    "numba",
    "numpy",
    "onnx",
    "onnxruntime",
    "openai",
    "optuna",
    "pandas",
    "peft",
    "plotly",
    "polars",
    "pyarrow",
    "pydantic",
    "requests",
    "safetensors",
    "scipy",
    "seaborn",
    "sentencepiece",
    "spacy",
    "streamlit",
    "sympy",
    "tensorboard",
    "tensorflow",
    "timm",
    "tokenizers",
    "torch",
    "torchaudio",
    "torchmetrics",
    "torchtext",
    "torchvision",
    "tqdm",
    "transformers",
    "triton",
    "trl",
    "ultralytics",
    "wandb",
    "xformers",
    "xgboost",
)
"""Modules that a training imports, for a name that was typed a letter wrong: who installs such a name as it stands may
get what somebody has put there for that."""


def package_of(module: str) -> str:
    """What pip calls it, where that is known to be another name; else ""."""
    top = module.partition(".")[0]
    package = PIP.get(module) or PIP.get(top, "")
    return package if package.replace("-", "_").lower() != top.lower() else ""


def files_of(module: str, beside: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """(files or packages of this name, from the working folder; the folder from which the nearest could be "
    "imported)."""
    parts = module.split(".")
    found: list[tuple[str, str]] = []
    for folder in _folders([os.getcwd(), *beside]):
        path = os.path.join(folder, *parts)
        if os.path.isfile(path + ".py") or os.path.isfile(os.path.join(path, "__init__.py")):
            found.append((path + ".py" if os.path.isfile(path + ".py") else path, folder))
    files = tuple(_shown(path) for path, _ in found[:3])
    return files, _shown(found[0][1]) if found else ""


def _folders(starts: Iterable[str]) -> Iterator[str]:
    """Folders near: each start, what lies in it, then its parents and their own folders."""
    seen: set[str] = set()
    todo = [(start, DEPTH) for start in dict.fromkeys(starts)]
    for start, _ in list(todo):
        parent = os.path.dirname(start)
        todo += [(parent, 1), (os.path.dirname(parent), 0)]
    while todo and len(seen) < FOLDERS:
        folder, depth = todo.pop(0)
        if folder in seen or not folder:
            continue
        seen.add(folder)
        yield folder
        if depth:
            todo += [(path, depth - 1) for path in _inside(folder)]


def _inside(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                e.path
                for e in entries
                if e.name not in SKIPPED and not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
            )[:FOLDERS]
    except OSError:
        return []


def _shown(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.count("..") > 2 else near


def importable() -> set[str]:
    """The top-level names that could be imported."""
    names = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in sys.modules)}
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                names |= {
                    e.name.partition(".")[0]
                    for e in entries
                    if e.name.endswith(".py") or (e.is_dir() and "." not in e.name and "-" not in e.name)
                }
        except OSError:  # a zip file, or a folder that is gone
            continue
    return names


def submodules(path: Any) -> set[str]:
    """The modules in a package's `__path__`; none is imported."""
    return {found.name for found in pkgutil.iter_modules(path)} if type(path) is list else set()


def other_environments(top: str) -> str:
    """The interpreter of another environment on the PATH that has this module; "" where there is none."""
    mine = os.path.realpath(sys.prefix)
    for folder in os.environ.get("PATH", "").split(os.pathsep)[:40]:
        prefix = os.path.dirname(os.path.realpath(folder)) if folder else ""
        if not prefix or prefix == mine or not os.path.exists(os.path.join(folder, "python3")):
            continue
        for site in glob.glob(os.path.join(prefix, "lib", "python3*", "*-packages")):
            if os.path.isdir(os.path.join(site, top)) or os.path.isfile(os.path.join(site, top + ".py")):
                return os.path.join(folder, "python3")
    return ""
