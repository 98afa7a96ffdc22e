"""The weights of a model: names and shapes, as the step takes them and as a checkpoint has them.

Most are the checkpoint's own. The stacks of experts and of heads, which one op reads, are assembled when a checkpoint
is loaded: each from rows of several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paged_kv.graphs.models.config import DecoderConfig

Shape = tuple[int, ...]

# Where RMS norms stand: the norms on the input and on the output of the attention, then of the MLP.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


@dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint's tensor that are a part of an assembled weight `[count, rows, columns]`."""

    name: str
    """The tensor's."""
    rows: tuple[int, int]
    """The first of its rows that are taken, and the one after the last."""
    at: tuple[int, int]
    """Their place: the index in the stack, and the first row there."""
    transposed: bool = False
    """The rows become columns."""


@dataclass(frozen=True)
class Assembled:
    """How a weight of the step comes from tensors of a checkpoint."""

    sources: Mapping[str, Shape]
    """Their names and shapes."""
    pieces: Callable[[], Iterator[Piece]]
    """Made when the tensors are known to be there: as many as a configuration says, whatever it says."""


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of every weight of the step, Hugging Face's where it has the weight; linear layers are
    `[out, in]`, those of a stack `[count, out, in]`.
    """
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    # Layers differ in one way alone: whether they have experts.
    kinds = {has: _layer(config, has) for has in {config.has_experts(i) for i in range(config.num_hidden_layers)}}
    for index in range(config.num_hidden_layers):
        layer = kinds[config.has_experts(index)]
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return tensors


def assembled_tensors(config: DecoderConfig) -> dict[str, Assembled]:
    """The weights of the step that a checkpoint does not have as they are."""
    found: dict[str, Assembled] = {}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        if config.latent is not None:
            found |= _heads(config, f"{layer}.self_attn")
        if config.has_experts(index):
            found |= _stacks(config, f"{layer}.mlp.experts")
    return found


def checkpoint_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Hugging Face's name and shape of every tensor that a checkpoint must have."""
    assembled = assembled_tensors(config)
    tensors: dict[str, Shape] = {}
    for name, shape in expected_tensors(config).items():
        tensors |= assembled[name].sources if name in assembled else {name: shape}
    return tensors


def _layer(config: DecoderConfig, has_experts: bool) -> dict[str, Shape]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.latent
    linear: dict[str, Shape] = {"self_attn.o_proj": (hidden, heads * (latent.v_dim if latent else config.head_dim))}
    linear |= {} if has_experts else {"mlp.down_proj": (hidden, config.intermediate_size)}
    linear |= {f"self_attn.{name}": shape for name, shape in _projections(config).items()}
    linear |= _experts(config) if has_experts else _gate_and_up(config, "mlp", config.intermediate_size)
    layer: dict[str, Shape] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if _has_bias(config, name)}
    layer |= {f"{name}.weight": (hidden,) for name in NORMS[config.norm_place] if name is not None}
    if latent is not None:
        layer["self_attn.kv_a_layernorm.weight"] = (latent.kv_rank,)
        if latent.q_rank is not None:
            layer["self_attn.q_a_layernorm.weight"] = (latent.q_rank,)
    if config.qk_norm is not None:
        sizes = (config.head_dim,) * 2 if config.qk_norm == "head" else _queries_and_keys(config)
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", sizes, strict=True)}
    return layer


def _queries_and_keys(config: DecoderConfig) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _projections(config: DecoderConfig) -> dict[str, Shape]:
    """What makes queries, keys and values."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.latent
    queries, keys = _queries_and_keys(config)
    if latent is not None:
        q_rank = latent.q_rank
        of_q: dict[str, Shape] = {"q_proj": (queries, hidden)}
        if q_rank is not None:
            of_q = {"q_a_proj": (q_rank, hidden), "q_b_proj": (queries, q_rank)}
        return of_q | {
            "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_dim, hidden),
            "k_up_proj": (heads, latent.kv_rank, latent.nope_dim),
            "v_up_proj": (heads, latent.v_dim, latent.kv_rank),
        }
    if config.fused_projections:
        return {"qkv_proj": (queries + 2 * keys, hidden)}
    return {f"{name}_proj": (size, hidden) for name, size in zip("qkv", (queries, keys, keys), strict=True)}


def _gate_and_up(config: DecoderConfig, at: str, inner: int) -> dict[str, Shape]:
    if config.fused_projections:
        return {f"{at}.gate_up_proj": (2 * inner, config.hidden_size)}
    return {f"{at}.{name}_proj": (inner, config.hidden_size) for name in ("gate", "up")}


def _experts(config: DecoderConfig) -> dict[str, Shape]:
    assert config.experts is not None
    experts, hidden, shared = config.experts, config.hidden_size, "mlp.shared_experts"
    return {
        "mlp.gate": (experts.count, hidden),
        "mlp.experts.gate_up_proj": (experts.count, 2 * experts.inner, hidden),
        "mlp.experts.down_proj": (experts.count, hidden, experts.inner),
        f"{shared}.down_proj": (hidden, experts.shared_inner),
        **_gate_and_up(config, shared, experts.shared_inner),
    }


def _has_bias(config: DecoderConfig, name: str) -> bool:
    if name.startswith("mlp."):
        return config.mlp_bias
    return config.o_bias if name == "self_attn.o_proj" else config.qkv_bias


def _heads(config: DecoderConfig, at: str) -> dict[str, Assembled]:
    """`kv_b_proj` has for each head the rows that make its keys of the latent, then those that make its values.

    Keys are not made: queries are multiplied by the transposed rows instead, and meet the latent itself.
    """
    assert config.latent is not None
    latent, heads = config.latent, config.num_attention_heads
    rows = latent.nope_dim + latent.v_dim
    name = f"{at}.kv_b_proj.weight"
    sources = {name: (heads * rows, latent.kv_rank)}

    def keys() -> Iterator[Piece]:
        for head in range(heads):
            yield Piece(name, (head * rows, head * rows + latent.nope_dim), (head, 0), transposed=True)

    def values() -> Iterator[Piece]:
        for head in range(heads):
            yield Piece(name, (head * rows + latent.nope_dim, (head + 1) * rows), (head, 0))

    return {f"{at}.k_up_proj.weight": Assembled(sources, keys), f"{at}.v_up_proj.weight": Assembled(sources, values)}


def _stacks(config: DecoderConfig, at: str) -> dict[str, Assembled]:
    """The experts of a layer: gate and up of each one below the other, and down."""
    assert config.experts is not None
    inner, hidden, count = config.experts.inner, config.hidden_size, config.experts.count

    def stack(parts: Mapping[str, Shape]) -> Assembled:
        def name(expert: int, part: str) -> str:
            return f"{at}.{expert}.{part}_proj.weight"

        def pieces() -> Iterator[Piece]:
            for expert in range(count):
                first = 0
                for part, shape in parts.items():
                    yield Piece(name(expert, part), (0, shape[0]), (expert, first))
                    first += shape[0]

        sources = {name(expert, part): shape for expert in range(count) for part, shape in parts.items()}
        return Assembled(sources, pieces)

    return {
        f"{at}.gate_up_proj.weight": stack({"gate": (inner, hidden), "up": (inner, hidden)}),
        f"{at}.down_proj.weight": stack({"down": (hidden, inner)}),
    }
