"""The training around a random model: sizes, data, loss, optimizer, precision; and the text of `build()`."""

from __future__ import annotations

import dataclasses
import random

from tests.nan.assemble import Writer, indent

OPTIMIZERS = [
    "torch.optim.SGD({p}, lr=1e-3)",
    "torch.optim.SGD({p}, lr=1e-3, momentum=0.9, foreach=True)",
    "torch.optim.Adam({p}, lr=1e-3)",
    "torch.optim.Adam({p}, lr=1e-3, foreach=True)",
    "torch.optim.AdamW({p}, lr=1e-3, foreach=False)",
    "torch.optim.AdamW({p}, lr=1e-3, foreach=True)",
    "torch.optim.RMSprop({p}, lr=1e-3)",
]
CLOSURES = [
    "torch.optim.LBFGS({p}, lr=1e-3, max_iter=3)",
    "torch.optim.LBFGS({p}, lr=1e-3, max_iter=2, history_size=3)",
    "torch.optim.Adam({p}, lr=1e-3)",
]


@dataclasses.dataclass
class Setup:
    """How a program trains. bad_step and bad_batch: when the fault comes; columns: how many `side` has; closure: the
    optimizer that is given the step as a closure, if one is; half: autocast to float16, not to bfloat16; cast: the
    model is cast by `.half()`; masked: a block of it has attention masks."""

    seed: int
    batch: int
    time: int
    features: int
    width: int
    classes: int
    tokens: bool
    style: str
    output: str
    loss: str
    optimizer: str
    bad_step: int
    accumulate: int
    micro: int
    autocast: bool
    double: bool
    stacked: bool
    clip: bool
    metric: bool
    returned: str
    columns: int = 1
    closure: str = ""
    half: bool = False
    cast: bool = False
    masked: bool = False
    real_target: bool = False
    scored: bool = False
    model: bool = True
    calls: list[str] = dataclasses.field(default_factory=list)

    @property
    def bad_batch(self) -> int:
        return self.bad_step * self.accumulate + self.micro

    @property
    def steps(self) -> int:
        return max(3, self.bad_step + 1)

    @property
    def about(self) -> str:
        names = ("tokens", "autocast", "half", "cast", "masked", "double", "stacked", "clip", "closure")
        flags = [name for name in names if getattr(self, name)]
        sizes = f"batch {self.batch}, time {self.time}, width {self.width}"
        return f"{sizes}, {self.loss}, accumulate {self.accumulate} {' '.join(flags)}"

    def root(self, writer: Writer, body: str, own: str) -> str:
        """The root module; `own` is a fault in its own forward."""
        stem = f"nn.Embedding(11, {self.width})" if self.tokens else f"nn.Linear({self.features}, {self.width})"
        pooled = {
            "mse": "x.mean(1)",
            "huber": "x.mean(1)",
            "bce": "x.mean(1)",
            "ce": "(x * pad[..., None]).sum(1) / pad.sum(1, keepdim=True)",
            "tokens": "x",
        }["tokens" if self.scored else self.loss]
        made = {
            "tensor": "logits",
            "tuple": "logits, x.detach()",
            "dict": '{"logits": logits, "spare": torch.log(x - x)}',
            "dataclass": "Output(logits, x)",
        }[self.output]
        first = own.replace("WIDTH", str(self.width)) if own else "x = self.stem(x)"
        given, unpack = writer.given, writer.unpack
        if self.style == "packed":
            given, unpack = "pad", f"side, x = x[:, 0, {self.features} :], x[..., : {self.features}]\n"
        return (
            f"class Root(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.stem = {stem}\n"
            f"        self.body = {body}()\n        self.head = nn.Linear({self.width}, {self.classes})\n\n"
            f"    def forward(self, x, {given}):\n"
            + indent(
                f"{unpack}{first}\nx = self.body(x, {writer.given})\nlogits = self.head({pooled})\nreturn {made}",
                8,
            )
            + "\n\n\n"
        )


def draw_setup(rng: random.Random) -> Setup:
    """Sizes and habits. The batch has a size of its own in most programs, not in all."""
    batch, time = rng.sample([2, 3, 5, 7, 9] if rng.random() < 0.75 else [4, 4, 5, 6], 2)
    width, accumulate = rng.choice([4, 6, 8]), rng.choice([1, 1, 1, 2])
    precision = rng.random()
    made = Setup(
        seed=rng.randrange(10**6),
        batch=batch,
        time=max(time, 3),
        features=rng.choice([10, 12, width]),
        width=width,
        classes=rng.choice([3, 4, 11]),
        tokens=rng.random() < 0.2,
        style=rng.choice(["plain", "plain", "dict", "tuple", "dataclass", "packed"]),
        output=rng.choice(["tensor", "tensor", "tuple", "dict", "dataclass"]),
        loss=rng.choice(["mse", "huber", "bce", "ce", "tokens"]),
        optimizer=rng.choice(OPTIMIZERS),
        bad_step=rng.randrange(3),
        accumulate=accumulate,
        micro=rng.randrange(accumulate),
        autocast=precision < 0.15,
        double=precision > 0.88,
        stacked=rng.random() < 0.5,
        clip=rng.random() < 0.2,
        metric=rng.random() < 0.3,
        returned=rng.choice(["loss", "loss", "loss", "loss.detach()", "loss.item()"]),
    )
    made.tokens = made.tokens and made.style != "packed"
    more = random.Random(made.seed)
    if more.random() < 0.2:
        made.bad_step = more.randrange(3, 8)
    made.half = made.autocast and more.random() < 0.5
    if made.accumulate == 1 and not made.clip and more.random() < 0.2:
        made.closure = made.optimizer = more.choice(CLOSURES)
    return made


def build_text(setup: Setup, writer: Writer, decoys: list[str], spoil: list[str], outside: str = "") -> str:
    """`build()`: model, data, optimizer and the step."""
    lines = [f"torch.manual_seed({setup.seed})"]
    if setup.model:
        lines.append("model = Root()" + (".double()" if setup.double else ".half()" if setup.cast else ""))
        parameters = "model.parameters()"
    else:
        dtype = ", dtype=torch.float64" if setup.double else ""
        lines.append(f"weights = [(torch.randn({setup.features}, {setup.width}{dtype}) * 0.4).requires_grad_()]")
        lines.append(
            f"weights += [(torch.randn({setup.width}, {setup.width}{dtype}) * 0.4).requires_grad_() "
            f"for _ in range({len(setup.calls)})]"
        )
        lines.append("model = None")
        parameters = "weights"
    lines += _data(setup)
    lines += decoys
    lines += spoil
    if setup.style == "packed":
        lines.append(f"x = [torch.cat([a, b[:, None].expand(-1, {setup.time}, -1)], -1) for a, b in zip(x, side)]")
        lines += ["x = torch.stack(x)"] if setup.stacked else []
    lines.append(f"optimizer = {setup.optimizer.format(p=parameters)}")
    lines.append("batches = iter(zip(x, side, pad, target))\n")
    lines.append("def step():\n" + indent(_step(setup, writer, outside), 4) + "\n")
    lines.append(
        f"return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps={setup.steps}"
        + (")" if setup.model else ", tensors=weights)")
    )
    return "\n\ndef build():\n" + indent("\n".join(lines), 4) + "\n"


def _data(setup: Setup) -> list[str]:
    count, b, t = setup.accumulate * setup.steps + 1, setup.batch, setup.time
    dtype = ", dtype=torch.float64" if setup.double else ", dtype=torch.float16" if setup.cast else ""
    x = (
        f"torch.randint(0, 11, ({count}, {b}, {t}))"
        if setup.tokens and setup.model
        else f"torch.randn({count}, {b}, {t}, {setup.features}{dtype})"
    )
    out = f"{count}, {b}, {setup.classes}" if setup.model else f"{count}, {b}"
    target = {
        "mse": f"torch.randn({out}{dtype})",
        "huber": f"torch.randn({out}{dtype})",
        "bce": f"torch.rand({out}{dtype}).round()",
        "ce": f"torch.randint(0, {setup.classes}, ({count}, {b}))",
        "tokens": f"torch.randint(0, {setup.classes}, ({count}, {b}, {t}))",
    }
    kind = setup.loss if setup.model and not setup.scored else "mse"
    out_text = target[kind] if setup.model and not setup.scored else f"torch.randn({count}, {b}{dtype})"
    lines = [
        f"x = {x}",
        f"side = torch.rand({count}, {b}, {setup.columns}{dtype}) + 0.5",
        f"pad = torch.arange({t}) < torch.randint(1, {t} + 1, ({count}, {b}, 1))",
        f"target = {out_text}",
    ]
    if kind == "tokens":
        lines.append("target = target.masked_fill(~pad, -100)")
    if not setup.stacked:
        lines.append("x, side, pad, target = ([each.clone() for each in group] for group in (x, side, pad, target))")
    return lines


def _step(setup: Setup, writer: Writer, outside: str) -> str:
    lines = ["optimizer.zero_grad()"]
    inner = ["x, side, pad, target = next(batches)"]
    forward = _forward(setup, writer, outside)
    if setup.metric:
        forward.insert(-1, "with torch.no_grad():\n    accuracy = pad[:0].float().mean()")
    if setup.autocast:
        dtype = "float16" if setup.half else "bfloat16"
        forward = [f'with torch.autocast("cpu", dtype=torch.{dtype}):\n' + indent("\n".join(forward), 4)]
    if setup.closure:
        body = "\n".join(["x, side, pad, target = batch", *lines, *forward, "loss.backward()", "return loss"])
        lines = ["batch = next(batches)", "def closure():\n" + indent(body, 4), "loss = optimizer.step(closure)"]
        return "\n".join([*lines, f"return {setup.returned}"])
    inner += forward
    if setup.accumulate > 1:
        body = "\n".join([*inner, "(loss / 2).backward()", "summed = summed + loss.detach()"])
        lines += ["summed = 0.0", "for _ in range(2):\n" + indent(body, 4), "loss = summed"]
    else:
        lines += [*inner, "loss.backward()"]
    if setup.clip:
        lines.append(
            "torch.nn.utils.clip_grad_norm_(" + ("model.parameters()" if setup.model else "weights") + ", 1.0)"
        )
    return "\n".join([*lines, "optimizer.step()", f"return {setup.returned}"])


def _forward(setup: Setup, writer: Writer, outside: str) -> list[str]:
    if not setup.model:
        return ["x = x @ weights[0]", *setup.calls, "score = x.mean((1, 2))", "loss = F.mse_loss(score, target)"]
    out = {"tensor": "out = {}", "tuple": "out, _ = {}", "dict": 'out = {}["logits"]', "dataclass": "out = {}.logits"}[
        setup.output
    ]
    lines = [out.format(f"model(x, {writer.packed})")]
    if outside:
        return [*lines, outside, "score = score.mean((1, 2))", "loss = F.mse_loss(score, target)"]
    return [
        *lines,
        {
            "mse": "loss = F.mse_loss(out, target)",
            "huber": "loss = F.smooth_l1_loss(out, target)",
            "bce": "loss = F.binary_cross_entropy_with_logits(out, target)",
            "ce": "loss = F.cross_entropy(out, target)",
            "tokens": "loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-100)",
        }[setup.loss],
    ]
