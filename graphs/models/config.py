"""The sizes of a decoder-only model and the switches in which families differ, read from Hugging Face's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from max.dtype import DType

from paged_kv.arguments import shown
from paged_kv.errors import ContractError
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.layer_ops import is_hadamard_size
from paged_kv.graphs.models.fields import MAX_LAYERS, Fields
from paged_kv.graphs.models.mixture import Experts
from paged_kv.graphs.models.recurrence import Recurrence
from paged_kv.graphs.rope import Linear, Llama3, LongRope, Proportional, Rope, Scaling, Yarn
from paged_kv.options import (
    CACHE_ROTATIONS,
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    Q_DTYPES,
    CacheRotation,
    is_head_dim,
)

Activation = Literal["silu", "gelu_tanh", "relu2"]
"""The activation of MLPs; relu2, the square of what is positive, in those without a gate."""
NormPlace = Literal["before", "after", "around", "around (GLM)", "before both"]
QkNorm = Literal["head", "head, rotated", "head, rotated, no weights", "all_heads"]

_LAYER_TYPES = ("full_attention", "sliding_attention")
THETA = (1.0 + 1e-6, 1e18)
_STRETCH = (1e-9, 1e9)
"""Ranges of rotary parameters in which frequencies, and their products with positions, are finite and above zero."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2): the K and V of all heads come from one latent a token."""

    q_rank: int | None
    """The rank of the queries' own latent; None where they come from the hidden state."""
    kv_rank: int
    """The rank of the latent that K and V come from."""
    nope_dim: int
    """Dimensions of a key that come from the latent and are not rotated."""
    rope_dim: int
    """Dimensions of a key that are rotated, of all heads the same; they lie in the cache beside the latent."""
    v_dim: int

    NORM_EPS: ClassVar[float] = 1e-6
    """The epsilon of the norms of latents, whatever the others have."""


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A query at position p is multiplied by `1 + beta * ln(1 + floor((p + first) / context))`."""

    beta: float
    context: int
    first: int = 0
    """The number of the first position."""
    unrotated: bool = False
    """In layers without a rotation alone."""


@dataclass(frozen=True, kw_only=True)
class FullHeads:
    """The heads of K and V in layers without a window, where those of the others are different (Gemma 4)."""

    kv_heads: int
    head_dim: int
    """The same of queries."""
    value_is_key: bool = False
    """V is the projection that K is made of, before its norm and its rotation."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer, which joins the layer's output (Gemma 4)."""

    size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A layer that drafts a model's tokens from its hidden states (`drafting`): what it takes, shares and gives."""

    kind: Literal["mtp", "eagle3"]
    vocab_size: int
    """Tokens that it drafts."""
    feeds_normed: bool = False
    """The hidden state that the next draft takes is its own after the last norm; else before it."""
    adds_normed: bool = False
    """EAGLE-3: the layer adds to the hidden state after `hidden_norm`; else before it."""
    layers: tuple[int, ...] = ()
    """EAGLE-3: the layers of the model whose inputs it takes."""
    model_hidden: int = 0
    """EAGLE-3: hidden_size of the model."""
    shared: tuple[str, ...] = ()
    """Its weights that are the model's."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One model: what its step computes, and what generation needs to know of it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The dtype of the checkpoint, None where it names none."""

    fused_qkv: bool = False
    """Q, K and V are one weight, `qkv_proj`."""
    fused_gate_up: bool = False
    """Gate and up are one weight, `gate_up_proj`."""
    mlp_or_mixer: tuple[Literal["mixer", "mlp"], ...] = ()
    """What each layer is, in models whose layers are either an MLP or a mixer (attention or a recurrence), never both;
    empty in all others."""
    mlp: Literal["mlp", "mlp.shared_experts"] = "mlp"
    """The name of the MLP among a layer's weights."""
    gated: bool = True
    """The MLP multiplies by a gate; else it is `c_proj(activation(c_fc(x)))`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """The layer that makes the logits has a bias."""
    qk_norm: QkNorm | None = None
    """The RMS norm of q and k: of each head, before or after its rotation, or of all heads as one vector before it.
    The norm without weights applies only in layers that rotate."""
    norm_place: NormPlace = "before"
    """Where norms stand: before attention and MLP (on their input), after them (on their output), or around them.
    "before both": attention and MLP share one normed input, and their outputs are added."""
    layer_norm: bool = False
    """Norms subtract the mean first (LayerNorm); else they are RMS norms."""
    norm_bias: bool = False
    """LayerNorms have biases."""
    norm_offset: float = 0.0
    """The number that is added to the weights of all norms."""
    norm_rounds_once: bool = False
    """Norms round after the product with their weight; else before it."""
    activation: Activation = "silu"
    sm_scale: float | None = None
    """The scale of the attention scores; 1 / sqrt(head_dim) where it is None."""
    attention_cap: float = 0.0
    """Scores s become `cap * tanh(s / cap)` before the softmax; 0: they do not."""
    windows: tuple[int, ...] = ()
    """Window of each layer: tokens that a token sees before itself, -1 for all; empty where every layer sees all."""
    causal: bool = True
    """A token sees those before it and itself; else those after it too, and as many of them as before it in layers with
    windows. Such a model embeds texts and generates none."""
    separate_windows: bool = False
    """Layers with a window have their own pages, of which a request needs no more than its window; else one page holds
    K and V of all layers. The user's choice for most models (`with_separate_windows`)."""
    step_cache: bool = False
    """K and V live for one step, so that all layers have them in one place (`with_step_cache`)."""
    local_rope: Rope | None = None
    """Rotation of layers with a window; None: that of the others, `rope`."""
    rotates: tuple[bool, ...] = ()
    """Whether each layer rotates q and k; empty where all do."""
    rotates_neighbours: bool = False
    """Rotation pairs elements 2i and 2i + 1 of a head; else i and i + half of the rotated ones."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    """As `attention_cap`, of the logits."""
    q_growth: QueryGrowth | None = None
    """Growth of queries with their position."""
    sinks: bool = False
    """Each head has a score that joins the softmax's denominator alone."""
    attention_gate: bool = False
    """Each head's output is multiplied by the sigmoid of a gate, whose rows of `q_proj` follow the head's query."""
    v_norm: bool = False
    """V has an RMS norm of each head, without weights."""
    full_heads: FullHeads | None = None
    shared_kv_layers: int = 0
    """Number of last layers without K and V of their own: each sees those of the last earlier layer of its kind, with
    a window or without."""
    shared_kv_mlp: int = 1
    """Width multiplier of the MLPs of layers that share K and V."""
    layer_inputs: LayerInputs | None = None
    layer_scalar: bool = False
    """The output of each layer is multiplied by a number of its own."""
    latent: LatentSizes | None = None
    recurrence: Recurrence | None = None
    """The layers that are recurrent, in a hybrid model."""
    experts: Experts | None = None
    draft_layers: int = 0
    """Number of layers after the model's own that draft tokens (multi-token prediction); they are no part of a step."""
    draft_head: DraftHead | None = None
    """What makes the one layer of this configuration the draft layer of another model."""
    encodings: tuple[tuple[str, Encoding], ...] = ()
    """The encoding of each weight that stays in blocks, by checkpoint name."""
    cache_rotation: CacheRotation | None = None
    """Rotation of q and k after their rotary embedding, for caches of few bits (docs/quantised-cache.md); chosen by the
    user (`with_cache_rotation`), never by a checkpoint."""
    float32_activations: bool = False
    """Activations are float32 and the requested dtype is the cache's alone: GGUF blocks, as in llama.cpp."""

    def window_left(self, layer: int) -> int:
        """Tokens that a token sees before itself, -1 for all."""
        return self.windows[layer] if self.windows else -1

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Return whether the layer keeps a state instead of K and V."""
        return self.recurrence is not None and self.recurrence.layers[layer]

    def has_mixer(self, layer: int) -> bool:
        """Return whether the layer attends or is recurrent."""
        return not self.mlp_or_mixer or self.mlp_or_mixer[layer] == "mixer"

    def has_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP or experts."""
        return not self.mlp_or_mixer or self.mlp_or_mixer[layer] == "mlp"

    def attends(self, layer: int) -> bool:
        """Return whether the layer sees K and V in the cache."""
        return self.has_mixer(layer) and not self.is_recurrent(layer)

    def kv_layer(self, layer: int) -> int:
        """The layer whose K and V a layer that attends sees: its own, but for the last ones where some are shared."""
        first = self.num_hidden_layers - self.shared_kv_layers
        if layer < first:
            return layer
        return max(index for index in range(first) if self.window_left(index) == self.window_left(layer))

    def has_kv(self, layer: int) -> bool:
        """Return whether the layer puts K and V into the cache."""
        return self.attends(layer) and self.kv_layer(layer) == layer

    @property
    def last_writing_layer(self) -> int:
        """The last layer that writes K and V or a state; later layers compute output rows only."""
        layers = range(self.num_hidden_layers)
        return max(layer for layer in layers if self.has_kv(layer) or self.is_recurrent(layer))

    def heads_of(self, layer: int) -> tuple[int, int]:
        """The KV heads and the head_dim of a layer that attends."""
        return self.cache_heads(windows=self.window_left(layer) >= 0)

    def cache_heads(self, *, windows: bool) -> tuple[int, int]:
        """The same of layers with windows, or of the others."""
        if self.full_heads is None or windows:
            return self.num_key_value_heads, self.head_dim
        return self.full_heads.kv_heads, self.full_heads.head_dim

    def kv_projections(self, layer: int) -> tuple[str, ...]:
        """What K and V of a layer are made of: "k" and "v"; "k" alone of both; none where it sees those of another."""
        if not self.has_kv(layer):
            return ()
        is_key = self.full_heads is not None and self.full_heads.value_is_key and self.window_left(layer) < 0
        return ("k",) if is_key else ("k", "v")

    def layer_growth(self, layer: int) -> QueryGrowth | None:
        """The growth of a layer's queries, None where it has none."""
        if self.q_growth is not None and self.q_growth.unrotated and self.layer_rope(layer) is not None:
            return None
        return self.q_growth

    def mlp_inner(self, layer: int) -> int:
        """The inner dimension of a layer's MLP."""
        is_shared = layer >= self.num_hidden_layers - self.shared_kv_layers
        return self.intermediate_size * (self.shared_kv_mlp if is_shared else 1)

    @property
    def mixes_windows(self) -> bool:
        """True if some of the layers that attend have a window and others have none."""
        return len({self.window_left(layer) >= 0 for layer in range(self.num_hidden_layers) if self.attends(layer)}) > 1

    @property
    def longest_window(self) -> int:
        """The most tokens before itself that a token sees in layers with windows; -1 where none has one."""
        return max(self.windows, default=-1)

    @property
    def has_window_lengths(self) -> bool:
        """True if the step has an input that says where windows end (`build_step`)."""
        return not self.causal and self.longest_window >= 0

    def in_window_cache(self, layer: int) -> bool:
        """Return whether the K and V of a layer are in the pages of windows."""
        return self.separate_windows and self.window_left(layer) >= 0

    @property
    def attention_width(self) -> int:
        """Columns of what q, k and v are made of."""
        return self.hidden_size * (2 if self.draft_head is not None and self.draft_head.kind == "eagle3" else 1)

    def cache_layer(self, layer: int) -> int:
        """The place of the K and V that a layer sees in their cache."""
        if self.step_cache:
            return 0
        before = range(self.kv_layer(layer))
        return sum(
            self.has_kv(index) and self.in_window_cache(index) == self.in_window_cache(layer) for index in before
        )

    def cache_layers(self, windows: bool = False) -> int:
        """The number of layers that have K and V in the cache, or in that of windows."""
        layers = range(self.num_hidden_layers)
        count = sum(self.has_kv(layer) and self.in_window_cache(layer) == windows for layer in layers)
        return min(count, 1) if self.step_cache else count

    def computed_in(self, dtype: DType) -> DType:
        """The dtype of activations, and of weights that are not in blocks, where `dtype` is asked for."""
        return DType.float32 if self.float32_activations else dtype

    def layer_rope(self, layer: int) -> Rope | None:
        """The rotation in a layer, None where it has none."""
        if self.rotates and not self.rotates[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.window_left(layer) >= 0 else self.rope


def with_cache_rotation(config: DecoderConfig, rotation: CacheRotation | None) -> DecoderConfig:
    """The model with q and k rotated before they meet the cache: scores stay what they were, to rounding.

    Raises:
        ContractError: the rotation is unknown, or the model's heads cannot have it.
    """
    if rotation is None:
        return config
    if rotation not in CACHE_ROTATIONS:
        raise ContractError(f"cache_rotation: expected {' or '.join(CACHE_ROTATIONS)}, got {shown(rotation)}")
    if config.latent is not None:
        raise ContractError(f"cache_rotation: {rotation} is of keys, and this model's cache holds latents")
    for _, head_dim in (config.cache_heads(windows=windows) for windows in (False, True)):
        if not is_hadamard_size(head_dim):
            problem = f"cache_rotation: {rotation} needs a head_dim that is a power of two, not {head_dim}"
            raise ContractError(problem)
    return replace(config, cache_rotation=rotation)


def with_separate_windows(config: DecoderConfig) -> DecoderConfig:
    """The model with pages of their own for its layers with windows, where other layers have none."""
    return replace(config, separate_windows=True) if config.mixes_windows else config


def with_step_cache(config: DecoderConfig) -> DecoderConfig:
    """The model with one place for the K and V of all layers, where they have one shape and no layer sees another's:
    for texts of one step each.
    """
    fits = config.full_heads is None and not config.shared_kv_layers and config.latent is None
    return replace(config, step_cache=fits)


def read_config(fields: Fields, eps_key: str = "rms_norm_eps", **switches: Any) -> DecoderConfig:
    """The sizes and the rotation from `config.json`'s usual keys; `switches` are what the family adds.

    Args:
        eps_key: What the family calls the epsilon of its norms.

    Raises:
        CheckpointError: a field is missing, of a wrong type, or of a value that this package does not run.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    hidden = fields.integer("hidden_size")
    # A missing head_dim is hidden_size / num_attention_heads, which must be an integer.
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"expected a multiple of num_attention_heads = {heads} without head_dim")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"expected a divisor of num_attention_heads = {heads}", kv_heads)
    if not is_head_dim(head_dim):
        problem = f"expected a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_HEAD_DIM}"
        raise fields.error("head_dim", problem, head_dim)
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized checkpoints are not supported")

    vocab_size = fields.integer("vocab_size")
    bos = fields.tokens("bos_token_id", vocab_size)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": switches.pop("intermediate_size", None) or fields.integer("intermediate_size"),
        "num_hidden_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number(eps_key),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.tokens("eos_token_id", vocab_size),
        "dtype": _dtype(fields),
        "draft_layers": fields.integer("num_nextn_predict_layers", default=0, least=0, most=MAX_LAYERS),
    }
    if "rope" not in switches:
        sizes["rope"] = read_rope(fields, head_dim)
    if "activation" not in switches:
        sizes["activation"] = fields.one_of("hidden_act", {"silu": "silu"})
    return DecoderConfig(**sizes, **switches)


def head_dim_of(fields: Fields) -> int:
    """`head_dim`, or `hidden_size / num_attention_heads` where it is missing or null."""
    return fields.integer("head_dim", default=fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def read_windows(fields: Fields, default: Sequence[bool] | None = None) -> tuple[int, ...]:
    """The window of each layer, from `layer_types` and `sliding_window`.

    Args:
        default: Which layers have a window where `layer_types` is missing; all where it is None.
    """
    if fields.get("sliding_window") is None:
        return ()
    # A window of W tokens counts the token itself.
    window = fields.integer("sliding_window") - 1
    layers = fields.layers()
    types = fields.get("layer_types")
    if types is None:
        windowed = [True] * layers if default is None else list(default)
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise fields.error("layer_types", f"expected a list of num_hidden_layers = {layers}")
        kinds = {"full_attention": False, "sliding_attention": True}
        windowed = [Fields(fields.file, {"layer_types": kind}).one_of("layer_types", kinds) for kind in types]
    return tuple(window if narrow else -1 for narrow in windowed) if any(windowed) else ()


def read_rotated(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer rotates q and k: `no_rope_layers` has 1 for a layer that does."""
    layers, flags = fields.layers(), fields.get("no_rope_layers")
    if not flags and isinstance(flags, list | None):
        interval = fields.integer("no_rope_layer_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    valid = isinstance(flags, list) and all(type(each) is int and each in (0, 1) for each in flags)
    if not valid or len(flags) != layers:
        raise fields.error("no_rope_layers", f"expected a list of num_hidden_layers = {layers} numbers 0 and 1")
    return tuple(each == 1 for each in flags)


def read_rope(fields: Fields, head_dim: int, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotation from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`.

    Args:
        layer_type: The key in `rope_parameters` where each type of layer has its own.
        theta: The base where the configuration has none.
    """
    rope = rope_section(fields, layer_type, theta)
    if rope is not None and layer_type is None:
        for kind in _LAYER_TYPES:
            rope.refuse(kind, "all layers of this family have one rotation")
    part = fields.number("partial_rotary_factor", default=1.0)
    theta = fields.number("rope_theta", theta, *THETA)
    if rope is not None:
        part = rope.number("partial_rotary_factor", default=part)
        theta = rope.number("rope_theta", theta, *THETA)
        if rope.get("alpha") is not None and _kind(rope)[1] == "dynamic":  # Hunyuan's: a constant stretch of the base
            theta *= rope.number("alpha", None, *_STRETCH) ** (head_dim / (head_dim - 2))
    if rope is not None and rope.get("rope_type") == "proportional":
        scaling = Proportional(int(part * head_dim // 2), rope.number("factor", 1.0, *_STRETCH))
        if not 0 < scaling.pairs <= head_dim // 2:
            raise rope.error("partial_rotary_factor", f"expected some of head_dim = {head_dim}", part)
        return Rope(head_dim, theta, scaling)
    dims = int(head_dim * part)
    if not 0 < dims <= head_dim or dims % 2:
        raise fields.error("partial_rotary_factor", f"expected an even part of head_dim = {head_dim}", part)
    return Rope(dims, theta, None if rope is None else _scaling(fields, rope, dims, layer_type))


def rope_section(fields: Fields, layer_type: str | None = None, theta: float = 10000.0) -> Fields | None:
    """The object that describes the rotation of layers: `rope_scaling` where it has keys, else `rope_parameters`.

    As transformers does it, `rope_scaling` replaces `rope_parameters` beside it; where each type of layer has a
    rotation, it changes that of `full_attention`.

    Raises:
        CheckpointError: another base, or another rotated part of each head, would be lost with `rope_parameters`, or
            these are not by type of layer.
    """
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    if scaling is not None and not scaling.values:
        scaling = None
    if parameters is None or not parameters.values:
        return scaling
    if layer_type is not None:
        part = parameters.section(layer_type)
        if part is None and not any(parameters.section(kind) for kind in _LAYER_TYPES):
            raise fields.error("rope_parameters", f"expected {layer_type} too: each type of layer has a rotation here")
        changed = dict(part.values) if part is not None else {}
        if scaling is not None and layer_type == "full_attention":
            changed |= scaling.values
        return Fields(fields.file, changed, f"{parameters.prefix}{layer_type}.")
    if scaling is None:
        return parameters
    for key, default in (("rope_theta", theta), ("partial_rotary_factor", 1.0)):
        is_named = any(each.get(key) is not None for each in (scaling, fields))
        if not is_named and parameters.get(key) not in (None, default):
            problem = f"rope_scaling replaces rope_parameters, so {key} would be {default:g}: name it in rope_scaling"
            raise parameters.error(key, problem)
    return scaling


def read_local_rope(fields: Fields, head_dim: int, key: str, theta: float) -> Rope:
    """The rotation of the layers that have a window: that of `rope_parameters.sliding_attention`, or of all dimensions
    without a scaling, by the number that `key` has or else by `theta`.
    """
    rope = fields.section("rope_parameters")
    if rope is not None and rope.get("sliding_attention") is not None:
        return read_rope(fields, head_dim, "sliding_attention", theta)
    return Rope(head_dim, fields.number(key, theta, *THETA))


def _kind(rope: Fields) -> tuple[str, Any]:
    """The key of the kind of scaling, which older files call "type", and the kind."""
    key = "type" if rope.get("rope_type") is None else "rope_type"
    return key, rope.get(key)


def _scaling(fields: Fields, rope: Fields, dims: int, layer_type: str | None) -> Scaling | None:
    key, kind = _kind(rope)
    if kind is None or kind == "default":
        return None
    if kind == "linear":
        return Linear(rope.number("factor", None, *_STRETCH))
    if kind == "dynamic":  # as long as a text is no longer than the context; transformers then turns all keys anew
        return None
    kinds = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
    if kind not in kinds:
        raise rope.error(key, f"expected {' or '.join(kinds)}")

    positions = fields.integer("max_position_embeddings")
    # As in transformers, what stands outside of the object counts first, but not where layers have rotations by type.
    outside = layer_type is None and fields.get("original_max_position_embeddings") is not None
    source = fields if outside else rope
    context = source.integer("original_max_position_embeddings", default=positions)
    if context < 2:
        raise source.error("original_max_position_embeddings", "expected at least 2", context)
    if kind == "longrope":
        factor = rope.number("factor", positions / context, *_STRETCH)
        sharpening = LongRope.sharpening(factor, context)
        short, long = (rope.numbers(name, dims // 2, *_STRETCH) for name in ("short_factor", "long_factor"))
        return LongRope(short, long, context, rope.number("attention_factor", sharpening, *_STRETCH))
    factor = rope.number("factor", None, *_STRETCH)
    if kind == "yarn":
        mscale, all_dim = (
            None if rope.get(name) in (None, 0) else rope.number(name, None, *_STRETCH)  # 0 is as not said
            for name in ("mscale", "mscale_all_dim")
        )
        sharpening = rope.number("attention_factor", Yarn.sharpening(factor, mscale, all_dim), *_STRETCH)
        fast, slow = rope.number("beta_fast", 32.0, *_STRETCH), rope.number("beta_slow", 1.0, *_STRETCH)
        return Yarn(factor, context, sharpening, fast, slow, rope.boolean("truncate", default=True))
    low, high = (rope.number(f"{name}_freq_factor", None, *_STRETCH) for name in ("low", "high"))
    if high <= low:
        raise rope.error("high_freq_factor", f"expected more than low_freq_factor = {low:g}")
    return Llama3(factor, low, high, context)


def _dtype(fields: Fields) -> str | None:
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    dtype = fields.get(key)
    if dtype is not None and dtype not in Q_DTYPES:
        raise fields.error(key, 'expected "float32", "bfloat16" or "float16"')
    return None if dtype is None else str(dtype)
