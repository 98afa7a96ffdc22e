"""The weights of a model: names and shapes, as the step takes them and as a checkpoint has them.

Most are the checkpoint's own. The stacks of experts and of heads, which one op reads, are assembled when a checkpoint
is loaded: each from rows of several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from max.dtype import DType

from paged_kv.graphs.encodings import Encoding, block_bytes, block_elements
from paged_kv.graphs.models.config import DecoderConfig, DraftHead
from paged_kv.graphs.models.mixture import Experts
from paged_kv.graphs.models.recurrence import Recurrence

Shape = tuple[int, ...]

# Where norms stand: the norms on the input and on the output of the attention, then of the MLP.
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "around (GLM)": (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    "before both": ("input_layernorm", None, None, None),
}


PARALLEL_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Norms of the MLP's output, of the parallel experts' input, and of their output."""


@dataclass(frozen=True)
class TensorPart:
    """Rows of a checkpoint's tensor that fill a part of an assembled weight `[count, rows, ...]` or `[rows, ...]`."""

    name: str
    """The tensor's."""
    at: tuple[int, int]
    """Their place: the index in the stack (0 of a weight that is no stack), and the first row there."""
    rows: tuple[int, int] | None = None
    """The first of its rows that are taken, and the one after the last; all where it is None."""
    index: int | None = None
    """The tensor is a stack `[count, rows, ...]`, and its rows are those of this entry."""
    scales: str | None = None
    """The tensor is a stack of MXFP4 codes `[count, rows, columns / 32, 16]`, and this the one of their scales."""
    transposed: bool = False
    """The rows become columns."""
    alternating: bool = False
    """At last, rows 0, 2, 4, ... come first, then rows 1, 3, 5, ..."""


@dataclass(frozen=True)
class Assembled:
    """A weight of the step, made of tensors of a checkpoint."""

    sources: Mapping[str, Shape]
    """Their names and shapes."""
    pieces: Callable[[], Iterator[TensorPart]]
    """Made when the tensors are known to be there: as many as a configuration says, whatever it says."""
    is_stack: bool = True
    """The weight is `[count, ...]`; else one matrix."""
    is_packed: bool = False
    """The sources are bytes, MXFP4 codes and scales, and so is the weight: blocks of codes and scale together."""


CHOICE_BIAS = "e_score_correction_bias"
"""The bias of a router of sigmoids. It is float32, whatever the dtype of the other weights: of two experts that
are nearly as good its rounding would choose another one."""
GATE_PARAMETERS = (".A_log", ".dt_bias", ".D")
"""Parameters of recurrent layers that are float32: they say how much of a state is forgotten at each token."""
GATED_NORM = "linear_attn.norm"
"""The norm of Gated DeltaNet's outputs, whose weights are as they are where those of other norms have an offset."""
RECURRENT = {"gated delta": "linear_attn", "mamba2": "mamba", "convolution": "conv"}
"""The name of each kind of recurrent layer among a layer's parts."""


def weight_dtype(name: str, dtype: DType) -> DType:
    """The dtype of a weight of a model whose weights are `dtype`."""
    return DType.float32 if name.endswith((CHOICE_BIAS, *GATE_PARAMETERS)) else dtype


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of every weight of the step, Hugging Face's where it has the weight; linear layers are
    `[out, in]`, those of a stack `[count, out, in]`.
    """
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if config.layer_inputs is not None:
        size = config.num_hidden_layers * config.layer_inputs.size
        tensors["model.embed_tokens_per_layer.weight"] = (config.layer_inputs.vocab_size, size)
        tensors["model.per_layer_model_projection.weight"] = (size, config.hidden_size)
        tensors["model.per_layer_projection_norm.weight"] = (config.layer_inputs.size,)
    kinds: dict[tuple[object, ...], dict[str, Shape]] = {}
    for index in range(config.num_hidden_layers):
        parts = config.has_experts(index), config.is_recurrent(index), config.has_mixer(index), config.has_mlp(index)
        kind = *parts, config.window_left(index) >= 0, config.has_kv(index), config.mlp_inner(index)
        layer = kinds.get(kind) or kinds.setdefault(kind, _layer(config, index))
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors |= _norm(config, "model.norm")
    if not config.tie_word_embeddings:
        vocab_size = config.vocab_size if config.draft_head is None else config.draft_head.vocab_size
        tensors["lm_head.weight"] = (vocab_size, config.hidden_size)
    if config.head_bias:
        tensors["lm_head.bias"] = (config.vocab_size,)
    return tensors if config.draft_head is None else tensors | _draft_inputs(config, config.draft_head)


def _draft_inputs(config: DecoderConfig, head: DraftHead) -> dict[str, Shape]:
    """What makes the input of a draft layer of a token's embedding and a hidden state."""
    hidden = config.hidden_size
    if head.kind == "mtp":
        return {
            **_norm(config, "model.enorm"),
            **_norm(config, "model.hnorm"),
            "model.eh_proj.weight": (hidden, 2 * hidden),
        }
    fc: Shape = (hidden, len(head.layers) * head.model_hidden)
    return {"model.fc.weight": fc, **_norm(config, "model.layers.0.hidden_norm")}


def stored_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """`expected_tensors` without those of a draft layer that are the model's."""
    shared = () if config.draft_head is None else config.draft_head.shared
    return {name: shape for name, shape in expected_tensors(config).items() if name not in shared}


def unused_tensors(config: DecoderConfig) -> frozenset[str]:
    """Tensors that a checkpoint may have and the step does not use: K and V of layers that see those of others."""
    shared = (layer for layer in range(config.num_hidden_layers) if config.attends(layer) and not config.has_kv(layer))
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias", "v_proj.bias")
    return frozenset(f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in parts)


def assembled_tensors(config: DecoderConfig, stored: Container[str] = ()) -> dict[str, Assembled]:
    """Weights of the step that are made of tensors of another form; `stored` are the names that the checkpoint has,
    which tell whether experts are stored one by one, in stacks or in MXFP4 blocks.
    """
    assembled: dict[str, Assembled] = {}
    encodings = dict(config.encodings)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        if config.latent is not None:
            assembled |= _heads(config, f"{layer}.self_attn")
        if config.recurrence is not None and config.recurrence.fused_qkvz and config.is_recurrent(index):
            assembled |= _split_qkvz(config, config.recurrence, f"{layer}.linear_attn", stored)
        if config.has_experts(index):
            assembled |= _stacks(config, f"{layer}.mlp.experts", stored, encodings)
    return assembled


def least_tensors(config: DecoderConfig, stored: Container[str]) -> int:
    """Lower bound of the tensors of a checkpoint of `stored` names: one a layer, and those of single experts."""
    if config.experts is None:
        return config.num_hidden_layers
    layers = [index for index in range(config.num_hidden_layers) if config.has_experts(index)]
    unstacked = sum(not _is_stacked(config.experts, f"model.layers.{index}.mlp.experts", stored) for index in layers)
    return max(config.num_hidden_layers, (3 if config.experts.gated else 2) * config.experts.count * unstacked)


def checkpoint_tensors(config: DecoderConfig, stored: Container[str] = ()) -> dict[str, Shape]:
    """Hugging Face's name and shape of every tensor that a checkpoint must have; `stored` are the names that it has."""
    assembled = assembled_tensors(config, stored)
    tensors: dict[str, Shape] = {}
    for name, shape in stored_tensors(config).items():
        tensors |= assembled[name].sources if name in assembled else {name: shape}
    return tensors


def _layer(config: DecoderConfig, index: int) -> dict[str, Shape]:
    attends, has_experts = config.attends(index), config.has_experts(index)
    has_mlp = config.has_mlp(index) and (config.experts is None or not has_experts or config.experts.parallel)
    linear: dict[str, Shape] = {}
    if attends:
        values = config.latent.v_dim if config.latent else config.heads_of(index)[1]
        linear["self_attn.o_proj"] = (config.hidden_size, config.num_attention_heads * values)
    if has_mlp:
        linear |= _down(config, config.mlp, config.mlp_inner(index))
    if attends:
        linear |= {f"self_attn.{name}": shape for name, shape in _projections(config, index).items()}
    if has_mlp:
        linear |= _gate_and_up(config, config.mlp, config.mlp_inner(index))
    if has_experts:
        linear |= _experts(config)
    layer: dict[str, Shape] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": shape[:-1] for name, shape in linear.items() if _has_bias(config, name)}
    for name in NORMS[config.norm_place][: 1 if config.mlp_or_mixer else None]:
        layer |= {} if name is None else _norm(config, name)
    if has_experts and config.experts is not None and (config.experts.sigmoid or config.experts.choice_bias):
        layer[f"mlp.{config.experts.router}.{CHOICE_BIAS}"] = (config.experts.count,)
    if has_experts and config.experts is not None and config.experts.parallel:
        router = f"mlp.{config.experts.router}"
        layer |= {f"{router}.scale": (config.hidden_size,), f"{router}.per_expert_scale": (config.experts.count,)}
        for name in PARALLEL_NORMS:
            layer |= _norm(config, name)
    if config.layer_inputs is not None:
        size, hidden = config.layer_inputs.size, config.hidden_size
        layer |= {"per_layer_input_gate.weight": (size, hidden), "per_layer_projection.weight": (hidden, size)}
        layer |= _norm(config, "post_per_layer_input_norm")
    if config.layer_scalar:
        layer["layer_scalar"] = (1,)
    if config.is_recurrent(index) and config.recurrence is not None:
        at = RECURRENT[config.recurrence.kind]
        layer |= {f"{at}.{name}": shape for name, shape in _recurrent(config, config.recurrence).items()}
    return layer | (_attention_parameters(config, index) if attends else {})


def _recurrent(config: DecoderConfig, recurrence: Recurrence) -> dict[str, Shape]:
    hidden, channels, inner, heads = config.hidden_size, recurrence.channels, recurrence.inner, recurrence.heads
    conv: dict[str, Shape] = {"conv1d.weight": (channels, recurrence.kernel)}
    gates: dict[str, Shape] = {"A_log": (heads,), "dt_bias": (heads,)}
    if recurrence.conv_bias:
        conv["conv1d.bias"] = (channels,)
    if recurrence.kind == "gated delta":
        gate_names = ("in_proj_ba",) if recurrence.fused_gates else ("in_proj_b", "in_proj_a")
        linear = {"in_proj_qkv": channels, "in_proj_z": inner} | dict.fromkeys(gate_names, 2 * heads // len(gate_names))
        gates["norm.weight"] = (recurrence.value_dim,)
        outputs = inner
    elif recurrence.kind == "mamba2":
        linear = {"in_proj": inner + channels + heads}
        gates |= {"D": (heads,), "norm.weight": (inner,)}
        outputs = inner
    else:
        linear, gates, outputs = {"in_proj": 3 * channels}, {}, channels
    layers: dict[str, Shape] = {name: (rows, hidden) for name, rows in linear.items()}
    layers["out_proj"] = (hidden, outputs)
    tensors = {f"{name}.weight": shape for name, shape in layers.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in layers.items()} if recurrence.bias else {}
    return tensors | biases | conv | gates


def _attention_parameters(config: DecoderConfig, index: int) -> dict[str, Shape]:
    """Tensors of attention other than linear layers: norms and sinks."""
    layer: dict[str, Shape] = {}
    if config.latent is not None:
        layer["self_attn.kv_a_layernorm.weight"] = (config.latent.kv_rank,)
        if config.latent.q_rank is not None:
            layer["self_attn.q_a_layernorm.weight"] = (config.latent.q_rank,)
    if config.sinks:
        layer["self_attn.sinks"] = (config.num_attention_heads,)
    if config.qk_norm not in (None, "head, rotated, no weights"):
        sizes = (config.heads_of(index)[1],) * 2 if config.qk_norm != "all_heads" else _queries_and_keys(config, index)
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", sizes, strict=True)}
    if not config.has_kv(index):
        layer.pop("self_attn.k_norm.weight", None)
    return layer


def _queries_and_keys(config: DecoderConfig, index: int) -> tuple[int, int]:
    kv_heads, head_dim = config.heads_of(index)
    return config.num_attention_heads * head_dim, kv_heads * head_dim


def _projections(config: DecoderConfig, index: int) -> dict[str, Shape]:
    """Return what makes queries, keys and values."""
    hidden, heads, latent = config.attention_width, config.num_attention_heads, config.latent
    queries, keys = _queries_and_keys(config, index)
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
    if config.fused_qkv:
        return {"qkv_proj": (queries + 2 * keys, hidden)}
    queries *= 2 if config.attention_gate else 1
    sizes = {"q": queries} | dict.fromkeys(config.kv_projections(index), keys)
    return {f"{name}_proj": (size, hidden) for name, size in sizes.items()}


def _norm(config: DecoderConfig, name: str) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def _down(config: DecoderConfig, at: str, inner: int) -> dict[str, Shape]:
    return {f"{at}.{'down_proj' if config.gated else 'c_proj'}": (config.hidden_size, inner)}


def _gate_and_up(config: DecoderConfig, at: str, inner: int) -> dict[str, Shape]:
    if not config.gated:
        return {f"{at}.c_fc": (inner, config.hidden_size)}
    if config.fused_gate_up:
        return {f"{at}.gate_up_proj": (2 * inner, config.hidden_size)}
    return {f"{at}.{name}_proj": (inner, config.hidden_size) for name in ("gate", "up")}


def _experts(config: DecoderConfig) -> dict[str, Shape]:
    assert config.experts is not None
    experts, hidden, shared = config.experts, config.hidden_size, "mlp.shared_experts"
    gate_and_up = {"up": experts.inner}
    if experts.gated:
        one = {"gate_up": 2 * experts.inner}
        gate_and_up = {"gate": experts.inner, **gate_and_up} if experts.separate_gate_up else one
    layers: dict[str, Shape] = {
        f"mlp.{experts.router}": (experts.count, hidden),
        **{f"mlp.experts.{name}_proj": (experts.count, rows, hidden) for name, rows in gate_and_up.items()},
        "mlp.experts.down_proj": (experts.count, hidden, experts.inner),
    }
    if experts.shared_inner:
        layers |= _down(config, shared, experts.shared_inner)
        layers |= _gate_and_up(config, shared, experts.shared_inner)
        if experts.shared_gate:
            layers["mlp.shared_expert_gate"] = (1, hidden)
    return layers


def _has_bias(config: DecoderConfig, name: str) -> bool:
    experts = config.experts
    if experts is not None and name.startswith((f"mlp.{experts.router}", "mlp.experts.")):
        return experts.bias
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

    def keys() -> Iterator[TensorPart]:
        for head in range(heads):
            yield TensorPart(name, (head, 0), (head * rows, head * rows + latent.nope_dim), transposed=True)

    def values() -> Iterator[TensorPart]:
        for head in range(heads):
            yield TensorPart(name, (head, 0), (head * rows + latent.nope_dim, (head + 1) * rows))

    return {f"{at}.k_up_proj.weight": Assembled(sources, keys), f"{at}.v_up_proj.weight": Assembled(sources, values)}


def _split_qkvz(config: DecoderConfig, recurrence: Recurrence, at: str, stored: Container[str]) -> dict[str, Assembled]:
    """`in_proj_qkvz` has for each key head the rows of its query, its key, its values, and the gates of these."""
    name = f"{at}.in_proj_qkvz.weight"
    if f"{at}.in_proj_qkv.weight" in stored:
        return {}
    count, dim, of_values = recurrence.key_heads, recurrence.key_dim, recurrence.inner // recurrence.key_heads
    each = 2 * dim + 2 * of_values
    sources = {name: (count * each, config.hidden_size)}

    def pieces(parts: Sequence[tuple[int, int]]) -> Iterator[TensorPart]:
        """Parts of a head by first row and number of rows: of all heads one part, then of all the next."""
        row = 0
        for first, rows in parts:
            for head in range(count):
                yield TensorPart(name, (0, row), (head * each + first, head * each + first + rows))
                row += rows

    qkv, z = [(0, dim), (dim, dim), (2 * dim, of_values)], [(2 * dim + of_values, of_values)]
    return {
        f"{at}.in_proj_qkv.weight": Assembled(sources, lambda: pieces(qkv), is_stack=False),
        f"{at}.in_proj_z.weight": Assembled(sources, lambda: pieces(z), is_stack=False),
    }


def _is_stacked(experts: Experts, at: str, stored: Container[str]) -> bool:
    """Return whether a checkpoint has the experts of a mixture in tensors of all of them."""
    stack = f"{at}.{'gate_up' if experts.gated else 'up'}_proj"
    return experts.transposed or experts.separate_gate_up or stack in stored


def _stacks(
    config: DecoderConfig, at: str, stored: Container[str], encodings: Mapping[str, Encoding]
) -> dict[str, Assembled]:
    """The experts of a layer: gate and up of each one below the other, and down."""
    experts = config.experts
    assert experts is not None
    of_units = {"gate_up": (2 * experts.inner, config.hidden_size)} if experts.gated else {}
    of_units = of_units or {"up": (experts.inner, config.hidden_size)}
    sizes = {**of_units, "down": (config.hidden_size, experts.inner)}
    stacks = {}
    for part, (rows, columns) in sizes.items():
        name, alternates = f"{at}.{part}_proj", experts.alternating and part == "gate_up"
        if encodings.get(f"{name}.weight") == "MXFP4":
            stacks[f"{name}.weight"] = _of_blocks(name, experts.count, rows, columns, alternates)
        elif _is_stacked(experts, at, stored):
            shape = (columns, rows) if experts.transposed else (rows, columns)
            stacks[f"{name}.weight"] = _of_stack(name, (experts.count, *shape), experts.transposed, alternates)
        else:
            parts = ("gate", "up") if part == "gate_up" else (part,)
            stacks[f"{name}.weight"] = _of_each(at, parts, experts.count, (rows // len(parts), columns))
        if experts.bias:
            stacks[f"{name}.bias"] = _of_stack(f"{name}_bias", (experts.count, rows), False, alternates)
    return stacks


def _of_each(at: str, parts: Sequence[str], count: int, shape: Shape) -> Assembled:
    """A stack of weights of which each expert has its own: those named `parts`, one below the other."""

    def name(expert: int, part: str) -> str:
        return f"{at}.{expert}.{part}_proj.weight"

    def pieces() -> Iterator[TensorPart]:
        for expert in range(count):
            for index, part in enumerate(parts):
                yield TensorPart(name(expert, part), (expert, index * shape[0]))

    return Assembled({name(expert, part): shape for expert in range(count) for part in parts}, pieces)


def _of_stack(name: str, shape: Shape, transposed: bool, alternating: bool) -> Assembled:
    """A stack that the checkpoint has as one tensor, in another order."""

    def pieces() -> Iterator[TensorPart]:
        for index in range(shape[0]):
            yield TensorPart(name, (index, 0), index=index, transposed=transposed, alternating=alternating)

    return Assembled({name: shape}, pieces)


def _of_blocks(name: str, count: int, rows: int, columns: int, alternating: bool) -> Assembled:
    """A stack that the checkpoint has as MXFP4 codes, 16 bytes for 32 values, and their scales."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    shape = (count, rows, columns // block_elements("MXFP4"))

    def pieces() -> Iterator[TensorPart]:
        for index in range(count):
            yield TensorPart(blocks, (index, 0), index=index, scales=scales, alternating=alternating)

    return Assembled({blocks: (*shape, block_bytes("MXFP4") - 1), scales: shape}, pieces, is_packed=True)
