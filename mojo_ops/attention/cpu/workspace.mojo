"""The head sizes of a call, and the working memory of one task for a segment whose heads go together."""

from std.math import align_up

from ...cache.paged_kv_cache import PagedKVCache
from ...cache.pointers import untracked
from ...isa.codes import head_units
from ...isa.convert import LANES
from ...isa.memory import FloatPointer, align_to_line
from ..params import AttentionRows
from ..softmax import AttentionState, MINUS_INFINITY
from .kv_tile import KVTile, OFFSET_WIDTH, SPAN_TILES
from .prefetch import EARLY_V_TOKENS, IntPointer, KV_TILE_TOKENS

comptime TILE_BUFFERS = 2 * SPAN_TILES
"""Tiles that a workspace holds: those of the present step of a segment and those of the next."""
comptime ROUNDED_FLOATS = 20
"""The memory of a query's weights as integers, in float32."""


@fieldwise_init
struct HeadLayout(ImplicitlyCopyable):
    """The sizes that all heads of a call share."""

    var kv_heads: Int
    """KV heads of a segment: all of the call, or a part of them (`SegmentPlan.cut_heads`)."""
    var call_heads: Int
    """KV heads of the call."""
    var group: Int
    """Query heads of a KV head."""
    var head_dim: Int
    """The head_dim of q and K; in latent attention of their rotary parts."""
    var padded_dim: Int
    """P: head_dim rounded up to what the arithmetic takes at once; in latent attention, `padded_value` more."""
    var k_stride: Int
    """Stored numbers from one KV head of a token to the next."""
    var v_stride: Int
    var value_dim: Int
    """The head_dim of V and o. Only prefill takes one that differs from `head_dim`."""
    var padded_value: Int
    """Pv: value_dim rounded up likewise."""
    var units: Int
    """Stored numbers of a head of K: `head_dim`, or the bytes of its codes and scale."""

    @staticmethod
    def of[*, latent: Bool = False](rows: AttentionRows, k: PagedKVCache, v: type_of(k), chunk: Int) -> Self:
        """The sizes of a call. In latent attention a key is a token's V and then its K (`../README.md`)."""
        var kv_heads = k.num_heads()
        var padded_value = align_up(v.head_dim(), chunk)
        return Self(
            kv_heads,
            kv_heads,
            rows.num_heads // kv_heads,
            k.head_dim(),
            align_up(k.head_dim(), chunk) + (padded_value if latent else 0),
            k.strides().head,
            v.strides().head,
            v.head_dim(),
            padded_value,
            head_units(k.dtype, k.head_dim()),
        )

    def part(self, kv_heads: Int) -> Self:
        """The sizes of a segment that has so many of the KV heads."""
        var part = self
        part.kv_heads = kv_heads
        return part

    @always_inline
    def adjacent(self) -> Bool:
        """Return whether the heads of a token are adjacent in memory, in K and in V."""
        return self.k_stride == self.units and self.v_stride == self.units


trait RunningStates:
    """The running softmax states of the queries of a segment."""

    def state(self, query: Int) -> AttentionState:
        """The state of one query of one KV head."""
        ...


struct SegmentWorkspace(Movable, RunningStates):
    """Working memory of one task, for a block of rows of one request.

    A KV head has M queries: the rows of the block times the group. The memory has room for `stride` of them.
    """

    var memory: List[Float32]
    var offsets: List[Int]
    """The token offsets of `TILE_BUFFERS` tiles, then the row addresses of a `Prefetcher`."""
    var tiles: List[KVTile]
    """`[TILE_BUFFERS]`."""
    var q: FloatPointer
    """`[Hk, stride, P]` float32 in the element order of `load_chunk`; with AMX pairs of bfloat16 instead, whose heads
    may be longer (`rotary_keys.mojo`)."""
    var acc: FloatPointer
    """`[Hk, stride, P]` float32: weighted values, in the order of `q`."""
    var weights: FloatPointer
    """`[max(Hk, SPAN_TILES), stride, KV_TILE_TOKENS]` float32: scores, then weights.

    With AMX the weights are `[Hk, stride, 2, KV_TILE_TOKENS]` bfloat16.
    """
    var rounded: FloatPointer
    """`[stride, ROUNDED_FLOATS]`: weights over codes as integers (`vectors/code_sums.mojo`)."""
    var amx_floats: FloatPointer
    """The memory that `AmxBuffers` points into."""
    var greatest: FloatPointer
    """`[Hk, stride]`: each query's lagging maximum. No score so far exceeds it by more than `RESCALE_THRESHOLD`."""
    var totals: FloatPointer
    """`[Hk, stride]`: the sum of each query's weights."""

    def __init__(out self, heads: HeadLayout, stride: Int, amx_floats: Int, query_floats: Int = 0):
        """Memory for `stride` queries of each KV head and `amx_floats` float32 numbers for `AmxBuffers`.

        Args:
            heads: The head sizes.
            stride: Queries of a KV head.
            amx_floats: The memory of `AmxBuffers`.
            query_floats: The numbers that a packed query takes, where they are more than P.
        """
        var packed = max(heads.padded_dim, query_floats)
        var queries = heads.kv_heads * stride
        var weights = max(heads.kv_heads, SPAN_TILES) * stride * KV_TILE_TOKENS
        var rounded = align_up(stride * ROUNDED_FLOATS, LANES)
        self.memory = List[Float32](
            length=queries * (packed + heads.padded_dim + 2) + weights + rounded + amx_floats + 16, fill=0
        )
        var rows = (KV_TILE_TOKENS + EARLY_V_TOKENS) * max(heads.kv_heads, SPAN_TILES)
        self.offsets = List[Int](length=TILE_BUFFERS * 2 * (KV_TILE_TOKENS + OFFSET_WIDTH) + rows, fill=0)
        self.tiles = List[KVTile](unsafe_uninit_length=TILE_BUFFERS)
        # Vectors must not straddle cache lines.
        self.q = align_to_line(untracked(self.memory.unsafe_ptr()))
        self.acc = self.q.unsafe_offset(queries * packed)
        self.weights = self.acc.unsafe_offset(queries * heads.padded_dim)
        self.rounded = self.weights.unsafe_offset(weights)
        self.amx_floats = self.rounded.unsafe_offset(rounded)
        self.greatest = self.amx_floats.unsafe_offset(amx_floats)
        self.totals = self.greatest.unsafe_offset(queries)

    @always_inline
    def clear(mut self, query: Int):
        """Makes the state of one query of one KV head empty."""
        self.greatest[unsafe_offset=query] = MINUS_INFINITY
        self.totals[unsafe_offset=query] = 0

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(self.greatest[unsafe_offset=query], self.totals[unsafe_offset=query])

    def tile(self, index: Int) -> Pointer[KVTile, MutUntrackedOrigin]:
        return untracked(self.tiles.unsafe_ptr()).unsafe_offset(index)

    def offset_buffer(self, index: Int) -> IntPointer:
        """The offsets of tile `index`; at index `TILE_BUFFERS` the memory for a `Prefetcher`'s row addresses."""
        return untracked(self.offsets.unsafe_ptr()).unsafe_offset(2 * (KV_TILE_TOKENS + OFFSET_WIDTH) * index)
