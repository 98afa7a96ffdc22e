"""Models of text and images, of which the text alone is read: a text model's configuration inside another one."""

from __future__ import annotations

from paged_kv.graphs.models import gemma3, gemma4, llama4, ministral3, mistral, qwen3_5
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields

_OUTER = ("architectures", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys that some files have beside the text's configuration and not in it."""
_GEMMA3_4B = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262208,
}
"""The values that transformers has for missing keys; published files leave these out."""
_TEXT = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
_PARTS = ("vision_tower", "vision_model", "multi_modal_projector", "visual")
_IMAGES = tuple(f"{at}{part}." for at in ("", "model.") for part in _PARTS)


def _read(fields: Fields, families: tuple[Family, ...], **defaults: object) -> DecoderConfig:
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", "expected the text model's configuration")
    kind = text.one_of("model_type", {family.model_type: family for family in families})
    outer = {key: fields.get(key) for key in _OUTER if fields.get(key) is not None}
    config: DecoderConfig = kind.config_of(text.with_defaults(**{**defaults, **outer}))
    return config


def _mistral3(fields: Fields) -> DecoderConfig:
    return _read(fields, (mistral.FAMILY, ministral3.FAMILY), tie_word_embeddings=True)


def _gemma3(fields: Fields) -> DecoderConfig:
    return _read(fields, (gemma3.FAMILY,), **_GEMMA3_4B)


def _gemma4(fields: Fields) -> DecoderConfig:
    return _read(fields, (gemma4.FAMILY,))


def _llama4(fields: Fields) -> DecoderConfig:
    return _read(fields, (llama4.FAMILY,))


def _qwen3_5(fields: Fields) -> DecoderConfig:
    return _read(fields, (qwen3_5.FAMILY, qwen3_5.MIXTURE))


MISTRAL3 = Family(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    read=_mistral3,
    renames=_TEXT,
    unread=_IMAGES,
    engine_only=True,
)
GEMMA3 = Family(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    read=_gemma3,
    renames=_TEXT,
    unread=_IMAGES,
    engine_only=True,
)
GEMMA4 = Family(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    read=_gemma4,
    renames={**_TEXT, **gemma4.FAMILY.renames},
    unread=(*_IMAGES, "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    engine_only=True,
)
LLAMA4 = Family(
    architecture="Llama4ForConditionalGeneration",
    model_type="llama4",
    read=_llama4,
    renames={**_TEXT, **llama4.FAMILY.renames},
    unread=_IMAGES,
    engine_only=True,
)
QWEN3_5 = Family(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    read=_qwen3_5,
    renames=_TEXT,
    unread=(*_IMAGES, *qwen3_5.FAMILY.unread),
    engine_only=True,
)
QWEN3_5_MIXTURE = Family(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    read=_qwen3_5,
    renames={**_TEXT, **qwen3_5.MIXTURE.renames},
    unread=(*_IMAGES, *qwen3_5.MIXTURE.unread),
    engine_only=True,
)
