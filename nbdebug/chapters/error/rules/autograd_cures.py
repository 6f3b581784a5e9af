"""What to write instead where a gradient's path ends."""

from __future__ import annotations

from nbdebug.chapters.error.facts_autograd import NoGradFacts
from nbdebug.chapters.error.rules.autograd_cuts import cured
from nbdebug.chapters.error.rules.autograd_words import wants
from nbdebug.finding import Fix


def cures(facts: NoGradFacts) -> tuple[Fix, ...]:
    """Fixes for error/no-grad-path, with the user's own names."""
    if facts.cut is not None:
        return cured(facts.cut, facts.asked)
    name = facts.asked or "loss"
    if facts.what == "not scalar":
        tried = facts.reduced is not None
        return (
            Fix(
                "Reduce it to one number.",
                f"{name}.mean().backward()",
                True if tried else None,
                {"the mean": facts.reduced, "shape": []} if tried else {},
            ),
            Fix("Or say with which weights its entries are added up.", f"{name}.backward(torch.ones_like({name}))"),
        )
    if facts.plain and facts.what == "loss":
        used = [*wants(facts), "model(x)"][0]
        loss = name if name.isidentifier() else "loss"
        return (Fix("Compute it from what the model gives.", f"{loss} = loss_fn({used}, target)"),)
    found = {
        "not a tensor": _not_a_tensor,
        "input": _input,
        "unused": _unused,
        "no parameters": _no_parameters,
        "not a leaf": _not_a_leaf,
        "grad is None": _grad_is_none,
        "inference": _inference,
    }
    return (
        found[facts.what](facts, name)
        if facts.what in found
        else (Fix("Print along the way who still has a gradient.", f"print({name}.requires_grad, {name}.grad_fn)"),)
    )


def _not_a_tensor(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.kind == "NoneType":
        giver = f"`{facts.giver}`" if facts.giver else "the function that makes it"
        return (Fix("Return the loss.", f"return loss   # at the end of {giver}"),)
    if facts.kind in ("tuple", "list"):
        return (
            Fix("Take the loss out of it.", f"{name}[0].backward()"),
            Fix("Or add up what it holds.", f"sum({name}).backward()"),
        )
    if facts.kind in ("dict", "OrderedDict"):
        return (Fix("Add up the losses that it holds.", f"sum({name}.values()).backward()"),)
    return (Fix("Keep the loss a tensor: no float(), .item() or NumPy on its way.", f"print(type({name}))"),)


def _input(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)


def _unused(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Differentiate with respect to what went in (the very tensor, not a copy made before or after).",
            f"y = f({name})\ntorch.autograd.grad(y.sum(), {name})",
        ),
        Fix("Or allow for it: the gradient is None then.", "torch.autograd.grad(..., allow_unused=True)"),
    )


def _no_parameters(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.untracked:
        path, what = facts.untracked[0]
        attribute = path.rpartition(".")[2]
        if "dict" in what:
            return (Fix("Keep the modules in a ModuleDict.", f"self.{attribute} = nn.ModuleDict(...)"),)
        if "modules" in what:
            return (Fix("Keep the modules in a ModuleList.", f"self.{attribute} = nn.ModuleList(...)"),)
        return (Fix("Make it a parameter.", f"self.{attribute} = nn.Parameter(...)"),)
    return (
        Fix(
            "Look at what there is, and let it have a gradient.",
            "for name, p in model.named_parameters():\n    print(name, p.requires_grad)",
        ),
    )


def _not_a_leaf(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Make a leaf of the finished value, and give the optimizer that.",
            f"{name} = {name}.detach().requires_grad_()",
        ),
    )


def _grad_is_none(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.tensor is not None and facts.tensor.made_by:
        return (Fix("Ask it to keep its gradient, before backward().", f"{name}.retain_grad()"),)
    if facts.tensor is not None and not facts.tensor.requires_grad:
        return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)
    return (Fix("Call backward() first, and pass over what has no gradient.", f"if {name}.grad is not None:\n    ..."),)


def _inference(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix("Use no_grad where the result goes into training later.", "with torch.no_grad():\n    ..."),
        Fix("Or copy it to an ordinary tensor.", f"{name} = {name}.clone()"),
    )
