"""The products of a prefill step on matrix tiles, computed a few at a time during the softmax."""

from std.math import ceildiv

from ....isa.amx import tile_load, tile_store
from ....isa.amx_tiles import AMX_TILE_ELEMENTS, multiply_2x2, store_sum, zero_sums
from ....isa.memory import Bf16Pointer, FloatPointer
from ..prefetch import FIXED_POINT_ONE, KV_TILE_TOKENS
from ..prefill.queries import QUERY_COLUMNS
from ..prefill.step import PrefillStep, STEP_TILES, STEP_TOKENS
from ..workspace import HeadLayout
from .prefill_workspace import PAIR_SCORE_FLOATS, PrefillWorkspace, visible_tiles


struct PairProducts(Movable):
    """The next pair's dot products and the last pair's weighted sums, a few at a time.

    `run` is called while vector instructions compute this pair's weights, so that both units of the core are busy.
    """

    var k: Bf16Pointer
    """The next KV tile of K, `[KV_TILE_TOKENS, P]`."""
    var q: Bf16Pointer
    """The queries of the next pair."""
    var scores: FloatPointer
    """The scores of the next pair and the next KV tile."""
    var score_tiles: Int
    """KV tiles of the step that the next pair sees."""
    var score_tile: Int
    """KV tiles whose dot products are computed."""
    var values: Bf16Pointer
    var weights: Bf16Pointer
    var acc: FloatPointer
    var sum_tiles: Int
    """KV tiles of the step that the last pair sees."""
    var sum_d: Int
    """The first element of head_dim whose weighted sums are not computed."""
    var padded_dim: Int
    var padded_value: Int
    var inner: Int
    """Products of the present 2 x 2 sums that are computed."""
    var due: Int
    """Products that are to be computed now, in units of `1 / FIXED_POINT_ONE`."""
    var rate: Int
    """The number that each call of `run` adds to `due`."""

    def __init__(
        out self, step: PrefillStep, heads: HeadLayout, next: Int, last: Int, calls: Int, workspace: PrefillWorkspace
    ):
        """For pairs `next` and `last`, each a pair or `NO_PAIR`, divided evenly among `calls` calls of `run`."""
        var padded_dim = heads.padded_dim
        self.padded_dim = padded_dim
        self.padded_value = heads.padded_value
        self.k = workspace.keys.unsafe_bitcast[BFloat16]()
        self.q = workspace.q.unsafe_bitcast[BFloat16]().unsafe_offset(next * 2 * QUERY_COLUMNS * padded_dim)
        self.scores = workspace.scores.unsafe_offset(next % 2 * PAIR_SCORE_FLOATS)
        self.score_tiles = visible_tiles(step, next, workspace.queries)
        self.score_tile = 0
        self.values = workspace.values.unsafe_bitcast[BFloat16]()
        self.weights = workspace.weights.unsafe_bitcast[BFloat16]().unsafe_offset(
            last % 2 * STEP_TILES * 4 * AMX_TILE_ELEMENTS
        )
        self.acc = workspace.queries.acc.unsafe_offset(last * 2 * QUERY_COLUMNS * heads.padded_value)
        self.sum_tiles = visible_tiles(step, last, workspace.queries)
        self.sum_d = 0 if self.sum_tiles > 0 else heads.padded_value
        self.inner = 0
        self.due = 0
        var products = padded_dim // 32 * self.score_tiles + 2 * (heads.padded_value // 32) * self.sum_tiles
        self.rate = ceildiv(products * FIXED_POINT_ONE, calls)

    @always_inline
    def run(mut self):
        """Computes the products that are due."""
        self.due += self.rate
        while self.due >= FIXED_POINT_ONE:
            self.due -= FIXED_POINT_ONE
            self.advance()

    @always_inline
    def finish(mut self):
        """Computes all remaining products."""
        while self.score_tile < self.score_tiles or self.sum_d < self.padded_value:
            self.advance()

    @always_inline
    def advance(mut self):
        """Computes the next four products."""
        if self.score_tile < self.score_tiles:
            if self.inner == 0:
                zero_sums()
            var k = self.k.unsafe_offset(32 * self.inner)
            var q = self.q.unsafe_offset(self.inner * AMX_TILE_ELEMENTS)
            multiply_2x2(
                k,
                k.unsafe_offset(16 * self.padded_dim),
                self.padded_dim * 2,
                q,
                q.unsafe_offset(QUERY_COLUMNS * self.padded_dim),
            )
            self.inner += 1
            if self.inner == self.padded_dim // 32:
                store_sum[0](self.scores)
                store_sum[1](self.scores.unsafe_offset(STEP_TOKENS * QUERY_COLUMNS))
                store_sum[2](self.scores.unsafe_offset(16 * QUERY_COLUMNS))
                store_sum[3](self.scores.unsafe_offset((STEP_TOKENS + 16) * QUERY_COLUMNS))
                self.inner = 0
                self.score_tile += 1
                self.k = self.k.unsafe_offset(KV_TILE_TOKENS * self.padded_dim)
                self.scores = self.scores.unsafe_offset(KV_TILE_TOKENS * QUERY_COLUMNS)
        elif self.sum_d < self.padded_value:
            var first = self.acc.unsafe_offset(self.sum_d)
            var second = first.unsafe_offset(QUERY_COLUMNS * self.padded_value)
            var pitch = self.padded_value * 4
            if self.inner == 0:
                tile_load[0](first, pitch)
                tile_load[1](first.unsafe_offset(16), pitch)
                tile_load[2](second, pitch)
                tile_load[3](second.unsafe_offset(16), pitch)
            var i = self.inner // 2
            var w = self.weights.unsafe_offset((self.inner % 2 + 4 * i) * AMX_TILE_ELEMENTS)
            var v = self.values.unsafe_offset((i * self.padded_value + self.sum_d) * KV_TILE_TOKENS)
            multiply_2x2(w, w.unsafe_offset(2 * AMX_TILE_ELEMENTS), 64, v, v.unsafe_offset(AMX_TILE_ELEMENTS))
            self.inner += 1
            if self.inner == 2 * self.sum_tiles:
                tile_store[0](first, pitch)
                tile_store[1](first.unsafe_offset(16), pitch)
                tile_store[2](second, pitch)
                tile_store[3](second.unsafe_offset(16), pitch)
                self.inner = 0
                self.sum_d += 32
