"""What bottleneck() leaves as it was, its magics, a script and its comparison, the watch, and tokens with a cache."""

from __future__ import annotations

import gc
import json
import pathlib
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

import nbdebug
from nbdebug.__main__ import main
from nbdebug.report import Where
from nbdebug.robust_stats import longer
from nbdebug.tools.speed import clock, cures, ops
from nbdebug.tools.speed.bottleneck import OWN, RECENT, WARM, SpeedWatch, load_times, share_of, slower
from nbdebug.tools.speed.rules import Loop, SpeedCure, SpeedFacts, StepTimes, WorkShare, name_cause
from tests.shell import started

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
def step(batch):
    loss = model(batch[0]).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.detach()
"""


def training() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    return model, torch.optim.Adam(model.parameters()), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)


@pytest.mark.parametrize("copies", [True, False])
def test_it_trains_as_the_steps_alone_and_leaves_nothing_behind(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the same steps without nbdebug. Torch's functions and hooks are its own again. copies: without, as
    where a GPU is in use, experiments run in this process, and all is put back."""
    if copies and torch.cuda.is_initialized():
        pytest.skip("a process that uses a GPU can't be copied")
    monkeypatch.setattr("nbdebug.tools.speed.clock.can_copy", lambda: copies)
    before = dataloader._BaseDataLoaderIter.__next__, nn.Module.train, torch.save
    weights = []
    for asked in (False, True):
        model, optimizer, loader = training()

        def step(batch: list[torch.Tensor], model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer):
            loss = model(batch[0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        if asked:
            report = nbdebug.bottleneck(
                lambda batch: step(batch), loader=loader, model=model, optimizer=optimizer, steps=8
            )
            assert report.steps == 7 and report.facts["speed"]["cures"] and report.facts["speed"]["samples"] == 8
        else:
            for batch in loader:
                step(batch)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))
    assert before == (dataloader._BaseDataLoaderIter.__next__, nn.Module.train, torch.save)


@pytest.mark.timeout(120)
def test_as_on_a_card_torch_s_methods_are_its_own_again_and_the_model_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There copies and reads are timed, too, and the ops are followed in this process."""
    monkeypatch.setattr("nbdebug.tools.speed.clock.can_copy", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    make = clock.Clock.__init__
    monkeypatch.setattr(
        clock.Clock, "__init__", lambda self, *a, **k: [make(self, *a, **k), setattr(self, "cuda", 1)][0]
    )
    methods = {name: getattr(torch.Tensor, name) for name in (*clock.MOVES, *clock.READS)}

    def weight_of_a_model() -> weakref.ref:
        model, optimizer, loader = training()

        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            loss = model(batch[0].to("cpu")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.norm().item()
            return loss.detach()

        assert nbdebug.bottleneck(step, loader=loader, model=model, optimizer=optimizer).steps
        return weakref.ref(model[0].weight)

    weight = weight_of_a_model()
    assert {name: getattr(torch.Tensor, name) for name in methods} == methods
    gc.collect()
    assert weight() is None


def test_what_the_step_raises_passes_and_wrong_arguments_are_refused() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nbdebug.bottleneck(step, model={}, names={})
    with pytest.raises(TypeError, match="loader"):
        nbdebug.bottleneck(lambda batch: batch, model={}, names={})
    with pytest.raises(ValueError, match="goal"):
        nbdebug.bottleneck(step, goal=0)


def test_magics_take_a_step_a_loop_and_a_watch() -> None:
    with started(SETUP) as book:
        done = book.run("report = %bottleneck --no-cures --steps 6 --goal 1 step\nreport")
        assert done.error is None and done.result.question == "%bottleneck --loader train_loader step"
        assert (
            "Goal: 1 steps a second" in str(done.result.full())
            and "<img" in done.result._repr_mimebundle_()["text/html"]
        )
        loop = "%%bottleneck --no-cures --steps 5\nfor x in 1000 * list(train_loader): step(x)"
        assert book.run(loop).result.steps == 4
        assert "needs a step" in book.run("%bottleneck").printed
        book.run("%bottleneck --watch")
        assert book.run("for x in train_loader: step(x)").error is None
        assert book.run("%bottleneck").result.steps == 7 and "Active: %bottleneck --watch" in book.run("%nbdebug").shown
        assert book.run("%bottleneck --watch off").result.steps == 7


def test_a_watch_tells_once_when_steps_become_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("nbdebug.tools.speed.bottleneck.time.perf_counter", lambda: now[0])
    watch, optimizer = SpeedWatch(told.append), types.SimpleNamespace()
    for step in range(WARM + OWN + 5 * RECENT):
        now[0] += 0.01 if step < WARM + OWN + RECENT else 0.03
        watch._after_update(optimizer, (), {})
    assert len(told) == 1 and "3 times the first ones" in told[0] and watch.report().symptoms


def test_a_script_runs_as_it_is_and_is_compared(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "before.json"
    script.write_text(
        "import sys\nassert sys.argv[1:] == ['--rate', '1'] and __name__ == '__main__'\n"
        + SETUP.lstrip()
        + "while True:\n    for batch in train_loader: step(batch)\n"
    )
    typed = ["bottleneck", "--no-cures", "--steps", "6", str(script), "--", "--rate", "1"]
    main([*typed[:1], "--json", *typed[1:]])
    saved.write_text(capsys.readouterr().out)
    times = json.loads(saved.read_text())["facts"]["speed"]
    assert len(times["steps"]) == 5
    assert main([*typed[:1], "--against", str(saved), "--slower-than", "9000%", *typed[1:]]) == 0
    assert "times the earlier step" in capsys.readouterr().out
    twice = {"steps": [{name: 2 * value for name, value in step.items()} for step in times["steps"]]}
    assert slower(twice, times, share_of("50%"))[0] and not slower(times, twice, share_of("5%"))[0]
    assert main(["bottleneck", str(tmp_path / "none.py")]) == 2


@pytest.mark.parametrize(
    "line", ["seen.append(sorted(range(300_000))[0])", "for turn in range(300_000): seen.append(turn)"]
)
def test_a_line_without_which_a_script_trains_the_same_is_named(
    line: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    loop = f"seen = []\nwhile True:\n    for batch in train_loader:\n        step(batch)\n        {line}\n"
    script.write_text(SETUP + loop)
    assert main(["bottleneck", "--json", str(script)]) == 1
    finding = json.loads(capsys.readouterr().out)["findings"][0]
    assert finding["code"] == "speed/bookkeeping" and finding["where"]["text"] == line
    assert "times as fast" in finding["evidence"]["without this line"]


@pytest.mark.parametrize("line", ["noise = [random() for _ in range(200_000)]", "slow = [model(batch[0])] * 200_000"])
def test_a_line_that_the_weights_depend_on_is_not(line: str) -> None:
    """A learned term, and random numbers that the loss takes."""
    with started(SETUP + "from random import random\nslow, noise = [0], [0]") as book:
        begin = f"def step(batch):\n    for _ in range(2):\n        {line}\n"
        body = "    loss = (model(batch[0]) + noise[-1] + slow[-1]).square().mean()\n"
        end = "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n    return loss.detach()"
        assert book.run(begin + body + end).error is None
        report = book.run("%bottleneck step").result
        assert report.ok, str(report)


def test_workers_that_stay_are_not_read_by_a_copy() -> None:
    """They are those of the original: a copy begins its own, and leaves these where they are."""
    data = TensorDataset(torch.arange(32.0))
    loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    first = [batch[0].tolist() for batch in loader]
    subject = clock.Training(lambda batch: None, {}, {}, loader)
    read = clock.apart(subject, lambda: [batch[0].tolist() for batch in loader])
    assert read == first == [batch[0].tolist() for batch in loader]


class Echo(nn.Module):
    """Takes a cache as models of transformers do: it keeps the sum of what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(11, 11)
        self.config = types.SimpleNamespace(use_cache=False)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        for _ in range(40 * input_ids.shape[1]):
            states = self.word(input_ids)
        past = states.sum(1, keepdim=True) + (0 if past_key_values is None else past_key_values)
        return types.SimpleNamespace(logits=past, past_key_values=past)


def test_a_cache_that_is_off_is_named_and_the_tokens_are_the_same() -> None:
    model = Echo()
    report = nbdebug.generation(model, torch.tensor([[1, 2, 3]]), max_new_tokens=24)
    assert [finding.code for finding in report] == ["speed/no-kv-cache"] and model.training
    assert report.findings[0].evidence["same tokens"] == "yes" and report.findings[0].fixes[0].verified
    model.config.use_cache = True
    assert nbdebug.generation(model, torch.tensor([1, 2, 3]), max_new_tokens=24).ok
    with pytest.raises(TypeError, match="whole numbers"):
        nbdebug.generation(model, torch.randn(1, 3))


def test_one_op_that_had_to_wait_makes_no_share() -> None:
    """The machine did something else while one op ran: that is no work of the step's."""
    weight = torch.rand(64, 64)
    watch = ops.OpWatch(salted=True)
    with watch:
        for number in range(3):
            watch.begin_step(number, {})
            rows = torch.rand(64, 64)
            (rows @ weight).sum()
            _ = rows * 2.0
            _ = rows * 2.0
    waited = next(op for op in watch.last if op.repeated)
    waited.seconds = 1.0
    before = watch.repeated()
    watch.drop_waits()
    after = watch.repeated()
    assert before is not None and before.share > 0.99
    assert after is not None and after.share < 0.9 and watch.seconds() < 0.5


def test_what_an_optimizer_counts_is_no_repeated_work() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    watch = ops.OpWatch(salted=True)
    with watch:
        for number in range(3):
            watch.begin_step(number, {id(p): p for p in model.parameters()})
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
    assert any(op.phase == "optimizer" for op in watch.ops) and not any(op.repeated for op in watch.ops)


def test_what_comes_before_a_loop_does_not_use_up_the_time_of_its_steps() -> None:
    """A script imports and loads for longer than a step may take: its steps are followed all the same."""
    watch = ops.OpWatch(salted=False)
    with watch:
        watch.begin_step(0, {})
        watch.until = 0.0
        _ = torch.rand(4) * 2
        assert watch.cut == 0 and not watch.last
        watch.begin_step(1, {})
        watch.begin_anew()
        _ = torch.rand(4) * 2
        assert watch.cut is None and len(watch.last) == 2
        watch.until = 0.0
        _ = torch.rand(4) * 2
    assert watch.cut == 1 and len(watch.last) == 2, "of a step that is too long, the beginning"


@pytest.mark.parametrize("text", ["x", "-1%", "100"])
def test_what_can_t_be_compared_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=f"got {text!r}"):
        share_of(text)
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(ValueError, match="no report"):
        load_times(str(tmp_path / "train.py"))


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has no switch by backend")
@pytest.mark.parametrize(
    ("measured", "code"), [(None, "small-kernels"), (1.2, "small-kernels"), (3.0, "redundant-work")]
)
def test_members_that_the_pairs_of_a_loop_share_are_no_redundant_work(measured: float | None, code: str) -> None:
    where = Where(phase="forward", file=__file__, line=7, text="table.append(cosine_similarity(z[i], z[j], dim=0))")
    facts = SpeedFacts(
        steps=(StepTimes({"forward": 0.2, "backward": 0.5}, 12),) * 8, ran=9, backwards=9,
        loop=Loop(where, 24, 3000, 0.99, 20.0, 1), repeated=WorkShare(where, 0.55, "computed again", 0.55),
        cures=[SpeedCure("equal results remembered", 1.1, measured)],
    )  # fmt: skip
    cause = name_cause(facts)
    assert cause is not None and cause.code == f"speed/{code}"


@pytest.mark.parametrize(
    ("measured", "workers", "named"), [(None, 0, True), (6.0, 0, True), (1.5, 0, False), (1.5, 2, True)]
)
def test_whether_data_are_waited_for_is_told_by_pairs_of_steps(
    measured: float | None, workers: int, named: bool
) -> None:
    """A busy machine can make a row of steps wait. Workers load on while a step has its batch again."""
    times = StepTimes({"waiting for data": 0.007, "forward": 0.001, "backward": 0.002}, 32)
    cures_ = [SpeedCure("the same batch again", 3.3, measured)]
    facts = SpeedFacts(steps=(times,) * 12, ran=13, backwards=13, workers=workers, cures=cures_)
    assert [f.code for f in [name_cause(facts)] if f is not None] == ["speed/loader-bound"] * named


def test_times_that_are_long_since_others_run_do_not_make_a_ratio() -> None:
    """A step of 1.5 ms meets another program more often than one of 1 ms: by their medians it would take 11 times as
    long."""
    long, short = [1.5] * 4 + [11.0] * 6, [1.0] * 6 + [11.0] * 4
    assert longer(short, long) == pytest.approx(1.5) and longer(long, short) == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(("seconds", "named"), [(0.001, False), (0.02, True)])
def test_a_model_that_computes_for_a_moment_may_stay_on_the_cpu(seconds: float, named: bool) -> None:
    times = StepTimes({"forward": seconds, "backward": seconds, "optimizer": seconds}, 32)
    facts = SpeedFacts(steps=(times,) * 12, ran=13, device="cpu", cards=1, backwards=13, on_cpu=("model",))
    finding = name_cause(facts)
    assert (finding is not None and finding.code == "speed/cpu-device") == named


@pytest.mark.parametrize("own", ["tf32", "ieee"])
def test_the_trial_of_tf32_puts_a_switch_by_backend_back(own: str) -> None:
    """In a process of its own: torch does not forget that the newer switch was used."""
    script = f"""
import torch
from nbdebug.tools.speed import cures
products, switch = torch.backends.cuda.matmul, cures.Switch()
products.fp32_precision = {own!r}
cures.tf32(None, switch)
for on in (True, False):
    switch.turn(on)
    assert products.fp32_precision == ("tf32" if on else {own!r}), (on, products.fp32_precision)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_profiler_that_is_on_is_named_and_the_step_is_timed_without_it() -> None:
    model, optimizer, loader = training()

    def step(batch: list[torch.Tensor]) -> None:
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        report = nbdebug.bottleneck(step, loader=loader, model=model, optimizer=optimizer, steps=8)
    finding = report.findings[0]
    assert finding.code == "speed/debug-mode" and "torch.profiler.profile(" in (finding.where.text or "")
    assert "times as fast" in finding.evidence["without a profiler"]


def test_the_trial_without_anomaly_detection_leaves_it_as_it_was_asked_for() -> None:
    """Around the steps, and in each of them: it is off in those of the trial alone."""
    switch = cures.Switch()
    with torch.autograd.set_detect_anomaly(True):
        cures.no_anomaly_detection(None, switch)
        for on in (True, False, True, False):
            switch.turn(on)
            assert torch.is_anomaly_enabled() is not on
        switch.undo()
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
