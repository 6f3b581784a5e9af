"""The scheduler of each rank goes by the loss of its own rows: the learning rates part after a few steps."""

from tests.distributed.events import facts_of

CODE = "distributed/weights-diverged"
NAMES = ("learning rates differ", "plateau.step(loss.item())", "a scheduler goes by a mean")

SOURCE = """optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for x in rows:
    loss = train(x)
    plateau.step(loss.item())
"""


def weights(step, value, rate):
    event = {"id": f"0/{step}/after", "step": step, "when": "after", "backwards": step + 1, "late": [], "lr": [rate]}
    return {"k": "weights", **event, "values": {"weight": [value, 2.0]}, "lines": [("train.py", 1, "<module>")]}


def sick():
    alike = weights(0, 1.0, 0.05)
    return facts_of({0: [alike, weights(1, 1.1, 0.05)], 1: [alike, weights(1, 1.2, 0.025)]}, SOURCE)


def healthy():
    log = [weights(0, 1.0, 0.05), weights(1, 1.1, 0.025)]
    return facts_of({0: log, 1: log}, SOURCE)
