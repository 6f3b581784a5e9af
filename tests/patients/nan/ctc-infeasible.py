"""Speech recognition with a convolution that keeps every fourth frame. One hurried utterance of the second batch has
more letters than frames left: no alignment exists and the loss is inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/ctc-infeasible", "forward", "", "ctc_loss", "ctc(log_probs, letters"
SAMPLES, STEP = (2,), 1


class Recogniser(nn.Module):
    def __init__(self, letters=12):
        super().__init__()
        self.stride = nn.Conv1d(10, 20, 4, stride=4)
        self.letter = nn.Linear(20, letters)

    def forward(self, sound):
        h = torch.relu(self.stride(sound.transpose(1, 2))).permute(2, 0, 1)
        return self.letter(h).log_softmax(-1)


def training(zero_infinity):
    torch.manual_seed(53)
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ctc = nn.CTCLoss(blank=0, zero_infinity=zero_infinity)
    sounds = torch.randn(3, 4, 32, 10)
    texts = (torch.arange(7) % 11 + 1).expand(3, 4, 7)
    frames = torch.full((3, 4), 32)
    frames[1, 2] = 20
    batches = iter(zip(sounds, frames, texts, strict=True))

    def step():
        sound, length, letters = next(batches)
        log_probs = model(sound)
        loss = ctc(log_probs, letters, length // 4, torch.full((4,), 7))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(zero_infinity=False)


def healthy():
    return training(zero_infinity=True)
