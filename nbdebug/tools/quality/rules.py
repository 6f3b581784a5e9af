"""From what was measured of outputs, as plain values, to named causes, each with its cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nbdebug.registry import declared, rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One problem that was seen. code: as in the catalogue; title: a sentence with its numbers; samples: rows of what
    was given; values: the numbers that prove it; fix: a tried one, which comes before the rule's suggestion."""

    code: str
    title: str
    samples: tuple[int, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: Where = dataclasses.field(default_factory=Where)
    fix: Fix | None = None


def names(code: str, cure: tuple[str, str], **page: str) -> None:
    """Declare the rule of a code. cure: title and code of what to write instead; page: as `rule` takes it."""

    def check(problem: Evidence) -> Finding | None:
        if problem.code != f"quality/{code}":
            return None
        where = dataclasses.replace(problem.where, samples=problem.samples or None)
        return Finding(problem.code, problem.title, where, dict(problem.values), (problem.fix or Fix(*cure),))

    check.__qualname__ = f"names.{code}"
    rule(code=f"quality/{code}", **page)(check)


def findings_of(problems: Iterable[Evidence]) -> tuple[Finding, ...]:
    """The findings of all that was seen, in its order."""
    checks = declared(__name__)
    return tuple(found for problem in problems for check in checks if (found := check(problem)) is not None)


COPIES = {  # of evaluation rows the last line, whatever their kind
    "item": ("sample", "training row", "distance"),
    "picture": ("sample", "training picture", "distance"),
    "text": ("sample", "training row", "words in common"),
    "sound": ("sample", "training sound", "distance"),
    "evaluation row": ("evaluation row", "training row", "score"),
}
"""How a row, the one of training that it repeats, and their distance or likeness are called."""


def repeated(kind: str, pairs: Sequence[tuple[int, int, Any]], total: int) -> Iterator[Evidence]:
    """What stands in training. kind: of COPIES; pairs: (row, training row, score) of each copy; total: all rows."""
    if not pairs:
        return
    one, rows = len(pairs) == 1, tuple(sorted(row for row, _, _ in pairs))
    noun = kind if kind in ("text", "sound", "evaluation row") else "sample"
    what = f"{'repeats' if one else 'repeat'} {kind}s of the training set"
    if kind == "evaluation row":
        what = f"{'stands' if one else 'stand'} in the training set"
    code = "quality/evaluation-overlap" if kind == "evaluation row" else "quality/memorized"
    each = [dict(zip(COPIES[kind], pair)) for pair in pairs]
    yield Evidence(code, f"{count(len(rows), noun)} of {total} {what}", rows, {"pairs": each})


PERPLEXITY = "https://huggingface.co/docs/transformers/perplexity"
CROSS_ENTROPY = "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html"

names(
    "padding-counted",
    (
        "Leave padding out of the mean.",
        "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=pad_id)",
    ),
    title="Padding counts in the perplexity.",
    symptom="The perplexity changes with the batch size or with the longest text, and is mostly far too low.",
    cause="The mean goes over padded positions too: their loss is easy to make small, or is zero while they are "
    "counted in the denominator.",
    confirm="`nbdebug.perplexity(logits, tokens, pad_id=…, reported=…)`: the number with padding equals yours.",
    fix="Give `ignore_index=pad_id`, or multiply by the mask and divide by its sum.",
    reference=CROSS_ENTROPY,
)
names(
    "mean-of-perplexities",
    (
        "Add up losses and tokens, and take the exponential once.",
        "total += loss.item() * tokens_in_batch\ncount += tokens_in_batch\n"
        "perplexity = math.exp(total / count)  # after the loop",
    ),
    title="The perplexities of batches are averaged.",
    symptom="The perplexity rises as batches become smaller; one hard text moves it a lot.",
    cause="The mean of exponentials is larger than the exponential of the mean (Jensen's inequality).",
    confirm="Evaluate with another batch size: the number changes.",
    fix="Sum the losses of all tokens, divide by their number, and take the exponential at the end.",
    reference=PERPLEXITY,
)
names(
    "mean-of-batches",
    (
        "Weigh each batch by its real tokens.",
        "total += loss.item() * tokens_in_batch\ncount += tokens_in_batch\n"
        "perplexity = math.exp(total / count)  # after the loop",
    ),
    title="Batches weigh the same, however many tokens they have.",
    symptom="The perplexity changes a little with the batch size or the order of the texts.",
    cause="The losses of batches, or of texts, are averaged without their numbers of tokens: short ones "
    "weigh too much.",
    confirm="Evaluate with another batch size: the number changes.",
    fix="Sum the losses of all tokens, and divide by their number.",
    reference=PERPLEXITY,
)
names(
    "wrong-token-count",
    ("Divide by the number of tokens that are predicted.", "count = (tokens[:, 1:] != pad_id).sum()"),
    title="The loss is divided by another number of tokens than it was summed over.",
    symptom="The perplexity is too low, by much for short texts and by little for long ones.",
    cause="The loss is a sum over the tokens that are predicted, all but the first of each text, and the count has the "
    "first ones, too.",
    confirm="Compare the count with the number of losses that are not zero.",
    fix="Count the shifted targets: `(tokens[:, 1:] != pad_id).sum()`.",
    reference=PERPLEXITY,
)
names(
    "wrong-base",
    ("Raise e to nats (2 goes with bits alone).", "perplexity = math.exp(loss)"),
    title="The base of the exponential is not that of the loss.",
    symptom="The perplexity is far lower, or far higher, than others report for the same model.",
    cause="torch's cross entropy is in nats: its perplexity is exp(loss). 2 ** loss goes with a loss in bits.",
    confirm="Compare `2 ** loss` and `math.exp(loss)` with your number.",
    fix="Use `math.exp(loss)`, or divide the loss by `math.log(2)` before `2 **`.",
    reference=PERPLEXITY,
)
names(
    "labels-not-shifted",
    (
        "Compare each position with the token after it, once.",
        "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=pad_id)",
    ),
    title="Targets are not the next tokens.",
    symptom="The perplexity is absurdly high, or near 1, while generated text is as it should be.",
    cause="A language model's output at a position is about the next token. Targets that are not shifted "
    "compare it with its own input; a model that shifts inside, given shifted labels, is compared with the token "
    "after the next.",
    confirm="Print one row of inputs beside its targets.",
    fix="Shift once: `logits[:, :-1]` beside `tokens[:, 1:]`; give Hugging Face models `labels=input_ids` as they are.",
    reference=PERPLEXITY,
)
names(
    "window-without-stride",
    (
        "Let windows overlap, and count the new tokens of each alone.",
        "for start in range(0, length, stride):\n    begin = max(0, start + stride - window)\n"
        "    ids = tokens[:, begin : start + stride]\n    targets = ids.clone()\n"
        "    targets[:, : start - begin] = -100  # context, no target",
    ),
    title="The text is cut into windows that do not overlap.",
    symptom="The perplexity falls as the window grows, by more than the model explains.",
    cause="The first tokens of each window are judged without the context that stands before them.",
    confirm="The loss by position in the window is high at its start.",
    fix="Move the window by a stride smaller than itself, and count only the tokens that are new.",
    reference=PERPLEXITY,
)

MEMORIZATION = "https://arxiv.org/abs/2301.13188"

names(
    "memorized",
    (
        "Take repeated items out of training, and stop earlier.",
        "report = nbdebug.check_data(training_folder)  # copies in the set itself\n"
        "# keep the checkpoint of the lowest validation loss, and make samples from it",
    ),
    title="Samples repeat the training set.",
    symptom="Samples look excellent and familiar; the training loss is far below validation's.",
    cause="Too many passes over too few items, or items that stand in the set many times, are learnt by heart.",
    confirm="Lay each sample beside its nearest training item: flipped, moved and noisy copies count.",
    fix="Remove repeated items, train on more, regularize, or take an earlier checkpoint.",
    reference=MEMORIZATION,
)
names(
    "mode-collapse",
    (
        "Sample with more variety, and look at the discriminator's balance or the guidance.",
        "outputs = model.generate(prompts, do_sample=True, temperature=1.0)  # or a lower guidance_scale",
    ),
    title="Many samples are one and the same.",
    symptom="Whatever the seed or the prompt, the same sample comes out.",
    cause="A generator with one sample that always passes, a decoder without sampling, a guidance scale that "
    "is too large, or one seed for all.",
    confirm="Compare the distances of samples with those of training items.",
    fix="Check that seeds differ; lower guidance, raise the temperature; train with a diversity term.",
    reference="https://arxiv.org/abs/1606.03498",
)
names(
    "color-shift",
    (
        "Make pictures with the statistics that training used.",
        "pixels = (decoded * std + mean).clamp(0, 1)  # training's own mean and std",
    ),
    title="All samples lean to one colour.",
    symptom="Shapes are right, and everything has a tint.",
    cause="Normalization is undone with other means and deviations, channels are swapped, or the weights drifted in a "
    "fine-tuning on tinted pictures or of high learning rate.",
    confirm="The mean a* and b* of samples beside the training set's, with their errors.",
    fix="Use one pair of functions for normalizing and its inverse; lower the rate; keep an average of the weights.",
    reference="https://en.wikipedia.org/wiki/CIELAB_color_space",
)
names(
    "blurred",
    (
        "Decode at the size of training, and with the right scale.",
        "images = vae.decode(latents / vae.config.scaling_factor)",
    ),
    title="Samples are softer than what the model learnt from.",
    symptom="Samples look washed out or out of focus.",
    cause="A loss of mean squares averages what is possible; sampling ends too early; pictures were resized twice.",
    confirm="The share of fine detail beside the training set's.",
    fix="More sampling steps, an adversarial or perceptual term, no resizing between model and file.",
    reference="https://arxiv.org/abs/1512.09300",
)
names(
    "noisy",
    ("Sample to the end of the schedule.", "images = pipeline(prompt, num_inference_steps=50).images"),
    title="Samples are grainier than what the model learnt from.",
    symptom="A grain lies over all samples.",
    cause="Sampling stops before the noise is gone, the scheduler is not training's, or weights are not averaged.",
    confirm="The share of fine detail beside the training set's.",
    fix="Use the scheduler and prediction type of training, and enough steps.",
    reference="https://arxiv.org/abs/2305.08891",
)
names(
    "silent",
    ("Look at what the decoder is given, and at its gain.", "print(latents.std(), decoded.abs().max())"),
    title="Sounds are silent.",
    symptom="A file of the right length, in which nothing is heard.",
    cause="A decoder that is given zeros or NaN, a gain that is divided twice, whole numbers taken for floats.",
    confirm="The peak is more than 80 dB under full scale.",
    fix="Follow the level from the latents to the file; write floats of -1 to 1.",
    reference="https://docs.pytorch.org/audio/stable/tutorials/audio_io_tutorial.html",
)
names(
    "clipped",
    ("Scale to the peak before it is written.", "sound = sound / max(1.0, float(sound.abs().max()))"),
    title="Sounds are cut off at full scale.",
    symptom="Loud places crackle; the wave is flat there.",
    cause="Values beyond -1 to 1 are cut when the file is written: the output is not scaled, or training's was.",
    confirm="Runs of equal values at the peak.",
    fix="Scale by the peak, or train on the level that is written.",
    reference="https://docs.pytorch.org/audio/stable/tutorials/audio_io_tutorial.html",
)
names(
    "repetition",
    (
        "Sample, and forbid repeated runs.",
        "outputs = model.generate(**inputs, do_sample=True, top_p=0.9, no_repeat_ngram_size=4)",
    ),
    title="Texts loop to their end.",
    symptom="A text begins well and then says one sentence over and over until the limit.",
    cause="Greedy decoding feeds a repetition's own likelihood; a model that never learnt its end token goes on.",
    confirm="The last part of the text is one part, repeated.",
    fix="Sample, penalize repetition, and make sure that training's texts end in the end token.",
    reference="https://arxiv.org/abs/1904.09751",
)
names(
    "truncated",
    ("Raise the limit of new tokens.", "outputs = model.generate(**inputs, max_new_tokens=1024)"),
    title="Texts end at a limit, in the middle of a sentence.",
    symptom="Long answers stop in the middle; short ones are whole.",
    cause="The limit of new tokens is lower than what answers need, or the model does not know its end token.",
    confirm="All texts that are cut have about the same length.",
    fix="Raise `max_new_tokens`, and check `eos_token_id`.",
    reference="https://huggingface.co/docs/transformers/main_classes/text_generation",
)
names(
    "evaluation-overlap",
    (
        "Take these rows out of training, and train again.",
        "known = set(map(normalized, evaluation))\ntraining = [r for r in training if normalized(r) not in known]",
    ),
    title="Evaluation rows stand in the training set.",
    symptom="Scores are too good, and fall on new data.",
    cause="Both sets come from one source; copies that differ in case or a few words pass a comparison.",
    confirm="Lay each row beside its training row: the report names both.",
    fix="Split before anything else, by source; take near copies out.",
    reference="https://arxiv.org/abs/2107.06499",
)

LORA = "https://arxiv.org/abs/2106.09685"

names(
    "adapter-zero",
    (
        "Begin with one factor at random and the other at zero, and look that the layer is called.",
        "nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)\nnn.init.zeros_(layer.lora_B)",
    ),
    title="Factors of an adapter are zero.",
    symptom="The model with the adapter answers exactly as the base model.",
    cause="The product of two factors is zero while one of them is. With both at zero neither has a gradient; a layer "
    "that is not called, or an optimizer without it, leaves the second at zero.",
    confirm="Print the norm of both factors of each layer after some steps.",
    fix="Start the first factor at random; check that its layer takes part in the forward pass.",
    reference=LORA,
)
names(
    "adapter-frozen",
    (
        "Make the optimizer after the adapter, of all that requires a gradient.",
        "for name, p in model.named_parameters():\n    p.requires_grad_('lora_' in name)\n"
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)",
    ),
    title="The factors of an adapter are not trained.",
    symptom="The loss hardly falls, and the adapter is the same after training.",
    cause="All was frozen after the adapter was put in, it was loaded for inference, or the optimizer was made before.",
    confirm="List factors that need a gradient, and those that the optimizer holds.",
    fix="Freeze the base first, then put the adapter in, then make the optimizer. With peft: `is_trainable=True`.",
    reference="https://huggingface.co/docs/peft/main/en/developer_guides/troubleshooting",
)
names(
    "adapter-inactive",
    ("Switch it on, and call the layer that has it.", "model.set_adapter('default')\nmodel.enable_adapter_layers()"),
    title="The adapter is there and not used.",
    symptom="The adapter is trained, and the outputs are those of the base model.",
    cause="It is disabled, another one is active, its scale is 0, or the forward pass takes the old layer.",
    confirm="Multiply its scale by ten: the outputs stay the same.",
    fix="Set the active adapter; look that the layer's forward adds the product of its factors.",
    reference="https://huggingface.co/docs/peft/main/en/developer_guides/troubleshooting",
)
names(
    "adapter-scale",
    (
        "Add the product times alpha / rank, in training and in use.",
        "return base(x) + (alpha / rank) * (x @ lora_A.T @ lora_B.T)",
    ),
    title="The adapter is added with another scale than was set.",
    symptom="The adapter is far too weak or too strong; results change with the rank.",
    cause="alpha / rank is forgotten, applied twice, or lost on saving: alpha is no weight, and many files lack it.",
    confirm="Compare what the layer adds with the product of its factors.",
    fix="Keep alpha beside the weights, and divide it by the rank (or by its root) once.",
    reference=LORA,
)
names(
    "adapter-merged-twice",
    (
        "Load the base weights anew, and merge once or not at all.",
        "model = PeftModel.from_pretrained(base_model, adapter)  # a base that was never merged",
    ),
    title="The adapter is added to weights that hold it already.",
    symptom="Results are exaggerated or broken after merging, saving and loading.",
    cause="A merged model was saved as the base, or merged again, and the adapter is put on top.",
    confirm="The base weights differ from the published ones by the product of the factors.",
    fix="Keep the merged model and the base apart; merge into a fresh copy of the base.",
    reference="https://huggingface.co/docs/peft/main/en/developer_guides/lora#merge-lora-weights-into-the-base-model",
)
names(
    "adapter-other-base",
    ("Use the base and the layers that it was trained on.", "print(json.load(open('adapter_config.json')))"),
    title="The saved adapter does not fit this model.",
    symptom="Loading says that keys are unexpected or missing, or says nothing and the adapter has no effect.",
    cause="The adapter belongs to another base or size, or its keys carry another program's names.",
    confirm="Compare the layers that the file names, and the shapes of its factors, with the model's.",
    fix="Load the base that its settings name; rename keys from one program's form to the other's.",
    reference="https://huggingface.co/docs/diffusers/main/en/api/loaders/lora",
)
names(
    "adapter-not-loaded",
    (
        "Load it with strict names, and look at what was not used.",
        "result = model.load_state_dict(state, strict=False)\n"
        "assert not result.unexpected_keys, result.unexpected_keys",
    ),
    title="The saved factors are not in the model.",
    symptom="The file is loaded without an error, and the model answers as before.",
    cause="`strict=False` passes over keys with other names (a missing adapter's name, another prefix).",
    confirm="The factors in the model are zero, those in the file are not.",
    fix="Use the library's own loading, or rename the keys; look at `unexpected_keys`.",
    reference="https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint",
)
names(
    "unfair-comparison",
    ("Evaluate both in one way.", "nbdebug.compare(a.eval(), b.eval(), inputs, metric, seeds=range(5))"),
    title="Two models are compared under different conditions.",
    symptom="One is better by more than is plausible, or the order changes with the day.",
    cause="Other data, seeds or limits, another prompt, or train mode: the difference is not the models' own.",
    confirm="Evaluate one model in both ways: it differs from itself.",
    fix="Give both the same inputs, seeds, limits and mode; change one thing at a time.",
    reference="https://arxiv.org/abs/1909.03004",
)
names(
    "prediction-type",
    ("Give both one type.", "scheduler = DDIMScheduler(prediction_type=training_type)"),
    title="The sampler takes the model's output for something else.",
    symptom="The training loss is low, and samples are noise, washed out or burnt.",
    cause="A model can be trained to give the noise, the clean data or the velocity; the sampler must be told which. A "
    "base of another version, or a scheduler with its default, has another one.",
    confirm="Add noise to training items: the output is near one of the three targets.",
    fix="Set `prediction_type` of the sampler to what training used.",
    reference="https://huggingface.co/docs/diffusers/main/en/api/schedulers/overview",
)
names(
    "noise-schedule",
    (
        "Make it of the betas, in order.",
        "betas = torch.linspace(1e-4, 0.02, 1000)\nalphas_cumprod = torch.cumprod(1 - betas, 0)",
    ),
    title="The noise schedule is none.",
    symptom="Losses look usual, and samples are noise; or the square root of a negative number is NaN.",
    cause="A cumulative sum in place of a product, betas in place of alphas, or the wrong way round in time.",
    confirm="alphas_cumprod begins near 1 and falls to near 0.",
    fix="`alphas_cumprod = torch.cumprod(1 - betas, 0)`, step 0 with the least noise.",
    reference="https://arxiv.org/abs/2006.11239",
)
