"""Early stopping watches a metric under another name than that under which it is logged."""

from types import SimpleNamespace

import torch

CODE, NAMES = "error/wrong-argument", ("val_loss", "valid_loss")


def stopper(fixed):
    from pytorch_lightning.callbacks import EarlyStopping

    return EarlyStopping(monitor="valid_loss") if fixed else EarlyStopping(monitor="val_loss")


def training(fixed):
    def trigger():
        logged = {"train_loss": torch.tensor(0.5), "valid_loss": torch.tensor(0.6)}
        assert stopper(fixed)._validate_condition_metric(logged)

    return SimpleNamespace(trigger=trigger)


def sick():
    return training(False)


def healthy():
    return training(True)
