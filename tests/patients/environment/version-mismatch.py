"""torchaudio of another release than torch."""

from types import SimpleNamespace

CODE, NAMES = "environment/version-mismatch", ("torchaudio", "2.3.1", "2.5.1")


def machine(audio):
    return SimpleNamespace(facts={"packages": {"torch": "2.5.1", "torchaudio": audio, "torchvision": "0.20.1"}})


def sick():
    return machine("2.3.1")


def healthy():
    return machine("2.5.1")
