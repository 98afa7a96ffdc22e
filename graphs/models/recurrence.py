"""The recurrent layers of hybrid models: sizes, and the keys of each family's `config.json` for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.fields import Fields

Kind = Literal["gated delta", "mamba2", "convolution"]

BLOCK = 16
"""Columns of a matrix state that lie together (`mojo_ops/recurrent`)."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Layers that keep a state of a constant size instead of K and V: a convolution's window and, but for those that
    are a convolution alone, a matrix `[key_dim, value_dim]` for each head.
    """

    kind: Kind
    """Gated DeltaNet (arXiv:2412.06464), Mamba-2 (arXiv:2405.21060), or a gated convolution (LFM2)."""
    layers: tuple[bool, ...]
    """True for each layer that is recurrent; the others attend over pages."""
    channels: int
    """Channels of the convolution."""
    kernel: int
    """Inputs of a channel that its convolution sees, the newest included."""
    heads: int = 0
    """Heads of values, each with a matrix state; 0 where there is none."""
    key_heads: int = 0
    """Heads of queries and keys; groups of Mamba-2."""
    key_dim: int = 0
    """Dimensions of a query and a key; Mamba-2's state size."""
    value_dim: int = 0
    tiled: bool = False
    """Value head h has key head `h % key_heads`, as GGUF files have them; else `h // (heads / key_heads)`."""
    fused_gates: bool = False
    """The gates b and a are one weight, `in_proj_ba`, those of each key head side by side."""
    fused_qkvz: bool = False
    """In the checkpoint, q, k, v and z are one weight, those of each key head below each other."""
    conv_bias: bool = False
    bias: bool = False
    """The projections have biases."""
    dt_range: tuple[float, float] = (0.0, float("inf"))
    """The range that Mamba-2's time steps are clamped to."""
    norm_groups: int = 1
    """Groups of channels that Mamba-2's gated norm takes apart."""

    def index(self, layer: int) -> int:
        """The place of a recurrent layer among all of them."""
        return sum(self.layers[:layer])

    @property
    def count(self) -> int:
        """The number of recurrent layers."""
        return sum(self.layers)

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.value_dim

    def conv_shape(self, slots: int | str) -> list[int | str]:
        """The windows of all convolutions, float32: `[slots, layers, kernel - 1, channels]`, the oldest input first."""
        return [slots, self.count, self.kernel - 1, self.channels]

    def matrix_shape(self, slots: int | str) -> list[int | str] | None:
        """The matrix states, float32: `[slots, layers, heads, blocks, key_dim, 16]`; None where there are none."""
        if not self.heads:
            return None
        return [slots, self.count, self.heads, -(-self.value_dim // BLOCK), self.key_dim, BLOCK]


def mamba2(
    fields: Fields,
    *,
    layers: tuple[bool, ...],
    heads: int,
    values: int,
    groups: int,
    state_size: int,
    kernel: int,
    conv_bias: bool,
    bias: bool,
    dt_range: tuple[float, float] = (0.0, float("inf")),
) -> Recurrence:
    """Mamba-2 layers with `values` values of all heads.

    Raises:
        CheckpointError: heads do not divide the values, or groups the heads.
    """
    if values % heads or heads % groups:
        sizes = f"{values} values of {heads} heads in {groups} groups"
        raise CheckpointError(f"{fields.file}: mamba: {sizes}: sizes that do not divide")
    return Recurrence(
        kind="mamba2",
        layers=layers,
        channels=values + 2 * groups * state_size,
        kernel=kernel,
        heads=heads,
        key_heads=groups,
        key_dim=state_size,
        value_dim=values // heads,
        conv_bias=conv_bias,
        bias=bias,
        dt_range=dt_range,
        norm_groups=groups,
    )


def read_layer_types(
    fields: Fields, recurrent: Sequence[str], attention: Sequence[str] = ("full_attention",)
) -> tuple[bool, ...]:
    """Tell for each layer if it is recurrent, from `layer_types` or, without it, from `full_attention_interval`: all
    but each so many-th, 4 where it is not said.

    Args:
        recurrent: Names of recurrent layers in `layer_types`.
        attention: Names of the others.

    Raises:
        CheckpointError: `layer_types` is no list of these two, one for each layer.
    """
    layers, types = fields.layers(), fields.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", f"expected a list of num_hidden_layers = {layers}")
    choices = dict.fromkeys(recurrent, True) | dict.fromkeys(attention, False)
    return tuple(Fields(fields.file, {"layer_types": kind}).one_of("layer_types", choices) for kind in types)
