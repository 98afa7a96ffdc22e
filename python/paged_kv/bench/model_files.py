"""The model of a benchmark's step in the formats that systems read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from paged_kv.bench.problems import bits
from paged_kv.bench.steps import RMS_EPS, ROPE_THETA, StepProblem, llama_config
from paged_kv.engine.demo import BOS_ID, EOS_ID, SPECIAL_TOKENS

WEIGHTS = "model.safetensors"


def write_folder(problem: StepProblem, folder: Path, dtype: str, ids: Mapping[str, int | None]) -> None:
    """The model in Hugging Face's format, in bfloat16 or float32.

    Args:
        problem: Sizes of a Llama without blocks.
        folder: It exists.
        dtype: The weights'.
        ids: Special tokens, by their names in config.json.
    """
    config: dict[str, Any] = llama_config(problem.case)
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"torch_dtype": dtype, "dtype": dtype, "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    (folder / "config.json").write_text(json.dumps({**config, **ids}, indent=1))
    weights = problem.weights
    if dtype == "float32":
        weights = {name: array.astype(np.float32) for name, array in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def write_gguf(
    problem: StepProblem,
    path: Path,
    tokens: Sequence[str] | None = None,
    *,
    plain: Literal["BF16", "F16", "F32"] = "BF16",
) -> None:
    """The model as llama.cpp reads it: norms and routers in float32; a Llama's rotary pairs are adjacent. `tokens` by
    their ids; the last is the two before it, which no text is encoded to. With another `plain` all matrices are
    of that type, in place of bfloat16 and of blocks.
    """
    import gguf

    case = problem.case
    writer = gguf.GGUFWriter(path, "qwen3moe" if case.experts else "llama")
    if case.experts:
        writer.add_expert_count(case.experts)
        writer.add_expert_used_count(case.chosen)
        writer.add_expert_feed_forward_length(case.intermediate)
    writer.add_context_length(8192)
    writer.add_embedding_length(case.hidden)
    writer.add_block_count(case.layers)
    writer.add_feed_forward_length(case.intermediate)
    writer.add_head_count(case.heads)
    writer.add_head_count_kv(case.kv_heads)
    writer.add_key_length(case.head_dim)
    writer.add_value_length(case.head_dim)
    writer.add_rope_dimension_count(case.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_vocab_size(case.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if tokens is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(tokens))
        normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
        writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
        writer.add_token_merges([" ".join(tokens[-3:-1])])  # never used; llama.cpp wants one
        writer.add_bos_token_id(BOS_ID)
        writer.add_eos_token_id(EOS_ID)
        writer.add_add_bos_token(True)
    for name, array in problem.weights.items():
        if array.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(_gguf_name(name), array.astype(np.float32))
            continue
        heads = case.heads if "q_proj" in name else case.kv_heads if "k_proj" in name else 0
        rows = bits(array)
        if plain != "BF16":
            rows = problem.values(name.removesuffix(".weight")).astype({"F16": np.float16, "F32": np.float32}[plain])
        if heads and not case.experts:  # the halves of a head, interleaved
            rows = rows.reshape(heads, 2, case.head_dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        encoding = case.encoding(name) if plain == "BF16" else None
        raw = np.ascontiguousarray(rows).view(np.uint8)
        kind = gguf.GGMLQuantizationType[encoding or plain]
        writer.add_tensor(_gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def _gguf_name(name: str) -> str:
    plain = name.removesuffix(".weight")
    if plain.startswith("model.layers."):
        _, _, layer, part = plain.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{top[plain]}.weight"
