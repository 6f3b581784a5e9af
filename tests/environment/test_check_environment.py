"""check_environment(): what is named of another machine's facts, what stays silent, and this machine's own facts."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import nbdebug
from nbdebug import __main__ as shell
from nbdebug.tools.environment import check_environment
from nbdebug.tools.environment.rules import serves
from tests.shell import started

CARD = {"name": "NVIDIA A100", "capability": [8, 0], "memory": 40 * 2**30}
BASE: dict[str, Any] = {
    "platform": "linux",
    "python": "3.11.9",
    "cpus": 32,
    "memory": 256 * 2**30,
    "packages": {
        "torch": "2.4.1+cu121",
        "torchvision": "0.19.1+cu121",
        "torchaudio": "2.4.1+cu121",
        "numpy": "2.0.2",
        "transformers": "4.44.2",
        "tokenizers": "0.19.1",
        "huggingface_hub": "0.24.6",
        "triton": "3.0.0",
    },
    "torch": {
        "version": "2.4.1+cu121",
        "cuda": "12.1",
        "hip": None,
        "mps": False,
        "arch_list": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
    },
    "gpus": [CARD, CARD],
    "driver": {"version": "525.105.17", "cuda": "12.0"},
    "env": {"CUDA_VISIBLE_DEVICES": "1,0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"},
    "interfaces": ["lo", "eth0", "docker0"],
    "shm": {"size": 64 * 2**30},
    "run": {
        "device": "cuda",
        "dtype": "bfloat16",
        "num_workers": 8,
        "prefetch_factor": 4,
        "batch_bytes": 2**28,
        "start_method": "fork",
        "pin_memory": True,
        "backend": "nccl",
        "nodes": 1,
        "world_size": 2,
    },
}


def changed(**parts: Any) -> dict[str, Any]:
    """The base with some entries of its parts changed; None takes an entry away."""
    facts = copy.deepcopy(BASE)
    for part, value in parts.items():
        if isinstance(value, dict) and isinstance(facts.get(part), dict):
            facts[part] |= value
            facts[part] = {key: inner for key, inner in facts[part].items() if inner != "-"}
        else:
            facts[part] = value
    return facts


HEALTHY = [
    {},
    {"env": {"CUDA_VISIBLE_DEVICES": "-"}},
    {"env": {"CUDA_VISIBLE_DEVICES": "GPU-8f2a,GPU-91bc"}},
    {"env": {"NCCL_SOCKET_IFNAME": "eth"}},
    {"env": {"NCCL_SOCKET_IFNAME": "=eth0"}},
    {"env": {"NCCL_SOCKET_IFNAME": "^docker,lo"}},
    {"env": {"GLOO_SOCKET_IFNAME": "ens5"}},  # another backend's
    {"env": {"TOKENIZERS_PARALLELISM": "true"}},  # no tokenizer was used
    {"env": {"CUDA_VISIBLE_DEVICES": ""}, "run": {"device": "cpu", "dtype": "float32"}},
    {
        "gpus": [],
        "driver": None,
        "torch": {"cuda": None, "arch_list": []},
        "run": {"device": "cpu", "pin_memory": False},
    },
    {"gpus": [{**CARD, "capability": [8, 9]}, {**CARD, "capability": [8, 6]}]},
    {"gpus": [{**CARD, "capability": [12, 0]}, CARD], "torch": {"arch_list": ["sm_80", "compute_90"]}},
    {"packages": {"torch": "2.99.0", "torchvision": "0.99.0", "torchaudio": "3.1", "triton": "9.0"}},
    {"packages": {"transformers": "5.9.0", "tokenizers": "0.40.0", "huggingface_hub": "1.31.0"}},
    {"packages": {"torch": "2.4.1", "torchvision": "0.19.0"}},
    {"packages": {"numpy": "1.26.4", "scipy": "1.10.0"}},
    {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},  # its new name came later
    {"run": {"tokenizer_used_before_workers": True, "start_method": "spawn"}},
    {"run": {"tokenizer_used_before_workers": True, "num_workers": 0}},
    {"run": {"tokenizer_used_before_workers": True, "start_method": "-"}, "python": "3.14.0"},
    {"shm": {"size": 2**34}, "run": {"world_size": 4, "nodes": 2}},
    {"shm": {"size": 64 * 2**20}, "run": {"num_workers": 0}},
    {"platform": "win32", "shm": "-", "driver": {"version": "528.33", "cuda": "-"}},
    {"torch": {"hip": "6.1", "cuda": None, "arch_list": ["gfx90a"]}, "driver": None},
]


@pytest.mark.parametrize("parts", HEALTHY, ids=str)
def test_healthy_machines_are_silent(parts: dict[str, Any]) -> None:
    facts = changed(**parts)
    if facts.get("shm") == "-":
        del facts["shm"]
    report = nbdebug.check_environment(facts=facts)
    assert report.ok, report.findings[0].title


SICK = [
    ("cpu-only-build", {"torch": {"version": "2.4.1", "cuda": None, "arch_list": []}}),
    ("gpu-arch-missing", {"gpus": [{**CARD, "capability": [3, 7]}] * 2, "run": {"dtype": "float16"}}),
    ("gpu-arch-missing", {"gpus": [CARD, {**CARD, "capability": [10, 0]}]}),
    ("driver-too-old", {"driver": {"version": "460.32.03", "cuda": "11.2"}}),
    ("driver-too-old", {"driver": {"version": "460.32.03", "cuda": "-"}}),
    ("driver-too-old", {"driver": None}),
    ("devices-hidden", {"env": {"CUDA_VISIBLE_DEVICES": ""}}),
    ("devices-hidden", {"env": {"CUDA_VISIBLE_DEVICES": "-1"}}),
    ("devices-hidden", {"env": {"CUDA_VISIBLE_DEVICES": "0"}, "run": {"device": "cuda:1", "world_size": 1}}),
    ("devices-hidden", {"env": {"CUDA_VISIBLE_DEVICES": "2,0,1"}}),
    ("dtype-unsupported", {"gpus": [{**CARD, "capability": [7, 0]}] * 2}),
    ("dtype-unsupported", {"run": {"dtype": "float8_e4m3fn"}}),
    ("numpy-abi", {"packages": {"torch": "2.2.2", "torchvision": "0.17.2", "torchaudio": "2.2.2", "triton": "2.2.0"}}),
    ("version-mismatch", {"packages": {"torchvision": "0.18.1"}}),
    ("version-mismatch", {"packages": {"torchvision": "0.19.1+cpu"}}),
    ("version-mismatch", {"packages": {"tokenizers": "0.20.3"}}),
    ("version-mismatch", {"packages": {"xformers": "0.0.28.post3"}}),
    ("version-mismatch", {"packages": {"huggingface_hub": "1.2.0"}}),
    ("shared-memory-small", {"shm": {"size": 2**30}}),
    ("shared-memory-small", {"shm": {"size": 2**33}}),  # enough for one of the two processes
    ("tokenizers-fork", {"run": {"tokenizer_used_before_workers": True, "start_method": "-"}, "python": "3.13.2"}),
    ("network-interface-missing", {"env": {"NCCL_SOCKET_IFNAME": "=eth"}}),
    ("network-interface-missing", {"env": {"NCCL_SOCKET_IFNAME": "^eth,lo,docker"}}),
    ("network-interface-missing", {"env": {"GLOO_SOCKET_IFNAME": "ens5"}, "run": {"backend": "gloo"}}),
    ("tokenizers-fork", {"run": {"tokenizer_used_before_workers": True}}),
    ("tokenizers-fork", {"run": {"tokenizer_used_before_workers": True}, "env": {"TOKENIZERS_PARALLELISM": "true"}}),
    ("deprecated-variable", {"env": {"TRANSFORMERS_CACHE": "/data"}}),
    (
        "pin-memory-unsupported",
        {
            "run": {"device": "mps", "dtype": "float32"},
            "gpus": [],
            "driver": None,
            "torch": {"cuda": None, "arch_list": []},
            "platform": "darwin",
        },
    ),
]


@pytest.mark.parametrize(("code", "parts"), SICK, ids=str)
def test_one_fault_is_named_alone(code: str, parts: dict[str, Any]) -> None:
    report = nbdebug.check_environment(facts=changed(**parts))
    assert [finding.code for finding in report] == [f"environment/{code}"]
    assert "text/html" in report._repr_mimebundle_() and report.findings[0].fixes[0].code


MAC = {
    "gpus": [],
    "driver": None,
    "platform": "darwin",
    "run": {"device": "mps", "dtype": "float32", "pin_memory": False},
}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({**MAC, "torch": {"cuda": None, "version": "2.4.1"}}, ["of torch 2.4.1 does not exist"]),
        (
            {**MAC, "torch": {"cuda": None, "version": "2.5.0"}, "packages": {"torch": "2.5.0"}},
            ["torch 2.5.0 computes in float16"],
        ),
        (
            {
                **MAC,
                "torch": {"cuda": None, "version": "2.7.0", "float32 products": "high"},
                "packages": {"torch": "2.7.0"},
            },
            ["('high') changes nothing on MPS", "computes in float16 and bfloat16, bfloat16 from macOS 14 on"],
        ),
        (
            {"torch": {"float32 products": "highest"}},
            ["set_float32_matmul_precision('high') lets NVIDIA A100 use TF32"],
        ),
        ({"torch": {"float32 products": "high"}}, []),
        (
            {
                "torch": {"float32 products": "high"},
                "gpus": [{**CARD, "capability": [7, 5]}] * 2,
                "run": {"dtype": "float16"},
            },
            ["changes nothing on NVIDIA A100: TF32 came with capability 8.0"],
        ),
        ({"run": {"device": "cpu", "dtype": "float32"}, "torch": {"float32 products": "high"}}, []),
    ],
    ids=str,
)
def test_what_two_switches_do_on_this_device(parts: dict[str, Any], words: list[str]) -> None:
    notes = nbdebug.check_environment(facts=changed(**parts)).notes
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes)), notes


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_86", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90", (10, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_90", (8, 6), False),
        ("sm_120", (12, 0), True),
        ("sm_90a", (9, 1), False),
    ],
)
def test_kernels_run_within_their_generation(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert serves(arch, capability) is runs


def test_this_machine_has_facts_and_the_report_names_no_secret(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_secret")
    monkeypatch.setenv("TORCH_HOME", str(pathlib.Path.home() / "cache"))
    report = nbdebug.check_environment()
    text = str(report.full()) + str([table.rows for table in report.tables])
    assert "hf_secret" not in text and str(pathlib.Path.home()) + "/" not in text and "TORCH_HOME" in text
    assert report.facts["machine"]["packages"]["torch"] and json.dumps(report.facts["machine"])
    wanted = [
        "numpy>=1",
        "torch<1  # old",
        "no-such-package-here",
        "-r other.txt",
        "tomli; python_version < '3'",
        "a b",
    ]
    pins = nbdebug.check_environment(requirements=wanted)
    found = next(f for f in pins if f.code == "environment/version-mismatch")
    assert "torch<1" in found.title and "no-such-package-here" in str(found.evidence["also"])
    with pytest.raises(TypeError, match="facts takes"):
        nbdebug.check_environment(facts=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="another form"):
        nbdebug.check_environment(facts={"gpus": [3]})


def test_what_ended_processes_have_left_is_counted(tmp_path) -> None:
    for name in (f"torch_{2**31}_17_0", f"torch_{os.getpid()}_17_0", "other"):
        (tmp_path / name).write_bytes(b"1234")
    (tmp_path / "pymp-old").mkdir()
    (tmp_path / "pymp-new").mkdir()
    os.utime(tmp_path / "pymp-old", (0, 0))
    assert check_environment._leftovers(tmp_path, tmp_path) == {"count": 2, "bytes": 4}


def test_facts_need_no_torch_and_go_to_another_machine(tmp_path, capsys) -> None:
    root = pathlib.Path(nbdebug.__file__).parents[1]
    command = [sys.executable, "-S", "-m", "nbdebug", "facts"]  # -S: nothing but the standard library
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert "packages" in json.loads(done.stdout), done.stderr
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(changed(env={"CUDA_VISIBLE_DEVICES": "9"})))
    assert shell.main(["check-environment", "--facts", str(path)]) == 1 and "devices-hidden" in capsys.readouterr().out
    path.write_text(json.dumps(BASE))
    assert shell.main(["check-environment", "--facts", str(path)]) == 0


def test_the_magic_saves_a_text_for_a_bug_report(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with started(f"facts = {BASE!r}") as notebook:
        done = notebook.run("%check_environment --facts facts --save env.txt")
        assert done.result.ok and done.result.question == "%check_environment"
        assert "525.105.17" in (tmp_path / "env.txt").read_text()
        assert "UsageError" in notebook.run("%check_environment --requirements none.txt").printed
        assert "UsageError" in notebook.run("%check_environment --facts 3").printed


def test_switches_warnings_and_the_saved_text(tmp_path, capsys, monkeypatch) -> None:
    text = "`torch.cuda.amp.GradScaler(args...)` is deprecated"
    monkeypatch.setitem(globals(), "__warningregistry__", {"version": 1, (text, FutureWarning, 7): True})
    report = nbdebug.check_environment()
    rows = dict(report.frame("The machine").itertuples(index=False))
    assert rows["FSDP"] == "fully_shard (torch.distributed.fsdp), FullyShardedDataParallel"
    assert "cuDNN benchmark" in rows["switches"] and "math" in rows["attention kernels allowed"]
    shown = report.frame("Warnings of this kernel")
    assert (f"{__name__}, line 7", "torch.amp.GradScaler('cuda')") in zip(shown["where"], shown["write instead"])
    shell.main(["check-environment", "--save", str(tmp_path / "env.txt")])
    assert "The machine" in (tmp_path / "env.txt").read_text() and "env.txt" in capsys.readouterr().err


def test_switches_by_backend_do_not_end_the_look() -> None:
    script = (
        "import torch, nbdebug; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
        "assert 'cuDNN benchmark' in ' '.join(str(nbdebug.check_environment().full()).split())"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
