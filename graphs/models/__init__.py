"""The registry of model families: a module for each, under the name that `config.json` has for its architecture."""

from __future__ import annotations

from paged_kv.graphs.models import (
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    ministral,
    mistral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (
        llama,
        mistral,
        qwen2,
        qwen3,
        olmo2,
        olmo3,
        granite,
        phi3,
        gemma3,
        deepseek_v2,
        deepseek_v3,
        qwen3_moe,
        gpt_oss,
        smollm3,
        gemma2,
        seed_oss,
        exaone4,
        ernie4_5,
        glm4,
        cohere,
        cohere2,
        starcoder2,
        stablelm,
        olmoe,
        glm4_moe,
        ministral,
    )
}


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
            raise fields.error("model_type", f"none of {', '.join(types)}")
        return types[kind]
    found = [name for name in names if name in FAMILIES] if isinstance(names, list) else []
    if not found:
        raise fields.error("architectures", f"none of {', '.join(FAMILIES)}")
    return FAMILIES[found[0]]
