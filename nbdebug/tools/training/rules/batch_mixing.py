"""Samples that are mixed: one sample's output depends on another, rows stand beside the targets of others, a text is
cut across."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.rules.findings import at_line, finding, wrong_call
from nbdebug.tools.training.static_facts import ORDER, BatchMixing

JOINED = (
    "{2} graphs are joined, and all edges lie among the first {0} of {1:,} nodes{line}: {3:.0%} have no edge",
    ["collate_fn", "train_loader", "forward"],
    Fix(
        "Add to a graph's edges the number of nodes before it.", "torch.cat([e + n for e, n in zip(edges, before)], 1)"
    ),
)
ACROSS = (
    "The text is cut across its columns{line}: a word is told by the one beside it in {0:.0%}, by the one below it, "
    "which is read as the one before, in {1:.0%} (the commonest word is right in {2:.0%})",
    ["train_loader", "columns"],
    Fix("Fill the columns one after the other.", "text.view(columns, rows).t().contiguous()"),
)
PARTNERS = (
    "`{op}` is to find the other view of each sample, and is told a view of another one{line}: row 0 is a view of "
    "sample {1}, row {2}, which its target names, one of sample {3}. `{0}` made these rows",
    ["loss_fn", "views", "partner"],
    Fix("Put all first views before all second ones.", "views = torch.cat(batch.unbind(1))"),
)


@rule(
    code="training/batch-mixing",
    title="One sample's output depends on other samples of the batch.",
    symptom="With a batch size of one it learns; with larger batches it hardly does, and a sample's score changes with "
    "its neighbours.",
    cause="A `view` or `reshape` where a `transpose` was needed (both give the same shape), a recurrent layer without "
    "`batch_first`, a softmax or a mean over dimension 0.",
    confirm="Change one row of the input in eval mode: only its own row of the output may change.",
    fix="Use `transpose` or `permute` to exchange dimensions, `reshape` only to join neighbours; check `batch_first` "
    "and `dim`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html",
)
def batch_mixing(facts: TrainingFacts) -> Finding | None:
    mixing = facts.static.mixing
    for call in facts.static.loss_calls:
        if call.across is not None:
            return _read_across(*call.across)
    for kind, said in {"unshifted edges": JOINED, "text cut across": ACROSS, "other partners": PARTNERS}.items():
        if found := wrong_call(facts.static, kind, "batch-mixing", *said):
            return found
    if mixing is None:
        title = "`{op}` gives the inputs another shape as they lie{line}; two of its dimensions had to be exchanged"
        fix = Fix("Exchange the dimensions.", "x = x.permute(0, 3, 1, 2)  # (N, H, W, C) to (N, C, H, W)")
        return wrong_call(facts.static, "exchanged dimensions", "batch-mixing", title, ["forward"], fix)
    if mixing.rows is not None:
        return _mixed_rows(mixing)
    who = f"`{mixing.op}`{at_line(mixing.where)}" if mixing.op else "The model"
    does = (
        f"mixes the samples: replacing sample {mixing.sample} of the batch changes the outputs of {mixing.others} of "
    )
    does += f"the {mixing.batch - 1} others"
    fix = Fix(
        "Move the batch dimension to the front before you join dimensions.",
        "x = x.transpose(0, 1)  # then: x.reshape(len(x), -1)",
    )
    if mixing.kind == ORDER:
        does = (
            "gives the outputs in an order of its own, and the loss takes them for those of the samples in the "
            f"batch's: with all rows moved on by one, {mixing.others} of {mixing.batch} do not move along"
        )
        fix = Fix("Put them back into the order of the batch.", "output = output[order.argsort()]")
    elif mixing.placed:
        does = "depends on the row in the batch: with all rows moved on by one, "
        does += f"{mixing.others} of {mixing.batch} outputs are others"
        fix = Fix("Add what belongs to a position along the sequence, not along the batch.", "x = x + pe[: x.size(1)]")
    elif mixing.layer:
        fix = Fix(f"Tell `{mixing.layer}` that the batch comes first.", f"nn.{mixing.kind}(…, batch_first=True)")
    return finding(
        "batch-mixing",
        f"{who} {does}",
        [mixing.module, "forward", mixing.op],
        [fix],
        place=mixing.where,
        evidence={"sample replaced": mixing.sample, "other samples changed": mixing.others, "batch size": mixing.batch},
    )


def _mixed_rows(mixing: BatchMixing) -> Finding:
    """Outputs beside the targets of other samples."""
    outputs, targets = (", ".join(map(str, rows)) for rows in mixing.rows or ((), ()))
    fix = Fix("Deal both anew by the same order.", "x, y = x[order], y[order]")
    if mixing.others > 1:
        fix = Fix(
            "Put both into the same order before they are flattened.",
            "output = output.transpose(0, 1)  # batch first, as the targets; then: output.flatten(0, 1)",
        )
    return finding(
        "batch-mixing",
        f"`{mixing.op}` compares outputs with targets of other samples{at_line(mixing.where)}: the outputs of sample "
        f"{mixing.sample} are in rows {outputs} …, its targets in rows {targets} …",
        ["loss_fn", "forward", mixing.op],
        [fix],
        place=mixing.where,
        evidence={"rows of the outputs": outputs, "rows of the targets": targets, "batch size": mixing.batch},
    )


def _read_across(sizes: tuple[int, ...], place: Where) -> Finding:
    """Scores that are taken for rows of classes as they lie."""
    order, classes = ", ".join(map(str, (0, *range(2, len(sizes)), 1))), sizes[1]
    return finding(
        "batch-mixing",
        f"`{place.op}` makes rows of {classes} out of scores of shape {list(sizes)} as they lie{at_line(place)}: a "
        f"row has {classes} neighbours of one class, not the {classes} classes of one place, and the loss compares it "
        "with the target of another place",
        ["loss_fn", place.op or "", "logits", "view"],
        [
            Fix(
                "Move the classes to the end first (or give the loss scores and targets as they are: it takes them).",
                f"logits = logits.permute({order}).reshape(-1, {classes})",
            )
        ],
        place=place,
        evidence={"shape of the scores": list(sizes)},
    )
