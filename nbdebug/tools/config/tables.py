"""What the field knows, as tables alone: characters that are not seen, what people write wrong, and how
settings are called, each with who says so."""

from __future__ import annotations

from typing import Any

SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
INVISIBLE = SPACES + (
    "\u00ad\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
"""Characters that an editor does not show, or shows as a space (Unicode, general categories Cf and Zs)."""
QUOTES = {"\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'"}
"""What word processors make of straight quotes."""
JSON_SAYS = {
    "Extra data": ("more text stands behind the end of the document", "Remove it: a file has one document."),
    "Expecting value": ("a value is missing", "Write the value, or null for none."),
}
"""The json module's words for a fault: what is wrong, and the cure."""
Row = tuple[str, str, str, str]
"""(pattern of a line, whose group x is replaced; by what: {} is the old text, a word in <> a form of it that
`document.py` makes; what is wrong; the cure), with {old}, {new} and {first}, the old text's first character."""
SLANTED = "".join(QUOTES)
DOUBLE = "JSON takes straight double quotes alone."
QUOTE_IT = "Put it into double quotes."
OPEN, CLOSE = "text without its opening quote", "text without its closing quote"
PATH = "a backslash that begins no escape (of a Windows path?)"
COMMENT = "a comment, which JSON does not have", "Remove the comment."
CONFLICT: Row = (r"^(?P<x>(?:<{7}|={7}|>{7})( .*)?)$", "", "a mark of a merge conflict", "Keep one of the two sides.")
STRAIGHT: Row = (f"(?P<x>[{SLANTED}])", "<straight>", "typographic quotes", "Write straight quotes.")
SWITCH = "T(?:rue|RUE)|F(?:alse|ALSE)"
JSON_BARE = r'[:\[,]\s*(?P<x>(?!(?:true|false|null|NaN|-?Infinity)\b)[^\W\d][^\n",\[\]{}:]*?"?)(?=\s*(?:[,\]}]|$))'
JSON_ROWS: tuple[Row, ...] = (
    CONFLICT,
    (r'^[^"]*?(?P<x>\s*(?://|#).*)$', "", *COMMENT),
    (f"(?P<x>[{INVISIBLE}])", " ", "an invisible character stands between the entries", "Replace it with a space."),
    (r"(?P<x>'[^'\n]*')", "<inner>", "text in single quotes", DOUBLE),
    (f"(?P<x>[{SLANTED}][^{SLANTED}\n]*[{SLANTED}])", "<inner>", "text in typographic quotes", DOUBLE),
    (r'(?P<x>(?<![\w.-])[A-Za-z_][\w.-]*"?)(?=\s*:)', "<quoted>", "the key `{old}` has no quotes", "Quote it."),
    (rf"(?P<x>\b(?:{SWITCH}|None|nil|NULL)\b)", "<word>", "`{old}` is Python; JSON writes `{new}`", "Write {new}."),
    (r"(?P<x>(?<![\w.+-])[-+.\d][\w.+-]*)", "<number>", "`{old}` is no number in JSON", "Write {new}."),
    (JSON_BARE, "<quoted>", "the text `{old}` has no opening quote", QUOTE_IT),
    (r'(?P<x>"[^"]*?)\s*,?\s*$', "<closed>", CLOSE, 'Close it with ".'),
    (r"(?P<x>\s*=\s*)", ": ", "`=` between key and value", "Write a colon."),
    (r"(?P<x>;)", ",", "a semicolon between entries", "Write a comma."),
)
"""On a line of JSON with its texts in quotes masked. No line of right JSON is changed by any."""
ODD = r'^(?=(?:[^"]*"[^"]*")*[^"]*"[^"]*$)\s*[{,]?\s*'
JSON_KEYS: tuple[Row, ...] = (
    (rf'{ODD}(?P<x>"[\w.-]+)\s*:\s*(?=["\d\[{{tfn-])', '{}"', "the key `{old}` has no closing quote", "Close it."),
    (rf'{ODD}(?P<x>[\w.-]+")\s*:', '"{}', "the key `{old}` has no opening quote", 'Write " before it.'),
)
"""On a line with one quote too many or too few."""
HEAD, REST = r"^[^=#]*?=\s*", r"(?=\s*(?:#|$))"
TOML_ODD = rf"{HEAD}(?P<x>\.\d+(?:[eE][-+]?\d+)?|\d+\.(?:[eE][-+]?\d+)?|0\d+){REST}"
DIGITS = "Write a digit on both sides of the point, and no zero in front."
TOML_ROWS: tuple[Row, ...] = (
    CONFLICT,
    (r"^\s*[\w.-]+(?P<x>\s*:\s*)(?=\S)", " = ", "a colon between key and value", "Write `=`."),
    (r"^\s*(?P<x>//|;|--)", "#", "`{old}` begins no comment in TOML", "Write `#`."),
    (r"\S(?P<x>\s*//.*)$", "", "`//` begins no comment in TOML", "Write `#`."),
    STRAIGHT,
    (r"^\s*\[[\w. -]+(?P<x>\s*)$", "]", "the header of a table is not closed", "Close it with ]."),
    (r"^\s*\[\[[\w. -]+(?P<x>\]?\s*)$", "]]", "the header of a table is not closed", "Close it with ]]."),
    (r"^(?!.*=)\s*[\w.-]+(?P<x>\s+)(?=\S)", " = ", "no `=` behind the key", "Write `=`."),
    (rf"{HEAD}(?P<x>{SWITCH}|yes|no){REST}", "<word>", "`{old}` is no value of TOML", "Write {new}."),
    (rf"^(?P<x>\s*)[\w.-]+\s*=\s*(?:None|null|~)?{REST}", "# ", "TOML has no value for nothing", "Leave the key out."),
    (rf'{HEAD}[^"#]*(?P<x>"[^"#]*?){REST}', '{}"', CLOSE, 'Close it with ".'),
    (rf"{HEAD}[^'#]*(?P<x>'[^'#]*?){REST}", "{}'", CLOSE, "Close it with '."),
    (rf"{HEAD}(?P<x>[^\"'#\s][^\"#]*\"){REST}", '"{}', OPEN, 'Write " before it.'),
    (rf"{HEAD}(?P<x>[^\"'#\s][^'#]*'){REST}", "'{}", OPEN, "Write ' before it."),
    (rf'{HEAD}(?P<x>"[^"]*\\[^"]*"){REST}', "<single>", PATH, "Use single quotes, or a slash."),
    (TOML_ODD, "<number>", "`{old}` is no number in TOML", DIGITS),
)
TOML_TEXT: tuple[Row, ...] = ((rf"{HEAD}(?P<x>[^\"'\[{{#\s][^#]*?){REST}", '"{}"', "text without quotes", QUOTE_IT),)
KEY, VALUE, REMARK = r"^\s*(?:- )?[\w.-]+", r"^\s*(?:- )?(?:[\w.-]+:\s+)?", r"(?=(?:\s+#.*)?$)"
YAML_COLONS: tuple[Row, ...] = (
    CONFLICT,
    (rf"{KEY}(?P<x>:)(?=\S)", ": ", "no space behind the colon", "Write a space behind it."),
    (rf"{KEY}(?P<x>\s*=\s*)(?=\S)", ": ", "`=` between key and value", "Write a colon and a space."),
    (rf"{KEY}(?P<x>\s*\uff1a\s*)", ": ", "a wide colon (U+FF1A)", "Write a plain colon and a space."),
    (r"^(?!.*:)\s*[\w.-]+(?P<x> +)(?=\S)", ": ", "no colon behind the key", "Write a colon behind it."),
    (r"^(?!.*:)\s*[\w.-]+(?P<x>\s*)$", ":", "no colon behind the key", "Write a colon behind it."),
)
WHOLE = "Put the whole value into quotes."
YAML_VALUES: tuple[Row, ...] = (
    (r"(?P<x>[^\x09\x20-\x7e\x85\xa0-\ud7ff\ue000-\U0010ffff])", "", "a control character", "Remove it."),
    STRAIGHT,
    (rf"{VALUE}(?P<x>[\"'].*?){REMARK}", "<single>", "a quote inside of text", "Put the value into the other quotes."),
    (rf"{VALUE}(?P<x>[@`%*&!|>,\]}}{{\[].*?){REMARK}", "<quoted>", "a bare value begins with `{first}`", WHOLE),
    (rf"{VALUE}(?P<x>[^\"'\s].*(?:: |:$).*?){REMARK}", "<quoted>", "a second colon in a value without quotes", WHOLE),
)

# -- what the field calls its settings, and what they may be ----------------------------------------------------------

OPTIM, LOADER = "torch.optim", "torch.utils.data.DataLoader"
PAGES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "lr learning_rate base_lr max_lr min_lr peak_lr init_lr initial_lr lr0 lr_initial final_lr end_lr eta_min "
        "warmup_lr warmup_init_lr unet_lr text_encoder_lr learning_rate_te learning_rate_unet backbone_lr encoder_lr "
        "decoder_lr head_lr actor_lr critic_lr embedding_lr lora_lr",
        {"type": "float", "min": 0, "max": 100},
        f"{OPTIM}: a rate is not negative; published ones stay below 100",
    ),
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
    (
        "batch_size train_batch_size eval_batch_size val_batch_size test_batch_size micro_batch_size "
        "micro_batch_size_per_gpu train_micro_batch_size_per_gpu per_device_train_batch_size batch_size_per_device "
        "per_device_eval_batch_size global_batch_size per_gpu_batch_size batch_size_per_gpu samples_per_gpu "
        "ims_per_batch mini_batch_size",
        {"type": "int", "min": 1},
        f"{LOADER}: a batch has a row or more",
    ),
    ("epochs num_epochs n_epochs total_epochs", {"type": "int", "min": 1}, "a training has an epoch or more"),
    ("num_train_epochs max_epochs", {"type": "float", "min": 1e-9}, "a training has an epoch or more"),
    (
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps num_attention_heads "
        "num_key_value_heads n_head n_heads num_heads nhead hidden_size d_model n_embd embed_dim hidden_dim num_layers "
        "n_layer n_layers num_hidden_layers vocab_size lora_rank lora_r network_dim intermediate_size",
        {"type": "int", "min": 1},
        "a count of one or more",
    ),
    ("lora_alpha network_alpha", {"type": "float", "min": 0}, "LoRA: alpha scales the adapter by alpha / rank"),
    ("num_workers dataloader_num_workers n_workers", {"type": "int", "min": 0}, f"{LOADER}: num_workers >= 0"),
    (
        "seed random_seed manual_seed data_seed",
        {"type": "int", "min": 0, "max": 2**32 - 1},
        "numpy.random.seed: 0 to 2**32 - 1",
    ),
    (
        "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_updates save_steps eval_steps logging_steps "
        "max_train_steps num_training_steps total_steps",
        {"type": "float", "min": 0},
        "a count of steps",
    ),
)
"""(names, what they may be, who says so)."""
DROPOUT = r"(?:.*_)?(?:dropout|dropout_rate|dropout_prob|drop_rate|drop_path|drop_path_rate|pdrop|dropout_p)"
OFF = -1
"""What many programs write for "not set"; it is no problem of a count or a seed."""
SWITCHES = ("no", "off", "yes", "on")
ARGUMENTS = "transformers.TrainingArguments"
CHOICES: dict[str, tuple[str, str]] = {
    "lr_scheduler_type": (
        "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt reduce_lr_on_plateau "
        "cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay",
        "transformers.SchedulerType",
    ),
    "mixed_precision": ("no fp16 bf16 fp8", "accelerate.Accelerator"),
    "eval_strategy": ("no steps epoch", ARGUMENTS),
    "evaluation_strategy": ("no steps epoch", ARGUMENTS),
    "save_strategy": ("no steps epoch best", ARGUMENTS),
    "attn_implementation": ("eager sdpa flash_attention_2 flash_attention_3 flex_attention", "transformers"),
}
_TRAINER = {"per_device_train_batch_size", "num_train_epochs", "save_total_limit", "per_device_eval_batch_size"}
OWNERS = {
    "mixed_precision": {"distributed_type", "compute_environment", "dynamo_backend", "network_dim", "network_module"},
    "eval_strategy": _TRAINER,
    "evaluation_strategy": _TRAINER,
    "save_strategy": _TRAINER,
}
"""Keys of files in which a choice is surely accelerate's or transformers'."""
FULL = {"fp32", "float32", "full", "none", "32"}
"""What people write for full precision."""
OWN_HEADS = (
    "head_dim d_kv d_head dim_head head_size kv_channels attention_head_dim attention_head_size qk_nope_head_dim "
    "v_head_dim mamba_d_state ssm_cfg num_key_value_groups n_embd_head"
)
"""Keys of models whose heads have a width of their own."""
WARMUPS = "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_updates"
TOTALS = "max_steps max_train_steps num_training_steps total_steps training_steps train_steps max_iters"
RATES = ("lr", "learning_rate", "base_lr")
CLASSES = ("_target_", "_component_", "class_path", "type", "name", "lr_scheduler_type", "lr_scheduler", "scheduler")
"""Keys of a rate, and of the class or type of a scheduler."""
EXPONENTS = r"(?m)\$\{[\w.:,]+\}|^\s*(?:- )?(?:_target_|_component_|class_path|init_args|_partial_):|^defaults:"
"""References, and classes with their arguments: files of OmegaConf (Hydra, torchtune) or jsonargparse (Lightning's
CLI), which take 1e-4 for a number."""
GIVEN = r"(?:\.(?:init_args|params|kwargs))?"
"""The section of a class's arguments, below its name's."""
RELATIONS: tuple[tuple[str, str, str, dict[str, str], str], ...] = (
    (
        "hidden_size d_model n_embd embed_dim hidden_dim model_dim dim",
        "multiple_of",
        "num_attention_heads n_head num_heads nhead n_heads encoder_attention_heads decoder_attention_heads",
        {"unless": OWN_HEADS},
        "torch.nn.MultiheadAttention: each head gets an equal part",
    ),
    (
        "num_attention_heads",
        "multiple_of",
        "num_key_value_heads",
        {},
        "grouped-query attention: each key-value head serves as many heads",
    ),
    (
        "save_steps",
        "multiple_of",
        "eval_steps",
        {"when": "load_best_model_at_end", "unless": "save_strategy eval_strategy evaluation_strategy"},
        f"{ARGUMENTS}: with load_best_model_at_end",
    ),
    (
        "min_lr eta_min",
        "at_most",
        "lr learning_rate max_lr base_lr",
        {},
        "a schedule falls from the learning rate to its minimum",
    ),
)
"""(names, relation, names of another in the same section, when: only beside this, unless: not beside these, but where
they are empty or "steps", who says so)."""
DEVICES = (
    ("precision", ("16-mixed", "16", 16), "accelerator", "cpu", "Lightning does not use float16 on the processor"),
    ("mixed_precision", ("fp16",), "use_cpu", True, "accelerate does not use fp16 on the processor"),
)
"""(precision, its values, device, its value, who says so): they do not go together."""
HALVES = ("fp16", "16-mixed", "16", 16)
EXCLUDING = (("fp16", "bf16"), ("load_in_4bit", "load_in_8bit"), ("fp16.enabled", "bf16.enabled"))
"""transformers.TrainingArguments and BitsAndBytesConfig, and DeepSpeed, refuse both of a pair."""
USUAL = frozenset(word for names, _, _ in PAGES for word in names.split())
KNOWN = {word for word in USUAL if len(word) > 8} | {
    *CHOICES,
    *f"{OWN_HEADS} {WARMUPS} {TOTALS} max_grad_norm gradient_checkpointing output_dir max_seq_length".split(),
    *"load_best_model_at_end load_in_4bit load_in_8bit lora_dropout hidden_dropout_prob attention_dropout".split(),
    *"lr_scheduler optimizer scheduler momentum dropout max_length target_modules".split(),
}
"""Keys of which a slip is told."""

# -- types, as schemas name them --------------------------------------------------------------------------------------

KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "list": ("a list", (list, tuple)),
    "object": ("a section", (dict,)),
}
JSON_TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "array": "list",
    "object": "object",
}
LIMITS = {"min": "minimum", "max": "maximum", "below": "exclusiveMaximum", "multiple_of": "multipleOf"}
"""Our names of limits, and JSON Schema's."""
PYTHON_TYPES = {int: "int", float: "float", str: "str", bool: "bool", list: "list", tuple: "list", dict: "object"}
VALIDATORS = {
    "type": "wrong-type", "enum": "invalid-choice", "const": "invalid-choice", "pattern": "invalid-choice",
    "minimum": "out-of-range", "maximum": "out-of-range", "exclusiveMinimum": "out-of-range",
    "exclusiveMaximum": "out-of-range", "minItems": "out-of-range", "maxItems": "out-of-range",
    "minLength": "out-of-range", "maxLength": "out-of-range", "multipleOf": "not-divisible",
    "additionalProperties": "unknown-key", "not": "inconsistent", "dependentRequired": "inconsistent",
    "required": "inconsistent", "if": "inconsistent", "oneOf": "inconsistent", "anyOf": "wrong-type",
}  # fmt: skip
"""What a JSON Schema says → the cause."""
