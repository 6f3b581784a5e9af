"""check_config(): healthy settings stay silent, one planted problem is named alone, faults of syntax get their line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nbdebug
from nbdebug import __main__ as shell
from nbdebug.tools.config.document import read
from nbdebug.tools.config.parsers import plain
from tests.config.healthy import HEALTHY


def check(folder: pathlib.Path, name: str, text: str, **options: Any) -> nbdebug.Report:
    path = folder / name
    path.write_bytes(text.encode())
    return nbdebug.check_config(path, **options)


def problems(report: nbdebug.Report) -> list[tuple[Any, str]]:
    return [(one["key"], one["code"].partition("/")[2]) for one in report.facts["problems"]]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_settings_are_silent_with_and_without_a_schema(name: str, tmp_path) -> None:
    assert problems(check(tmp_path, name, HEALTHY[name])) == []
    schema = nbdebug.schema_from(tmp_path / name)
    assert problems(nbdebug.check_config(tmp_path / name, schema=schema)) == []


SYNTAX = [
    ("a.json", '{\n "a": 1,\n "b": 2\n', [3]),
    ("a.json", '{\n "a": {\n  "x": 1,\n "b": 2\n}\n', [3]),
    ("a.json", '{\n "a": 1\n "b": 2\n}\n', [2]),
    ("a.json", "{\n 'a': 1,\n b: None,\n}\n", [2, 3]),
    ("a.json", '{\n "a": [1, 2,],\n "b": 2 # yes\n}\n', [2, 3]),
    ("a.json", '{\n "a": "C:\\data\\new",\n "b": .5\n}\n', [2, 3]),
    ("a.json", '{\n "a": "foo,\n "b: "foo"\n}\n', [2, 3]),
    ("a.json", '{\n "a": [1, 2\n "b": 2\n}\n', [2]),
    ("a.json", '{\n "a": 1,\u00a0\n /* one\n two */ "b": \u201cx\u201d\n}}\n', [2, 3, 4, 5]),
    ("a.json", '{\n "a": 2024-01-01,\n "b": +1,\n b": "x"\n}\n', [2, 3, 4]),
    ("a.json", '{\n<<<<<<< HEAD\n "a": 1\n=======\n>>>>>>> main\n}\n', [2, 4, 5]),
    ("a.json", "", [1]),
    ("a.yaml", "a: 1\nb:2\nc: 3\n", [2]),
    ("a.yaml", "a: 1\nb 2\nc = 3\n", [2, 3]),
    ("a.yaml", "a: 1\ntitle: foo: bar\nc: *.jpg\n", [2, 3]),
    ("a.yaml", 'a: 1\nb: "foo\nc: "x"\n', [2]),
    ("a.yaml", "a: 1\nb: [0.9, 0.999\nc: @x\n", [2, 3]),
    ("a.yaml", "m:\n    a: 1\n  b: 2\n    c: 3\n", [3]),
    ("a.yaml", "m:\n\ta: 1\n\tb: 2\n", [2, 3]),
    ("a.yaml", "a: 1\nb: {{ root }}\nc: 3\n", [2]),
    ("a.yaml", "m:\n  n:\n\ta: 1\n    b: 2\n", [3]),
    ("a.yaml", " a: 1\nb: 2\nc: 3\n", [1]),
    ("a.yaml", "a: 1\nm\n  b: 2\nc: 3\n", [2]),
    ("a.yaml", "m:\n  a: 1\n\u00a0\u00a0b: 2\n  c: 3\n", [3]),
    ("a.yaml", "m: vit\n<<<<<<< HEAD\na: 1\n=======\nb: 2\n>>>>>>> main\n", [2, 4, 6]),
    ("a.toml", "a = 1\nb = {\n  c = 1, # one\n  d = 2,\n}\n", [2]),
    ("a.toml", "a = 1\nb = foo\nc = True\n", [2, 3]),
    ("a.toml", "a: 1\nb = [1, 2\nd = 3\n// x\n[model\nc = None\n", [1, 2, 4, 5, 6]),
    ("a.toml", '\ufeffa = "C:\\data"\nb = "foo\nc = .5,\n', [1, 2, 3]),
]


@pytest.mark.parametrize(("name", "text", "lines"), SYNTAX)
def test_faults_of_syntax_are_told_apart_each_with_its_line_and_a_mend(name, text, lines, tmp_path) -> None:
    report = check(tmp_path, name, text)
    assert problems(report) == [(line, "syntax") for line in lines]
    fixes = [fix for finding in report for fix in finding.fixes]
    if text:
        assert all(fix.verified for fix in fixes if fix.edit), [fix for fix in fixes if not fix.verified]
        assert all(f"line {line}" in str(report.full()) for line in lines) and "Around line" in str(report.full())


SCHEMA: dict[str, dict[str, Any]] = {
    "name": {"type": "str"},
    "kind": {"type": "str", "choices": ["adam", "sgd", "no"]},
    "model.width": {"type": "int", "min": 1, "multiple_of": "model.heads"},
    "model.heads": {"type": "int", "min": 1},
    "model.dropout": {"type": "float", "min": 0, "below": 1},
    "train.lr": {"type": "float", "min": 0, "max": 1},
    "train.warmup": {"type": "int", "min": 0, "less_than": "train.steps"},
    "train.steps": {"type": "int", "min": 1},
    "train.fp16": {"type": "bool", "not_with": "train.bf16"},
    "train.bf16": {"type": "bool"},
    "data.root": {"type": "str", "exists": "folder"},
}
PLANTS: dict[str, tuple[str, Any, str]] = {
    "text": ("train.lr", "1e-4", "wrong-type"),
    "switch": ("kind", False, "wrong-type"),
    "true": ("model.heads", True, "wrong-type"),
    "range": ("model.dropout", 6, "out-of-range"),
    "choice": ("kind", "adamm", "invalid-choice"),
    "unknown": ("train.stps", 4, "unknown-key"),
    "divisible": ("model.width", 7, "not-divisible"),
    "order": ("train.warmup", 10**7, "inconsistent"),
    "both": ("train.fp16", True, "inconsistent"),
    "path": ("data.root", "nowhere", "missing-path"),
    "invisible": ("data.root", "da\u200bta", "invisible-character"),
    "blank": ("data.root", "data ", "invisible-character"),
}


def write(values: dict[str, Any], form: str) -> str:
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = value
    if form == "json":
        return json.dumps(sections, indent=2, ensure_ascii=False)
    sections = dict(sorted(sections.items(), key=lambda item: isinstance(item[1], dict)))
    lines = []
    for name, value in sections.items():
        mark, inner = (": ", f"{name}:") if form == "yaml" else (" = ", f"[{name}]")
        if isinstance(value, dict):
            lines += [inner, *(f"  {key}{mark}{json.dumps(v, ensure_ascii=False)}" for key, v in value.items())]
        else:
            lines.append(f"{name}{mark}{json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def spread(name: str) -> str:
    """A healthy file, JSON with a line for each entry."""
    text = HEALTHY[name]
    return text if not name.endswith(".json") else json.dumps(json.loads(text), indent=2, ensure_ascii=False)


def larger(one: Any, document: Any) -> str:
    """Another whole number of the file, above this one."""
    return next((k for k, s in document.settings.items() if type(s.value) is int and s.value > one.value), "")


CHANGED: dict[str, tuple[Any, Any]] = {
    "wrong-type": (lambda one: type(one.value) in (int, float), lambda one, document: (f'"{one.word}"', {})),
    "out-of-range": (
        lambda one: type(one.value) in (int, float) and one.value >= 0,
        lambda one, document: ("-7", {"type": "float", "min": 0}),
    ),
    "invalid-choice": (
        lambda one: str(one.value).isidentifier() and isinstance(one.value, str),
        lambda one, document: ('"zebra"', {"type": "str", "choices": [one.value, "other"]}),
    ),
    "not-divisible": (
        lambda one: type(one.value) is int and one.value > 1,
        lambda one, document: (str(one.value * 3 + 1), {"type": "int", "multiple_of": one.value}),
    ),
    "inconsistent": (
        lambda one: type(one.value) is int and one.value >= 0,
        lambda one, document: (
            str(document.settings[larger(one, document)].value + 1),
            {"type": "int", "less_than": larger(one, document)},
        ),
    ),
    "missing-path": (
        lambda one: str(one.value).isidentifier() and isinstance(one.value, str),
        lambda one, document: ('"no/such"', {"type": "str", "exists": "file"}),
    ),
    "invisible-character": (
        lambda one: str(one.value).isidentifier() and isinstance(one.value, str),
        lambda one, document: (json.dumps(one.value + "\u200b", ensure_ascii=False), {}),
    ),
}
"""Code → (whether a setting can have this problem, (its value, its rules))."""


def rewritten(code: str, one: Any, line: str, form: str) -> tuple[list[str], Any] | None:
    """(the lines in the place of this one, the key that is at fault) of a problem that is not the value's."""
    if code == "duplicate-key":
        again = line if line.rstrip().endswith(",") or form != "JSON" else f"{line},"
        return [again, line], one.key
    if code == "syntax":
        return [line.replace("=" if form == "TOML" else ":", "", 1)], one.line
    swapped = one.name[:-2] + one.name[-1] + one.name[-2]
    if code == "unknown-key" and len(swapped) > 5 and swapped.islower() and swapped != one.name:
        return [line.replace(one.name, swapped, 1)], one.key.removesuffix(one.name) + swapped
    return None


def planted(document: Any, schema: dict[str, dict[str, Any]], code: str) -> tuple[str, Any, dict[str, Any]] | None:
    """(the text with one problem of this code, the key that is at fault, the schema); None where it has no place."""
    lines, names = document.text.split("\n"), [one.name for one in document.settings.values()]
    for key, one in document.settings.items():
        line = lines[one.line - 1] if one.word and key in schema and names.count(one.name) == 1 else ""
        mark = re.search(rf"^\s*[\"']?{re.escape(one.name)}[\"']?\s*[:=]\s*", line)
        if mark is None or line[mark.end() :].rstrip(",") != one.word:
            continue
        fits, change = CHANGED.get(code, (None, None))
        if fits is None:
            new, fault, rules = *(rewritten(code, one, line, document.format) or (None, key)), schema
        elif not fits(one) or code == "inconsistent" and larger(one, document) not in schema:
            continue
        else:
            word, more = change(one, document)
            fault, rules = key, schema | {key: more or schema[key]}
            new = [line[: mark.end()] + word + line[mark.end() + len(one.word) :]]
        if new is not None:
            return "\n".join([*lines[: one.line - 1], *new, *lines[one.line :]]), fault, rules
    return None


CODES = ("syntax", "duplicate-key", "unknown-key", *CHANGED)
MENDED = ("duplicate-key", "unknown-key", "wrong-type", "out-of-range", "not-divisible", "inconsistent")


@pytest.mark.parametrize("name", HEALTHY)
def test_one_problem_of_each_code_in_a_healthy_file_is_named_alone_and_mended(name: str, tmp_path) -> None:
    path = tmp_path / name
    path.write_text(spread(name))
    document, schema = read(path), nbdebug.schema_from(path)
    for code in CODES:
        plant = planted(document, schema, code)
        if plant is None:
            continue
        text, key, rules = plant
        path.write_text(text)
        report = nbdebug.check_config(path, schema=rules)
        assert problems(report) == [(key, code)], (code, text)
        if code in ("syntax", "duplicate-key", "invisible-character"):
            assert problems(nbdebug.check_config(path)) == [(key, code)], (code, text)
        (fix,) = report.findings[0].fixes
        if code in MENDED or fix.edit:
            assert fix.edit is not None and fix.verified, (code, fix)
            report.apply(write=True)
            assert nbdebug.check_config(path, schema=rules).ok, (code, path.read_text())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["json", "yaml", "toml"]),
    st.sampled_from([None, "double", *PLANTS]),
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0, 0.99).map(lambda v: round(v, 3)),
    st.integers(2, 10**6),
    st.permutations(sorted(SCHEMA)),
)
def test_one_planted_problem_is_named_alone(tmp_path, form, plant, heads, times, dropout, steps, order) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    values = {"name": "run", "kind": "no", "model.width": heads * times, "model.heads": heads, "data.root": "data"}
    values |= {"model.dropout": dropout, "train.lr": 0.001, "train.warmup": steps // 2, "train.steps": steps}
    values |= {"train.fp16": False, "train.bf16": True}
    values = {key: values[key] for key in order}
    wanted: list[tuple[Any, str]] = []
    if plant == "divisible":
        values["model.heads"] = 4
    if plant in PLANTS:
        key, value, code = PLANTS[plant]
        values[key], wanted = value, [(key, code)]
    text = write(values, form)
    if plant == "double":
        line = next(line for line in text.split("\n") if re.search(r"\bdropout\b", line))
        more = "," if form == "json" and not line.endswith(",") else ""
        text, wanted = text.replace(line, f"{line.rstrip()}{more}\n{line}"), [("model.dropout", "duplicate-key")]
    if plant == "true":  # a width that true divides is no second problem
        values["model.width"] = 8
    report = check(tmp_path, f"run.{form}", text, schema=SCHEMA)
    assert problems(report) == wanted, text
    assert all(fix.verified is not False for finding in report for fix in finding.fixes)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("optimizer:\n  lr: 1e-4\n", [("optimizer.lr", "wrong-type")]),
        (
            'train:\n  batch_size: "16"\n  learning_rate: -0.1\n',
            [("train.batch_size", "wrong-type"), ("train.learning_rate", "out-of-range")],
        ),
        ("train:\n  lr: 0,001\n  gpus: 0,1\n", [("train.lr", "wrong-type")]),
        ("mixed_precision: no\n", [("mixed_precision", "wrong-type")]),
        ("mixed_precision: fp32\ndistributed_type: NO_GPU\n", [("mixed_precision", "invalid-choice")]),
        ("model:\n  d_model: 100\n  nhead: 8\n", [("model.d_model", "not-divisible")]),
        ("fp16: true\nbf16: true\n", [("fp16", "inconsistent")]),
        ("warmup_steps: 5000\nmax_steps: 1000\n", [("warmup_steps", "inconsistent")]),
        ("learning_rtae: 0.1\n", [("learning_rtae", "unknown-key")]),
        ("attn_dropout: 10\nseed: 4294967296\n", [("attn_dropout", "out-of-range"), ("seed", "out-of-range")]),
        ("load_best_model_at_end: true\nsave_steps: 500\neval_steps: 300\n", [("save_steps", "not-divisible")]),
        ("lr_scheduler_type: cosin\n", [("lr_scheduler_type", "invalid-choice")]),
    ],
)
def test_without_a_schema_it_knows_what_the_field_knows(text, wanted, tmp_path) -> None:
    assert problems(check(tmp_path, "run.yaml", text)) == wanted


@pytest.mark.parametrize(
    "word", "1e-4 1.0e-4 1.5e4 no Off 012 0x1F 1_000 1:30 2024-01-01 .5 5. .inf ~ null yEs 0b11 -0 +3 1e5".split()
)
def test_a_plain_word_is_what_pyyaml_makes_of_it(word: str) -> None:
    yaml = pytest.importorskip("yaml")
    theirs, ours = yaml.safe_load(f"a: {word}")["a"], plain(word)
    assert (type(theirs).__name__, str(theirs)) in [(type(ours).__name__, str(ours)), ("date", str(ours))]


@dataclasses.dataclass
class Inner:
    width: int = 8


@dataclasses.dataclass
class Options:
    lr: float = 0.1
    name: str | None = None
    kind: Literal["adam", "sgd"] = "adam"
    model: Inner = dataclasses.field(default_factory=Inner)


def test_objects_and_schemas_of_many_kinds(tmp_path) -> None:
    pydantic = pytest.importorskip("pydantic")
    assert nbdebug.check_config(Options(), schema=Options).ok
    wrong = {"lr": "high", "kind": "adm", "model": {"widht": 8}}
    expected = [("lr", "wrong-type"), ("kind", "invalid-choice"), ("model.widht", "unknown-key")]
    assert problems(nbdebug.check_config(wrong, schema=Options)) == expected
    model = pydantic.create_model("Model", lr=(float, pydantic.Field(gt=0, lt=1)), seed=(int | None, None))
    assert problems(nbdebug.check_config(argparse.Namespace(lr=2.0, seed=None), schema=model)) == [
        ("lr", "out-of-range")
    ]
    assert nbdebug.check_config(model(lr=0.5), schema=model).ok
    rules = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(rules))
    assert problems(nbdebug.check_config({"n": 0, "m": 1}, schema=tmp_path / "schema.json")) == [
        ("n", "out-of-range"),
        ("m", "unknown-key"),
    ]


def test_what_is_no_config_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="got int"):
        nbdebug.check_config(3)
    with pytest.raises(TypeError, match="schema takes"):
        nbdebug.check_config({}, schema=3)
    with pytest.raises(FileNotFoundError):
        nbdebug.check_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"\.py"):
        check(tmp_path, "a.py", "x = 1")
    with pytest.raises(ValueError, match="larger"):
        check(tmp_path, "a.json", " " * (10 * 2**20 + 1))


def test_a_table_that_stands_twice_is_no_other_problem(tmp_path) -> None:
    text = "[a]\nx = 1\n\n[b]\ny = 2\n\n[a]\nz = 3\n"
    schema = {"a.x": {"type": "int"}, "a.z": {"type": "int"}, "b.y": {"type": "int"}}
    assert problems(check(tmp_path, "a.toml", text, schema=schema)) == [("a", "duplicate-key")]


def test_untrusted_files_do_nothing_and_end(tmp_path) -> None:
    assert check(tmp_path, "a.yaml", "a: !!python/object/apply:os.system [exit 1]\nb: !env X\n").ok
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    assert problems(check(tmp_path, "b.yaml", bomb))[0][1] == "syntax"
    assert not check(tmp_path, "c.yaml", "a: &a [*a]\n").ok
    assert not check(tmp_path, "m.yaml", "a: &a\n  <<: *a\n").ok
    assert not check(tmp_path, "d.json", "[" * 100_000).ok
    assert problems(check(tmp_path, "e.json", '{"a": "\\ud800"}')) == []


def test_a_model_an_optimizer_and_a_loader_are_compared(tmp_path) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.01)
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    text = '{"lr": 0.001, "weight_decay": 0.01, "batch_size": 2}'
    assert problems(check(tmp_path, "a.json", text, optimizer=optimizer, loader=loader)) == [("lr", "inconsistent")]
    assert problems(check(tmp_path, "a.json", text, checkpoint={"batch_size": 4})) == [("batch_size", "inconsistent")]


def test_the_mended_line_is_an_edit_that_can_be_applied(tmp_path) -> None:
    report = check(tmp_path, "a.yaml", "train:\n  lr: 1e-4  # small\n")
    assert "+  lr: 1.0e-4  # small" in report.patch()
    report.apply(write=True)
    assert nbdebug.check_config(tmp_path / "a.yaml").ok
    assert "text/html" in report._repr_mimebundle_()


def test_each_edit_is_tried_on_the_text_and_a_near_path_is_found(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    schema = {"data": {"type": "str", "exists": "file"}, "fp16": {"type": "bool"}, "bf16": {"not_with": "fp16"}}
    schema |= {"warmup": {"type": "int", "less_than": "steps"}, "steps": {"type": "int"}}
    text = "data: train.json\nfp16: true\nbf16: true  # both\nwarmup: 20\nsteps: 20\nsteps: 10\n"
    report = check(tmp_path, "a.yaml", text, schema=schema)
    expected = [
        ("data", "missing-path"),
        ("steps", "duplicate-key"),
        ("bf16", "inconsistent"),
        ("warmup", "inconsistent"),
    ]
    assert sorted(problems(report)) == sorted(expected)
    while not report.ok:
        assert report.edit and "problems with this line" in str(report.findings[0].fixes[0].after)
        report.apply(write=True)
        report = nbdebug.check_config(tmp_path / "a.yaml", schema=schema)
    text = (tmp_path / "a.yaml").read_text()
    assert text == 'data: "train.jsonl"\nfp16: true\nbf16: false  # both\nwarmup: 9\nsteps: 10\n'
    report = check(tmp_path, "b.yaml", "lr: 0.1\nlr: 1e-4\n")
    assert problems(report) == [("lr", "duplicate-key")] and report.edit.new == "lr: 1e-4", "what stays is wrong too"


def test_a_value_that_is_merged_in_is_told_where_it_stands(tmp_path) -> None:
    report = check(tmp_path, "a.yaml", "base: &base\n  lr: -1\nlarge:\n  <<: *base\n  batch_size: 4\n")
    assert problems(report) == [("base.lr", "out-of-range")]


def test_from_a_shell_the_exit_status_tells(tmp_path, capsys) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("lr: 0.1\n")
    bad.write_text("lr: 1e-4\n")
    assert shell.main(["check-config", str(good)]) == 0
    assert shell.main(["check-config", str(good), str(bad)]) == 1 and "1.0e-4" in capsys.readouterr().out
    assert shell.main(["check-config", str(tmp_path / "none.yaml")]) == 2 and "none.yaml" in capsys.readouterr().err


def test_the_planned_learning_rate_is_drawn(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    text = (
        "max_steps: 50\noptimizer:\n  lr: 0.1\nlr_scheduler:\n  class_path: torch.optim.lr_scheduler.{}\n  init_args:\n"
    )
    path.write_text(text.format("CosineAnnealingLR") + "    T_max: 50\n")
    (curve,) = [plot.data["curves"]["as planned"] for plot in nbdebug.check_config(path).plots]
    assert curve[0] == [0, 0.1] and curve[-1][0] == 49 and curve[-1][1] < 0.001
    assert "learning rate" in nbdebug.check_config(path)._repr_mimebundle_()["text/html"]
    path.write_text(text.format("CosineAnnealingLR") + "    eta_min: 0.0\n")
    report = nbdebug.check_config(path)
    assert report.ok and not report.plots and "CosineAnnealingLR refuses these settings" in str(report)
    import transformers.optimization  # noqa: F401

    settings = {"learning_rate": 1.0, "max_steps": 100, "warmup_steps": 10, "lr_scheduler_type": "linear"}
    (plot,) = nbdebug.check_config(settings).plots
    rates = dict(plot.data["curves"]["as planned"])
    assert rates[0] == 0 and rates[10] == 1 and rates[55] == 0.5


def test_betas_and_half_precision_on_the_processor() -> None:
    for config, code in (
        ({"optimizer": {"betas": [0.9, 1.2]}}, "out-of-range"),
        ({"accelerator": "cpu", "precision": "16-mixed"}, "inconsistent"),
        ({"trainer": {"accelerator": "cpu", "precision": 16}}, "inconsistent"),
        ({"save_strategy": "never", "num_train_epochs": 3}, "invalid-choice"),
    ):
        assert [f.code for f in nbdebug.check_config(config)] == [f"config/{code}"]
    for config in ({"betas": [0.9, 0.999]}, {"accelerator": "gpu", "precision": "16-mixed"}, {"save_strategy": "x"}):
        assert nbdebug.check_config(config).ok


def test_what_only_the_jsonschema_library_knows(tmp_path) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {
            "lr": {"type": "number", "maximum": 1},
            "name": {"type": "string", "pattern": "^[a-z]+$"},
            "layers": {"type": "array", "minItems": 2},
            "resume": {"type": "boolean"},
        },
        "dependentRequired": {"resume": ["path"]},
        "required": ["lr"],
    }
    good = {"lr": 0.1, "name": "abc", "layers": [1, 2]}
    assert nbdebug.check_config(good, schema=schema).ok
    for change, code in (
        ({"name": "a1"}, "invalid-choice"),
        ({"layers": [1]}, "out-of-range"),
        ({"resume": True}, "inconsistent"),
        ({"lr": 3}, "out-of-range"),
        ({"lr": "x"}, "wrong-type"),
    ):
        assert [f.code for f in nbdebug.check_config(good | change, schema=schema)] == [f"config/{code}"], change
    path = tmp_path / "run.json"
    path.write_text('{\n "lr": 0.1,\n "name": "A1"\n}')
    assert nbdebug.check_config(path, schema=schema).findings[0].where.line == 3
    with pytest.raises(ValueError, match="schema can't be used"):
        nbdebug.check_config(good, schema={"properties": {"lr": {"$ref": "https://example.org/none.json"}}})


def test_multiples_are_asked_of_finite_numbers_of_any_size() -> None:
    for value, named in ((math.inf, []), (math.nan, []), (10**400, ["config/not-divisible"]), (3 * 10**400, [])):
        report = nbdebug.check_config({"width": value}, schema={"width": {"type": "float", "multiple_of": 3}})
        assert [finding.code for finding in report] == named
