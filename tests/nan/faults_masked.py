"""Forward faults around infinities that were meant, and around nothing to reduce."""

from __future__ import annotations

from tests.nan.faults import forward

# --- forward: infinities that were meant, and what went wrong with them ---
MASKED = "kept = pad & (s > 0)[:, None]\nscores = h.mean(-1).masked_fill(~kept, -math.inf)\n"
forward(
    "masked softmax",
    "fully-masked-softmax",
    "softmax",
    (0.0, -1.0),
    MASKED + "! weights = torch.softmax(scores, -1)\ny = h + weights[..., None]",
    "",
    "weights",
)
forward(
    "masked log_softmax",
    "fully-masked-softmax",
    "log_softmax",
    0.0,
    MASKED + "! weights = F.log_softmax(scores, -1)\ny = h + weights.exp()[..., None]",
    "",
    "weights",
)
forward(
    "masked attention",
    "fully-masked-softmax",
    "softmax",
    0.0,
    """
kept = pad & (s > 0)[:, None]
scores = (h @ h.transpose(1, 2)) / h.size(-1) ** 0.5
scores = scores + torch.zeros_like(scores).masked_fill(~kept[:, None, :], -math.inf)
! weights = scores.softmax(-1)
y = h + weights.to(h.dtype) @ h""",
    "",
    "weights",
)
forward(
    "masked softmax module",
    "fully-masked-softmax",
    "softmax",
    0.0,
    MASKED + "! weights = self.soft(scores)\ny = h + weights[..., None]",
    "",
    "weights",
    init="self.soft = nn.Softmax(-1)",
    child="soft",
)
forward(
    "masked multihead",
    "fully-masked-softmax",
    "softmax",
    0.0,
    """
empty = ~(pad & (s > 0)[:, None])
! mixed, _ = self.attend(h, h, h, key_padding_mask=empty)
y = h + mixed""",
    "",
    "mixed",
    init="self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)",
    child="attend",
)
HEADS = "self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)"
CLOSED = "closed = (s <= 0).repeat_interleave(2)[:, None, None].expand(-1, h.size(1), h.size(1))\n"
forward(
    "multihead, bool mask",
    "fully-masked-softmax",
    "softmax",
    (0.0, -1.0),
    CLOSED + "! mixed, _ = self.attend(h, h, h, attn_mask=closed)\ny = h + mixed",
    "",
    "mixed",
    init=HEADS,
    child="attend",
    rare=True,
)
forward(
    "multihead, float mask",
    "fully-masked-softmax",
    "softmax",
    0.0,
    CLOSED
    + "added = torch.zeros(closed.shape, dtype=h.dtype).masked_fill(closed, -math.inf)\n"
    + "! mixed, _ = self.attend(h, h, h, attn_mask=added, average_attn_weights=False)\ny = h + mixed",
    "",
    "mixed",
    init=HEADS,
    child="attend",
    rare=True,
)
forward(
    "multihead, causal mask and left padding",
    "fully-masked-softmax",
    "softmax",
    0.0,
    """
left = (s <= 0)[:, None] & (torch.arange(h.size(1)) < 1)
later = torch.ones(h.size(1), h.size(1), dtype=torch.bool).triu(1)
! mixed, _ = self.attend(h, h, h, key_padding_mask=left, attn_mask=later)
y = h + mixed""",
    "",
    "mixed",
    init=HEADS,
    child="attend",
    rare=True,
)
forward(
    "hand-made stable softmax",
    "inf-minus-inf",
    "sub",
    0.0,
    MASKED + "peak = scores.max(-1, keepdim=True).values\n! lowered = scores - peak\n"
    "raised = lowered.exp()\ny = h + raised[..., None]",
    "",
    "lowered",
)
forward(
    "entropy with a mask",
    "zero-times-inf",
    "mul",
    0.0,
    """
legal = torch.ones(h.shape, dtype=torch.bool)
legal[..., 0] = (s > 0)[:, None]
logs = h.masked_fill(~legal, -math.inf).log_softmax(-1)
! terms = logs.exp() * logs
y = h - 0.1 * terms.sum(-1, keepdim=True)""",
    "",
    "terms",
)
forward(
    "mask times minus infinity",
    "zero-times-inf",
    "mul",
    0.0,
    """
closed = (s > 0)[:, None, None].to(h.dtype)
scores = h.masked_fill(closed == 0, -math.inf)
! opened = scores * closed
y = h + 0.1 * opened""",
    "",
    "opened",
)

# --- forward: nothing to reduce ---
forward(
    "mean of none",
    "empty-reduction",
    "mean",
    0.0,
    "chosen = h[s > 0.0]\n! middle = chosen.mean()\ny = h - 0.1 * middle",
    "chosen",
    "middle",
    rows="all",
)
forward(
    "std of one",
    "empty-reduction",
    "std",
    0.0,
    "chosen = h.mean((1, 2))[s < 0.25]\nif not len(chosen): chosen = h.flatten()\n"
    "! spread = chosen.std()\ny = h / (1 + spread)",
    "chosen",
    "spread",
    rows="one",
)
forward(
    "var of one",
    "empty-reduction",
    "var",
    0.0,
    "chosen = h.mean((1, 2))[s < 0.25]\nif not len(chosen): chosen = h.flatten()\n"
    "! spread = torch.var(chosen)\ny = h / (1 + spread)",
    "chosen",
    "spread",
    rows="one",
)
forward(
    "means by row",
    "empty-reduction",
    "mean",
    0.0,
    """
middles = []
for row, size in zip(h, (s > 0).long() * 2):
    ! middles.append(row[:size].mean(0))
y = h + 0.1 * torch.stack(middles)[:, None]""",
    "",
    "middles",
    rows="loop",
)
