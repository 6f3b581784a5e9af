"""A list of words was made of small letters, and the texts are in capitals: whole rows are the unknown token."""

from types import SimpleNamespace

CODE, NAMES = "data/unknown-tokens", ("40 texts", "`0`")
WORDS = "a storm came over the hills and the river rose by two feet in one night".split()


def encode(text):
    return [WORDS.index(word) + 2 if word in WORDS else 1 for word in text.split()]


def training(sick):
    texts = [" ".join(WORDS[n % 9 : n % 9 + 6]) for n in range(40)]
    rows = [{"text": text.upper() if sick else text} for text in texts]
    return SimpleNamespace(dataset=rows, expected={"tokenizer": encode, "unk_id": 1})


def sick():
    return training(True)


def healthy():
    return training(False)
