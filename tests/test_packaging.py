"""The metadata is honest: what is imported is declared, what is declared is pinned, and Binder gets the same."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import nbdebug

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEEDED: list[str] = PROJECT["project"]["dependencies"]
TOOLS: list[str] = PROJECT["project"]["optional-dependencies"]["dev"]
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
ABSENT = {"pynvml": "nvidia-ml-py"}
"""Modules of extras that need not be installed, and their packages."""
OWNERS = functools.cache(
    importlib.metadata.packages_distributions
)  # reads every installed package: a third of a second


def bare(requirement: str) -> str:
    """The name of a requirement, as packages are compared: torch>=2.6 → torch."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def bounds(requirements: list[str]) -> dict[str, str]:
    return {bare(r): r[len(bare(r)) :] for r in requirements}


def third_party(path: pathlib.Path) -> dict[str, bool]:
    """Package → is it first tried under `try … except ImportError`?"""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tries = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(h.type is not None and re.search("ImportError|'Exception'", ast.dump(h.type)) for h in node.handlers)
    ]
    guarded = {id(inner) for node in tries for part in node.body for inner in ast.walk(part)}
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        )
        for name in {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"nbdebug"}:
            found[name] = found.get(name, False) or id(node) in guarded
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "nbdebug").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_import_is_declared(path: pathlib.Path) -> None:
    needed, optional = set(bounds(NEEDED)), {bare(one) for extra in EXTRAS.values() for one in extra}
    for name, guarded in third_party(path).items():
        owner = {bare(o) for o in OWNERS().get(name, [ABSENT.get(name, name)])}
        asked = guarded or path.parent.name == "integrations"  # who imports that has the package
        assert owner & (needed | (optional if asked else set())), f"{name} is imported and not declared"


def test_every_package_has_an_honest_lower_bound() -> None:
    for requirement in NEEDED + TOOLS:
        assert re.fullmatch(r"[A-Za-z0-9-]+>=[0-9][0-9.]*", requirement), requirement


def test_the_installed_versions_are_within_the_bounds() -> None:
    for name, bound in bounds(NEEDED).items():
        have = [int(part) for part in re.findall(r"\d+", importlib.metadata.version(name))[:3]]
        assert have >= [int(part) for part in bound[2:].split(".")], f"{name} {have} is below {bound}"


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "nbdebug/__init__.py"
    assert f"## {nbdebug.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        installed = importlib.metadata.version("torch-nbdebug")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch-nbdebug is not installed here (make setup installs it)")
    assert installed == nbdebug.__version__, "run `make setup` again"


def test_constraints_pin_every_requirement_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r'[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*(; python_(full_)?version >= "[0-9.]+")?')
    assert not [line for line in lines if not pin.fullmatch(line)]
    pinned = {bare(line) for line in lines}
    assert {bare(r) for r in NEEDED + TOOLS} <= pinned
    assert "torch==2.13.0" in lines


def test_binder_gets_the_same_packages_with_condas_cpu_torch_and_opens_the_first_notebook() -> None:
    text = (ROOT / "binder" / "environment.yml").read_text(encoding="utf-8").replace("ruamel.yaml", "ruamel-yaml")
    listed = bounds(re.findall(r"^  - (\S+)$", text.split("dependencies:")[1], re.MULTILINE))
    renamed = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base", "soundfile": "pysoundfile"}
    of_notebooks = {"jsonschema", "pillow", "soundfile", "pyarrow", "ruamel-yaml", "ipyparallel", "transformers"}
    of_notebooks |= {"accelerate", "pytorch-lightning", "jupyterlab", "ipykernel", "nbclient"}
    needed = bounds(NEEDED) | {name: bound for name, bound in bounds(TOOLS).items() if name in of_notebooks}
    assert "python" in listed and of_notebooks <= set(needed)
    for name, bound in needed.items():
        assert listed[renamed.get(name, name)] == bound
    after = (ROOT / "binder" / "postBuild").read_text(encoding="utf-8")
    assert "--no-deps" in after and "/lab/tree/notebooks/00_first_aid.ipynb" in after


def test_make_help_tells_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    told = set(re.findall(r"^([a-z-]+):.*## \S", text, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony and told == set(phony[1].split()) == {"help", "setup", "demo", "test", "test-all", "lint", "notebooks"}


def test_no_file_names_this_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = [f"{ROOT}/", f"{pathlib.Path.home()}/", "pypi" + ".org", "python" + "hosted", "registry." + "npm"]
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".jpg"):
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [place for place in places if place in text], name


def test_the_top_level_holds_what_a_reader_expects_there() -> None:
    """A test or a program that writes into the folder where it was started leaves its files here."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed.stdout.splitlines()}
    hidden = {".ci", ".github", ".gitignore", ".git-blame-ignore-revs"}
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt"}
    assert top - hidden == files | {"nbdebug", "notebooks", "tests", "binder"}
