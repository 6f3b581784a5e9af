"""The critic's step comes before the actor's backward and changes the weights that it needs."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/inplace-modified", "names": ["critic_opt", "step"]}


class Agent:
    def __init__(self, fixed):
        mk = lambda i, o: nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))
        self.actor, self.critic = mk(3, 2), mk(5, 1)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.fixed = fixed

    def learn(self, s, a, r):
        critic_loss = nn.functional.mse_loss(self.critic(torch.cat([s, a], 1)), r)
        actor_loss = -self.critic(torch.cat([s, self.actor(s)], 1)).mean()
        if self.fixed:
            self.actor_opt.zero_grad()
            actor_loss.backward()
            self.actor_opt.step()
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()
        if not self.fixed:
            self.actor_opt.zero_grad()
            actor_loss.backward()
            self.actor_opt.step()


def build(fixed=False):
    torch.manual_seed(0)
    agent = Agent(fixed)
    batch = (torch.rand(6, 3), torch.rand(6, 2), torch.rand(6, 1))
    return SimpleNamespace(trigger=lambda: [agent.learn(*batch) for _ in range(2)])
