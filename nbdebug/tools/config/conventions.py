"""What the field knows of a setting by its name, where there is no schema. It is silent where a name is not here.

Each entry has the names, what they may be, and who says so. A relation holds between settings of one section.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.tools.config.document import Expectation, Setting

OPTIM = "torch.optim"
RATES = (
    "lr learning_rate base_lr max_lr min_lr peak_lr init_lr initial_lr lr0 lr_initial final_lr end_lr eta_min "
    "warmup_lr warmup_init_lr unet_lr text_encoder_lr learning_rate_te learning_rate_unet backbone_lr encoder_lr "
    "decoder_lr head_lr actor_lr critic_lr embedding_lr lora_lr"
)
BATCHES = (
    "batch_size train_batch_size eval_batch_size val_batch_size test_batch_size micro_batch_size "
    "micro_batch_size_per_gpu train_micro_batch_size_per_gpu per_device_train_batch_size batch_size_per_device "
    "per_device_eval_batch_size global_batch_size per_gpu_batch_size batch_size_per_gpu samples_per_gpu "
    "ims_per_batch mini_batch_size"
)
COUNTS = (
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps num_attention_heads "
    "num_key_value_heads n_head n_heads num_heads nhead hidden_size d_model n_embd embed_dim hidden_dim num_layers "
    "n_layer n_layers num_hidden_layers vocab_size lora_rank lora_r network_dim intermediate_size"
)
PAGES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (RATES, {"type": "float", "min": 0, "max": 100}, f"{OPTIM}: a rate is not negative; published ones stay below 100"),
    ("weight_decay wd l2_reg", {"type": "float", "min": 0}, f"{OPTIM} refuses a negative weight decay"),
    (
        "adam_beta1 adam_beta2 beta1 beta2 beta_1 beta_2 adam_b1 adam_b2",
        {"type": "float", "min": 0, "below": 1},
        f"{OPTIM}.Adam: 0 <= beta < 1",
    ),
    ("betas adam_betas opt_betas", {"min": 0, "below": 1}, f"{OPTIM}.Adam: 0 <= beta < 1"),
    (
        "eps adam_epsilon adam_eps epsilon layer_norm_eps rms_norm_eps",
        {"type": "float", "min": 0},
        f"{OPTIM}: eps >= 0",
    ),
    (
        "ema_decay label_smoothing label_smoothing_factor warmup_ratio mlm_probability warmup_fraction",
        {"type": "float", "min": 0, "max": 1},
        "a share of one",
    ),
    (BATCHES, {"type": "int", "min": 1}, "torch.utils.data.DataLoader: a batch has a row or more"),
    ("epochs num_epochs n_epochs total_epochs", {"type": "int", "min": 1}, "a training has an epoch or more"),
    ("num_train_epochs max_epochs", {"type": "float", "min": 1e-9}, "a training has an epoch or more"),
    (COUNTS, {"type": "int", "min": 1}, "a count of one or more"),
    ("lora_alpha network_alpha", {"type": "float", "min": 0}, "LoRA: alpha scales the adapter by alpha / rank"),
    (
        "num_workers dataloader_num_workers n_workers",
        {"type": "int", "min": 0},
        "torch.utils.data.DataLoader: num_workers >= 0",
    ),
    (
        "seed random_seed manual_seed data_seed",
        {"type": "int", "min": 0, "max": 2**32 - 1},
        "numpy.random.seed: 0 to 2**32 - 1",
    ),
    (
        "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_updates",
        {"type": "float", "min": 0},
        "a count of steps",
    ),
    (
        "save_steps eval_steps logging_steps max_train_steps num_training_steps total_steps",
        {"type": "float", "min": 0},
        "a count of steps",
    ),
)
OFF = -1
"""What many programs write for "not set"; it is no problem of a count or a seed."""
SWITCHES = ("no", "off", "yes", "on")
CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "lr_scheduler_type": (
        (
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
            "reduce_lr_on_plateau",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        ),
        "transformers.SchedulerType",
    ),
    "mixed_precision": (("no", "fp16", "bf16", "fp8"), "accelerate.Accelerator"),
    "eval_strategy": (("no", "steps", "epoch"), "transformers.TrainingArguments"),
    "evaluation_strategy": (("no", "steps", "epoch"), "transformers.TrainingArguments"),
    "save_strategy": (("no", "steps", "epoch", "best"), "transformers.TrainingArguments"),
    "attn_implementation": (
        ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        "transformers",
    ),
}
ACCELERATE = {"distributed_type", "compute_environment", "dynamo_backend", "network_dim", "network_module"}
"""Keys of files whose `mixed_precision` is accelerate's."""
ARGUMENTS = {"per_device_train_batch_size", "num_train_epochs", "save_total_limit", "per_device_eval_batch_size"}
"""Keys of files whose strategies are transformers'."""
DROPOUT = re.compile(
    r"(?:.*_)?(?:dropout|dropout_rate|dropout_prob|drop_rate|drop_path|drop_path_rate|pdrop|dropout_p)"
)
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "model_dim", "dim")
HEADS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "nhead",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
OWN_HEADS = {
    "head_dim",
    "d_kv",
    "d_head",
    "dim_head",
    "head_size",
    "kv_channels",
    "attention_head_dim",
    "attention_head_size",
    "qk_nope_head_dim",
    "v_head_dim",
    "mamba_d_state",
    "ssm_cfg",
    "num_key_value_groups",
    "n_embd_head",
}
"""Keys of models whose heads have a width of their own."""
WARMUPS = ("warmup_steps", "num_warmup_steps", "lr_warmup_steps", "warmup_iters", "warmup_updates")
TOTALS = (
    "max_steps",
    "max_train_steps",
    "num_training_steps",
    "total_steps",
    "training_steps",
    "train_steps",
    "max_iters",
)
DEVICES = (
    ("precision", ("16-mixed",), "accelerator", "cpu", "Lightning takes bf16-mixed in its place on the processor"),
    ("mixed_precision", ("fp16",), "use_cpu", True, "accelerate does not use fp16 on the processor"),
)
"""(precision, its values, device, its value, who says so): they do not go together."""
EXCLUDING = (("fp16", "bf16"), ("load_in_4bit", "load_in_8bit"), ("fp16.enabled", "bf16.enabled"))
"""transformers.TrainingArguments and BitsAndBytesConfig, and DeepSpeed, refuse both of a pair."""


@functools.cache
def convention(name: str) -> Expectation | None:
    """What a setting of this name may be; None where nothing is known."""
    name = name.lower()
    for names, rules, source in PAGES:
        if name in names.split():
            return Expectation(**rules, lenient=True, null=True, source=source)
    if DROPOUT.fullmatch(name):
        return Expectation(
            type="float", min=0, max=1, lenient=True, null=True, source="torch.nn.Dropout: a probability"
        )
    if name in CHOICES:
        choices, source = CHOICES[name]
        return Expectation(type="str", choices=choices, lenient=True, null=True, source=source)
    return None


def conventions(settings: Mapping[str, Setting]) -> dict[str, Expectation]:
    """What the settings of a file may be, by their names and by each other."""
    expected: dict[str, Expectation] = {}
    for key, setting in settings.items():
        usual = convention(setting.name)
        if usual is not None and not setting.section and not _not_set(setting):
            expected[key] = usual
    for key, relation in _relations(settings):
        usual = expected.get(key, Expectation(lenient=True, null=True))
        expected[key] = dataclasses.replace(usual, **relation)
    return expected


def _not_set(setting: Setting) -> bool:
    whole = (convention(setting.name) or Expectation()).type == "int"
    return setting.value == OFF and (whole or "epoch" in setting.name or "step" in setting.name)


def _relations(settings: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections: dict[str, dict[str, Setting]] = {}
    for setting in settings.values():
        sections.setdefault(setting.parent, {})[setting.name] = setting
    for parent, here in sections.items():
        yield from _heads(here)
        yield from _excluding(parent, settings)
        yield from _checkpoints(here)
        yield from _batches(here)
        yield from _rates(here)
        yield from _devices(here)
    yield from _warmup(settings)


def _whole(setting: Setting | None) -> bool:
    return setting is not None and type(setting.value) is int and setting.value > 0


def _heads(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    widths, heads = ([here[n] for n in names if _whole(here.get(n))] for names in (WIDTHS, HEADS))
    if len(widths) == 1 and heads and not any(here[name].value is not None for name in OWN_HEADS & here.keys()):
        yield (
            widths[0].key,
            {"multiple_of": heads[0].key, "source": "torch.nn.MultiheadAttention: each head gets an equal part"},
        )
    shared = here.get("num_key_value_heads")
    if _whole(shared) and _whole(here.get("num_attention_heads")):
        source = "grouped-query attention: each key-value head serves as many heads"
        yield here["num_attention_heads"].key, {"multiple_of": shared.key, "source": source}  # type: ignore[union-attr]


def _excluding(parent: str, settings: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    for first, second in EXCLUDING:
        one, other = (f"{parent}.{name}" if parent else name for name in (first, second))
        if one in settings and other in settings:
            yield one, {"not_with": other, "source": "transformers and DeepSpeed refuse both"}


def _checkpoints(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The best checkpoint can be loaded only where each saving step is an evaluating one."""
    best, save, evaluate = (here.get(n) for n in ("load_best_model_at_end", "save_steps", "eval_steps"))
    strategies = {str(here[n].value) for n in ("save_strategy", "eval_strategy", "evaluation_strategy") if n in here}
    if best is not None and save is not None and _whole(save) and _whole(evaluate) and strategies <= {"steps"}:
        source = "transformers.TrainingArguments: with load_best_model_at_end"
        yield save.key, {"multiple_of": evaluate.key, "when": best.key, "source": source}  # type: ignore[union-attr]


def _batches(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    total, micro = (here.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    steps = here.get("gradient_accumulation_steps")
    if total is not None and micro is not None and _whole(total) and _whole(micro):
        source = "DeepSpeed: micro batch x accumulation steps x number of GPUs"
        factor = steps.value if steps is not None and _whole(steps) else 1
        yield total.key, {"multiple_of": micro.value * factor, "source": source}


def _devices(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Half precision where the same section asks for the processor."""
    for name, halves, place, asked, source in DEVICES:
        precision, device = here.get(name), here.get(place)
        if precision is not None and device is not None and precision.value in halves and device.value == asked:
            yield precision.key, {"not_with": device.key, "source": source}


def _rates(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    low = here.get("min_lr") or here.get("eta_min")
    high = [here[n] for n in ("lr", "learning_rate", "max_lr", "base_lr") if n in here]
    if low is not None and len(high) == 1 and not isinstance(high[0].value, str) and (high[0].value or 0) > 0:
        yield low.key, {"at_most": high[0].key, "source": "a schedule falls from the learning rate to its minimum"}


def _warmup(settings: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where the file has one warm-up and one number of steps."""
    warmups, totals = ([s for s in settings.values() if s.name in names] for names in (WARMUPS, TOTALS))
    if len(warmups) == len(totals) == 1 and type(totals[0].value) is int and totals[0].value > 0:
        yield warmups[0].key, {"at_most": totals[0].key, "source": "the warm-up is a part of the training"}


USUAL = frozenset(word for names, _, _ in PAGES for word in names.split())
KNOWN = {word for word in USUAL if len(word) > 8} | {
    *CHOICES,
    *OWN_HEADS,
    *WARMUPS,
    *TOTALS,
    "max_grad_norm",
    "gradient_checkpointing",
    "output_dir",
    "max_seq_length",
    "load_best_model_at_end",
    "load_in_4bit",
    "load_in_8bit",
    "lora_dropout",
    "hidden_dropout_prob",
    "attention_dropout",
    "lr_scheduler",
    "optimizer",
    "scheduler",
    "momentum",
    "dropout",
    "max_length",
    "target_modules",
}


def misspelt(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Keys that differ from a long, usual one by two letters swapped, or one missing or too many. They are no usual key
    and no plural, and the usual one does not stand beside them."""
    near: dict[str, str] = {}
    siblings: dict[str, set[str]] = {}
    for setting in settings.values():
        siblings.setdefault(setting.parent, set()).add(setting.name)
    for key, setting in settings.items():
        name = setting.name
        if len(name) < 9 or name.lower() in KNOWN or name in USUAL or not re.fullmatch(r"[a-z_]+", name):
            continue
        for usual in difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.88):
            if (
                len(usual) > 8
                and not re.search(r"\d", usual)
                and usual not in siblings[setting.parent]
                and _one_slip(name, usual)
            ):
                near[key] = usual
    return near


def _one_slip(name: str, usual: str) -> bool:
    """Whether a slip of the finger leads from one to the other; a plural or another word is none."""
    if name.rstrip("s") == usual.rstrip("s") or name.count("_") != usual.count("_"):
        return False
    if len(name) == len(usual):  # another letter may be another word: patch_size, batch_size
        swapped = [i for i, (a, b) in enumerate(zip(name, usual)) if a != b]
        pair = len(swapped) == 2 and swapped[1] == swapped[0] + 1
        return pair and name[swapped[0]] == usual[swapped[1]] and name[swapped[1]] == usual[swapped[0]]
    short, long = sorted((name, usual), key=len)
    return len(long) - len(short) == 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
