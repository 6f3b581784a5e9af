"""check_notebook(): it changes nothing, runs none of the user's code, and stands strange notebooks."""

from __future__ import annotations

import importlib.util
import pathlib
import time
import types
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.duplicate_hooks import find_duplicate_hooks
from nbdebug.tools.notebook.cells import CellHistory, bound
from nbdebug.tools.notebook.check_notebook import _first_append, _largest, notebook_causes
from nbdebug.tools.notebook.stale_code import EditedModule
from tests.notebook.books import BOOKS, HOOK, MODEL, OPT, SETUP, TRAIN
from tests.shell import of_cells

HOSTILE = """class Rude:
    ran = []
    def _note(self, *args):
        Rude.ran.append(1)
        raise RuntimeError("touched")
    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __bool__ = __getattr__ = __getitem__ = __call__ = _note
    __hash__ = object.__hash__
    value = property(_note)
class Strange(type):
    def __instancecheck__(cls, thing):
        raise RuntimeError("asked")
    def __getattribute__(cls, name):
        raise RuntimeError("asked") if name not in ("__mro__", "__dict__", "__class__") else None
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("computed")
rude, odd = Rude(), torch.zeros(3).as_subclass(Odd)
holder = {"a": [rude], rude: 1}
loop = []; loop.append(loop)
class Wrapper(nn.Module):
    def __getattr__(self, name):
        raise RuntimeError("asked")
wrapped = Wrapper()"""


def test_nothing_is_changed_and_nothing_of_the_users_runs() -> None:
    cells = [
        SETUP,
        MODEL,
        OPT,
        HOOK,
        "net[0].register_forward_hook(note);",
        TRAIN,
        HOSTILE,
        "x",
        "1 +",
        "raise KeyError('k')",
        "%%bash\nexit 0",
        "def broken(:",
        "net[0].register_forward_hook(note);",
    ]
    with of_cells(cells) as (shell, _):
        names, hooks = dict(shell.user_ns), len(shell.user_ns["net"][0]._forward_hooks)
        random = torch.get_rng_state()
        report = nbdebug.check_notebook(shell=shell)
        assert [f.code for f in report] == ["notebook/hooks-registered-twice"], str(report)
        assert not report.unchecked and not shell.user_ns["Rude"].ran
        assert shell.user_ns.keys() == names.keys() and all(shell.user_ns[n] is names[n] for n in names)
        assert len(shell.user_ns["net"][0]._forward_hooks) == hooks == 2
        assert torch.equal(torch.get_rng_state(), random)


def test_a_script_has_no_cells_and_is_checked_all_the_same() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    report = nbdebug.check_notebook({"net": net, "optimizer": optimizer})
    assert report.ok and "no record of cells" in report.subject
    net = nn.Linear(3, 1)
    net(torch.ones(1, 3)).sum().backward()
    report = nbdebug.check_notebook({"net": net, "optimizer": optimizer})
    assert [f.code for f in report] == ["training/parameters-not-in-optimizer"]


def test_names_must_be_a_dict() -> None:
    with pytest.raises(TypeError, match="globals"):
        nbdebug.check_notebook([1])  # type: ignore[arg-type]


def test_a_model_made_anew_and_not_trained_yet_is_a_note() -> None:
    with of_cells([SETUP, MODEL, OPT, TRAIN, MODEL]) as (shell, _):
        report = nbdebug.check_notebook(shell=shell)
    assert report.ok and "make the optimizer again" in report.headline
    assert not report.examined, "nothing calls it healthy"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("super with a name", "notebook/class-redefined"),
        ("a name that a later cell defines", "notebook/cells-out-of-order"),
        ("model cell run again", None),
    ],
)
def test_what_explains_one_exception(name: str, code: str | None) -> None:
    with of_cells(BOOKS[name].cells) as (shell, error):
        found = notebook_causes(error or RuntimeError("another"), shell.user_ns, shell)
    assert [f.code for f in found] == ([code] if code else [])


@pytest.mark.parametrize("use", ["helpers_e.added(1)", "from helpers_e import added"])
def test_a_name_that_the_file_has_and_the_loaded_module_has_not(
    use: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write = "%%writefile helpers_e.py\ndef old(x):\n    return x"
    with of_cells([write, "import helpers_e", f"{write}\ndef added(x):\n    return x", use]) as (shell, error):
        assert error is not None
        found = notebook_causes(error, shell.user_ns, shell)
        report = nbdebug.explain(error, shell=shell)
    assert [f.code for f in found] == ["error/stale-import"] and "`added`" in found[0].title
    assert report.findings[0].code == "error/stale-import"


def test_notes_tell_what_cells_left_on() -> None:
    cells = [
        SETUP,
        "torch.set_grad_enabled(False)",
        "torch.set_default_dtype(torch.float64)",
        "list = [1]",
        "x = x / 255",
        "x = x / 255",
    ]
    with of_cells(cells) as (shell, _):
        said = str(nbdebug.check_notebook(shell=shell))
    for word in ("Gradients are off", "In [2]", "float64 by default", "Python's own list()", "In [5] and In [6]"):
        assert word in said, said


def test_a_report_is_small_and_escapes_what_is_the_users() -> None:
    cells = [SETUP, "big = torch.zeros(2048, 2048)", "big + 0  # <script>alert(1)</script>"]
    with of_cells(cells) as (shell, _):
        report = nbdebug.check_notebook(shell=shell)
    html = report._repr_mimebundle_()["text/html"]
    assert [f.code for f in report] == ["memory/cell-output-held"] and len(html) < 100_000
    assert "<script>" not in html


def test_five_hundred_cells_and_ten_thousand_objects(capsys: pytest.CaptureFixture[str]) -> None:
    many = "class Thing:\n    pass\nthings = []\nfor i in range(3300):\n    t = Thing()\n"
    "    t.a, t.b = [i], {'k': (i,)}\n    things.append(t)"
    filler = [f"value_{n} = x.mean() * {n}\ndef f_{n}(a):\n    return a * {n}\n" + TRAIN for n in range(490)]
    with of_cells([SETUP, MODEL, OPT, many]) as (shell, _):
        for text in filler:  # recorded as if they had run: to run them all takes longer than the check
            shell.history_manager.store_inputs(shell.execution_count, text)
            shell.execution_count += 1
        begun = time.perf_counter()
        report = nbdebug.check_notebook(shell=shell)
        took = time.perf_counter() - begun
    assert report.ok and "494 cells" in report.subject
    with capsys.disabled():
        print(f" check_notebook: {took:.2f} s for {report.subject}")


# -- the parts --------------------------------------------------------------------------------------------------------


def history(*cells: str) -> CellHistory:
    return CellHistory({n: (text, text) for n, text in enumerate(cells, 1)}, {})


def test_what_a_statement_binds() -> None:
    known = history(
        "a, (b, *c) = f()\nd.e = 1\nfor g in h: i = 2\nwith j as k: pass\nimport l.m, n as o\ndel p\n"
        "q += 1\n"
        "def r(): s = 1\nclass t: u = 1\nif v: w: int = 3\nx[0] = 1"
    )
    paths = [b.path for b in known.cells[1].bindings]
    assert paths == ["a", "b", "c", "d.e", "g", "i", "k", "l", "o", "p", "q", "r", "t", "w"]
    assert [b.how for b in known.bindings("p", "del")] == ["del"] and known.bindings("p") == []
    assert not list(bound(known.cells[1].body[-1]))


def test_a_cell_reaches_the_functions_that_it_calls() -> None:
    known = history("def inner(m):\n    m.eval()", "def outer(m):\n    inner(m)", "outer(net)", "net = 1")
    assert [cell.number for cell in known.reaching("eval")] == [1, 2, 3]
    assert len(known.reach(3)) == 3 and len(known.reach(4)) == 1


def test_two_hooks_that_hold_different_things_are_two() -> None:
    net = nn.Linear(2, 2)

    def hook(store: Any) -> Any:
        return lambda module, inputs, output: store.append(output)

    first: list[Any] = []
    second: list[Any] = []
    net.register_forward_hook(hook(first))
    net.register_forward_hook(hook(second))
    assert find_duplicate_hooks([("net", net), ("first", first), ("second", second)]) == []
    again = find_duplicate_hooks(
        [("net", net), ("second", second)]
    )  # nobody has the first list any more: of a run before
    assert [one.word for one in again] == ["forward hook"]


def test_the_cell_that_appends_into_a_dict_is_named_and_the_variable_of_a_traceback() -> None:
    known = history(
        "history = {'loss': [], 'aux': []}",
        "history['loss'].append(loss.item())",
        "history['aux'].append(aux)",
        "print(history)",
    )
    assert _first_append("history", known).cell == "In [3]" and _first_append("history['aux']", known).cell == "In [3]"

    def fails() -> None:
        few, many = torch.zeros(2), torch.zeros(3000)
        raise ValueError(few.numel() + many.numel())

    with pytest.raises(ValueError) as caught:
        exec(
            "fails()",
            {
                "fails": types.FunctionType(
                    fails.__code__, {"torch": torch, "ValueError": ValueError, "__name__": "__main__"}
                )
            },
        )
    assert _largest(caught.value) == "many" and _largest(None) == ""


def test_explain_tells_the_cell_that_changed_the_object() -> None:
    with of_cells([SETUP, MODEL, OPT, TRAIN, "small = net.half()", TRAIN]) as (shell, error):
        finding = nbdebug.explain(error, shell=shell).findings[0]
    assert finding.code == "error/dtype-mismatch" and finding.chain[0].where.cell == "In [5]"
    assert "net.half()" in finding.chain[0].what


def test_a_function_that_a_decorator_has_made_from_text_was_not_edited(tmp_path: pathlib.Path) -> None:
    """Hypothesis gives its wrapper the name of the file and the line of the function."""
    file = tmp_path / "properties_zz.py"
    file.write_text("from hypothesis import given, strategies\n@given(strategies.integers())\ndef holds(x): ...\n")
    spec = importlib.util.spec_from_file_location("properties_zz", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # not in sys.modules: other tests would meet it, edited
    spec.loader.exec_module(module)
    assert EditedModule(module, str(file)).changed == []
    file.write_text(file.read_text().replace("@given(strategies.integers())\n", "") + "def more(): ...\n")
    assert EditedModule(module, str(file)).changed == ["more"]
