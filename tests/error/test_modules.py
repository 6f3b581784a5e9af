"""Modules and classes that are not there: at an import, and in a file's pickle."""

from __future__ import annotations

import io
import pickle
import sys
import types

import pytest
import torch

import nbdebug

CODE = "error/module-not-found"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names={})
    return report, str(report)


def only(report):
    (finding,) = report.findings
    assert finding.code == CODE and finding.fixes and finding.where.phase is None
    return finding


def imported(source, name="__main__"):
    return lambda: exec(compile(source, "cell.py", "exec"), {"__name__": name})


def module(monkeypatch, name, **members):
    made = types.ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_a_file_in_a_folder_that_is_not_searched(folder) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "my_models.py").write_text("class Net: pass\n")
    report, said = explained(imported("import my_models"))
    assert only(report) and "lib/my_models.py" in said and "sys.path.append('lib')" in said
    (folder / "lib" / "layers").mkdir()
    (folder / "lib" / "layers" / "__init__.py").write_text("")
    assert "lib/layers" in explained(imported("from layers import Block"))[1]


@pytest.mark.parametrize(("file", "text", "place", "command"), [
    ("pyproject.toml", "[project]\nname = 'nets'\n", "src/nets_q7/__init__.py", "%pip install -e '.'"),
    ("setup.py", "", "src/nets_q7.py", "%pip install -e '.'"),
    ("pyproject.toml", "[tool.ruff]\n", "src/nets_q7.py", 'PYTHONPATH="$PWD/src:$PYTHONPATH"'),
    ("setup.py", "", "lib/nets_q7.py", 'PYTHONPATH="$PWD/lib:$PYTHONPATH"'),
])  # fmt: skip
def test_a_project_is_installed_once_and_a_folder_is_put_on_the_path(folder, file, text, place, command) -> None:
    (folder / file).write_text(text)
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_text("")
    fixes = only(explained(imported("import nets_q7"))[0]).fixes
    assert "sys.path.append" in fixes[0].code and command in fixes[1].code and len(fixes) == 2, fixes


def test_the_root_of_a_project_above_the_notebooks_folder(folder, monkeypatch) -> None:
    (folder / "pyproject.toml").write_text("[build-system]\n")
    for part in ("nets_q8", "notebooks"):
        (folder / part).mkdir()
    (folder / "nets_q8" / "__init__.py").write_text("")
    monkeypatch.chdir(folder / "notebooks")
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part != str(folder)])
    fixes = only(explained(imported("import nets_q8"))[0]).fixes
    assert fixes[1].code == "%pip install -e '..'"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import cv2", ["`opencv-python`", "%pip install opencv-python"]),
        ("import numpyy", ["there is `numpy`"]),
        ("import surely_not_there_zz", ["%pip install surely_not_there_zz"]),
        ("from torch import tensr", ["`torch` has no `tensr`", "from torch import tensor"]),
        ("from .models import Net", ["relative"]),
    ],
)
def test_imports(source, words) -> None:
    if source == "import cv2" and pytest.importorskip("importlib.util").find_spec("cv2"):
        pytest.skip("cv2 is installed here")
    report, said = explained(imported(source))
    assert only(report) and all(word in said for word in words), said


def test_circles_and_names_that_are_taken(folder) -> None:
    (folder / "circle_a.py").write_text("import circle_b\nclass A: pass\n")
    (folder / "circle_b.py").write_text("from circle_a import A\n")
    report, said = explained(imported("import circle_a"))
    assert only(report) and "`circle_a`" in said and "import each other" in said
    (folder / "tokens_zz.py").write_text("x = 1\n")
    report, said = explained(imported("import tokens_zz.fast"))
    assert only(report) and "tokens_zz.py has the name" in said


def test_a_whole_model_whose_module_is_gone(monkeypatch) -> None:
    kind = type("Net", (torch.nn.Linear,), {"__module__": "models_then", "__qualname__": "Net"})
    module(monkeypatch, "models_then", Net=kind)
    file = io.BytesIO()
    torch.save(kind(2, 2), file)
    monkeypatch.delitem(sys.modules, "models_then")
    file.seek(0)
    report, said = explained(lambda: torch.load(file, weights_only=False))
    assert only(report) and "`models_then.Net`" in said
    module(monkeypatch, "service_now", Net=type("Net", (), {}))
    file.seek(0)
    report, said = explained(lambda: torch.load(file, weights_only=False))
    assert "`service_now` has a class of that name" in said
    assert "sys.modules['models_then'] = service_now\n" in only(report).fixes[0].code


def test_the_same_file_read_as_weights_alone(monkeypatch) -> None:
    kind = type("Net", (torch.nn.Linear,), {"__module__": "models_then", "__qualname__": "Net"})
    module(monkeypatch, "models_then", Net=kind)
    file = io.BytesIO()
    torch.save(kind(2, 2), file)
    file.seek(0)
    report, said = explained(lambda: torch.load(file, weights_only=True))
    assert not report.findings and "`models_then.Net`" in said and "weights_only=False" in said
    monkeypatch.delitem(sys.modules, "models_then")
    file.seek(0)
    report, said = explained(lambda: torch.load(file, weights_only=True))
    assert only(report) and "`models_then.Net`" in said


def test_a_class_of_the_main_program_and_plain_pickles(monkeypatch) -> None:
    kind = type("Probe7", (), {"__module__": "__main__", "__qualname__": "Probe7"})
    monkeypatch.setattr(sys.modules["__main__"], "Probe7", kind, raising=False)
    data = pickle.dumps(kind())
    monkeypatch.delattr(sys.modules["__main__"], "Probe7")
    report, said = explained(lambda: pickle.loads(data))
    assert only(report) and "pickled with the class `Probe7`" in said
    other = type("Model7", (), {"__module__": "old_package"})
    module(monkeypatch, "old_package", Model7=other)
    data = pickle.dumps(other())
    monkeypatch.delitem(sys.modules, "old_package")
    report, said = explained(lambda: pickle.loads(data))
    assert only(report) and "whole object" in said and "`old_package`" in said


def test_near_misses() -> None:
    for call in (
        lambda: torch.functionall,
        lambda: {}["models"],
        lambda: torch.nn.Linear(2, 2).weigth,
        imported("models_of_mine.Net()"),
    ):
        assert not explained(call)[0].findings


def test_a_name_typed_wrong_is_not_what_is_offered_to_be_installed() -> None:
    def attempt() -> None:
        import torchvison  # noqa: F401

    finding = only(explained(attempt)[0])
    assert "torchvision" in finding.title and "torchvison" not in finding.fixes[0].code


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import torch.optim.lr_schedulers", "it has `torch.optim.lr_scheduler`"),
        ("import torch.lr_scheduler", "it has `torch.optim.lr_scheduler`"),
        ("import torch.nn.Linear", "from torch.nn import Linear"),
        ("import torch.nn.quite_another", "pkgutil.iter_modules(torch.nn.__path__)"),
    ],
)
def test_an_installed_package_that_lacks_a_module_is_not_installed_again(line, said) -> None:
    report, text = explained(lambda: exec(line))
    assert only(report) and said in text and "pip" not in text and "not installed" not in text
