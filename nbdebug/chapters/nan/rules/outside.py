"""Rules for what was bad before the step did anything: weights, buffers, the batch, memory that nobody filled."""

from nbdebug.catalogue import rule
from nbdebug.chapters.nan.facts import NanFacts
from nbdebug.chapters.nan.rules.words import answer, verb
from nbdebug.finding import Finding, Fix


@rule(
    code="nan/uninitialized-memory",
    title="Memory was used that nobody had filled.",
    symptom="NaN, inf or absurd numbers on some days and none on others, from the same script and the same seed.",
    cause="`torch.empty`, `torch.empty_like`, `x.new_empty` and `torch.Tensor(n)` hand out memory as it is. A "
    "parameter made of it needs an init; a buffer made of it must be written in every place before it is "
    "read.",
    confirm="`torch.use_deterministic_algorithms(True)` before building the model fills such memory with NaN, so "
    "that it fails every time.",
    fix="Write the init: `nn.init.xavier_uniform_(self.weight)` or `nn.init.normal_(self.weight, std=0.02)`, in "
    "the module's own `__init__`, so that it runs however the model is loaded. For buffers use `torch.zeros`.",
    reference="https://docs.pytorch.org/docs/stable/deterministic.html",
)
def uninitialized_memory(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    whole = birth.external == "parameter" and birth.whole and birth.made == "nan"
    if not whole and not birth.op.startswith(("empty", "new_empty")):
        return None
    name = birth.name or "a tensor"
    says = "uses memory that was never filled" + (f", in `{name}`" if birth.name else "")
    code = (
        f'nn.init.normal_(model.get_parameter("{name}"), std=0.02)'
        if birth.external
        else "torch.zeros(...)  # in place of torch.empty"
    )
    return answer(facts, "uninitialized-memory", says, Fix("Initialise it.", code), tensor=name)


@rule(
    code="nan/parameter-nonfinite",
    title="A weight or a buffer was already NaN or inf before the step.",
    symptom="NaN at the very first batch, whatever the data. Loading the checkpoint gave no warning.",
    cause="`load_state_dict` compares names and shapes, not values. The file was saved after a run had gone bad, "
    "or was damaged by a conversion, such as a cast to float16 of a weight above 65,504.",
    confirm="`[n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]`, before the first step.",
    fix="Go back to an older checkpoint in which this list is empty, or initialise the layers named there afresh "
    "(`layer.reset_parameters()`) and train them again. From then on check before `torch.save`, and keep "
    "more than one checkpoint.",
    reference="https://github.com/pytorch/pytorch/issues/10008",
)
def parameter_nonfinite(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external not in ("parameter", "buffer"):
        return None
    fill = f"""with torch.no_grad():
    t = model.get_{birth.external}("{birth.name}")
    t[~torch.isfinite(t)] = 0"""
    check = """bad = [n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]
assert not bad, bad  # after load_state_dict, and before torch.save"""
    return answer(
        facts,
        "parameter-nonfinite",
        f"starts with a bad {birth.external}, `{birth.name}` ({birth.bad_elements:,} of {birth.elements:,} elements)",
        Fix("Fill the bad elements to go on; better, load sound weights or initialise the layer afresh.", fill),
        Fix("Look for this from now on.", check, None, {"why not": "it is a check"}),
        tensor=birth.name,
    )


@rule(
    code="nan/input-nonfinite",
    title="The batch already held NaN or inf.",
    symptom="NaN from the first layer on, in some rows of one batch. The same data may train for hours before "
    "that row comes up.",
    cause="A missing value that was read as NaN, a column divided by a spread of zero, a log of zero in the "
    "preprocessing, a cast to float16 of a large number. A mask does not help afterwards: 0 * NaN is NaN.",
    confirm="`torch.isfinite(x).flatten(1).all(1)` names the good rows; in pandas `df.isna().sum()` and "
    "`np.isinf(df).sum()`.",
    fix="Repair the data where it is made: `df.dropna()`, or fill and tell the model, `x = "
    "torch.cat([torch.nan_to_num(x), x.isnan().float()], -1)`. Give `torch.nan_to_num` its `posinf` and "
    "`neginf`: the default for inf is the largest number of the dtype. An assertion in the Dataset costs "
    "nothing: `assert torch.isfinite(x).all(), index`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.isfinite.html",
)
def input_nonfinite(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external is None:
        return None
    what = "the model's input" if birth.external == "input" else "a tensor from outside the model"
    made = {"nan": "NaN"}.get(birth.made, birth.made if birth.made != "mixed" else "NaN and inf")
    return answer(
        facts,
        "input-nonfinite",
        f"{verb(birth.where, 'brings', 'bring')} {made} in {what}",
        Fix(
            "As a stopgap, fill the holes; better, repair the data where it is read.",
            "x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)",
        ),
        Fix(
            "Tell the model where the holes were.",
            "x = torch.cat([torch.nan_to_num(x), x.isnan().to(x.dtype)], -1)",
            None,
            {"why not": "it changes the model's input width"},
        ),
    )
