"""The registry of model families: a module for each, under the name that `config.json` has for its architecture."""

from __future__ import annotations

from paged_kv.graphs.models import (
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granite_hybrid,
    granitemoe,
    hunyuan,
    internlm3,
    lfm2,
    llama,
    llama4,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    with_images,
)
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields

_USUAL = "ForCausalLM"

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        olmo2.FAMILY,
        olmo3.FAMILY,
        granite.FAMILY,
        phi3.FAMILY,
        gemma3.FAMILY,
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        smollm3.FAMILY,
        gemma2.FAMILY,
        seed_oss.FAMILY,
        exaone4.FAMILY,
        ernie4_5.FAMILY,
        glm4.FAMILY,
        cohere.FAMILY,
        cohere2.FAMILY,
        starcoder2.FAMILY,
        stablelm.FAMILY,
        olmoe.FAMILY,
        glm4_moe.FAMILY,
        ministral.FAMILY,
        ministral3.FAMILY,
        mixtral.FAMILY,
        llama4.FAMILY,
        phimoe.FAMILY,
        phimoe.SAVED_BY_TRANSFORMERS,
        granitemoe.FAMILY,
        ernie4_5_moe.FAMILY,
        hunyuan.FAMILY,
        internlm3.FAMILY,
        qwen3_next.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5.MIXTURE,
        granite_hybrid.FAMILY,
        lfm2.FAMILY,
        nemotron_h.FAMILY,
        gemma4.FAMILY,
        glm4_moe_lite.FAMILY,
        minimax_m2.FAMILY,
        with_images.MISTRAL3,
        with_images.GEMMA3,
        with_images.GEMMA4,
        with_images.LLAMA4,
        with_images.QWEN3_5,
        with_images.QWEN3_5_MIXTURE,
    )
}


def _with_head(name: str) -> str:
    """The architecture that makes texts, of the same layers: models that embed are saved without a head."""
    for end in ("TextModel", "Model", "TextForSequenceClassification", "ForSequenceClassification"):
        if name.endswith(end):
            return name.removesuffix(end) + _USUAL
    return name


def find_family(fields: Fields) -> Family:
    """The family that a `config.json` names, in `architectures` or, without them, in `model_type`.

    Raises:
        CheckpointError: it names none of them.
    """
    names = fields.get("architectures")
    if names is None:
        types = {family.model_type: family for family in FAMILIES.values()}
        kind = fields.get("model_type")
        if not isinstance(kind, str) or kind not in types:
            raise fields.error("model_type", f"expected one of {', '.join(types)}")
        return types[kind]
    for name in names if isinstance(names, list) else ():
        name = _with_head(name) if isinstance(name, str) else ""
        if name in FAMILIES:
            return FAMILIES[name]
    supported = ", ".join(name.removesuffix(_USUAL) for name in FAMILIES)
    raise fields.error("architectures", f"expected one of {supported}, most with {_USUAL}")
