"""%%diagnose on loops that tell themselves what they train: models made inside, several together, no loader."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.tools.training.evaluate import ACCELERATOR_BYTES, SavedBatches
from nbdebug.tools.training.loop_frames import LoopStart, LoopSubject
from tests.shell import started

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X = torch.randn(320, 6)
Y = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long()
def build():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))
"""
STEP = """
{}opt.zero_grad()
{}loss = LOSS
{}loss.backward()
{}opt.step()
"""


def step(indent: int) -> str:
    """One step, with the loss of a test; what comes first stands on the line that it is written in."""
    return STEP.strip().format("", *[" " * indent] * 3)


MADE = "net = build(); opt = torch.optim.SGD(net.parameters(), lr=0.2)"
LOADED = "loader = DataLoader(TensorDataset(X, Y), 32, shuffle=True)"
LOOPS = {
    "in a function": (
        f"""
def main():
    {MADE}
    {LOADED}
    for epoch in range(12):
        for x, y in loader:
            out = net(x)
            {step(12)}
""",
        "main()",
    ),
    "in the cell": (
        "",
        f"""
{MADE}
{LOADED}
for epoch in range(12):
    for x, y in loader:
        out = net(x)
        {step(8)}
""",
    ),
    "two models": (
        f"""
{LOADED}
enc, head = nn.Sequential(nn.Linear(6, 24), nn.ReLU()), nn.Linear(24, 4)
opt = torch.optim.SGD([*enc.parameters(), *head.parameters()], lr=0.2)
""",
        f"""
for epoch in range(12):
    for x, y in loader:
        out = head(enc(x))
        {step(8)}
""",
    ),
    "all of the data": (
        f"""
{MADE}
x, y = X, Y
""",
        f"""
for epoch in range(120):
    out = net(x)
    {step(4)}
""",
    ),
    "batches by a function": (
        f"""
{MADE}
def get_batch(n=32):
    rows = torch.randint(len(X), (n,))
    return X[rows], Y[rows]
""",
        f"""
for it in range(120):
    x, y = get_batch()
    out = net(x)
    {step(4)}
""",
    ),
    "slices": (
        MADE,
        f"""
for epoch in range(12):
    order = torch.randperm(len(X))
    for i in range(0, len(X), 32):
        x, y = X[order[i : i + 32]], Y[order[i : i + 32]]
        out = net(x)
        {step(8)}
""",
    ),
    "arguments unpacked": (
        f"""
{MADE}
def get_batch(n=32):
    rows = torch.randint(len(X), (n,))
    return X[rows], Y[rows]
def train_step(x, y):
    out = net(x)
    {step(4)}
""",
        """
for it in range(120):
    train_step(*get_batch())
""",
    ),
    "arrays": (
        f"{MADE}; XN, YN = X.numpy(), Y.numpy(); import numpy",
        f"""
for it in range(120):
    rows = numpy.random.choice(len(XN), 32)
    out, y = net(torch.from_numpy(XN[rows])), torch.from_numpy(YN[rows])
    {step(4)}
""",
    ),
    "next": (
        f"{MADE}; {LOADED}",
        f"""
batches = iter(loader)
for it in range(120):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    out = net(x)
    {step(4)}
""",
    ),
    "what a generator makes of a loader": (
        f"""
{MADE}; {LOADED}
def cycle():
    while True:
        for rows, labels in loader:
            yield dict(rows=rows, labels=labels)
batches = cycle()
""",
        f"""
for it in range(120):
    batch = next(batches)
    out, y = net(batch["rows"]), batch["labels"]
    {step(4)}
""",
    ),
    "a closure": (
        f"{MADE}; {LOADED}",
        """
for epoch in range(12):
    for x, y in loader:
        def closure():
            opt.zero_grad()
            out = net(x)
            loss = LOSS
            loss.backward()
            return loss
        opt.step(closure)
""",
    ),
    "a state that is carried on": (
        """
net, head = nn.GRU(6, 24, batch_first=True), nn.Linear(24, 4)
opt = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.03)
""",
        f"""
for epoch in range(12):
    state = torch.zeros(1, 4, 24)
    for i in range(0, 80, 10):
        x, y = X.view(4, 80, 6)[:, i : i + 10], Y.view(4, 80)[:, i : i + 10].reshape(-1)
        hidden, state = net(x, state.detach())
        out = head(hidden).reshape(-1, 4)
        {step(8)}
""",
    ),
    "accelerate": (
        f"""
from accelerate import Accelerator
{MADE}; {LOADED}
accelerator = Accelerator(cpu=True)
net, opt, loader = accelerator.prepare(net, opt, loader)
""",
        """
for epoch in range(12):
    for x, y in loader:
        with accelerator.accumulate(net):
            out = net(x)
            loss = LOSS
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
""",
    ),
    "a generator": (
        f"""
{MADE}
def batches(n=32):
    order = torch.randperm(len(X))
    for i in range(0, len(X), n):
        yield X[order[i : i + n]], Y[order[i : i + n]]
""",
        f"""
for epoch in range(12):
    for x, y in batches():
        out = net(x)
        {step(8)}
""",
    ),
}


def diagnosed(kind: str, loss: str, line: str = "%%diagnose") -> SimpleNamespace:
    setup, cell = (text.replace("LOSS", loss) for text in LOOPS[kind])
    with started(SETUP + setup) as book:
        before = torch.get_rng_state()
        answer = book.run(f"{line}\n{cell.strip()}")
        answer.same_numbers = torch.equal(before, torch.get_rng_state())
    return answer


@pytest.mark.parametrize("sick", [True, False])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_softmax_too_many_is_named_and_cured_and_the_healthy_loop_is_well(kind: str, sick: bool) -> None:
    answer = diagnosed(kind, "F.cross_entropy(out.softmax(-1), y)" if sick else "F.cross_entropy(out, y)")
    report = answer.result
    assert [finding.code for finding in report.findings] == ["training/double-softmax"] * sick
    assert re.search(r"batch is your loop's\s+own", str(report.full())) and answer.same_numbers
    if sick:
        fix = report.findings[0].fixes[0]
        assert fix.verified and fix.edit is not None and fix.edit.new.strip() == "loss = F.cross_entropy(out, y)"
    else:
        assert report.verdict == "healthy"


def test_an_edit_of_a_line_of_several_statements_trains_nothing_by_itself() -> None:
    setup = SETUP + MADE.replace("lr=0.2", "lr=0.1")
    cell = """
%%diagnose
for epoch in range(60):
    opt.zero_grad(); out = net(X); loss = F.cross_entropy(out.softmax(-1), Y); loss.backward(); opt.step()
"""
    with started(setup) as book:
        fix = book.run(cell.strip()).result.findings[0].fixes[0]
    assert fix.verified and fix.edit is not None and "cross_entropy(out, Y); loss.backward()" in fix.edit.new
    assert fix.after["steps"] == 100


def test_the_loop_that_makes_its_model_runs_again_as_edited() -> None:
    report = diagnosed("in a function", "F.cross_entropy(out, y) * 100").result
    assert [finding.code for finding in report.findings] in (["training/lr-too-high"], ["training/exploding-gradients"])
    assert report.findings[0].fixes[0].verified


def test_a_loop_whose_lines_tell_nothing_is_tried_on_the_loader_that_was_given() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 3)
    batches = [(x, x.sum(1, keepdim=True)) for x in rows.split(20)]  # a list: its reading is not watched
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    def train(callback: object) -> None:
        step = lambda loss: (optimizer.zero_grad(), getattr(loss, "backward")(), optimizer.step())  # noqa: B009
        for _ in range(6):
            for x, y in batches:
                step((net(x) - y).square().mean())

    report = nbdebug.diagnose(
        train,
        model=net,
        optimizer=optimizer,
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_loader=batches,
        progress=False,
    )
    assert [finding.code for finding in report.findings] == ["training/lr-too-low"] and report.findings[0].fixes[
        0
    ].after


def test_models_of_one_loop_are_named() -> None:
    report = diagnosed("two models", "F.cross_entropy(out, y)").result
    assert "models `head`, `enc`" in report.subject and "train_loader `loader`" in report.subject


def test_a_stale_model_of_the_same_name_is_not_taken() -> None:
    with started(SETUP + f"{MADE}\n{LOADED}") as book:
        old = book.shell.user_ns["net"]
        report = book.run("%%diagnose\n" + LOOPS["in the cell"][1].strip().replace("LOSS", "F.nll_loss(out, y)")).result
        assert book.shell.user_ns["net"] is not old
    assert [finding.code for finding in report.findings] == ["training/missing-log-softmax"]


def test_two_that_play_against_each_other_are_well() -> None:
    setup = f"""
{LOADED}
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
D = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
og, od = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (G, D))
bce = nn.BCEWithLogitsLoss()
"""
    cell = """
%%diagnose
for epoch in range(6):
    for real, _ in loader:
        fake, one, zero = G(torch.randn(len(real), 4)), torch.ones(len(real), 1), torch.zeros(len(real), 1)
        d_loss = bce(D(real), one) + bce(D(fake.detach()), zero)
        od.zero_grad()
        d_loss.backward()
        od.step()
        g_loss = bce(D(fake), one)
        og.zero_grad()
        g_loss.backward()
        og.step()
"""
    with started(SETUP + setup) as book:
        assert book.run(cell.strip()).result.verdict == "healthy"
    with started(SETUP + setup.replace("for m in (G, D)", "for m in (D, D)")) as book:
        [found] = book.run(cell.strip()).result.findings
    assert found.code == "training/parameters-not-in-optimizer" and "`G` gets gradients" in found.title


PAIRS = """
enc, dec, out = nn.GRU(8, 16, batch_first=True), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters(), *out.parameters()], lr=0.01)
"""
READS = """
%%diagnose
for it in range(60):
    source = torch.randint(1, 8, (16, 6))
    target = torch.cat([torch.zeros(16, 1, dtype=torch.long), source.flip(1)], 1)
    hidden, state = enc(F.one_hot(source, 8).float())
    scores = out(dec(F.one_hot(target[:, READ], 8).float(), state)[0])
    loss = F.cross_entropy(scores.reshape(-1, 8), target[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(("read", "codes"), [(":-1", []), ("1:", ["training/leakage"])])
def test_a_decoder_that_reads_the_token_that_it_predicts(read: str, codes: list[str]) -> None:
    with started(SETUP + PAIRS) as book:
        report = book.run(READS.strip().replace("READ", read)).result
    assert [finding.code for finding in report.findings] == codes


@pytest.mark.parametrize("labels", ["torch.arange(len(x))", "torch.randperm(len(x))"])
def test_a_loss_of_two_terms_that_ends_at_guessing_is_not_well(labels: str) -> None:
    cell = f"""
%%diagnose
for epoch in range(15):
    for x, _ in loader:
        scores = 8 * F.normalize(a(x), dim=1) @ F.normalize(b(x), dim=1).T
        labels = {labels}
        loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
    setup = f"{LOADED}; a, b = nn.Linear(6, 16), nn.Linear(6, 16)\n"
    setup += "opt = torch.optim.Adam([*a.parameters(), *b.parameters()], 0.01)"
    with started(SETUP + setup) as book:
        report = book.run(cell.strip()).result
    assert report.ok == ("arange" in labels)
    assert report.ok or [one.code for one in report] == ["training/batch-mixing"]
    assert report.ok or any("no better than an answer that ignores the input" in one.what for one in report.symptoms)


def test_what_is_saved_of_batches() -> None:
    whole, saved = torch.zeros(4), SavedBatches()
    saved.add((whole,))
    saved.add((whole,))
    for value in map(whole.add_, (1, 0)):
        saved.add((value,))
    assert saved.batches[0][0] is saved.batches[1][0] and float(saved.batches[1][0].sum()) == 0.0
    assert [float(batch[0].sum()) for batch in saved.batches] == [0.0, 0.0, 4.0, 4.0]
    large, on_card = torch.empty(ACCELERATOR_BYTES // 8, device="meta"), SavedBatches()
    on_card.add((large,))
    assert on_card.full and not on_card.batches  # a loader can be read again
    own = SavedBatches()
    for value in (large, large, torch.empty_like(large), torch.empty_like(large), large):
        own.add((value,), own=True)
    assert own.full and len(own.batches) == 3


def test_a_loop_that_calls_no_model_says_so() -> None:
    with started(SETUP + "W = torch.zeros(6, 4, requires_grad=True); opt = torch.optim.SGD([W], lr=0.1)") as book:
        answer = book.run("%%diagnose\nfor it in range(3):\n    F.cross_entropy(X @ W, Y).backward()\n    opt.step()")
    assert "called no model" in answer.printed


def test_what_the_loop_raises_passes_with_the_findings() -> None:
    def train(callback: object) -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        nbdebug.diagnose(train, progress=False)
    assert isinstance(caught.value.report, nbdebug.Report)  # type: ignore[attr-defined]
    assert DataLoader.__iter__.__module__ == "torch.utils.data.dataloader"


def test_a_pass_that_was_begun_before_is_followed_whole() -> None:
    loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), 8)
    other = DataLoader(TensorDataset(torch.randn(6, 3)), 2)
    found: list[LoopSubject] = []

    def train(callback: object) -> None:
        for _ in other:  # statistics of the data
            pass
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(2):
            for x, y in loader:
                loss = (net(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    start = LoopStart()
    with start.waiting(lambda subject: found.append(subject)):
        train(None)
    assert found[0].part("train_loader") is loader and isinstance(found[0].model, nn.Linear)
    report = nbdebug.diagnose(train, progress=False)
    assert "10 steps in" in str(report.full())


def test_a_criterion_that_the_loop_calls_otherwise_is_not_its_loss() -> None:
    setup = "net, loss_fn = nn.Linear(6, 1), nn.MSELoss(); opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    setup += "train_loader = DataLoader(TensorDataset(X, X.sum(1)), 32)"
    cell = """
%%diagnose
for epoch in range(8):
    for x, y in train_loader:
        opt.zero_grad()
        loss = loss_fn(net(x)FORM, y)
        loss.backward()
        opt.step()
"""
    by_hand = cell.replace("loss_fn(net(x)FORM, y)", "(net(x)FORM - y - GOAL).square().mean()")
    goal = "0.1 * old(x).detach().flatten()"  # of another network, as of a Q-function
    other = by_hand.replace("GOAL", goal).replace("%%diagnose", "%%diagnose\nold = nn.Linear(6, 1)")
    wrong = ["training/wrong-loss-shape"]
    for text, form, codes in ((cell, ".squeeze(1)", []), (cell, "", wrong), (other, "", wrong)):
        with started(SETUP + setup) as book:
            report = book.run(text.strip().replace("FORM", form)).result
        assert [finding.code for finding in report.findings] == codes and (codes or report.ok)


POLICY = (
    "net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)); opt = torch.optim.Adam(net.parameters(), LR)"
)
DRAWN = """
%%diagnose
for it in range(90):
    rows = torch.randn(64, 6)
    actions = torch.distributions.Categorical(logits=net(rows))
    action = actions.sample()
    REWARD = (action == (rows[:, 0] > 0).long()).float()
    loss = -(actions.log_prob(action) * (REWARD - REWARD.mean())).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
FOLLOWED = """
%%diagnose
import copy
target = copy.deepcopy(net)
for it in range(150):
    rows = torch.randint(len(X), (64,))
    with torch.no_grad():
        goal = X[rows, 0] + 0.9 * target(X[rows].roll(1, 1)).max(1).values
    loss = F.mse_loss(net(X[rows]).max(1).values, goal)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 20 == 0:
        target.load_state_dict(net.state_dict())
"""


@pytest.mark.parametrize(
    ("rate", "name", "well"), [(0.02, "reward", True), (1e-8, "reward", False), (0.02, "gain", False)]
)
def test_a_policy_is_judged_by_its_reward(rate: float, name: str, well: bool) -> None:
    with started(SETUP + POLICY.replace("LR", f"{rate}")) as book:
        report = book.run(DRAWN.strip().replace("REWARD", name)).result
    assert not report.findings and report.ok == well and "policy gradient" in str(report.full())
    assert not any("loss rose" in symptom.what for symptom in report.symptoms)


@pytest.mark.parametrize("rate", [0.01, 1e-9])
def test_where_targets_follow_the_model_start_and_end_are_held_against_the_same(rate: float) -> None:
    with started(SETUP + POLICY.replace("LR", f"{rate}")) as book:
        report = book.run(FOLLOWED.strip()).result
    assert report.ok == (rate > 1e-8) and "`target` follows the model" in str(report.full())
    assert [finding.code for finding in report.findings] == ["training/lr-too-low"] * (not report.ok)


BODY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wide = nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        self.body = nn.Sequential(*wide, nn.Linear(32, 8), nn.ReLU())
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.body(x))
net, opt = Net(), None
def fit(net, opt, steps):
    for it in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        opt.step()
TRAINED
net.head.reset_parameters()
FROZEN.requires_grad_(False)
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.003)
"""
TRAINED = "fit(net, torch.optim.Adam(net.parameters(), lr=0.003), 200)"


@pytest.mark.parametrize(
    ("trained", "frozen", "blamed"), [("", "body", "body"), (TRAINED, "head", "head"), (TRAINED, "body", "")]
)
def test_a_frozen_part_with_the_values_of_an_initialization(trained: str, frozen: str, blamed: str) -> None:
    setup = BODY.replace("TRAINED", trained).replace("FROZEN", f"net.{frozen}")
    with started(SETUP + setup) as book:
        report = book.run("%diagnose fit(net, opt, 100)").result
    assert [finding.code for finding in report.findings] == ["training/frozen-parameters"] * bool(blamed)
    assert not blamed or "random initial values" in report.findings[0].title


@pytest.mark.parametrize("sick", [True, False])
@pytest.mark.parametrize("kind", LOOPS)
def test_preflight_takes_a_loop_and_leaves_it_at_its_start(kind: str, sick: bool) -> None:
    loss = "F.cross_entropy(out.softmax(-1), y)" if sick else "F.cross_entropy(out, y)"
    setup, cell = (text.replace("LOSS", loss) for text in LOOPS[kind])
    with started(SETUP + setup) as book:
        net = book.shell.user_ns.get("net", nn.Linear(1, 1))
        before = [p.clone() for p in net.parameters()]
        random = torch.get_rng_state()
        report = book.run(f"%%preflight\n{cell.strip()}").result
        assert all(map(torch.equal, before, net.parameters())) and torch.equal(random, torch.get_rng_state())
    assert [finding.code for finding in report.findings] == ["training/double-softmax"] * sick
    assert sick or report.ok


@pytest.mark.parametrize("kind", ["in a function", "two models", "batches by a function"])
def test_precision_and_fit_take_a_loop_and_leave_it_at_its_start(kind: str) -> None:
    setup, cell = (text.replace("LOSS", "F.cross_entropy(out, y)") for text in LOOPS[kind])
    with started(SETUP + setup) as book:
        net = book.shell.user_ns.get("net", nn.Linear(1, 1))
        before = [p.clone() for p in net.parameters()]
        random = torch.get_rng_state()
        half = book.run(f"%%precision --dtype bfloat16\n{cell.strip()}").result
        fits = book.run(f"%%fit --memory 8GiB\n{cell.strip()}").result
        assert all(map(torch.equal, before, net.parameters())) and torch.equal(random, torch.get_rng_state())
    assert half.ok and half.question == "%%precision --dtype bfloat16 --mode autocast"
    assert fits.ok and fits.question == "%%fit" and "32 rows" in fits.subject


SUMS = """
class Far(nn.Module):
    def forward(self, x):
        return (x * 1e5).sum(-1, keepdim=True) * 1e-5
def main(n):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Far(), nn.Linear(1, 4))
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for x, y in DataLoader(TensorDataset(X, Y), 32):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
"""


def test_precision_and_fit_take_the_call_of_a_loop() -> None:
    with started(SETUP + SUMS) as book:
        half = book.run("%precision --mode cast main(3)").result
        fits = book.run("%fit --memory 1MiB --loop main(3)").result
        assert book.run("%precision 3").error is None  # IPython's own
        named = book.run("%precision --batch (X[:5],Y[:5]) --loss-fn F.cross_entropy main(3)").result
        assert (
            list(named.fp32_modules) == ["2"] and book.run("%fit m (X[:5],Y[:5]) --loop main(3)").error is not None
        )  # there is no m
    assert list(half.fp32_modules) == ["2"] and half.question == "%precision --dtype float16 --mode cast main(3)"
    assert fits.question == "%fit main(3)" and not fits.ok


def test_preflight_takes_a_function_that_trains() -> None:
    steps: list[float] = []

    def train() -> None:
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in torch.randn(20, 16, 3):
            optimizer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())

    assert "training/wrong-output-activation" in [finding.code for finding in nbdebug.preflight(train)]
    assert len(steps) < 10  # stopped when enough was known


FITS = """
    for epoch in range(8):
        for x, y in loader:
            for opt in opts:
                opt.zero_grad()
            loss = F.cross_entropy(head(enc(x)), y)
            loss.backward()
            for opt in opts:
                opt.step()
"""
PARTS = f"{LOADED}; enc, head = nn.Sequential(nn.Linear(6, 24), nn.ReLU()), nn.Linear(24, 4); SGD = torch.optim.SGD"
PARTS += "; both = [*enc.parameters(), *head.parameters()]"
FIT = "def fit():" + FITS
CLASS = """
class Fit:
    def __init__(self, rate):
        self.rate = rate
        self.opts = [torch.optim.SGD(both, lr=self.rate)]
    def run(self):
        opts = self.opts
"""
RATES = {
    "two": ("opts = [SGD(enc.parameters(), lr=1e-6), SGD(head.parameters(), lr=1e-6)]", FIT, "fit()"),
    "a default": ("", "def fit(rate=1e-6):\n    opts = [SGD(both, rate)]" + FITS, "fit()"),
    "an argument": ("", CLASS.strip() + FITS.replace("\n", "\n    "), "Fit(1e-6).run()"),
    "a key": ("settings = {'lr': 1e-6}\nopts = [SGD(both, lr=settings['lr'])]", FIT, "fit()"),
}


@pytest.mark.parametrize("kind", RATES)
def test_a_rate_is_edited_where_it_is_given(kind: str) -> None:
    setup, fit, call = RATES[kind]
    with started(f"{SETUP}{PARTS}\n{setup}") as book:
        book.run(fit)
        [found] = book.run(f"%%diagnose\n{call}").result.findings
    edit = found.fixes[0].edit
    assert found.code == "training/lr-too-low" and found.fixes[0].verified and edit is not None
    assert "1e-6" in edit.old and "1e-6" not in edit.new


CALLED = """
import torch
from torch import nn
X = torch.randn(64, 8); Y = (X @ torch.randn(8, 3)).argmax(1)
model = nn.Linear(8, 3); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = []
def loop(report=None):
    for i in range(0, 64, 8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X[i:i + 8]), Y[i:i + 8])
        loss.backward()
        optimizer.step()
        calls.append(report is not None)
        if report is not None:
            report(i // 8, loss)
def plain(): loop()
def with_options(epochs=1): [loop() for _ in range(epochs)]
def by_name(epochs=1, callback=None): loop(callback)
def first(report): loop(report)
def any_of_them(*args, **kwargs): loop()
"""


@pytest.mark.parametrize("name", ["plain", "with_options", "by_name", "first", "any_of_them"])
def test_a_loop_is_given_a_callback_where_it_takes_one(name: str) -> None:
    with started(CALLED) as book:
        names = book.shell.user_ns
        for ask in (f"%diagnose {name}", f"%preflight {name}"):
            ran = book.run(ask)
            assert ran.error is None and ran.result.verdict == "healthy", ran.shown
        assert nbdebug.diagnose(names[name], progress=False).steps == 8
        assert nbdebug.preflight(names[name]).verdict == "healthy"
        assert set(names["calls"]) == {name in ("by_name", "first")}
