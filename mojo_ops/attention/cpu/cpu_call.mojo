"""A call of attention on the CPU: its operands, and what its kernels are compiled for."""

from ...cache.paged_kv_cache import DynamicKVCache
from ..logits import Logits
from ..params import AttentionRows
from ..row_masks import RowMasks
from .kernel_choice import CpuKernelChoice
from .plan import Segment
from .rotary_keys import KeyRotation
from .workspace import HeadLayout


@fieldwise_init
struct CpuCall[dtype: DType, o_dtype: DType, Masks: RowMasks, kv_dtype: DType, latent: Bool, rotates: Bool](
    ImplicitlyCopyable
):
    """The operands of a call as its tasks take them.

    Parameters:
        dtype: The dtype of q.
        o_dtype: The dtype of o.
        Masks: What rows see of their tokens beside their lengths.
        kv_dtype: The dtype of the cache.
        latent: True if a key is a token's V and then its K, so that V is read once.
        rotates: True if queries and keys are rotated as they are read (`rotary_keys.mojo`).
    """

    comptime Rows = AttentionRows[Self.dtype, Self.o_dtype, Self.Masks]
    comptime Queries[to: DType] = AttentionRows[to if Self.rotates else Self.dtype, Self.o_dtype, Self.Masks]
    """The rows with the queries that a kernel takes, which rotates to `to`."""
    comptime Choice = CpuKernelChoice[Self.dtype, Self.kv_dtype]
    comptime prefill_only = Self.latent or Self.Masks.has_masks
    """True if all blocks are prefill blocks: only these take masks, and another head_dim of V than of K."""

    var rows: Self.Rows
    var k: DynamicKVCache[Self.kv_dtype]
    var v: DynamicKVCache[Self.kv_dtype]
    var logits: Logits
    var heads: HeadLayout
    var choice: Self.Choice

    @always_inline
    def part(self, segment: Segment) -> Self:
        """The KV heads of a segment, as if the call had no others."""
        var part = self
        part.heads = self.heads.part(segment.heads_of(self.heads.kv_heads))
        part.rows = self.rows.from_head(segment.head * self.heads.group, self.heads.head_dim, self.heads.value_dim)
        part.logits = self.logits.from_head(segment.head * self.heads.group)
        part.k = self.k.from_head(segment.head)
        part.v = self.v.from_head(segment.head)
        return part

    @always_inline
    def queries[to: DType](self, segment: Segment, mut rotation: KeyRotation) -> Self.Queries[to]:
        """The rows with the queries of a segment, rotated to `to` where the call rotates."""
        comptime if Self.rotates:
            return rebind[Self.Queries[to]](rotation.rotate_queries[to, Self.kv_dtype](self.rows, segment, self.heads))
        else:
            return rebind[Self.Queries[to]](self.rows)
