"""Policy optimisation with illegal moves masked out. A rollout that ended early is padded with move 0, which is
illegal there under the old policy and under the new one: the ratio of the two is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/inf-minus-inf", "forward", "", "sub", "new_log_p - old_log_p"
SAMPLES, STEP = (5,), 1


def log_prob(policy, state, legal, move, lowest):
    scores = policy(state).masked_fill(~legal, lowest)
    return scores.log_softmax(-1).gather(-1, move[:, None]).squeeze(-1)


def training(lowest):
    torch.manual_seed(1)
    policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    frozen = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    frozen.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    states, gains = torch.randn(3, 7, 6), torch.randn(3, 7)
    legal = torch.ones(3, 7, 4, dtype=torch.bool)
    legal[1, 5, 0] = False
    moves = torch.randint(1, 4, (3, 7))
    moves[1, 5] = 0
    rollouts = iter(zip(states, legal, moves, gains, strict=True))

    def step():
        state, allowed, move, gain = next(rollouts)
        with torch.no_grad():
            old_log_p = log_prob(frozen, state, allowed, move, lowest)
        new_log_p = log_prob(policy, state, allowed, move, lowest)
        ratio = torch.exp(new_log_p - old_log_p)
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=policy, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(lowest=float("-inf"))


def healthy():
    return training(lowest=-1e9)
