"""Reports written out by hand, such as the chapters give: what the views' tests and the gallery are fed with."""

from __future__ import annotations

import math
from typing import Any

from nbdebug.report import Finding, Fix, Link, Plot, Report, RuledOut, Table, Where
from nbdebug.tools.guard.record.files import StepLine, last_steps


def counts(first: int, *numbers: int) -> dict[str, int]:
    """How many elements have the exponents `first`, `first + 1`, …"""
    return {str(exponent): n for exponent, n in enumerate(numbers, first)}


def forward_log() -> Report:
    """Two rows of a batch of eight: relu makes a zero, log makes -inf of it, zero times that is NaN."""
    line, relu, times = (
        Where(
            step=3,
            phase="forward",
            module=module,
            module_type=kind,
            op=op,
            file="<cell>",
            line=number,
            cell="In [7]",
            text=text,
            samples=(2, 5),
        )
        for module, kind, op, number, text in (
            ("head.ent", "Entropy", "log", 4, "        logp = torch.log(p)"),
            ("head.act", "ReLU", "relu", 3, "        p = self.act(self.proj(x))"),
            ("head.ent", "Entropy", "mul", 5, "        return -(p * logp).sum(-1)"),
        )
    )
    finding = Finding(
        "nan/log-of-nonpositive",
        "Rows 2 and 5 take the logarithm of zero: `head.ent` (In [7], line 4).",
        line,
        evidence={
            "operand": "p",
            "dtype": "float32",
            "shape": (8, 512),
            "smallest": 0.0,
            "largest": 6.1384,
            "zeros": 5,
            "negative values": 0,
            "at fault": 5,
            "by row": {
                "row 2": {"zeros": 3, "smallest": 0.0, "largest": 4.2},
                "row 5": {"zeros": 2, "smallest": 0.0, "largest": 6.1384},
            },
        },
        fixes=_log_fixes(),
        chain=(
            Link("`relu` set 5 elements to zero.", relu, {"zeros": 5, "elements": 4096}),
            Link("`log` of these zeros is -inf.", line),
            Link("Zero times -inf is NaN, and the sum passes it on to the loss.", times),
        ),
    )
    return Report(
        "nan_trace(train_step)",
        (finding,),
        ruled_out=(
            RuledOut("The batch was bad when it came in", "all 4,096 values of `x` are finite"),
            RuledOut("A weight was bad before the step", "14 of 14 parameters and 3 of 3 buffers are finite"),
            RuledOut("The training diverged", "the losses before were 0.52, 0.44, 0.39"),
        ),
        unchecked=("The optimizer: the step stopped at the loss.",),
        notes=(
            "A -inf in `attn.mask` is intended: softmax absorbs it.",
            "The step was run 6 times: 4 times to find the rows, twice to try the fixes.",
        ),
        subject="model `net` (Classifier), optimizer `opt` (AdamW)",
        losses=(0.52, 0.44, 0.39),
        plots=_log_plots(),
    )


def _log_fixes() -> tuple[Fix, ...]:
    return (
        Fix(
            "Keep the input of the logarithm above zero:",
            "logp = torch.log(p.clamp_min(1e-8))",
            True,
            {"loss": 0.3117, "gradients": "finite", "the other 6 rows": "unchanged"},
        ),
        Fix(
            "Or leave the zeros out, as their share of the entropy is zero:",
            "logp = torch.log(p)\nreturn -torch.where(p > 0, p * logp, 0.0).sum(-1)",
            False,
            {"loss": 0.3117, "gradients": "NaN in head.proj.weight"},
        ),
        Fix(
            "Or compute the entropy from the scores:",
            "torch.distributions.Categorical(logits=scores).entropy()",
            None,
            {"reason": "it needs the scores, which this step does not keep"},
        ),
    )


def _log_plots() -> tuple[Plot, ...]:
    modules = (
        ("", "Classifier"),
        ("embed", "Embedding"),
        ("norm", "LayerNorm"),
        ("head", "Head"),
        ("head.proj", "Linear"),
        ("head.act", "ReLU"),
        ("head.ent", "Entropy"),
        ("out", "Linear"),
    )
    sizes = counts(-14, 1, 0, 2, 6, 11, 24, 48, 90, 171, 340, 612, 905, 880, 610, 280, 96, 15)
    histogram = {
        "dtype": "float32",
        "operand": "input of log",
        "counts": sizes,
        "zeros": 5,
        "nans": 0,
        "infs": 0,
        "neg_infs": 0,
        "bad_counts": {},
    }
    tree = [
        {"name": name, "type": kind, "born": name == "head.ent", "path": name in ("", "head", "head.ent")}
        for name, kind in modules
    ]
    return Plot("histogram", histogram), Plot("tree", {"modules": tree})


def backward_sqrt() -> Report:
    """The forward is finite; the square root's derivative at zero is infinite, and zero times that is NaN."""
    line = Where(
        step=0,
        phase="backward",
        module="dist",
        module_type="PairDistance",
        op="sqrt",
        line=31,
        file="models/contrast.py",
        text="    return ((a - b) ** 2).sum(-1).sqrt()",
        samples=(5,),
    )
    finding = Finding(
        "nan/sqrt-grad-at-zero",
        "Row 5 has distance zero, where the square root has no finite derivative: `dist` (contrast.py, line 31).",
        line,
        evidence={
            "operand": "input of sqrt",
            "smallest": 0.0,
            "largest": 41.7,
            "zeros": 1,
            "gradient that came in": 0.0,
            "gradient that went out": float("nan"),
        },
        fixes=(
            Fix(
                "Move the square root away from zero:",
                "return ((a - b) ** 2).sum(-1).add(1e-12).sqrt()",
                True,
                {"loss": 1.2046, "gradients": "finite", "the other 15 rows": "unchanged"},
            ),
            Fix(
                "Or let torch do it; its norm has gradient 0 at 0:",
                "return torch.linalg.vector_norm(a - b, dim=-1)",
                True,
                {"loss": 1.2046, "gradients": "finite"},
            ),
        ),
        chain=(
            Link("The two views of row 5 are the same, so their squared distance is exactly 0.", line),
            Link("In backward, 1 / (2·sqrt(0)) is inf; the incoming gradient of 0 times inf is NaN.", line),
            Link(
                "All 6 gradients of the encoder are NaN.",
                Where(step=0, phase="backward", module="encoder.0", module_type="Linear"),
                {"first": "encoder.0.weight"},
            ),
        ),
    )
    other = Finding(
        "nan/grad-overflow",
        "A gradient is too large for float32: `encoder.2` (contrast.py, line 12).",
        Where(
            phase="backward",
            module="encoder.2",
            op="mm",
            file="models/contrast.py",
            line=12,
            text="        return self.net(x)",
        ),
        fixes=(Fix("Clip the gradients.", "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)", False),),
    )
    sizes = {
        "dtype": "float32",
        "operand": "input of sqrt",
        "counts": counts(-5, 1, 0, 0, 1, 1, 2, 3, 3, 2, 1, 1),
        "zeros": 1,
    }
    return Report(
        "nan_trace(step)",
        (finding, other),
        ruled_out=(RuledOut("The loss is not finite", "loss 1.2046"),),
        subject="model `net` (Siamese)",
        plots=(Plot("histogram", sizes), Plot("tree", {"modules": _deep_tree()})),
    )


def _deep_tree() -> list[dict[str, Any]]:
    """Twenty-four blocks of three modules each, nearly all on the path."""
    tree: list[dict[str, Any]] = [
        {"name": "", "type": "Siamese", "path": True},
        {"name": "encoder", "type": "Sequential", "path": True},
    ]
    for i in range(24):
        tree += [
            {"name": f"encoder.{i}", "type": "Block", "path": True},
            {"name": f"encoder.{i}.norm", "type": "LayerNorm", "path": True},
            {"name": f"encoder.{i}.mlp", "type": "Linear", "path": True},
            {"name": f"encoder.{i}.drop", "type": "Dropout", "path": False},
        ]
    return [
        *tree,
        {"name": "dist", "type": "PairDistance", "born": True, "path": True},
        {"name": "probe", "type": "Linear"},
    ]


def bad_parameter() -> Report:
    """Weights that were bad before the first step; no line of the user's is at fault."""
    name = "encoder.layers.11.attention.self.query"
    where = Where(step=0, phase="parameter", module=name, module_type="Linear")
    finding = Finding(
        "nan/parameter-nonfinite",
        f"`{name}.weight` was NaN before the first step.",
        where,
        evidence={
            "parameter": f"{name}.weight",
            "dtype": "float16",
            "shape": (768, 768),
            "nan": 12,
            "inf": 3,
            "elements": 589824,
        },
        chain=(
            Link("12 of 589,824 weights are NaN and 3 are inf, as loaded.", where),
            Link(
                "Every row that passes through the layer becomes NaN.",
                Where(
                    module=name, op="linear", file="modeling.py", line=212, text="        mixed = self.query(hidden)"
                ),
            ),
        ),
        fixes=(
            Fix(
                "Load the weights again, from another copy:",
                'net.load_state_dict(torch.load("copy.pt", weights_only=True))',
                None,
                {"reason": "nbdebug does not touch your files"},
            ),
        ),
    )
    sizes = counts(
        -24,
        40,
        70,
        150,
        310,
        640,
        1200,
        2300,
        4700,
        9300,
        18500,
        36000,
        68000,
        101000,
        119493,
        110000,
        71000,
        31000,
        9800,
        3800,
        1500,
        540,
        160,
        60,
        25,
        9,
        2,
    )
    tree: list[dict[str, Any]] = [{"name": "", "type": "Encoder", "path": True}]
    on_path = ("", ".attention", ".attention.self", ".attention.self.query", ".output")
    for i in range(12):
        tree += [
            {
                "name": f"encoder.layers.{i}{part}",
                "type": kind,
                "path": i == 11 and part in on_path,
                "born": f"encoder.layers.{i}{part}" == name,
            }
            for part, kind in (
                ("", "Layer"),
                (".attention", "Attention"),
                (".attention.self", "SelfAttention"),
                (".attention.self.query", "Linear"),
                (".attention.self.key", "Linear"),
                (".attention.self.value", "Linear"),
                (".output", "Linear"),
            )
        ]
    return Report(
        "nan_trace(step, model=net)",
        (finding,),
        subject="model `net` (Encoder)",
        unchecked=("Batch rows: all rows pass through this weight.",),
        plots=(
            Plot(
                "histogram",
                {
                    "dtype": "float16",
                    "operand": "query.weight",
                    "counts": sizes,
                    "zeros": 210,
                    "nans": 12,
                    "infs": 3,
                },
            ),
            Plot("tree", {"modules": tree}),
        ),
    )


def overflow() -> Report:
    """exp of large scores leaves float32; the values at fault are finite and large."""
    where = Where(
        step=41,
        phase="forward",
        module="",
        module_type="Policy",
        op="exp",
        file="train.py",
        line=88,
        text="ratio = torch.exp(new_logp - old_logp)",
        samples=tuple(range(16, 64)),
    )
    finding = Finding(
        "nan/overflow",
        "Rows 16–63 overflow in exp: its input reaches 341, float32 ends at 88.7 (train.py, line 88).",
        where,
        {"largest input": 341.2, "largest that is safe": 88.72, "at fault": 48},
        chain=(Link("`exp` of 341.2 is inf in float32.", where),),
    )
    sizes = counts(-8, 3, 9, 20, 41, 77, 160, 210, 180, 120, 88, 61, 40, 22, 12, 31, 14, 3)
    return Report(
        "nan_trace(step)",
        (finding,),
        plots=(
            Plot(
                "histogram",
                {
                    "dtype": "float32",
                    "operand": "input of exp",
                    "counts": sizes,
                    "zeros": 2,
                    "bad_zeros": 0,
                    "bad_counts": counts(6, 31, 14, 3),
                },
            ),
        ),
    )


def silent() -> Report:
    return Report(
        "nan_trace(step, max_steps=3)",
        notes=("GradScaler skipped step 0 because a scaled gradient was inf: normal.",),
        ruled_out=(
            RuledOut("A loss that is not finite", "3 of 3 losses are finite"),
            RuledOut("A gradient that is not finite", "42 of 42 gradients are finite"),
            RuledOut("A parameter that is not finite", "14 of 14 parameters are finite"),
        ),
        unchecked=("The compiled model: the step was traced in eager.",),
        subject="model `net` (Classifier), optimizer `opt` (AdamW)",
        losses=(2.3026, 2.1911, 2.0518),
    )


def recorded() -> Report:
    """A record of two runs on disk that ended in a step that was not finite."""
    found = forward_log()
    steps = range(0, 1200, 3)
    losses = [[n, 2.3 * 0.997**n + 0.3 + 0.04 * math.sin(n)] for n in steps]
    norms = [[n, 1.2 + 0.5 * math.sin(n / 9) + 60 * (n == 900)] for n in steps]
    course = {
        "losses": losses,
        "norms": norms,
        "marks": {"tripped": [1199], "above": [900], "scaler": [0, 1, 2]},
        "counts": {"tripped": 1, "above": 1, "scaler": 3},
        "runs": [700],
        "steps": 1200,
        "joined": True,
    }
    return Report(
        "open_record(run.nbdebug)",
        found.findings,
        subject="model `net`, optimizer `opt` (AdamW)",
        notes=("1,200 steps in 2 runs, 14 minutes.",),
        losses=found.losses,
        plots=(Plot("run", course), *found.plots),
    )


def recorded_well() -> Report:
    """A record in which nothing happened, of a run that has just begun."""
    course = {
        "losses": [[0, 2.4], [1, 2.1], [2, 2.2], [3, 1.9]],
        "norms": [[0, 1.0], [1, 1.0], [2, 1.0], [3, 1.0]],
        "marks": {},
        "steps": 4,
    }
    return Report(
        "open_record(run.nbdebug)",
        notes=("4 steps in 2 seconds.",),
        subject="model `net`",
        steps=4,
        losses=(2.4, 1.9),
        plots=(Plot("run", course),),
    )


def watched_well() -> Report:
    """A guard that had nothing to stop."""
    lines = [StepLine(n, 0.32, 1.5) for n in (9998, 9999)]
    return Report(
        "guard(model, optimizer)",
        notes=("212 of 10,000 steps (2.1%) were clipped to a norm of 1.",),
        subject="model `net` and optimizer `opt`",
        headline="10,000 steps watched, none stopped.",
        steps=10000,
        losses=(4.2, 0.31),
        tables=last_steps(lines),
    )


def stopped() -> Report:
    """A guard that has stopped a step and knows why."""
    found = forward_log()
    told = (
        (408, 0.52, 1.1, "ok"),
        (409, 0.44, 7.5, "ok"),
        (410, 0.3912, 1e5, "above"),
        (411, math.nan, None, "tripped"),
    )
    lines = [StepLine(n, loss, norm, n in (409, 410), outcome) for n, loss, norm, outcome in told]
    return Report(
        "guard(model, optimizer)",
        found.findings,
        found.ruled_out,
        notes=("Still watching.",),
        subject=found.subject,
        headline="1 of 412 steps stopped: step 411.",
        steps=412,
        losses=found.losses,
        tables=last_steps(lines),
        plots=found.plots,
    )


def diagnosed() -> Report:
    """A run that blew up, and what became of it with the fix."""
    blown = [[n, round(2.3 * 1.12**n, 4) if n < 40 else None] for n in range(60)]
    cured = [[n, round(2.3 * 0.95**n + 0.02 * math.sin(n) ** 2, 4)] for n in range(60)]
    checkups = [{"step": n, "training": 2.3 * 1.1**n, "validation": 2.2 * 1.11**n} for n in range(0, 40, 5)]
    finding = Finding(
        "training/lr-too-high",
        "lr=200 is too high: the loss goes from 2.3 to 191",
        Where(step=7, phase="optimizer"),
        {"where": ["lr"]},
        (
            Fix(
                "Lower the learning rate.",
                "lr=0.2",
                True,
                {"loss as it is": "not finite", "loss with the fix": 0.11, "steps": 60},
            ),
        ),
    )
    return Report(
        "diagnose(train)",
        (finding,),
        subject="a model of type Sequential, trained by SGD",
        steps=60,
        plots=(Plot("losses", {"curves": {"as it is": blown, "with the fix": cured}, "checkups": checkups}),),
    )


EVIL = '<script>alert("x")</script>'


def hostile() -> Report:
    """Names, messages, paths and lines that try to be HTML, terminal codes or endless."""
    where = Where(
        step=0,
        phase="forward",
        module=f"net.{EVIL}",
        module_type="A<img src=x onerror=alert(1)>",
        op="div",
        file=f"models/{EVIL}.py",
        line=1,
        samples=(0,),
        text=f'x = y / z  # {EVIL} & "$a$" \x1b[31mred\x1b[0m \u202egnp',
    )
    finding = Finding(
        "nan/div-by-zero",
        f"Row 0 divides by zero: `net.{EVIL}` ({EVIL}.py, line 1) \x1b[1m\udc80",
        where,
        evidence={
            EVIL: EVIL,
            "list": [EVIL] * 50,
            "number": 10**400,
            "none": None,
            "nested": {EVIL: {EVIL: f"`{EVIL}`"}},
            "words": "supercalifragilistic" * 40,
        },
        chain=(Link(f"{EVIL} was zero", where, {EVIL: EVIL}),),
        fixes=(Fix(f"Not {EVIL}", f"x = y / (z + 1e-8)  # {EVIL}", None, {"reason": EVIL}),),
    )
    return Report(
        f"nan_trace({EVIL})",
        (finding,),
        (RuledOut(EVIL, EVIL),),
        (EVIL,),
        (EVIL,),
        subject=EVIL,
        headline=EVIL * 9,
        tables=(Table(EVIL, (EVIL, "a"), [(EVIL, 10**400), (None, EVIL)], EVIL),),
        plots=(
            Plot("histogram", {"dtype": EVIL, "operand": EVIL, "counts": {"0": 3}, "zeros": 1}),
            Plot(
                "run",
                {
                    "losses": [[0, 10**400], [EVIL, 1], [1, -1e308], [2**80, 5e-324], 3],
                    "runs": EVIL,
                    "steps": EVIL,
                    "norms": [[0, 5e-324], [1, 1e308]],
                    "counts": {"tripped": EVIL},
                    "marks": {"tripped": [0, EVIL], EVIL: [1]},
                },
            ),
            Plot(
                "losses",
                {
                    "curves": {EVIL: [[0, 10**400], [1, None], [EVIL, 2]], "b": EVIL},
                    "curves of": EVIL * 3,
                    "checkups": [
                        {"step": 0, "training": 1.0},
                        EVIL,
                        {"step": 1, "training": 2.0, "validation": EVIL},
                    ],
                },
            ),
            Plot("tree", {"modules": [{"name": EVIL, "type": "$x$" + EVIL, "born": True, "path": True}]}),
        ),
    )


ALL = {
    make.__name__: make
    for make in (
        forward_log,
        backward_sqrt,
        bad_parameter,
        overflow,
        silent,
        recorded,
        recorded_well,
        watched_well,
        stopped,
        diagnosed,
        hostile,
    )
}
