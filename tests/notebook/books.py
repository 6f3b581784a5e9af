"""Notebooks as people write them: each with one hazard, beside the same notebook as it should have been."""

from __future__ import annotations

from typing import NamedTuple


class Book(NamedTuple):
    """cells: sources in the order in which they ran; code: the cause; cell: from 0, the one that brings it in; names:
    what the report must name; twin: the repaired cells."""

    cells: list[str]
    twin: list[str]
    code: str
    cell: int
    names: list[str]


SETUP = """import copy, torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randn(32, 1)"""
MODEL = "net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))"
OPT = "opt = torch.optim.SGD(net.parameters(), lr=0.1)"
TRAIN = """for _ in range(3):
    opt.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    opt.step()"""
FIT = "def fit(model, optimizer, steps=3):\n    for _ in range(steps):\n        optimizer.zero_grad(set_to_none=True)\n" \
      "        (model(x) - y).square().mean().backward()\n        optimizer.step()\n    optimizer.zero_grad()"


def file(name: str, text: str) -> str:
    """A cell that writes a module into the notebook's folder."""
    return f"import pathlib\npathlib.Path({name!r}).write_text({text!r})\nNone"


DICE = "def dice(a, b):\n    return {} * (a * b).sum() / (a.sum() + b.sum())\n"
NET = "from torch import nn\nclass Head(nn.Module):\n    def __init__(self):\n        super().__init__()\n" \
      "        self.fc = nn.Linear(4, 1)\n    def forward(self, x):\n        return self.fc(x){}\n"
HOOK = "record = []\ndef note(module, inputs, output):\n    record.append(output.mean().item())"
NET_CLASS = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 1)\n" \
            "    def forward(self, x):\n        return self.fc(x){}"
OLD_STYLE = "class Base(nn.Module):\n    def __init__(self):\n        super(Base, self).__init__()\n" \
            "        self.fc = nn.Linear(4, 1)\n    def train(self, mode=True):\n        return super(Base, self).train(mode)"
LOADER = "loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collate)"
COLLATE = "def collate(rows):\n    return torch.stack([r[0] for r in rows]){}"
RUN = "for batch in loader:\n    total = batch.sum()"
SCHEDULER = "sched = torch.optim.lr_scheduler.StepLR(opt, 1)"
TRAINER = "class Trainer:\n    def __init__(self, model):\n        self.model = model\n    def evaluate(self):\n" \
          "        return self.model(x).mean()"

BOOKS: dict[str, Book] = {
    "file edited, not imported again": Book(
        [SETUP, file("losses_a.py", DICE.format(1)), "import losses_a", "first = losses_a.dice(x, x)",
         file("losses_a.py", DICE.format(2)), "second = losses_a.dice(x, x)"],
        [SETUP, file("losses_a.py", DICE.format(1)), "import losses_a", "first = losses_a.dice(x, x)",
         file("losses_a.py", DICE.format(2)), "import importlib\nimportlib.reload(losses_a)\nNone",
         "second = losses_a.dice(x, x)"], "error/stale-import", 4, ["losses_a", "dice", "reload"]),
    "reloaded, but the name is of before": Book(
        [SETUP, file("losses_b.py", DICE.format(1)), "import losses_b\nfrom losses_b import dice",
         file("losses_b.py", DICE.format(20)), "import importlib\nimportlib.reload(losses_b)", "dice(x, x)"],
        [SETUP, file("losses_b.py", DICE.format(1)), "import losses_b\nfrom losses_b import dice",
         file("losses_b.py", DICE.format(20)), "import importlib\nimportlib.reload(losses_b)\nfrom losses_b import dice",
         "dice(x, x)"], "error/stale-import", 4, ["losses_b", "dice"]),
    "class in a file, imported again": Book(
        [SETUP, file("heads_a.py", NET.format("")), "from heads_a import Head\nnet = Head()",
         file("heads_a.py", NET.format(".tanh()")), "from heads_a import Head\nnet = Head()", "out = net(x)"],
        [SETUP, file("heads_a.py", NET.format("")), "from heads_a import Head\nnet = Head()",
         file("heads_a.py", NET.format(".tanh()")),
         "import importlib, heads_a\nimportlib.reload(heads_a)\nfrom heads_a import Head\nnet = Head()", "out = net(x)"],
        "error/stale-import", 4, ["heads_a", "Head.forward", "reload"]),
    "class reloaded, model of before": Book(
        [SETUP, file("heads_b.py", NET.format("")), "import importlib, heads_b\nfrom heads_b import Head\nnet = Head()",
         file("heads_b.py", NET.format(".tanh()")), "importlib.reload(heads_b)\nfrom heads_b import Head",
         "out = net(x)"],
        [SETUP, file("heads_b.py", NET.format("")), "import importlib, heads_b\nfrom heads_b import Head\nnet = Head()",
         file("heads_b.py", NET.format(".tanh()")), "importlib.reload(heads_b)\nfrom heads_b import Head\nnet = Head()",
         "out = net(x)"], "notebook/class-redefined", 4, ["net", "Head"]),
    "model cell run again": Book(
        [SETUP, MODEL, OPT, TRAIN, MODEL, TRAIN], [SETUP, MODEL, OPT, TRAIN, MODEL, OPT, TRAIN],
        "training/parameters-not-in-optimizer", 4, ["net", "opt"]),
    "model made anew, trained in a function that clears gradients": Book(
        [SETUP, FIT, MODEL, OPT, "fit(net, opt)", f"%%time\n{MODEL}", "fit(net, opt)"],
        [SETUP, FIT, MODEL, OPT, "fit(net, opt)", f"%%time\n{MODEL}\n{OPT}", "fit(net, opt)"],
        "training/parameters-not-in-optimizer", 5, ["net", "opt"]),
    "head replaced after the optimizer was made": Book(
        [SETUP, MODEL, OPT, "net[2] = nn.Linear(8, 1)", TRAIN], [SETUP, MODEL, "net[2] = nn.Linear(8, 1)", OPT, TRAIN],
        "training/parameters-not-in-optimizer", 3, ["net", "opt"]),
    "a function replaces the head": Book(
        [SETUP, NET_CLASS.format(""), "def new_head(m):\n    m.fc = nn.Linear(4, 1)", "net = Net()", OPT, TRAIN,
         "new_head(net)", "x.mean()", TRAIN],
        [SETUP, NET_CLASS.format(""), "def new_head(m):\n    m.fc = nn.Linear(4, 1)", "net = Net()", OPT, TRAIN,
         f"new_head(net)\n{OPT}", "x.mean()", TRAIN], "training/parameters-not-in-optimizer", 6, ["net", "opt", "net.fc.weight"]),
    "unfrozen after the optimizer was made": Book(
        [SETUP, MODEL, "for p in net[0].parameters():\n    p.requires_grad = False",
         "opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)", TRAIN,
         "for p in net.parameters():\n    p.requires_grad_(True)", TRAIN],
        [SETUP, MODEL, "for p in net[0].parameters():\n    p.requires_grad = False",
         "opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)", TRAIN,
         "for p in net.parameters():\n    p.requires_grad_(True)\n" + OPT, TRAIN],
        "training/parameters-not-in-optimizer", 5, ["net", "opt"]),
    "a copy takes the model's name": Book(
        [SETUP, MODEL, OPT, TRAIN, "net = copy.deepcopy(net)", TRAIN],
        [SETUP, MODEL, OPT, TRAIN, "best = copy.deepcopy(net)", TRAIN],
        "training/parameters-not-in-optimizer", 4, ["net", "opt"]),
    "hook function, registered in a cell that ran again": Book(
        [SETUP, MODEL, HOOK, "net[0].register_forward_hook(note);", "net(x);", "net[0].register_forward_hook(note);",
         "net(x);"],
        [SETUP, MODEL, HOOK, "handle = net[0].register_forward_hook(note)", "net(x);",
         "handle.remove()\nhandle = net[0].register_forward_hook(note)", "net(x);"],
        "notebook/hooks-registered-twice", 5, ["net", "register_forward_hook", "note"]),
    "hooks from a helper": Book(
        [SETUP, MODEL, "acts = {}\ndef spy(model):\n    for name, part in model.named_modules():\n"
         "        def keep(m, i, o, name=name):\n            acts[name] = o.detach()\n"
         "        part.register_forward_hook(keep)", "spy(net)", "net(x);", "spy(net)\nnet(x);"],
        [SETUP, MODEL, "acts = {}\ndef spy(model):\n    for name, part in model.named_modules():\n"
         "        def keep(m, i, o, name=name):\n            acts[name] = o.detach()\n"
         "        part.register_forward_hook(keep)", "spy(net)", "net(x);", MODEL, "spy(net)\nnet(x);"],
        "notebook/hooks-registered-twice", 5, ["net", "register_forward_hook"]),
    "probe object made again": Book(
        [SETUP, MODEL, "class Probe:\n    def __init__(self, m):\n        self.seen = []\n"
         "        m.register_full_backward_hook(self.keep)\n    def keep(self, m, i, o):\n        self.seen.append(1)",
         "probe = Probe(net)", "net(x).sum().backward()", "probe = Probe(net)", "net(x).sum().backward()"],
        [SETUP, MODEL, "class Probe:\n    def __init__(self, m):\n        self.seen = []\n"
         "        m.register_full_backward_hook(self.keep)\n    def keep(self, m, i, o):\n        self.seen.append(1)",
         "probe = Probe(net)", "net(x).sum().backward()", "other = Probe(net)", "net(x).sum().backward()"],
        "notebook/hooks-registered-twice", 5, ["net", "register_full_backward_hook", "keep"]),
    "gradient hook on parameters": Book(
        [SETUP, MODEL, "for p in net.parameters():\n    p.register_hook(lambda g: 0.5 * g)", "net(x).sum().backward()",
         "for p in net.parameters():\n    p.register_hook(lambda g: 0.5 * g)"],
        [SETUP, MODEL, "for p in net.parameters():\n    p.register_hook(lambda g: 0.5 * g)", "net(x).sum().backward()",
         "for p in net.parameters():\n    p.register_hook(lambda g: g.clamp(-1, 1))"],
        "notebook/hooks-registered-twice", 4, ["net", "register_hook"]),
    "step hook of the optimizer": Book(
        [SETUP, MODEL, OPT, "steps = []\ndef count(optimizer, args, kwargs):\n    steps.append(1)",
         "opt.register_step_post_hook(count)\nNone", TRAIN, "opt.register_step_post_hook(count)\nNone", TRAIN],
        [SETUP, MODEL, OPT, "steps = []\ndef count(optimizer, args, kwargs):\n    steps.append(1)",
         "opt.register_step_post_hook(count)\nNone", TRAIN, f"{OPT}\nopt.register_step_post_hook(count)\nNone", TRAIN],
        "notebook/hooks-registered-twice", 6, ["opt", "register_step_post_hook", "count"]),
    "a view was shown": Book(
        [SETUP, "big = torch.zeros(2048, 1024)", "big[:2]", "del big", "torch.zeros(2).sum()"],
        [SETUP, "big = torch.zeros(2048, 1024)", "big[:2].clone()", "del big", "torch.zeros(2).sum()"],
        "memory/cell-output-held", 2, ["Out", "big"]),
    "a dict of tensors was shown": Book(
        [SETUP, "batch = {'image': torch.zeros(4096, 1024)}\nbatch", "batch = None\nimport gc; gc.collect();"],
        [SETUP, "batch = {'image': torch.zeros(4096, 1024)}\nbatch;", "batch = None\nimport gc; gc.collect();"],
        "memory/cell-output-held", 1, ["Out", "batch"]),
    "the failed call keeps its variables": Book(
        [SETUP, "def wide(n):\n    h = torch.zeros(n, 1024)\n    return h @ torch.zeros(3, 3)", "wide(8192)",
         "import gc\ngc.collect();"],
        [SETUP, "def wide(n):\n    h = torch.zeros(n, 1024)\n    return h @ torch.zeros(3, 3)", "wide(8)",
         "import gc\ngc.collect();"], "memory/traceback-held", 2, ["traceback"]),
    "class changed, model of before": Book(
        [SETUP, NET_CLASS.format(""), "net = Net()", "a = net(x)", NET_CLASS.format(".relu()"), "b = net(x)"],
        [SETUP, NET_CLASS.format(""), "net = Net()", "a = net(x)", NET_CLASS.format(".relu()"), "net = Net()",
         "b = net(x)"], "notebook/class-redefined", 4, ["net", "Net", "forward"]),
    "the same class again, and isinstance": Book(
        [SETUP, NET_CLASS.format(""), "nets = [Net(), Net()]", NET_CLASS.format(""),
         "known = [n for n in nets if isinstance(n, Net)]"],
        [SETUP, NET_CLASS.format(""), "nets = [Net(), Net()]", NET_CLASS.format(""), "nets = [Net(), Net()]",
         "known = [n for n in nets if isinstance(n, Net)]"], "notebook/class-redefined", 3, ["nets", "Net"]),
    "super with a name": Book(
        [SETUP, OLD_STYLE, "net = Base()", "net.train()", OLD_STYLE, "net.train()"],
        [SETUP, OLD_STYLE, "net = Base()", "net.train()", OLD_STYLE, "net = Base()", "net.train()"],
        "notebook/class-redefined", 4, ["net", "Base", "super"]),
    "the parent class again, the child not": Book(
        [SETUP, OLD_STYLE, "class Child(Base):\n    pass", "net = Child()", OLD_STYLE, "net = Child()"],
        [SETUP, OLD_STYLE, "class Child(Base):\n    pass", "net = Child()", OLD_STYLE, "class Child(Base):\n    pass",
         "net = Child()"], "notebook/class-redefined", 4, ["Child", "Base"]),
    "pickle refuses": Book(
        [SETUP, NET_CLASS.format(""), "net = Net()", NET_CLASS.format(""), "import io\ntorch.save(net, io.BytesIO())"],
        [SETUP, NET_CLASS.format(""), "net = Net()", NET_CLASS.format(""), "net = Net()",
         "import io\ntorch.save(net, io.BytesIO())"], "notebook/class-redefined", 3, ["net", "Net"]),
    "members of an Enum": Book(
        ["from enum import Enum", "class Phase(Enum):\n    TRAIN = 1\n    TEST = 2", "phase = Phase.TRAIN",
         "class Phase(Enum):\n    TRAIN = 1\n    TEST = 2", "training = phase == Phase.TRAIN"],
        ["from enum import Enum", "class Phase(Enum):\n    TRAIN = 1\n    TEST = 2", "phase = Phase.TRAIN",
         "class Phase(Enum):\n    TRAIN = 1\n    TEST = 2", "phase = Phase.TRAIN", "training = phase == Phase.TRAIN"],
        "notebook/class-redefined", 3, ["phase", "Phase"]),
    "the scheduler of an optimizer of before": Book(
        [SETUP, MODEL, OPT, SCHEDULER, TRAIN, OPT, f"{TRAIN}\nsched.step()"],
        [SETUP, MODEL, OPT, SCHEDULER, TRAIN, OPT, SCHEDULER, f"{TRAIN}\nsched.step()"],
        "notebook/stale-reference", 5, ["sched", "opt"]),
    "the loader's collate function of before": Book(
        [SETUP, "data = torch.utils.data.TensorDataset(x)", COLLATE.format(""), LOADER, RUN, COLLATE.format(" / 2"), RUN],
        [SETUP, "data = torch.utils.data.TensorDataset(x)", COLLATE.format(""), LOADER, RUN, COLLATE.format(" / 2"),
         LOADER, RUN], "notebook/stale-reference", 5, ["loader", "collate"]),
    "the loader's data set of before": Book(
        [SETUP, "data = torch.utils.data.TensorDataset(x)\ndef collate(rows):\n    return rows[0][0]", LOADER, RUN,
         "data = torch.utils.data.TensorDataset((x - x.mean()) / x.std())", RUN],
        [SETUP, "data = torch.utils.data.TensorDataset(x)\ndef collate(rows):\n    return rows[0][0]", LOADER, RUN,
         "data = torch.utils.data.TensorDataset((x - x.mean()) / x.std())", LOADER, RUN],
        "notebook/stale-reference", 4, ["loader", "data"]),
    "the trainer's model of before": Book(
        [SETUP, TRAINER, MODEL, "trainer = Trainer(net)", "trainer.evaluate();", MODEL, "trainer.evaluate();"],
        [SETUP, TRAINER, MODEL, "trainer = Trainer(net)", "trainer.evaluate();", MODEL, "trainer = Trainer(net)",
         "trainer.evaluate();"], "notebook/stale-reference", 5, ["trainer", "net"]),
    "a name that a later cell defines": Book(
        [SETUP, "scaled = scale * x", "scale = 2.0"], [SETUP, "scaled = scale * x", "scale = 2.0", "scaled = scale * x"],
        "notebook/cells-out-of-order", 1, ["scale"]),
}
