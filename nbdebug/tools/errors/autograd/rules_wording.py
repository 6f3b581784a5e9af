"""What `error/no-grad-path` says, by the kind of request and of cut; before it the words that all rules on autograd
share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from nbdebug.report import Fix, Link, Where
from nbdebug.text import listed
from nbdebug.tools.errors.autograd.facts import GraphCut, NoGradFacts
from nbdebug.tools.errors.facts import Raised, as_code

NODE_WORDS = {
    "Addmm": "a Linear",
    "Convolution": "a convolution",
    "CudnnConvolution": "a convolution",
    "NativeBatchNorm": "batch norm",
    "CudnnBatchNorm": "batch norm",
    "NativeLayerNorm": "layer norm",
    "MkldnnRnnLayer": "the recurrent layer",
    "CopySlices": "an item assignment",
    "Mm": "a matrix product",
    "Bmm": "a matrix product",
    "T": "a transpose",
    "Mul": "a product",
    "Div": "a division",
    "Pow": "a power",
}


def cause_where(cause: Where, raised: Raised) -> Where:
    """The line of the cause, else the line that failed; the phase is that of the failure."""
    where = cause if cause.line is not None else raised.where
    return dataclasses.replace(where, phase=raised.where.phase, module=where.module or raised.where.module)


def op_words(node: str) -> str:
    """An op by the name of its node: "NativeBatchNorm" → "batch norm", "Relu" → "`relu`"."""
    small = "".join("_" + c.lower() if c.isupper() else c for c in node).strip("_")
    return NODE_WORDS.get(node, f"`{small}`")


def no_grad_title(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.expression}`" if facts.expression else "the loss"
    if facts.what in ("loss", "hook"):
        return _loss_title(facts, name)
    if facts.what == "not scalar":
        shape = list(tensor.shape) if tensor is not None else None
        return f"{name} has shape {shape}, but `backward()` needs a scalar"
    if facts.what == "not a tensor":
        return _not_a_tensor_title(facts)
    if facts.what == "input":
        missing = f"{name} does not require grad, so there is no gradient with respect to it"
        return cut_title(facts.cut, name) if facts.cut is not None else missing
    if facts.what == "unused":
        return f"{name} is not part of the graph: the outputs were not computed from it"
    if facts.what == "no parameters":
        return _no_parameters_title(facts)
    if facts.what == "not a leaf":
        op = f" but the result of `{tensor.made_by}`" if tensor is not None and tensor.made_by else ""
        return f"{name} is not a leaf{op}: an optimizer can only update leaf tensors"
    if facts.what == "grad is None":
        return _none_grad_title(facts)
    name = name if facts.expression else "a tensor"
    return f"{name} was made under `torch.inference_mode()`, and autograd can't use such a tensor later"


def _loss_title(facts: NoGradFacts, name: str) -> str:
    if facts.cut is not None:
        return cut_title(facts.cut, name)
    others = _with_graph(facts)
    one = len(others) == 1
    if facts.no_path:
        unused = f", and {listed(others)}, which {'has' if one else 'have'} one, {'is' if one else 'are'} not used"
        return f"Nothing that {name} is computed from has a gradient: no parameter takes part in it" + (
            unused if others else ""
        )
    still = f" ({listed(others)} still {'has' if one else 'have'} one)" if others else ""
    return f"{name} has no `grad_fn`: its graph ends somewhere before it{still}"


def _with_graph(facts: NoGradFacts) -> list[str]:
    """The user's variables that still have a gradient, without parameters."""
    return [tensor.name for tensor in facts.raised.tensors if tensor.requires_grad and tensor.made_by]


def _not_a_tensor_title(facts: NoGradFacts) -> str:
    name = f"`{facts.expression}`" if facts.expression else "what `backward()` was called on"
    if facts.cut is not None:
        return cut_title(facts.cut, name)
    if facts.type_name == "NoneType":
        producer = f": `{facts.producer}` returns nothing" if facts.producer else ""
        return f"{name} is None{producer}, so there is no loss to call `backward()` on"
    producer = f": it is the result of `{facts.producer}`" if facts.producer else ""
    return f"{name} is a {facts.type_name}, not a tensor, so it has no `backward()`{producer}"


def _no_parameters_title(facts: NoGradFacts) -> str:
    if facts.untracked:
        name, what = facts.untracked[0]
        return f"The optimizer got no parameters: `{name}` is {what}, which `parameters()` does not see"
    if any(some == 0 for _, some, whole in facts.counts if whole):
        return "The optimizer got no parameters: those that it could get are frozen (`requires_grad` is False)"
    return f"The optimizer got no parameters: `{facts.expression}` is empty"


def _none_grad_title(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.expression}`" + (f" (`{facts.parameter}`)" if facts.parameter else "")
    start = f"`{facts.expression}.grad` is None: "
    if tensor is not None and tensor.made_by:
        return start + f"`{facts.expression}` is a result of `{tensor.made_by}`, and only leaves keep their gradient"
    if tensor is not None and not tensor.requires_grad:
        return start + f"{name} does not require grad"
    return start + f"no `backward()` has reached {name} since its gradient was last cleared"


def cut_title(cut: GraphCut, name: str) -> str:
    """One sentence on a cut. name: of what a gradient was requested, in backticks."""
    target = f"`{cut.target}`" if cut.target else name
    source = f"`{cut.source}`" if cut.source else "its input"
    end = "" if target == name or cut.kind in ("global", "frozen") else f", so {name} has none"
    if cut.kind == "block":
        return _block_title(cut, target) + end
    if cut.kind == "number" and _is_inside_more(cut):
        return f"{name} has no gradient: `{cut.op}` in `{cut.text}` returns only the value of {source}, not its graph"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    sentences = {
        "whole numbers": f"{target} has no gradient: `{cut.text}` returns integers, and `{cut.op}` has no derivative",
        "comparison": f"{target} has no gradient: `{cut.text}` is true or false, and a comparison has no derivative",
        "detached": f"{target} has no gradient: `{call}` in `{cut.text}` cuts it off from {source}",
        "number": f"{target} is a plain number without a graph: `{cut.op}` in `{cut.text}` returns only the value of "
        f"{source}",
        "rebuilt": f"{target} has no gradient: `{cut.text}` creates a new tensor from the values, without the graph of "
        f"{source}",
        "sampled": f"{target} has no gradient: `{cut.text}` draws a sample without one",
        "checkpoint": f"{target} has no gradient: `{cut.text}` passes none, because none of its inputs requires one",
        "gradient": f"{target} is a gradient without a graph: `{cut.text}` records one only with `create_graph=True`",
        "global": f"{name} has no graph: gradients are off everywhere, because `{cut.op}` was called and never undone",
        "frozen": f"{name} has no gradient: all parameters of {listed(cut.names)} are frozen (`requires_grad=False`)",
    }
    return sentences[cut.kind] + end


def _is_inside_more(cut: GraphCut) -> bool:
    """Whether the number that a cut returns is not itself the target, but goes into more of the statement."""
    if not (cut.target or cut.statement.startswith("return")):
        return True
    collects = cut.statement.endswith(("}", "]")) or "tensor(" in cut.statement
    return not cut.statement.endswith(cut.text) and collects


def _block_title(cut: GraphCut, target: str) -> str:
    if "decorated with" in cut.text:
        function = cut.text.partition(" ")[0]
        return f"{target} comes from `{function}`, which is decorated with `{cut.op}` and records no graph"
    function = f" in `{cut.function}`" if cut.function else ""
    return f"{target} is computed under `{cut.text.rstrip(':')}`{function}, which records no graph"


def cut_chain(facts: NoGradFacts) -> tuple[Link, ...]:
    cut = facts.cut
    if cut is None:
        return ()
    links = []
    if cut.source and cut.kind not in ("block", "global", "frozen"):
        none = "requires no gradient" if cut.kind == "checkpoint" else ""
        links.append(Link(f"`{cut.source}` {none or ('has a gradient' if cut.sure else 'may have a gradient')}"))
    if cut.where.line is not None:
        target = "" if cut.kind == "frozen" else f" of `{cut.target}`" if cut.target else " of the result"
        function = f" in `{cut.function}`" if cut.function else ""
        links.append(Link(f"`{cut.text}`{function} ends the gradient path{target}", cut.where))
    name = f"`{facts.expression}`" if facts.expression else "the loss"
    links.append(Link(f"a gradient of {name} is requested", facts.raised.where))
    return tuple(links)


def no_grad_fixes(facts: NoGradFacts) -> tuple[Fix, ...]:
    """Fixes for error/no-grad-path, with the user's own names."""
    cut, name = facts.cut, facts.expression or "loss"
    if cut is not None:
        target = cut.target or facts.expression or "loss"
        assignment = f"{target} = " if cut.target or not cut.function else ""
        return _CUT_FIXES[cut.kind](cut, target, cut.source or "scores", assignment)
    if facts.what == "loss" and facts.no_path:
        used = [*_with_graph(facts), "model(x)"][0]
        loss = name if name.isidentifier() else "loss"
        return (Fix("Compute it from the model's output.", f"{loss} = loss_fn({used}, target)"),)
    if facts.what in _FIXES:
        return _FIXES[facts.what](facts, name)
    return (
        Fix("Print which tensors on the way still have a gradient.", f"print({name}.requires_grad, {name}.grad_fn)"),
    )


def _not_scalar_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    mean = facts.mean
    after = {"the mean": mean, "shape": []} if mean is not None else {}
    return (
        Fix("Reduce it to a scalar.", f"{name}.mean().backward()", True if mean is not None else None, after),
        Fix("Or give a weight to each of its elements.", f"{name}.backward(torch.ones_like({name}))"),
    )


def _not_a_tensor_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.type_name == "NoneType":
        producer = f"`{facts.producer}`" if facts.producer else "the function that computes it"
        return (Fix("Return the loss.", f"return loss   # at the end of {producer}"),)
    if facts.type_name in ("tuple", "list"):
        return (
            Fix(f"Take the loss out of the {facts.type_name}.", f"{name}[0].backward()"),
            Fix("Or sum its items.", f"sum({name}).backward()"),
        )
    if facts.type_name in ("dict", "OrderedDict"):
        return (Fix("Sum the losses in it.", f"sum({name}.values()).backward()"),)
    return (Fix("Keep the loss a tensor: no float(), .item() or NumPy before backward().", f"print(type({name}))"),)


def _requires_grad_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Let it require a gradient before the forward.", f"{name}.requires_grad_()"),)


def _unused_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Differentiate with respect to the very tensor that went in, not a copy made before or after.",
            f"y = f({name})\ntorch.autograd.grad(y.sum(), {name})",
        ),
        Fix("Or allow unused inputs: their gradient is then None.", "torch.autograd.grad(..., allow_unused=True)"),
    )


def _no_parameters_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.untracked:
        path, what = facts.untracked[0]
        attribute = path.rpartition(".")[2]
        title = f"Keep the modules in a Module{'Dict' if 'dict' in what else 'List'}."
        if facts.edit is not None:
            return (Fix.of(title, facts.edit),)
        if "dict" in what:
            return (Fix("Keep the modules in a ModuleDict.", f"self.{attribute} = nn.ModuleDict(...)"),)
        if "modules" in what:
            return (Fix("Keep the modules in a ModuleList.", f"self.{attribute} = nn.ModuleList(...)"),)
        return (Fix("Make it a parameter.", f"self.{attribute} = nn.Parameter(...)"),)
    code = "for name, p in model.named_parameters():\n    print(name, p.requires_grad)"
    return (Fix("Print the parameters, and unfreeze those to train.", code),)


def _not_a_leaf_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    code = f"{name} = {name}.detach().requires_grad_()"
    return (Fix("Make the finished value a leaf, and give that to the optimizer.", code),)


def _none_grad_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.tensor is not None and facts.tensor.made_by:
        return (Fix("Let it keep its gradient, before backward().", f"{name}.retain_grad()"),)
    if facts.tensor is not None and not facts.tensor.requires_grad:
        return _requires_grad_fixes(facts, name)
    return (Fix("Call backward() first, and skip what has no gradient.", f"if {name}.grad is not None:\n    ..."),)


def _inference_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix("Use no_grad where the result is used in training later.", "with torch.no_grad():\n    ..."),
        Fix("Or clone it to a normal tensor.", f"{name} = {name}.clone()"),
    )


_FIXES: dict[str, Callable[[NoGradFacts, str], tuple[Fix, ...]]] = {
    "not scalar": _not_scalar_fixes,
    "not a tensor": _not_a_tensor_fixes,
    "input": _requires_grad_fixes,
    "unused": _unused_fixes,
    "no parameters": _no_parameters_fixes,
    "not a leaf": _not_a_leaf_fixes,
    "grad is None": _none_grad_fixes,
    "inference": _inference_fixes,
}

PICKS_CLASSES = ("argmax", "max", "topk", "argmin", "one_hot", "multinomial", "sort", ".indices")
"""Ops that pick classes: probabilities can replace what they pick."""


def _integer_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    if cut.op not in PICKS_CLASSES:
        return (Fix("Keep floating-point numbers.", _without_cut(cut, target)),)
    soft = cut.text.replace("argmax(", "softmax(")
    if cut.op != "argmax" or soft in (cut.text, f"{source}.softmax()"):
        source = re.sub(r"\.(topk|max|min|sort)\(.*$", "", source)
        soft = f"{source}.softmax(-1)   # over the classes"
    return (
        Fix(
            "Use probabilities where the loss needs a gradient, and keep the argmax for the metric.", assignment + soft
        ),
        Fix("Or use a loss that takes the scores themselves.", f"nn.functional.cross_entropy({source}, target)"),
    )


def _comparison_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    left, sign, right = cut.text.partition(f" {cut.op} ")
    if not sign or cut.op not in (">", ">=", "<", "<="):
        left, right = source, "0.5"
    if cut.op.startswith("<"):
        left, right = right, left
    soft = f"{assignment}torch.sigmoid(({left} - {right}) / 0.1)"
    return (
        Fix("Use a soft threshold (a steep sigmoid) where the loss needs a gradient.", soft),
        Fix("Or compute the loss on the values before the threshold.", source),
    )


def _detached_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    title = "Keep the graph here; detach a copy where the value is only displayed."
    if cut.kind == "number":
        title = "Keep the tensor; take its number for the log only."
    first = Fix(title, _without_cut(cut, target))
    if ".append(" not in cut.statement + (cut.where.text or ""):
        return (first,)
    return first, Fix("And join the tensors with stack, which keeps their graphs.", "torch.stack(...)")


def _new_tensor_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    several = source.startswith("[") or source.endswith("s")
    value = f"torch.stack({source})" if several else source
    code = cut.statement.replace(cut.text, value) if cut.text and cut.text in cut.statement else f"{target} = {value}"
    return (Fix("Use the tensor itself; join several with stack, which keeps their graphs.", code),)


def _sample_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    reparameterized = assignment + cut.text.replace(".sample(", ".rsample(")
    reinforce = f"loss = -({source}.log_prob({target}) * reward).mean()"
    return (
        Fix("Draw a reparameterized sample, where the distribution has one.", reparameterized),
        Fix("Or use the log-probability of the sample (REINFORCE).", reinforce),
    )


def _checkpoint_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    newer = re.sub(r",? *use_reentrant=\w+", "", cut.text)[:-1] + ", use_reentrant=False)"
    return (
        Fix("Use its newer form, which needs no such input.", cut.statement.replace(cut.text, newer)),
        Fix("Or let an input require a gradient.", f"{source}.requires_grad_()"),
    )


def _gradient_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    called = cut.text.endswith(")")
    code = f"{assignment}{cut.text[:-1]}, create_graph=True)" if called else "loss.backward(create_graph=True)"
    return (Fix("Request gradients that have a graph.", code),)


def _block_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    if "decorated with" in cut.text:
        return (Fix("Call the model itself to train it; this function is for evaluation.", "model(x)"),)
    outside = f"outside of `{cut.text.rstrip(':')}`" if cut.text.startswith("with ") else f"without {cut.text}"
    title = "Compute it outside of the block; keep the block for evaluation."
    return (Fix(title, f"{cut.statement}   # {outside}"),)


def _global_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    return (
        Fix("Turn gradients on again.", "torch.set_grad_enabled(True)"),
        Fix("From now on, use a block: it restores the setting at its end.", "with torch.no_grad():\n    ..."),
    )


def _frozen_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    name = as_code(cut.names[-1]) if cut.names else "model"
    return (Fix("Unfreeze what should be trained.", f"{name}.requires_grad_(True)"),)


_CUT_FIXES: dict[str, Callable[[GraphCut, str, str, str], tuple[Fix, ...]]] = {
    "whole numbers": _integer_fixes,
    "comparison": _comparison_fixes,
    "detached": _detached_fixes,
    "number": _detached_fixes,
    "rebuilt": _new_tensor_fixes,
    "sampled": _sample_fixes,
    "checkpoint": _checkpoint_fixes,
    "gradient": _gradient_fixes,
    "block": _block_fixes,
    "global": _global_fixes,
    "frozen": _frozen_fixes,
}


def _without_cut(cut: GraphCut, target: str) -> str:
    """The statement without the op that cuts."""
    if "numpy" in cut.statement:  # what comes after is to be written with torch's ops
        return f"{target} = {cut.source or cut.text}   # and torch's ops instead of NumPy's after it"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    if call in cut.statement:
        rest = cut.statement.replace(".cpu()" + call, "").replace(call, "")
        return re.sub(r"torch\.(?:as_)?tensor\((.*)\)$", r"\1", rest)  # which would copy the value, without its graph
    if cut.source and cut.text in cut.statement:
        inner = f"({cut.source})" if " " in cut.source and cut.text + "." in cut.statement else cut.source
        return cut.statement.replace(cut.text, inner)
    return f"{target} = {cut.source or cut.text}"
