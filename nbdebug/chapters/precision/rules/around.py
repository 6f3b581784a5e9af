"""Rules over what is around the modules: gradients that need a loss scale, and the optimizer's epsilon."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.precision.facts import Order, PrecisionFacts
from nbdebug.chapters.precision.rules.words import listed, short
from nbdebug.finding import Finding, Fix, Where


@rule(
    code="precision/loss-scale-needed",
    title="Gradients are too small for half precision and become zero.",
    symptom="The loss is finite and right, and some or all weights stay as they are.",
    cause="Gradients below about 6e-8 are zero in float16. Without a loss scale, layers far from the loss, or a loss "
    "that is a mean over many values, give nothing else.",
    confirm="The gradients' norms by parameter, in float16 beside float32: zero in the one, not in the other.",
    fix="Scale the loss: `torch.amp.GradScaler`, with `scaler.unscale_(optimizer)` before clipping; or train in "
    "bfloat16, which has float32's range and needs no scale.",
    reference="https://arxiv.org/abs/1710.03740",
)
def loss_scale_needed(facts: PrecisionFacts) -> Finding | None:
    scaling = facts.scaling
    if scaling is None or facts.kept:
        return None
    title = (
        f"The gradient of {listed(scaling.lost)} is zero in {facts.dtype} and not in float32: the loss needs a scale"
    )
    fix = Fix(
        "Scale the loss, and unscale before the update.",
        "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        scaling.off_scaled < scaling.off,
        {
            "scale": scaling.scale,
            "gradients' norm off by": f"{scaling.off_scaled:.1%}",
            "without it": f"{scaling.off:.1%}",
        },
    )
    evidence = {
        "where": scaling.lost,
        "parameters without a gradient": len(scaling.lost),
        "norm of all gradients off by": f"{scaling.off:.1%}",
    }
    module = scaling.lost[0].rpartition(".")[0]
    return Finding("precision/loss-scale-needed", title, Where(phase="backward", module=module), evidence, (fix,))


@rule(
    code="precision/unscale-order",
    title="Gradients are changed while they still carry the loss scale.",
    symptom="With a GradScaler the model hardly learns, or in leaps; without it the same script does. The norm that "
    "`clip_grad_norm_` returns is in the thousands.",
    cause="`scaler.scale(loss).backward()` leaves gradients that are 65,536 times too large. Clipped to 1 and unscaled "
    "afterwards they are 65,536 times too small; never unscaled, they make an update that is far too large. Seen "
    "in a whole training the same fault is called training/clip-before-unscale.",
    confirm="What the optimizer gets must be the same with `GradScaler(init_scale=2**12)` as with `2**16`.",
    fix="scale, backward, `scaler.unscale_(optimizer)`, clip, `scaler.step(optimizer)`, `scaler.update()`: in this "
    "order.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)
def unscale_order(facts: PrecisionFacts) -> Finding | None:
    order = facts.order
    if order is None:
        return None
    said = (
        f"The loss scale {order.scale:g} is never taken out of the gradients"
        if order.never
        else f"Gradients are changed while they still carry the loss scale {order.scale:g}: from a norm of "
        f"{short(order.left)} to {short(order.written)}"
    )
    title = f"{said}; the optimizer gets a norm of {short(order.got)} where it should get {short(order.mended)}"
    clip = order.where.text or "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    code = "\n".join(
        (
            "scaler.scale(loss).backward()",
            "scaler.unscale_(optimizer)",
            *[clip] * (not order.never),
            "scaler.step(optimizer)",
            "scaler.update()",
        )
    )
    fix = Fix(
        "Let the scaler step the optimizer: it takes the scale out."
        if order.never
        else "Take the scale out first, then clip.",
        code,
        _nearer(order),
        {"norm that the optimizer gets": order.mended, "before": order.got},
    )
    evidence = {
        "where": ("clip_grad_norm_", "unscale_", "scaler"),
        "scale": order.scale,
        "norm behind backward": order.left,
        "norm when the scale is taken out": order.written,
        "norm that the optimizer gets": order.got,
        "the same with a scale 16 times smaller": order.got_smaller,
    }
    return Finding("precision/unscale-order", title, order.where, evidence, (fix,))


def _nearer(order: Order) -> bool:
    """With the scale taken out behind backward, is the norm no larger than the whole gradient's, and not vanishing?"""
    whole = order.left / order.scale
    return 0 < order.mended <= 1.01 * whole and order.mended != order.got


@rule(
    code="precision/epsilon-underflow",
    title="The optimizer's epsilon is zero in the dtype of the weights.",
    symptom="float16 weights become NaN or inf in the first updates, where a gradient is zero.",
    cause="Adam divides by the root of a running mean of squares plus epsilon. In float16 1e-8 is zero, and so is the "
    "mean for weights without a gradient: 0 / 0.",
    confirm="`torch.tensor(optimizer.param_groups[0]['eps'], dtype=torch.float16)` is 0.",
    fix="Keep the weights in float32 and use autocast; or an epsilon that the dtype holds (1e-4 in float16).",
    reference="https://pytorch.org/docs/stable/amp.html",
)
def epsilon_underflow(facts: PrecisionFacts) -> Finding | None:
    if facts.epsilon is None:
        return None
    eps, optimizer, dtype = facts.epsilon
    title = f"{optimizer}'s epsilon of {short(eps)} is zero in {dtype}, the dtype of the weights that it updates"
    fixes = (
        Fix(
            "Keep the weights in float32, and run the step under autocast.",
            f'with torch.autocast("cuda", dtype=torch.{dtype}):\n    loss = loss_fn(model, batch)',
        ),
        Fix("Or give it an epsilon that the dtype holds.", f"torch.optim.{optimizer}(model.parameters(), eps=1e-4)"),
    )
    return Finding(
        "precision/epsilon-underflow",
        title,
        Where(phase="optimizer"),
        {"where": ("optimizer", "eps"), "eps": eps, f"eps in {dtype}": 0.0},
        fixes,
    )
