"""The healthy parts of a random program, as text: ordinary layers, and decoys that absorb a non-finite value.

A block is what its `__init__` says and what its `forward` does. It takes `x` (rows, time, width), `side` (rows,
columns), of which column `s` is its own, and `pad` (rows, time; True where there is something), and leaves `y` in the
shape of `x`. A non-finite row of `x` stays non-finite in `y`, so that a fault further up is never absorbed by chance.

A decoy needs `s` to hold a few bad values (`bad`) in every batch; what it makes of them never matters to the loss, the
gradients or the parameters.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Block:
    name: str
    text: str
    init: str = ""
    top: str = ""
    bad: float | None = None
    plain: bool = False
    """plain: needs no module, so that it may stand in a program that has none, or after the model."""


LAYERS = [
    Block("linear", "y = x + torch.tanh(self.lin(x))", "self.lin = nn.Linear(WIDTH, WIDTH)"),
    Block(
        "mlp",
        "y = x + self.mlp(x)",
        "self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, WIDTH))",
    ),
    Block(
        "conv",
        "y = x + self.out(F.relu(self.norm(self.conv(x[:, None])))).squeeze(1)",
        "self.conv, self.norm, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1)",
    ),
    Block("layer norm", "y = x + self.norm(x)", "self.norm = nn.LayerNorm(WIDTH)"),
    Block(
        "batch norm", "y = x + self.norm(x.reshape(-1, x.size(-1))).view(x.shape)", "self.norm = nn.BatchNorm1d(WIDTH)"
    ),
    Block(
        "attention",
        """
q, k, v = self.qkv(x).chunk(3, -1)
scores = q @ k.transpose(1, 2) / WIDTH ** 0.5
later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
scores = scores.masked_fill(later, float("-inf")).masked_fill(~pad[:, None, :], float("-inf"))
y = x + self.out(torch.softmax(scores, -1) @ v)""",
        "self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)",
    ),
    Block(
        "multihead",
        "mixed, _ = self.attend(x, x, x, key_padding_mask=~pad)\ny = x + mixed",
        "self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)",
    ),
    Block(
        "fused attention",
        """
q, k, v = self.qkv(x).chunk(3, -1)
y = x + F.scaled_dot_product_attention(q, k, v, attn_mask=pad[:, None, :].expand(-1, x.size(1), -1))""",
        "self.qkv = nn.Linear(WIDTH, 3 * WIDTH)",
    ),
    Block("gru", "states, _ = self.gru(x)\ny = x + states", "self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)"),
    Block("gate", "y = x + torch.sigmoid(self.gate(x)) * x", "self.gate = nn.Linear(WIDTH, WIDTH)"),
    Block(
        "einsum",
        "y = x + torch.einsum('btd,de->bte', x, self.mix) * 0.1",
        "self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)",
    ),
    Block(
        "scatter",
        """
order = torch.arange(x.size(1)).flip(0)[None, :, None].expand(x.shape)
y = x + 0.1 * torch.zeros_like(x).scatter_add(1, order, x)""",
        plain=True,
    ),
    Block("index", "y = x + 0.1 * x[:, torch.arange(x.size(1)).roll(1)]\ny[:, 0] += 0.1 * x[:, 0]", plain=True),
    Block(
        "split and cat",
        "left, right = x.split([2, x.size(-1) - 2], -1)\ny = x + 0.1 * torch.cat([left.flip(-1), right.sin()], -1)",
        plain=True,
    ),
    Block(
        "unbind and stack",
        "moments = [0.5 * m + 0.1 for m in x.unbind(1)]\ny = x + torch.stack(moments, 1)",
        plain=True,
    ),
    Block("in place", "y = x * 0.9\ny += 0.1 * x\ny.mul_(1.01).add_(0.01)", plain=True),
    Block(
        "fourier",
        """
waves = torch.fft.rfft(x.to(side.dtype), dim=1)
low = torch.cat([waves[:, :1], waves[:, 1:] * 0.5], 1)
y = x + torch.fft.irfft(low, n=x.size(1), dim=1)""",
        plain=True,
    ),
    Block(
        "complex",
        "turned = torch.view_as_complex(x.to(side.dtype).view(*x.shape[:2], -1, 2).contiguous()) * 1j\n"
        "y = x + 0.1 * torch.view_as_real(turned).reshape(x.shape)",
        plain=True,
    ),
    Block(
        "own function",
        "y = x + Scale.apply(x, 0.3)",
        top="""
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None
""",
        plain=True,
    ),
    Block("lookup", "y = x + self.table(pad.long())", "self.table = nn.Embedding(2, WIDTH)"),
    Block(
        "norms at zero",  # eps: torch's own 1e-12 is zero in half precision
        """
flat = x * 0.0
y = x + torch.linalg.vector_norm(flat, dim=-1, keepdim=True) + F.normalize(flat, dim=-1, eps=1e-3)
y = y + flat.std(-1, keepdim=True) * 0.1""",
        plain=True,
    ),
    Block("guarded log", "y = x + 0.1 * torch.log(F.relu(x).clamp(min=1e-3)) + 0.0 * x", plain=True),
    Block(
        "guarded where",
        "safe = torch.where(x > 0, x, torch.ones_like(x))\n"
        "y = x + torch.where(x > 0, safe.sqrt(), torch.zeros_like(x))",
        plain=True,
    ),
]

DECOYS = [
    Block(
        "masked softmax",
        """
scores = x.mean(-1).masked_fill(~pad, float("-inf"))
y = x * (1 + torch.softmax(scores, -1)[..., None])""",
        plain=True,
    ),
    Block(
        "log of a mask",
        "scores = x.mean(-1) + torch.log(pad.to(x.dtype))\ny = x * (1 + torch.softmax(scores, -1)[..., None])",
        plain=True,
    ),
    Block(
        "where drops nan",
        "logs = torch.log(s)\ny = x + 0.1 * torch.where(s > 0, logs, torch.zeros_like(logs))[:, None, None]",
        bad=-1.0,
        plain=True,
    ),
    Block(
        "where drops inf",
        "ratio = 1.0 / s\ny = x + 0.1 * torch.where(s == 0, torch.zeros_like(ratio), ratio)[:, None, None]",
        bad=0.0,
        plain=True,
    ),
    Block(
        "nan_to_num", "ratio = (s - s) / (s * 2)\ny = x + torch.nan_to_num(ratio)[:, None, None]", bad=0.0, plain=True
    ),
    Block(
        "nan_to_num of the detached",
        "ratio = x.detach().mean((1, 2)) / s\n"
        "y = x + 0.1 * torch.nan_to_num(ratio, posinf=1.0, neginf=-1.0)[:, None, None]",
        bad=0.0,
        plain=True,
    ),
    Block("clamp of inf", "huge = torch.exp(s)\ny = x + 0.1 * huge.clamp(max=5.0)[:, None, None]", bad=5e3, plain=True),
    Block(
        "minimum of inf",
        "huge = s * s\ny = x + 0.1 * torch.minimum(huge, torch.ones_like(huge))[:, None, None]",
        bad=math.inf,
        plain=True,
    ),
    Block("tanh of inf", "y = x + torch.tanh(1.0 / s)[:, None, None]", bad=0.0, plain=True),
    Block("metric kept", "with torch.no_grad():\n    self.seen = (x.mean((1, 2)) / s).mean()\ny = x * 1.0", bad=0.0),
    Block("metric with a graph", "spare = torch.log(x.abs().mean((1, 2)) * s)\ny = x * 1.0", bad=0.0, plain=True),
    Block(
        "boolean indexing", "logs = torch.log(s)\ny = x + 0.1 * logs[torch.isfinite(logs)].sum()", bad=0.0, plain=True
    ),
    Block(
        "comparison",
        "ratio = x.detach().mean((1, 2)) / s\ny = x + (ratio > 0.5).to(x.dtype)[:, None, None]",
        bad=0.0,
        plain=True,
    ),
    Block(
        "max over minus infinity",
        "best = x.masked_fill(~pad[..., None], float('-inf')).amax(1, keepdim=True)\ny = x + 0.1 * best",
        plain=True,
    ),
    Block(
        "min over infinity",
        "least = x.masked_fill(~pad[..., None], float('inf')).min(1, keepdim=True).values\ny = x + 0.1 * least",
        plain=True,
    ),
    Block(
        "logsumexp",
        "soft = torch.logsumexp(x.masked_fill(~pad[..., None], float('-inf')), 1, keepdim=True)\ny = x + 0.1 * soft",
        plain=True,
    ),
    Block(
        "running logaddexp",
        """
total = torch.full_like(x[:, 0], float("-inf"))
for moment in x.unbind(1):
    total = torch.logaddexp(total, moment)
y = x + 0.1 * total[:, None]""",
        plain=True,
    ),
    Block(
        "running maximum",
        """
best = torch.full_like(x[:, 0], float("-inf"))
for moment in x.unbind(1):
    best = torch.maximum(best, moment)
y = x + 0.1 * best[:, None]""",
        plain=True,
    ),
    Block(
        "exp of minus infinity",
        "raised = torch.exp(torch.tanh(x).masked_fill(~pad[..., None], -float('inf')))\ny = x + 0.1 * raised",
        plain=True,
    ),
    Block(
        "top two",
        """
floor = x.topk(2, -1).values[..., -1:]
kept = torch.softmax(x.masked_fill(x < floor, float("-inf")), -1)
y = x + kept""",
        plain=True,
    ),
    Block(
        "overwritten nan",
        "y = torch.full_like(x, float('nan'))\ny[:, 0] = x[:, 0]\ny[:, 1:] = x[:, 1:] * 1.1",
        plain=True,
    ),
    Block("empty, then filled", "y = torch.empty_like(x)\ny.copy_(x)\ny = y + 0.1 * x", plain=True),
    Block(
        "nanmean",
        "marked = torch.where(s > 0, s, torch.full_like(s, float('nan')))\ny = x + 0.1 * marked.nanmean()",
        bad=-1.0,
        plain=True,
    ),
    Block(
        "overflow that is cut",
        "share = torch.sigmoid(-torch.exp(s))\ny = x * (1 + share[:, None, None])",
        bad=5e3,
        plain=True,
    ),
    Block("division by infinity", "far = torch.exp(s)\ny = x + 0.1 / (1 + far)[:, None, None]", bad=5e3, plain=True),
    Block(
        "where drops log of the negative",
        """
logs = torch.log(x.abs().mean((1, 2)) * s)
y = x + 0.1 * torch.where(s > 0, logs, torch.zeros_like(logs))[:, None, None]""",
        bad=-1.0,
        plain=True,
    ),
    Block(
        "root behind a relu",
        """
gate = torch.relu(torch.sigmoid(x) + s[:, None, None])
y = x + 0.1 * torch.sqrt(gate)""",
        bad=-3e3,
        plain=True,
    ),
    Block(
        "argmax over bad scores",
        "worst = torch.nan_to_num(torch.log(s), nan=-9.0, neginf=-9.0).argmax()\ny = x + 0.1 * x[worst].detach()",
        bad=0.0,
        plain=True,
    ),
]

HEADS = "self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)"
MASKED = [
    Block(
        "multihead, causal float mask",
        """
later = torch.full((x.size(1), x.size(1)), float("-inf"), dtype=x.dtype).triu(1)
mixed, _ = self.attend(x, x, x, attn_mask=later)
y = x + mixed""",
        HEADS,
    ),
    Block(
        "multihead, causal bool mask and padding",
        """
later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
mixed, _ = self.attend(x, x, x, key_padding_mask=~pad, attn_mask=later, average_attn_weights=False)
y = x + mixed""",
        HEADS,
    ),
    Block(
        "multihead without weights, rows masked",  # the fused kernel gives zeros there
        """
empty = ~(pad & (s > 0)[:, None])
mixed, _ = self.attend(x, x, x, key_padding_mask=empty, need_weights=False)
y = x + mixed""",
        HEADS,
        bad=0.0,
    ),
    Block(
        "encoder layer",
        "y = self.layer(x, src_key_padding_mask=~pad)",
        "self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)",
    ),
]
"""Attention masks as torch's own layers take them; drawn apart, as the rare faults are."""
NOT_CAST = frozenset({"fourier"})
"""The blocks that need more than half precision."""
