"""Notebooks that look untidy and are well: nothing is said of them."""

from __future__ import annotations

from tests.notebook.books import COLLATE, DICE, FIT, MODEL, NET, NET_CLASS, OPT, SETUP, TRAIN, TRAINER, file

EMA = "class Ema:\n    def __init__(self, model):\n        self.shadow = copy.deepcopy(model)\n" \
      "    def update(self, model):\n        for a, b in zip(self.shadow.parameters(), model.parameters()):\n" \
      "            a.data.lerp_(b.data, 0.1)"
LORA = "class Lora(nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n        self.inner = inner\n" \
       "        self.inner.requires_grad_(False)\n        self.a = nn.Parameter(torch.zeros(4, 1))\n" \
       "    def forward(self, x):\n        return self.inner(x) + x @ self.a"
SPY = "def spy(store):\n    def hook(module, inputs, output):\n        store.append(output.mean().item())\n    return hook"
DATA = "def make(seed):\n    torch.manual_seed(seed)\n    return torch.utils.data.TensorDataset(torch.randn(16, 4))"

HEALTHY: dict[str, list[str]] = {
    "all cells twice": [SETUP, MODEL, OPT, TRAIN, SETUP, MODEL, OPT, TRAIN],
    "a model of the same name, loaded to look at": [
        SETUP, FIT, MODEL, OPT, "fit(net, opt)", "weights = net.state_dict()", f"{MODEL}\nnet.load_state_dict(weights)\n"
        "net.eval()", "score = (net(x) - y).abs().mean().item()", "kept = opt.state_dict()"],
    "two models, two optimizers, one made anew": [
        SETUP, "gen = nn.Linear(4, 4)\ndis = nn.Linear(4, 1)", "opt_g = torch.optim.Adam(gen.parameters())\n"
        "opt_d = torch.optim.Adam(dis.parameters())", "dis(gen(x)).mean().backward()\nopt_g.step()\nopt_d.step()",
        "dis = nn.Linear(4, 1)\nopt_d = torch.optim.Adam(dis.parameters())", "dis(gen(x)).mean().backward()\nopt_d.step()"],
    "an average of the weights beside the model": [SETUP, EMA, MODEL, "ema = Ema(net)", OPT, TRAIN, "ema.update(net)",
                                                   TRAIN, "ema.update(net)", "best = copy.deepcopy(net)", TRAIN],
    "frozen parts, and the optimizer has the rest": [
        SETUP, LORA, "base = nn.Linear(4, 1)", "net = Lora(base)",
        "opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])", TRAIN, "net = Lora(base)\n"
        "opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])", TRAIN],
    "the optimizer has the head alone": [SETUP, MODEL, "opt = torch.optim.SGD(net[2].parameters(), lr=0.1)", TRAIN, TRAIN],
    "a second stage with another optimizer": [
        SETUP, MODEL, OPT, "sched = torch.optim.lr_scheduler.StepLR(opt, 1)", f"{TRAIN}\nsched.step()",
        "opt = torch.optim.Adam(net.parameters(), lr=1e-3)", TRAIN, "rates = sched.get_last_lr()"],
    "folds in a loop": [SETUP, FIT, "nets = []\nfor seed in range(3):\n    torch.manual_seed(seed)\n    net = nn.Linear(4, 1)\n"
                        "    opt = torch.optim.SGD(net.parameters(), lr=0.1)\n    fit(net, opt)\n    nets.append(net)",
                        "scores = [float((n(x) - y).abs().mean()) for n in nets]"],
    "one name for two data sets": [
        SETUP, DATA, "data = make(0)\ntrain_loader = torch.utils.data.DataLoader(data, batch_size=4)",
        "data = make(1)\nval_loader = torch.utils.data.DataLoader(data, batch_size=4)",
        "for (batch,) in train_loader:\n    pass\nfor (batch,) in val_loader:\n    pass"],
    "hooks of one function over different lists": [
        SETUP, MODEL, SPY, "first, last = [], []\nnet[0].register_forward_hook(spy(first));",
        "net[0].register_forward_hook(spy(last));", "net(x).mean().item()"],
    "hooks with handles": [SETUP, MODEL, SPY, "seen = []\nhandles = [p.register_forward_hook(spy(seen)) for p in net]",
                           "net(x).mean().item()", "for handle in handles:\n    handle.remove()\n"
                           "seen = []\nhandles = [p.register_forward_hook(spy(seen)) for p in net]"],
    "class and objects again": [SETUP, NET_CLASS.format(""), "net = Net()", OPT, TRAIN, NET_CLASS.format(".tanh()"),
                                "net = Net()", OPT, TRAIN, "isinstance(net, Net)"],
    "an older model, kept to compare": [SETUP, NET_CLASS.format(""), "baseline = Net()", NET_CLASS.format(".tanh()"),
                                        "net = Net()", "gap = (net(x) - baseline(x)).abs().max().item()"],
    "the same class again, and nothing asks for it": [SETUP, NET_CLASS.format(""), "net = Net()", NET_CLASS.format(""),
                                                      OPT, TRAIN],
    "small results shown, the model too": [SETUP, MODEL, "net", "x", "x[:3]", "del x", "import gc\ngc.collect()"],
    "a large result, still in use": [SETUP, "big = torch.zeros(4096, 2048)\nbig", "big.sum().item()"],
    "a file that was touched and described": [
        SETUP, file("losses_c.py", DICE.format(1)), "from losses_c import dice",
        file("losses_c.py", '"""Losses."""\n\n' + DICE.format(1).replace("    return", '    """Dice."""\n    # the overlap\n'
                                                                         "    return")), "dice(x, x).item()"],
    "a file that was reloaded as it was": [
        SETUP, file("losses_d.py", DICE.format(1)), "import losses_d\nfrom losses_d import dice",
        "import importlib\nimportlib.reload(losses_d)", "dice(x, x).item()"],
    "autoreload": ["%load_ext autoreload\n%autoreload 2", SETUP, file("heads_c.py", NET.format("")),
                   "from heads_c import Head\nnet = Head()", file("heads_c.py", NET.format(".tanh() * 2")),
                   "out = net(x)", "x.mean().item()"],
    "a file with state of its own": [
        SETUP, file("state_a.py", "calls = 0\nscale = 1.0\ndef call():\n    global calls\n    calls += 1\n"),
        "import state_a\nstate_a.call()\nstate_a.call()", "state_a.scale = 2.0", "state_a.calls"],
    "an error, and the cell again": [SETUP, "scaled = scale * x", "scale = 2.0", "scaled = scale * x", "scaled.sum().item()"],
    "a misspelt name": [SETUP, "scalled = 1", "out = scaled * x", "scaled = 1\nout = scaled * x"],
    "magics, help and the shell": [SETUP, "%time z = x.mean()", "!echo hello", "%%time\nnet = nn.Linear(4, 1)", "print?",
                                   "%%capture shown\nprint(1)", "files = !ls", "opt = torch.optim.SGD(net.parameters(), 0.1)",
                                   TRAIN],
    "a trainer, and a model of another name": [SETUP, TRAINER, MODEL, "trainer = Trainer(net)", "trainer.evaluate();",
                                               "other = nn.Linear(4, 1)", "trainer.evaluate();"],
    "a loader made again after its function": [
        SETUP, "data = torch.utils.data.TensorDataset(x)", COLLATE.format(""),
        "loader = torch.utils.data.DataLoader(data, collate_fn=collate)", COLLATE.format(" / 2"),
        "loader = torch.utils.data.DataLoader(data, collate_fn=collate)", "total = sum(b.sum() for b in loader)"],
    "moved, compiled, switched": [SETUP, MODEL, OPT, TRAIN, "net = net.to('cpu').double().float()", "net = net.train()",
                                  TRAIN, "net.eval()", "score = net(x).mean().item()", "net.train();", TRAIN],
    "losses as numbers, and one loss with its graph": [
        SETUP, MODEL, "losses = []\nfor _ in range(4):\n    loss = net(x).mean()\n    losses.append(loss.item())", "loss"],
    "two optimizers for one model, unfrozen later": [
        SETUP, MODEL, "net[0].requires_grad_(False)", "opt = torch.optim.SGD(net[2].parameters(), lr=0.1)", TRAIN,
        "net[0].requires_grad_(True)", "opt.add_param_group({'params': net[0].parameters()})", TRAIN],
}
