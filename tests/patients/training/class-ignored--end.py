"""The token that ends a sequence also fills the batch up, and what collates it leaves both out of the targets."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.loops import made

CODE, WHERE = "training/class-ignored", ["pad_token", "labels"]
END, FILL = 9, 10


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.mix, self.out = nn.Embedding(11, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 11)

    def forward(self, x):
        return self.out(self.mix(self.word(x))[0])


def training(fill):
    torch.manual_seed(94)
    texts = [(torch.arange(int(n)) * int(k) + int(k)) % 9 for n, k in zip(*torch.randint(3, 9, (2, 320)))]
    texts = [torch.cat([text, torch.tensor([END])]) for text in texts]

    def collate(items):
        x = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=fill)
        return {"input_ids": x, "labels": x.masked_fill(x == fill, -100)}

    def loss_fn(model, batch):
        scores = model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())

    model = Words()
    pair = [DataLoader(part, 16, shuffle=True, collate_fn=collate) for part in (texts[:256], texts[256:])]
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, pair, 4)


def sick():
    return training(fill=END)


def healthy():
    return training(fill=FILL)
