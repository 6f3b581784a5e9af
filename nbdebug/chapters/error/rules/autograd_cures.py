"""What to write instead where a gradient's path ends."""

from __future__ import annotations

import re

from nbdebug.chapters.error.facts_autograd import Cut, NoGradFacts
from nbdebug.chapters.error.rules.autograd_words import indexed, wants
from nbdebug.finding import Fix


def cures(facts: NoGradFacts) -> tuple[Fix, ...]:
    """Fixes for error/no-grad-path, with the user's own names."""
    if facts.cut is not None:
        return _of_cut(facts.cut, facts)
    name = facts.asked or "loss"
    if facts.what == "not scalar":
        tried = facts.reduced is not None
        return (Fix("Reduce it to one number.", f"{name}.mean().backward()", True if tried else None,
                    {"the mean": facts.reduced, "shape": []} if tried else {}),
                Fix("Or say with which weights its entries are added up.", f"{name}.backward(torch.ones_like({name}))"))
    if facts.plain and facts.what == "loss":
        used = wants(facts)
        return (Fix("Compute it from what the model gives.", f"{name} = loss_fn({used[0] if used else 'model(x)'}, target)"),)
    found = {"not a tensor": _not_a_tensor, "input": _input, "unused": _unused, "no parameters": _no_parameters,
             "not a leaf": _not_a_leaf, "grad is None": _grad_is_none, "inference": _inference, "whole numbers": _whole}
    return found[facts.what](facts, name) if facts.what in found else (Fix(
        "Print along the way who still has a gradient.", f"print({name}.requires_grad, {name}.grad_fn)"),)


def _of_cut(cut: Cut, facts: NoGradFacts) -> tuple[Fix, ...]:
    to, source = cut.target or facts.asked or "loss", cut.source or "scores"
    gets = f"{to} = " if cut.target or not cut.function else ""
    if cut.kind == "whole numbers":
        if cut.op in ("argmax", "max", "topk", "argmin", "one_hot", "multinomial", "sort"):
            return (Fix("Use probabilities where the loss needs a gradient, and keep the argmax for the metric.",
                        gets + _soft(cut, source)),
                    Fix("Or a loss that takes the scores themselves.", f"nn.functional.cross_entropy({source}, target)"))
        return (Fix("Stay with floating point numbers.", _without(cut, to)),)
    if cut.kind == "comparison":
        return (Fix("Use a soft threshold where the loss needs a gradient.", gets + _softened(cut, source)),
                Fix("Or compute the loss on the values before the threshold.", source))
    if cut.kind in ("detached", "number"):
        stacked = any(".append(" in w for w in (cut.written, cut.where.text or ""))
        first = Fix("Keep the tensor; take its number for the log only." if cut.kind == "number" else
                    "Leave the cut out; detach a copy for what is only shown.", _without(cut, to))
        return (first, Fix("And join the tensors with stack, which keeps their graphs.", "torch.stack(...)")) if stacked else (
            first,)
    if cut.kind == "rebuilt":
        return (Fix("Use the tensor itself; join several with stack, which keeps their graphs.",
                    f"{to} = torch.stack({source})" if source.startswith("[") or source.endswith("s")
                    else f"{to} = {source}"),)
    if cut.kind == "sampled":
        return (Fix("Draw with the reparameterised form, where the distribution has one.",
                    cut.text.replace(".sample(", ".rsample(")),
                Fix("Or use the log-probability of the draw (REINFORCE).", "loss = -(dist.log_prob(action) * reward).mean()"))
    if cut.kind == "checkpoint":
        return (Fix("Use its newer form, which needs no such input.", cut.written.replace(
            cut.text, _keyword(cut.text, "use_reentrant=False"))),
            Fix("Or let an input want a gradient.", f"{source}.requires_grad_()"))
    if cut.kind == "block" and "decorated with" in cut.text:
        return (Fix("Call the model itself where it is to be trained; what is decorated is for evaluation.", "model(x)"),)
    if cut.kind == "gradient":
        code = cut.text[:-1] + ", create_graph=True)" if cut.text.endswith(")") else "loss.backward(create_graph=True)"
        return (Fix("Ask for gradients that have a graph.", f"{to} = {code}"),)
    if cut.kind == "block":
        return (Fix("Compute it outside of the block; keep the block for what is only evaluated.",
                    f"{cut.written}   # outside of `{cut.text.rstrip(':')}`" if cut.text.startswith("with ")
                    else f"{cut.written}   # without {cut.text}"),)
    if cut.kind == "global":
        return (Fix("Turn gradients on again.", "torch.set_grad_enabled(True)"),
                Fix("And use a block from now on, which undoes itself.", "with torch.no_grad():\n    ..."))
    name = indexed(cut.names[-1]) if cut.names else "model"
    return (Fix("Let what is to be trained have a gradient again.", f"{name}.requires_grad_(True)"),)


def _softened(cut: Cut, source: str) -> str:
    """A threshold as a steep sigmoid."""
    left, found, right = cut.text.partition(f" {cut.op} ")
    if not found or cut.op not in (">", ">=", "<", "<="):
        left, right = source, "0.5"
    if cut.op.startswith("<"):
        left, right = right, left
    return f"torch.sigmoid(({left} - {right}) / 0.1)"


def _keyword(call: str, keyword: str) -> str:
    """A call with one argument more, or another value for it."""
    plain = re.sub(r",? *use_reentrant=\w+", "", call)
    return plain[:-1] + f", {keyword})"


def _soft(cut: Cut, source: str) -> str:
    """The probabilities in place of the winner, over the same dimension."""
    soft = cut.text.replace("argmax(", "softmax(")
    return soft if cut.op == "argmax" and soft not in (cut.text, f"{source}.softmax()") else (
        f"{source}.softmax(-1)   # over the classes")


def _without(cut: Cut, to: str) -> str:
    """The statement without the op that cuts."""
    if "numpy" in cut.written:  # stay in torch: what comes after is to be written with its ops
        return f"{to} = {cut.source or cut.text}   # and torch's ops instead of NumPy's"
    for written in (f".{cut.op}()", cut.op if cut.op.startswith(".") else "."):
        if written in cut.written and written != ".":
            return cut.written.replace(".cpu()" + written, "").replace(written, "")
    if cut.source and cut.text in cut.written:
        return cut.written.replace(cut.text, cut.source)
    return f"{to} = {cut.source or cut.text}"


def _not_a_tensor(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.kind == "NoneType":
        return (Fix("Return the loss.", f"return loss   # at the end of `{facts.giver or 'the function that makes it'}`"),)
    if facts.kind in ("tuple", "list"):
        return (Fix("Take the loss out of it.", f"{name}[0].backward()"),
                Fix("Or add up what it holds.", f"sum({name}).backward()"))
    if facts.kind in ("dict", "OrderedDict"):
        return (Fix("Add up the losses that it holds.", f"sum({name}.values()).backward()"),)
    return (Fix("Keep the loss a tensor: no float(), .item() or NumPy on its way.", f"print(type({name}))"),)


def _input(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)


def _unused(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Differentiate with respect to what went in (the very tensor, not a copy made before or after).",
                f"y = f({name})\ntorch.autograd.grad(y.sum(), {name})"),
            Fix("Or allow for it: the gradient is None then.", "torch.autograd.grad(..., allow_unused=True)"))


def _no_parameters(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.untracked:
        path, what = facts.untracked[0]
        attribute = path.rpartition(".")[2]
        if "dict" in what:
            return (Fix("Keep the modules in a ModuleDict.", f"self.{attribute} = nn.ModuleDict(...)"),)
        if "modules" in what:
            return (Fix("Keep the modules in a ModuleList.", f"self.{attribute} = nn.ModuleList(...)"),)
        return (Fix("Make it a parameter.", f"self.{attribute} = nn.Parameter(...)"),)
    return (Fix("Look at what there is, and let it have a gradient.",
                "for name, p in model.named_parameters():\n    print(name, p.requires_grad)"),)


def _not_a_leaf(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Make a leaf of the finished value, and give the optimizer that.",
                f"{name} = {name}.detach().requires_grad_()"),)


def _grad_is_none(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.tensor is not None and facts.tensor.made_by:
        return (Fix("Ask it to keep its gradient, before backward().", f"{name}.retain_grad()"),)
    if facts.tensor is not None and not facts.tensor.requires_grad:
        return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)
    return (Fix("Call backward() first, and pass over what has no gradient.", f"if {name}.grad is not None:\n    ..."),)


def _inference(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Use no_grad where the result goes into training later.", "with torch.no_grad():\n    ..."),
            Fix("Or copy it to an ordinary tensor.", f"{name} = {name}.clone()"))


def _whole(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Make it floating point first.", f"{name}.float().requires_grad_()"),)
