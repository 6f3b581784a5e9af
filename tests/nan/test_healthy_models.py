"""Real architectures, small and random: nothing is found, and traced steps end as plain ones do, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbdebug
from tests.nan.judge import answer_of

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, WORDS = 3, 7, 40
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
LLAMA = SMALL | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def text(left: bool = False) -> dict[str, torch.Tensor]:
    """Token ids with padding: on the right, or on the left as generators have it."""
    ids = torch.randint(3, WORDS, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[2, 2:] = 0
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def classify(left: bool = False) -> dict[str, torch.Tensor]:
    return text(left) | {"labels": torch.randint(0, 2, (ROWS,))}


def generate(left: bool = False) -> dict[str, torch.Tensor]:
    given = text(left)
    return given | {"labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, 2, (ROWS,))}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 20), "labels": torch.randint(3, WORDS, (ROWS, 5))}


def sound() -> dict[str, torch.Tensor]:
    mask = torch.ones(ROWS, 400, dtype=torch.long)
    mask[1, 250:] = 0
    return {"input_values": torch.randn(ROWS, 400), "attention_mask": mask, "labels": torch.randint(0, 2, (ROWS,))}


def config(name: str, **settings: Any) -> Any:
    return getattr(transformers, name + "Config")(**settings)


D_MODEL = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": WORDS,
}
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": ("Bert", "BertForSequenceClassification", SMALL, classify),
    "roberta": ("Roberta", "RobertaForMaskedLM", SMALL, generate),
    "electra": ("Electra", "ElectraForSequenceClassification", SMALL | {"embedding_size": 8}, classify),
    "albert": ("Albert", "AlbertForSequenceClassification", SMALL | {"embedding_size": 8}, classify),
    "distilbert": (
        "DistilBert",
        "DistilBertForSequenceClassification",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS},
        classify,
    ),
    "deberta-v2": (
        "DebertaV2",
        "DebertaV2ForSequenceClassification",
        SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        classify,
    ),
    "gpt2": (
        "GPT2",
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": WORDS},
        generate,
    ),
    "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", SMALL, lambda: generate(left=True)),
    "opt": (
        "OPT",
        "OPTForCausalLM",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "vocab_size": WORDS,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
        },
        lambda: generate(left=True),
    ),
    "bloom": (
        "Bloom",
        "BloomForCausalLM",
        {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS},
        lambda: generate(left=True),
    ),
    "llama": ("Llama", "LlamaForCausalLM", LLAMA, lambda: generate(left=True)),
    "mistral": ("Mistral", "MistralForCausalLM", LLAMA | {"sliding_window": 4}, generate),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", LLAMA, generate),
    "mixtral": ("Mixtral", "MixtralForCausalLM", LLAMA | {"num_local_experts": 3}, generate),
    "t5": (
        "T5",
        "T5ForConditionalGeneration",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": WORDS,
            "decoder_start_token_id": 0,
        },
        generate,
    ),
    "bart": ("Bart", "BartForConditionalGeneration", D_MODEL | {"max_position_embeddings": 32}, generate),
    "whisper": (
        "Whisper",
        "WhisperForConditionalGeneration",
        D_MODEL
        | {
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        speech,
    ),
    "vit": (
        "ViT",
        "ViTForImageClassification",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "image_size": 16,
            "patch_size": 8,
        },
        images,
    ),
    "wav2vec2": (
        "Wav2Vec2",
        "Wav2Vec2ForSequenceClassification",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "conv_dim": (8, 8),
            "conv_stride": (4, 2),
            "conv_kernel": (8, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "classifier_proj_size": 8,
        },
        sound,
    ),
}


def built(name: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """The model in train mode, and three batches."""
    family, head, settings, batch = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, head)(config(family, **settings)).train()
    return model, [batch() for _ in range(3)]


def training(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = iter(batches)

    def step() -> torch.Tensor:
        loss = model(**next(stream)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, optimizer


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a step changes."""
    found: dict[str, Any] = {f"model.{key}": value for key, value in model.state_dict().items()}
    found |= {f"gradient.{key}": value.grad for key, value in model.named_parameters()}
    found |= {f"buffer.{key}": value for key, value in model.named_buffers()}
    for number, (_, held) in enumerate(optimizer.state.items()):
        found |= {f"optimizer.{number}.{key}": value for key, value in held.items()}
    return found | {"generator": torch.get_rng_state(), "training": [module.training for module in model.modules()]}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same in both, bit for bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b

    return [key for key in {**one, **other} if key not in one or key not in other or not same(one[key], other[key])]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_found_and_nothing_is_changed(name: str):
    model, batches = built(name)
    twin = copy.deepcopy(model)
    plain_step, plain_optimizer = training(twin, batches)
    torch.manual_seed(1)
    losses = [plain_step().item() for _ in range(3)]
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses), "the model itself is not healthy"
    expected = state(twin, plain_optimizer)

    step, optimizer = training(model, batches)
    torch.manual_seed(1)
    report = nbdebug.nan_trace(step, model=model, optimizer=optimizer, max_steps=3)

    assert report.ok, report.findings
    assert "own_fault" not in answer_of(report), report.unchecked
    assert not differing(expected, state(model, optimizer))
    with pytest.raises(StopIteration):
        step()


def test_at_least_twelve_architectures():
    assert len(MODELS) >= 12
